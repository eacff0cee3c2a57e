"""SERo's exploration: train while a growing share of the units is masked; every refresh chooses the masks anew.

Masks multiply the outputs of the layers that write a space: output and gradients equal those of weights masked on both
sides, and masked units receive no gradient (M in eq. 5). They are in no state dict, but in the resume state.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitcompress.errors import InputError
from vitcompress.families import Family
from vitcompress.methods.options import SeroOptions
from vitcompress.methods.sero.layout import UNIT_KINDS, Live, project, unit_spaces
from vitcompress.surgery.masks import mask_channels
from vitcompress.training.distributed import derived_seed

Ranks = dict[str, np.ndarray]
STATE = ("scores", "sparsity", "skipped", "revived", "trace")


def sparsity_at(options: SeroOptions, epoch: int, step: int, steps: int) -> float:
    """Share of units to mask: 0 in the warm-up, s (1 - (1 - t / T)^3) after it, T all epochs; s in the last epoch."""
    if epoch == options.epochs - 1:
        return options.sparsity
    if epoch < options.warmup_epochs:
        return 0.0
    progress = ((epoch - options.warmup_epochs) * steps + step) / (options.epochs * steps)
    return options.sparsity * (1 - (1 - progress) ** 3)


class Exploration:
    """The masks of an exploration, as hooks of its training (`StepHooks`).

    live: space -> whether each channel is live, (channels,). scores: of the last refresh. trace: live units by epoch.
    """

    def __init__(self, model: nn.Module, family: Family, options: SeroOptions, seed: int) -> None:
        self.model, self.options, self.seed = model, options, seed
        self.masked_pass = options.criterion_pass == "masked" and options.criterion.startswith("gradient")
        self.spaces = unit_spaces(family.spaces(model))
        owners = (model.get_submodule(axis.owner) for space in self.spaces for axis in space.axes)
        frozen = any(not parameter.requires_grad for owner in owners for parameter in owner.parameters())
        if frozen and options.criterion.startswith("gradient"):
            message = "sero ranks channels by gradients, but some of their layers are frozen"
            raise InputError(message, hint="call model.requires_grad_(True), or use criterion = 'weight'")
        self.live: Live = {space.name: np.ones(space.size, dtype=bool) for space in self.spaces}
        self.scores: dict[str, list[float]] = {space.name: [] for space in self.spaces}
        self.sparsity = 0.0
        self.skipped, self.revived = 0, dict.fromkeys(UNIT_KINDS, 0)
        self.trace: list[dict[str, object]] = []
        self._refresh_is_next, self._seen, self._before = False, Ranks(), list[Tensor]()
        self._masks = ExitStack()

    def before_step(self, epoch: int, step: int, steps: int, backward: Callable[[], object]) -> None:
        """Refresh the masks every `refresh` iterations."""
        self._refresh_is_next = (step + 1) % self.options.refresh == 0 or step + 1 == steps
        sparsity = sparsity_at(self.options, epoch, step, steps)
        if sparsity > 0 and step % self.options.refresh == 0:
            self._refresh(sparsity, backward)
        if step + 1 == steps:
            self.trace.append({"epoch": epoch, "wanted": self.sparsity, **self.counts()})

    def before_update(self) -> None:
        """Record the scores that the next refresh needs, then scale the gradient of every linear layer by |W|."""
        if self.masked_pass and self._refresh_is_next:
            self._seen = self._mean_by_unit(self._gradient)
        if self.options.weight_scale == "gradient":
            for weight in self._linear_weights():
                if weight.grad is not None:
                    weight.grad.mul_(weight.detach().abs())
        elif self.options.weight_scale == "update":
            self._before = [weight.detach().clone() for weight in self._linear_weights()]

    @torch.no_grad()
    def after_update(self) -> None:
        """Scale the update itself by |W| over its mean (eq. 5 to the letter, at an unchanged learning rate)."""
        for weight, before in zip(self._linear_weights(), self._before, strict=False):
            size = before.abs()
            weight.copy_(before + (weight - before) * size / size.mean().clamp_min(torch.finfo(size.dtype).tiny))
        self._before = []

    def _refresh(self, sparsity: float, backward: Callable[[], object]) -> None:
        """New masks at `sparsity`; the old ones stay if a score is not finite, as after an fp16 overflow."""
        scores = self._scores(backward)
        if not scores or not all(np.isfinite(score).all() for score in scores.values()):
            self.skipped += 1
            return
        live = project(self.spaces, scores, self._mean_by_unit(Tensor.detach), sparsity, self.options)
        for space in self.spaces:
            self.revived[space.kind] += int((live[space.name] & ~self.live[space.name]).sum())
        self.sparsity, self.scores = sparsity, {name: score.tolist() for name, score in scores.items()}
        self.set(live)

    def _scores(self, backward: Callable[[], object]) -> Ranks:
        if self.options.criterion == "random":
            draw = np.random.default_rng(derived_seed("SERo random units", self.seed))
            return {space.name: draw.random(space.size) for space in self.spaces}
        if self.options.criterion == "weight":
            return self._mean_by_unit(Tensor.detach)
        if not self.masked_pass:
            self._masks.close()  # "with respect to the full weight matrices": masked units are scored too
            backward()
            self._seen = self._mean_by_unit(self._gradient)
            self.set(self.live)
        return self._seen

    def _gradient(self, weight: Tensor) -> Tensor:
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        return gradient * weight.detach() if self.options.criterion == "gradient_times_weight" else gradient

    def _mean_by_unit(self, elements: Callable[[Tensor], Tensor]) -> Ranks:
        """Eq. 1 to 3: per unit the mean |elements| over the inputs of the layers that write it, mean of q and k."""
        means = {}
        for space in self.spaces:
            rows = []
            for axis in (a for a in space.axes if a.dim == 0 and a.tensor.endswith(".weight") and not a.per_head):
                if isinstance(owner := self.model.get_submodule(axis.owner), nn.Linear):
                    values = elements(owner.weight).abs().mean(dim=1)
                    rows.append(values[axis.offset : axis.offset + axis.copies * space.size].view(axis.copies, -1))
            means[space.name] = torch.cat(rows).mean(dim=0).cpu().double().numpy()
        return means

    def _linear_weights(self) -> list[Tensor]:
        """Every linear layer, including the classifier, as in the released code."""
        return [module.weight for module in self.model.modules() if isinstance(module, nn.Linear)]

    def set(self, live: Mapping[str, np.ndarray]) -> None:
        """Mask all channels that are not live, instead of those masked before."""
        self._masks.close()
        self.live = dict(live)
        like, masked = next(self.model.parameters()), [space for space in self.spaces if not live[space.name].all()]
        masks = {space: torch.as_tensor(live[space.name], device=like.device).to(like.dtype) for space in masked}
        self._masks.enter_context(mask_channels(self.model, masks))

    def close(self) -> None:
        """Remove all masks from the model."""
        self._masks.close()

    def counts(self) -> dict[str, list[int]]:
        """Kind -> [live units, all units]."""
        own = {kind: [self.live[space.name] for space in self.spaces if space.kind == kind] for kind in UNIT_KINDS}
        return {kind: [sum(int(live.sum()) for live in of), sum(map(len, of))] for kind, of in own.items()}

    def state(self) -> dict[str, object]:
        """JSON data: the live channels of every masked space, and the scores for the next refresh."""
        kept = {name: np.flatnonzero(live).tolist() for name, live in self.live.items() if not live.all()}
        seen = {name: value.tolist() for name, value in self._seen.items()} if self.masked_pass else {}
        return {"kept": kept, "seen": seen, **{name: getattr(self, name) for name in STATE}}

    def restore(self, data: Any) -> None:
        """Continue from `state`."""
        vars(self).update({name: data[name] for name in STATE})
        self._seen, kept = {name: np.array(values) for name, values in data["seen"].items()}, data["kept"]
        self.set({s.name: np.isin(np.arange(s.size), kept.get(s.name, np.arange(s.size))) for s in self.spaces})
