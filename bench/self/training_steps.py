"""Training steps with vitcompress's hooks, compared with plain ones."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from vitcompress.bench import timing
from vitcompress.bench.artifacts import synthetic_images
from vitcompress.bench.self.parts import Line, Options, time_ratio
from vitcompress.families import family_of
from vitcompress.methods.sero.exploration import Exploration
from vitcompress.methods.sero.options import CriterionPass
from vitcompress.methods.sero.options import Options as SeroOptions
from vitcompress.models.create import create_model, input_config
from vitcompress.surgery.gates import GatedModel
from vitcompress.surgery.masks import mask_channels

GATES = {"channel gates": (0.0, 1.05), "score search": (0.0, 1.12)}  # aims
BYPASS: dict[str, Any] = {"attention_bypass": "norm_identity", "both_pruned_output_act": "gelu"}  # released HetDPT code
EXPLORATION: dict[CriterionPass, tuple[float, float]] = {"masked": (0.0, 1.08), "dense": (0.0, 1.20)}  # aims
REFRESH, SPARSITY = 8, 0.5
MANY = 10**6  # steps of an epoch that does not end


def time_gates(options: Options) -> Iterator[Line]:
    """Time of a training step with channel gates, and in HetDPT's score search, over that of the plain timm model."""
    plain, widths, searched = (create_model(options.arch).train() for _ in range(3))
    family = family_of(widths)
    masks = {space.name: torch.ones(space.size) for space in family.spaces(widths) if space.kind != "residual"}
    sites = [site for site in family.sites(searched) if site.kind in ("attention", "activation")]
    search = GatedModel(searched, family, sites, **BYPASS)
    with mask_channels(widths, family, masks):
        models = {"plain": plain, "channel gates": widths, "score search": search}
        steps = {name: Step(model, input_config(plain).size, options.batch) for name, model in models.items()}
        base, *others = _measure(steps, options, options.runs)
    for samples in others:
        yield time_ratio(samples.name, samples, base, GATES[samples.name])


def time_exploration(options: Options) -> Iterator[Line]:
    """Time of SERo's exploration steps over that of plain ones, in cycles from one refresh of the masks to the next."""
    cycles: dict[str, Callable[[], None]] = {}
    for criterion in (None, *EXPLORATION):
        model = create_model(options.arch).train()
        cycles[criterion or "plain"] = Step(model, input_config(model).size, options.batch, criterion).cycle
    base, *others = _measure(cycles, options, max(3, options.runs // 2))
    for samples, (criterion, aim) in zip(others, EXPLORATION.items(), strict=True):
        yield time_ratio(f"exploration step, {criterion} criterion", samples, base, aim)


def _measure(steps: Mapping[str, Callable[[], None]], options: Options, runs: int) -> list[timing.Samples]:
    targets = [timing.Target(name, step) for name, step in steps.items()]
    return timing.measure(targets, timing.Protocol("steps", options.batch, warmup=1, runs=runs))


class Step:
    """One optimizer step of a training, with SERo's hooks unless `criterion` is None."""

    def __init__(
        self, model: nn.Module, size: tuple[int, int, int], batch: int, criterion: CriterionPass | None = None
    ) -> None:
        self.model, self.number = model, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        self.images, self.targets = synthetic_images(size, batch, 0), torch.zeros(batch, dtype=torch.long)
        self.hooks: Exploration | None = None
        if criterion is not None:
            settings = SeroOptions(sparsity=SPARSITY, refresh=REFRESH, criterion_pass=criterion)
            self.hooks = Exploration(model, family_of(model), settings, lambda epoch, step, steps: SPARSITY, seed=0)

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.hooks:
            self.hooks.before_step(0, self.number, MANY, self._backward)
            self.optimizer.zero_grad(set_to_none=True)
        self._backward()
        if self.hooks:
            self.hooks.before_update()
        self.optimizer.step()
        if self.hooks:
            self.hooks.after_update()
        self.number += 1

    def cycle(self) -> None:
        """All steps from one refresh of the masks to the next."""
        for _ in range(REFRESH):
            self()

    def _backward(self) -> None:
        logits = self.model(self.images)
        logits = torch.stack(logits).mean(0) if isinstance(logits, tuple) else logits  # two heads in training
        loss: Any = nn.functional.cross_entropy(logits, self.targets)
        loss.backward()
