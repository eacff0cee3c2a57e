"""Time of SERo's exploration step over that of a plain training step, all refreshes of the masks included."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from vitcompress.bench import timing
from vitcompress.bench.artifacts import synthetic_images
from vitcompress.bench.self.parts import Options, line
from vitcompress.families import family_of
from vitcompress.methods.sero import method as sero
from vitcompress.methods.sero.exploration import Exploration
from vitcompress.methods.sero.options import CriterionPass
from vitcompress.models.create import create_model, input_config

AIMS: dict[CriterionPass, tuple[float, float]] = {"masked": (0.0, 1.08), "dense": (0.0, 1.20)}
REFRESH, SPARSITY = 8, 0.5
MANY = 10**6  # steps of an epoch that does not end


def run(options: Options) -> Iterator[dict[str, Any]]:
    """Cycles of one refresh and the steps up to the next, plain and both criterion passes in turns."""
    steps: dict[str, _Step] = {"plain": _Step(options, None)}
    steps |= {name: _Step(options, name) for name in AIMS}
    samples = {name: timing.Samples(name, options.batch, "wall") for name in steps}
    for cycle in range(max(3, options.runs // 2) + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            for _ in range(REFRESH):
                step()
            if cycle:  # the first one also makes the first masks and the optimiser's state
                samples[name].blocks_ms.append([1000 * (time.perf_counter() - began) / REFRESH])
    for name, aim in AIMS.items():
        yield line(f"exploration step, {name} criterion", samples[name], samples["plain"], aim)


class _Step:
    """One optimiser step of a training, with SERo's hooks around it unless `criterion_pass` is None."""

    def __init__(self, options: Options, criterion_pass: CriterionPass | None) -> None:
        self.model, self.number = create_model(options.arch).train(), 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.images = synthetic_images(input_config(self.model).size, options.batch, 0)
        self.targets = torch.zeros(options.batch, dtype=torch.long)
        self.hooks = None if criterion_pass is None else _hooks(self.model, criterion_pass)

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

    def _backward(self) -> None:
        loss: Any = nn.functional.cross_entropy(self.model(self.images), self.targets)
        loss.backward()


def _hooks(model: nn.Module, criterion_pass: CriterionPass) -> Exploration:
    options = sero.Options(sparsity=SPARSITY, refresh=REFRESH, criterion_pass=criterion_pass)
    return Exploration(model, family_of(model), options, lambda epoch, step, steps: SPARSITY, seed=0)
