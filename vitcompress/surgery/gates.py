"""Layer gates: forward hooks that change what a model computes and leave its weights alone.

`GatedModel` has one gate and one learnable score per removable layer, for HetDPT's importance search
(straight-through) and for NOSE's dilution (gates between 0 and 1). Channel masks are in `surgery.masks`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitcompress.errors import PlanError
from vitcompress.families import GATED, Family
from vitcompress.families.edited_block import SITE_PARTS
from vitcompress.families.gated_ffn import gate_at_bias
from vitcompress.plan import Plan


class _StraightThrough(torch.autograd.Function):
    """gate * branch + (1 - gate) * other; the score receives d loss / d gate = sum(delta * (branch - other)).

    HetDPT, learnable importance search: the forward pass uses only the gate, never the score.
    """

    @staticmethod
    def forward(ctx: Any, branch: Tensor, other: Tensor, score: Tensor, gate: float) -> Tensor:
        ctx.save_for_backward(branch, other)
        ctx.gate = gate
        if gate == 1.0:
            return branch.view_as(branch)
        return other.view_as(other) if gate == 0.0 else gate * branch + (1.0 - gate) * other

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        delta = grads[0]
        branch, other = ctx.saved_tensors
        wide = torch.promote_types(delta.dtype, torch.float32)
        score = torch.dot(delta.reshape(-1).to(wide), (branch.to(wide) - other.to(wide)).reshape(-1))
        return ctx.gate * delta, (1.0 - ctx.gate) * delta, score, None


class GatedModel(nn.Module):
    """A model with a gate on each layer that a plan removes: 1 computes the layer, 0 its replacement.

    With every gate at 0 or 1 it computes what `surgery.apply_plan` builds for a plan of the closed ones. Layer and
    replacement are always both computed, so the set of parameters with gradients never changes (required by DDP).
    Scores and gates are in the state dict of this module, not of the model. A deep copy has its own gates.

    Args:
        model: the dense or already edited model; trained in place. The hooks of the gates are never removed from it.
        family: its family.
        plan: removes the attentions and activations to gate. An appended activation is applied when all gates of its
            block are 0.
        gate_means: gated FFN -> mean of its gate, (hidden,), used by `mean_gate`; for others the gate at the bias.

    Raises:
        PlanError: the plan removes a site that the model does not have or that cannot be gated.
    """

    def __init__(self, model: nn.Module, family: Family, plan: Plan, gate_means: Mapping[str, Tensor]) -> None:
        super().__init__()
        own = [site for site in family.sites(model) if site.kind in GATED]
        sites = [site for site in own if site.name in plan.removed or site.gates in plan.removed]
        gateable = {name for site in sites for name in (site.name, site.gates)}
        if unknown := [name for name in plan.removed if name not in gateable]:
            raise PlanError(f"{unknown[0]} cannot be gated; layers that can: {', '.join(site.name for site in own)}")
        self.training = model.training
        self.model = model
        self.sites = tuple(sites)
        device = next(model.parameters()).device
        self.scores = nn.ParameterList([nn.Parameter(torch.zeros((), device=device)) for _ in self.sites])
        self._gates = {site.name: 1.0 for site in self.sites}
        self._means = {s.name: gate_means[s.gates].to(device) for s in self.sites if s.gates in gate_means}
        self._inputs: dict[str, Tensor] = {}
        for number, site in enumerate(self.sites):
            replacement = plan.removed.get(site.name, "drop")  # of a gate whose FFN is removed: the FFN is dropped
            target = site.gates if replacement == "drop" and site.gates else site.name
            if replacement == "double":  # of an attention; replaces its whole branch, including drop path
                self.model.get_submodule(site.block).register_forward_pre_hook(partial(self._remember, site.name))
                branch = next(branch for branch in family.wiring.branches if SITE_PARTS["attention"] in branch)
                target = f"{site.block}.{branch[-1]}"
            self.model.get_submodule(target).register_forward_hook(partial(self._gate, site.name, number, replacement))
        for block in plan.appended:
            names = [site.name for site in self.sites if site.block == block]
            self.model.get_submodule(block).register_forward_hook(partial(self._activate, names))

    def _remember(self, site: str, block: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Store the input of a block for the gate at the end of its attention branch."""
        self._inputs[site] = args[0]

    def _gate(self, site: str, number: int, replacement: str, layer: nn.Module, args: Any, out: Tensor) -> Any:
        """Mix `out`, the output of a layer, with the output of its `replacement`."""
        match replacement:
            case "double":
                other = self._inputs.pop(site)
            case "identity" | "norm_identity":
                other = args[0]
            case "mean_gate":
                mean, ffn = self._means.get(site), self.model.get_submodule(site.rpartition(".")[0])
                other = (gate_at_bias(ffn) if mean is None else mean).to(out).expand_as(out)
            case _:
                other = torch.full_like(out, float(replacement == "drop_gate"))  # 0 for `drop`
        return _StraightThrough.apply(out, other, self.scores[number], self._gates[site])

    def _activate(self, sites: list[str], block: nn.Module, args: Any, out: Tensor) -> Tensor:
        return F.gelu(out) if all(self._gates[site] == 0.0 for site in sites) else out

    def forward(self, x: Tensor) -> Any:
        """x: images, (batch, channels, height, width) -> the output of the model."""
        return self.model(x)

    def set_gate(self, site: str, value: float) -> None:
        """Set one gate: 1 keeps the layer, 0 removes it, values between blend (NOSE dilution)."""
        if site not in self._gates:
            raise PlanError(f"{site} is not a gated layer; gated: {', '.join(self._gates)}")
        if not 0.0 <= value <= 1.0:
            raise PlanError(f"the gate of {site} must be in 0..1, got {value}")
        self._gates[site] = float(value)

    def gate_values(self) -> dict[str, float]:
        return dict(self._gates)

    def scores_of(self) -> dict[str, float]:
        return {site.name: float(score.detach()) for site, score in zip(self.sites, self.scores, strict=True)}

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self._gates[site.name] for site in self.sites], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        self._gates = {site.name: float(value) for site, value in zip(self.sites, state, strict=True)}
