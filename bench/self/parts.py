"""Shared by all parts: options, the models of recipes, interleaved measurements, and the form of a result."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress import surgery
from vitcompress.bench import suite, timing
from vitcompress.families import family_of
from vitcompress.io.text import format_interval, format_ratio
from vitcompress.methods.structure import structure_of_steps
from vitcompress.models.create import create_model
from vitcompress.plan import Plan
from vitcompress.recipe.load import load_recipe
from vitcompress.recipe.schema import Recipe

Line = dict[str, Any]  # one result as plain data: `what`, and `text` or a `ratio` with its samples
OPEN = (0.0, math.inf)


@dataclass(frozen=True)
class Options:
    """folder: for temporary files. arch: model of the parts that need only one. threads: of one call of a runtime.

    explicit: batch and runs if set on the command line, for parts with a protocol of their own.
    """

    folder: Path
    arch: str = "deit_small_patch16_224"
    batch: int = 8
    runs: int = 20
    threads: int | None = None
    explicit: tuple[int | None, int | None] = (None, None)


def create_dense(recipe: Recipe) -> tuple[nn.Module, Plan]:
    """Dense model of a recipe with random weights, and the plan that changes nothing."""
    return create_model(recipe.model.name, recipe.model.args), Plan(recipe.model.name, recipe.model.args)


def plan_recipe(name: str, changes: Sequence[str] = ()) -> tuple[nn.Module, Plan]:
    """Dense model of a recipe with random weights, and the plan of its steps without scoring. changes: as `--set`."""
    recipe = load_recipe(name, changes)
    dense, base = create_dense(recipe)
    steps = ((step.method, step.options) for step in recipe.steps)
    return dense, structure_of_steps(dense, family_of(dense), base, steps)


def prune_recipe(name: str, changes: Sequence[str] = ()) -> tuple[nn.Module, nn.Module]:
    """Dense model of a recipe, and a copy pruned and folded by `plan_recipe`."""
    dense, plan = plan_recipe(name, changes)
    model = surgery.apply_to_copy(dense, plan)
    surgery.fold_linears(model, plan)
    return dense, model


def time_ratio(what: str, a: timing.Samples, b: timing.Samples, aim: tuple[float, float] = OPEN) -> Line:
    """Time of `a` over time of `b` with its interval, the range that is aimed at (None: open), and every sample."""
    ratio = timing.ratio(a, b).record(a.batch)
    samples = {s.name: s.blocks_ms for s in (a, b)}
    limits = [end if end < math.inf else None for end in aim]
    figures = {"ratio": ratio["median"], "ci95": ratio["ci95"], "aim": limits}
    return {"what": what, **figures, "batch": a.batch, "verdict": ratio["verdict"], "samples_ms": samples}


def speed_ratios(bench: suite.Bench, options: Options) -> Iterator[Line]:
    """Speed of each later artifact of a measurement over the first, with every sample."""
    for row, ratio in zip(bench.rows[1:], bench.ratios, strict=True):
        both = bench.rows[0], row
        yield {
            "ratio": ratio["median"],
            "ci95": list(ratio["ci95"]),
            "verdict": ratio["verdict"],
            "batch": options.batch,
            "threads": options.threads,
            "images_per_second": [one["images_per_second"] for one in both],
            "samples_ms": {Path(one["artifact"]).name: one["samples_ms"] for one in both},
            "warnings": [text.replace(f"{options.folder}/", "") for text in bench.warnings],
        }


def describe(line: Line) -> str:
    """A line as text: its own `text`, or the ratio with its interval."""
    if "text" in line:
        return f"{line['what']}: {line['text']}"
    text = f"{line['what']}: {format_ratio(line['ratio'], 3)} ({format_interval(line['ci95'], 3)})"
    if "speedup" in line:
        text += f", {line['speedup']:.3f} times as fast at a MACs ratio of {line['macs_ratio']:.3f}"
    return text
