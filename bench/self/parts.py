"""What all parts share: options, the models of recipes, and the form of a line."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from vitcompress import surgery
from vitcompress.bench import timing
from vitcompress.families import family_of
from vitcompress.io.text import between, times
from vitcompress.methods.structure import structure_of_steps
from vitcompress.models.create import create_model
from vitcompress.plan import Plan
from vitcompress.recipe.load import load_recipe


@dataclass(frozen=True)
class Options:
    """arch: model of the parts that need one only. folder: where files may be made. threads: of a runtime's call.

    given: batch and runs where they were asked for, for parts with a protocol of their own.
    """

    folder: Path
    arch: str = "deit_small_patch16_224"
    batch: int = 8
    runs: int = 20
    threads: int | None = None
    given: tuple[int | None, int | None] = (None, None)


class Part(Protocol):
    """One subject: yields a line per figure, as plain data with `what` and, where two are compared, `ratio`."""

    def __call__(self, options: Options) -> Iterator[dict[str, Any]]: ...


def planned(name: str, changes: Sequence[str] = ()) -> tuple[nn.Module, Plan]:
    """Dense model of a recipe with random weights, and the plan that it gives without scoring. changes: as `--set`."""
    recipe = load_recipe(name, changes)
    dense = create_model(recipe.model.name, recipe.model.args)
    steps = ((step.method, step.options) for step in recipe.steps)
    base = Plan(recipe.model.name, recipe.model.args)
    return dense, structure_of_steps(dense, family_of(dense), base, steps)


def structured(name: str, changes: Sequence[str] = ()) -> tuple[nn.Module, nn.Module]:
    """Dense model of a recipe, and a copy that is pruned and folded as `planned`."""
    dense, plan = planned(name, changes)
    model = surgery.apply_to_copy(dense, plan)
    surgery.fold_linears(model, plan)
    return dense, model


def line(what: str, a: timing.Samples, b: timing.Samples, aim: tuple[float, float] = (0.0, math.inf)) -> dict[str, Any]:
    """Time of `a` over time of `b` with its interval, the range aimed at (None: open), and every sample behind it."""
    found = asdict(timing.ratio(a, b))
    figures = {
        "ratio": found["median"],
        "ci95": [end if end < math.inf else None for end in found["ci95"]],
        "aim": [end if end < math.inf else None for end in aim],
    }
    samples = {s.name: s.blocks_ms for s in (a, b)}
    return {"what": what, **figures, "batch": a.batch, "verdict": found["verdict"], "samples_ms": samples}


def text(found: dict[str, Any]) -> str:
    """A line in words: what it brings as `text`, else the ratio with its interval."""
    if "text" in found:
        return f"{found['what']}: {found['text']}"
    said = f"{found['what']}: {times(found['ratio'], 3)} ({between(found['ci95'], 3)})"
    if "speedup" in found:
        said += f", {found['speedup']:.3f} times as fast at a MACs ratio of {found['macs_ratio']:.3f}"
    return said
