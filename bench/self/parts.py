"""Shared by all parts: options, the models of recipes, interleaved measurements, and the form of a result."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress import surgery
from vitcompress.bench import suite, timing
from vitcompress.bench.report.records import RatioRecord
from vitcompress.exporters.runtimes import Runner, RunnerOptions, TorchRunner, open_runner
from vitcompress.families import Space, family_of
from vitcompress.io.text import format_interval, format_ratio
from vitcompress.methods.table import find_method
from vitcompress.models.create import create_model, create_on_meta
from vitcompress.plan import Plan
from vitcompress.recipe.load import load_recipe

Line = dict[str, Any]  # one result as plain data: `what`, and `text` or a `ratio` with its samples
Aim = Sequence[float | None]  # least and largest ratio that is aimed at; None: open


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

    def protocol(self) -> suite.BenchOptions:
        """The published protocol with the batch and runs of these options and a short warm-up."""
        return suite.BenchOptions("paper", self.batch, 3, self.runs, RunnerOptions(threads=self.threads))


def plan_recipe(name: str, changes: Sequence[str] = ()) -> Plan:
    """The plan of all steps of a recipe without scoring. changes: as `--set`."""
    recipe = load_recipe(name, changes)
    plan = Plan(recipe.model.name, recipe.model.args)
    model = create_on_meta(plan.arch, plan.arch_args)
    for step in recipe.steps:
        delta = find_method(step.method).structure(model, family_of(model), plan, step.options)
        model, plan = surgery.apply_to_copy(model, delta), plan.then(delta)
    return plan


def prune_recipe(name: str, changes: Sequence[str] = ()) -> tuple[nn.Module, nn.Module]:
    """Dense model of a recipe with random weights, and a copy pruned and folded by `plan_recipe`."""
    plan = plan_recipe(name, changes)
    dense = create_model(plan.arch, plan.arch_args)
    model = surgery.apply_to_copy(dense, plan)
    surgery.fold_linears(model, plan)
    return dense, model


def first_channels(space: Space, count: int) -> tuple[int, ...]:
    """The first `count` channels of every head."""
    return tuple(c for c in range(space.size) if c % (space.size // space.heads) < count)


def compare(
    artifacts: Mapping[str, nn.Module] | Mapping[str, Path],
    settings: suite.BenchOptions,
    precisions: Mapping[str, str] | None = None,
) -> suite.Bench:
    """Measure models and files interleaved, each under its name and in its precision, if any."""
    runners: list[Runner] = []
    with ExitStack() as stack:
        for name, artifact in artifacts.items():
            options = replace(settings.runner, precision=(precisions or {}).get(name, settings.runner.precision))
            if isinstance(artifact, nn.Module):
                runners.append(TorchRunner(deepcopy(artifact), options, name=name))
            else:
                runners.append(open_runner(artifact, options))
            stack.callback(runners[-1].close)
            runners[-1].name = name
        return suite.compare(runners, settings)


def time_ratio(what: str, a: timing.Samples, b: timing.Samples, aim: Aim) -> Line:
    """Time of `a` over time of `b` with its interval and every sample."""
    samples = {s.name: s.blocks_ms for s in (a, b)}
    return {"what": what, **_figures(timing.ratio(a, b)), "aim": aim, "samples_ms": samples}


def speed_ratios(bench: suite.Bench, options: Options) -> Iterator[Line]:
    """Speed of each later artifact of a measurement over the first, with every sample."""
    for row, ratio in zip(bench.rows[1:], bench.ratios, strict=True):
        both = bench.rows[0], row
        yield {
            **_figures(ratio),
            "threads": options.threads,
            "images_per_second": [one["images_per_second"] for one in both],
            "samples_ms": {one["artifact"]: one["samples_ms"] for one in both},
            "warnings": [text.replace(f"{options.folder}/", "") for text in bench.warnings],
        }


def _figures(ratio: RatioRecord) -> Line:
    return {"ratio": ratio["median"], "ci95": ratio["ci95"], "verdict": ratio["verdict"], "batch": ratio["batch"]}


def describe(line: Line) -> str:
    """A line as text: its own `text`, or the ratio with its interval."""
    if "text" in line:
        return f"{line['what']}: {line['text']}"
    text = f"{line['what']}: {format_ratio(line['ratio'], 3)} ({format_interval(line['ci95'], 3)})"
    if "speedup" in line:
        text += f", {line['speedup']:.3f} times as fast at a MACs ratio of {line['macs_ratio']:.3f}"
    return text
