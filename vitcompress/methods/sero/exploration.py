"""SERo's exploration: train while a growing share of the units is masked, and let every refresh choose anew.

Masks are gates on the layers that write a space (`surgery.masks.mask_channels`): output and gradients are those of weights
masked on both sides, and pruned units receive none (eq. 5's M). A mask lives outside the model: it is in no state dict,
and in the resume state it is a list of live channels per space.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitcompress.families import Family, Space
from vitcompress.methods.sero.layout import KINDS, Live, project, unit_spaces
from vitcompress.methods.sero.options import Options
from vitcompress.surgery.masks import mask_channels
from vitcompress.training.distributed import derived_seed

Ranks = dict[str, np.ndarray]


class Exploration:
    """The masks of one exploration, as hooks of its training (`learner.StepHooks`).

    live: space -> whether each channel lives, (channels,). scores: what made it so, of the last refresh. trace: per
    epoch what had been reached at its end.
    """

    def __init__(
        self,
        model: nn.Module,
        family: Family,
        options: Options,
        sparsity_at: Callable[[int, int, int], float],
        seed: int,
    ) -> None:
        self.model, self.family, self.options, self.sparsity_at = model, family, options, sparsity_at
        self.seed = seed
        self.from_step = options.criterion_pass == "masked" and options.criterion.startswith("gradient")
        self.spaces = unit_spaces(family.spaces(model))
        self.live: Live = {space.name: np.ones(space.size, dtype=bool) for space in self.spaces}
        self.scores: dict[str, list[float]] = {space.name: [] for space in self.spaces}
        self.sparsity = 0.0
        self.skipped, self.revived = 0, dict.fromkeys(KINDS, 0)
        self.trace: list[dict[str, Any]] = []
        self._due_next, self._seen, self._before = False, dict[str, Tensor](), dict[str, Tensor]()
        self._gates = ExitStack()

    # ------------------------------------------------------------------------------------------------ around a step

    def before_step(self, epoch: int, step: int, steps: int, backward: Callable[[], object]) -> None:
        """Refresh the masks where it is due."""
        self._due_next = (step + 1) % self.options.refresh == 0 or step + 1 == steps
        sparsity = self.sparsity_at(epoch, step, steps)
        if sparsity > 0 and step % self.options.refresh == 0:
            self._choose(sparsity, backward)
        if step + 1 == steps:
            self.trace.append({"epoch": epoch, "wanted": self.sparsity, **self.counts()})

    def before_update(self) -> None:
        """Take the scores that a later refresh needs, then scale the gradient of every linear layer by |W|."""
        if self.from_step and self._due_next:
            self._seen = self._measured(self._gradient_elements)
        if self.options.weight_scale == "gradient":
            for weight in self._linear_weights():
                if weight.grad is not None:
                    weight.grad.mul_(weight.detach().abs())
        elif self.options.weight_scale == "update":
            self._before = {str(i): weight.detach().clone() for i, weight in enumerate(self._linear_weights())}

    @torch.no_grad()
    def after_update(self) -> None:
        """Scale the step itself by |W| over its mean (eq. 5 taken at its word, at an unchanged learning rate)."""
        for i, weight in enumerate(self._linear_weights() if self._before else ()):
            before = self._before[str(i)]
            size = before.abs()
            weight.copy_(before + (weight - before) * size / size.mean().clamp_min(torch.finfo(size.dtype).tiny))
        self._before = {}

    def _choose(self, sparsity: float, backward: Callable[[], object]) -> None:
        """New masks at `sparsity`; the old ones stay when a score is not finite, as after an fp16 overflow."""
        found = self._scores(backward)
        if not found or not all(np.isfinite(score).all() for score in found.values()):
            self.skipped += 1
            return
        ties = _plain(self._measured(lambda weight: weight.detach()))
        live = project(self.spaces, found, ties, sparsity, self.options.rules)
        for space in self.spaces:
            self.revived[space.kind] += int((live[space.name] & ~self.live[space.name]).sum())
        self.sparsity, self.scores = sparsity, {name: score.tolist() for name, score in found.items()}
        self.set(live)

    def _scores(self, backward: Callable[[], object]) -> Ranks:
        if self.options.criterion == "random":
            draw = np.random.default_rng(derived_seed("SERo random units", self.seed))
            return {space.name: draw.random(space.size) for space in self.spaces}
        if self.options.criterion == "weight":
            return _plain(self._measured(lambda weight: weight.detach()))
        if not self.from_step:
            self._gates.close()  # "with respect to the full weight matrices": masked units are scored too
            backward()
            self._seen = self._measured(self._gradient_elements)
            self.set(self.live)
        return _plain(self._seen)

    def _gradient_elements(self, weight: Tensor) -> Tensor:
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        return gradient * weight.detach() if self.options.criterion == "gradient_times_weight" else gradient

    def _measured(self, elements: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Eq. 1 to 3: per unit the mean |elements| over the inputs of the layers that write it, mean of q and k."""
        found = {}
        for space in self.spaces:
            rows = []
            for axis in space.axes:
                owner = self.model.get_submodule(axis.tensor.rpartition(".")[0])
                if isinstance(owner, nn.Linear) and axis.dim == 0 and axis.tensor.endswith(".weight"):
                    values = elements(owner.weight).abs().mean(dim=1)
                    values = values[axis.offset : axis.offset + axis.copies * space.size]
                    rows.append(values.view(axis.copies, space.size))
            found[space.name] = torch.cat(rows).mean(dim=0)
        return found

    def _linear_weights(self) -> list[Tensor]:
        """Every linear layer, the classifier included, as in the released code."""
        return [module.weight for module in self.model.modules() if isinstance(module, nn.Linear)]

    # ---------------------------------------------------------------------------------------------------- the masks

    def set(self, live: Mapping[str, np.ndarray]) -> None:
        """Mask what does not live, in place of what was masked."""
        self._gates.close()
        self.live = dict(live)
        like = next(self.model.parameters())
        gates = {
            name: torch.as_tensor(channels, device=like.device).to(like.dtype)
            for name, channels in self.live.items()
            if not channels.all()
        }
        self._gates.enter_context(mask_channels(self.model, self.family, gates))

    def close(self) -> None:
        """Take all masks off the model."""
        self._gates.close()

    def counts(self) -> dict[str, Any]:
        """Kind -> live units and all units."""
        return {kind: [_count(self.live, self.spaces, kind), _total(self.spaces, kind)] for kind in KINDS}

    def state(self) -> dict[str, Any]:
        """Plan data: the live channels of every masked space, and what the next refresh would have seen."""
        return {
            "kept": {name: np.flatnonzero(live).tolist() for name, live in self.live.items() if not live.all()},
            "seen": {name: value.tolist() for name, value in self._seen.items()} if self.from_step else {},
            "scores": self.scores,
            "sparsity": self.sparsity,
            "skipped": self.skipped,
            "revived": self.revived,
            "trace": self.trace,
        }

    def restore(self, data: Any) -> None:
        """Continue from `state`."""
        self.sparsity, self.skipped, self.revived = data["sparsity"], data["skipped"], dict(data["revived"])
        self.trace, self.scores, like = list(data["trace"]), data["scores"], next(self.model.parameters())
        self._seen = {name: torch.tensor(values, device=like.device) for name, values in data["seen"].items()}
        live: Live = {space.name: np.ones(space.size, dtype=bool) for space in self.spaces}
        for name, channels in data["kept"].items():
            live[name][:] = False
            live[name][channels] = True
        self.set(live)


def _plain(scores: Mapping[str, Tensor]) -> Ranks:
    return {name: value.double().cpu().numpy() for name, value in scores.items()}


def _count(live: Live, spaces: tuple[Space, ...], kind: str) -> int:
    return sum(int(live[space.name].sum()) for space in spaces if space.kind == kind)


def _total(spaces: tuple[Space, ...], kind: str) -> int:
    return sum(space.size for space in spaces if space.kind == kind)
