"""Several runs side by side: one table, and a plot of accuracy against speed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

from vitcompress.bench.plots.figure import COLOURS, MARKS, check_path, new_figure, save_figure
from vitcompress.bench.report.files import format_accuracy
from vitcompress.bench.report.records import AccuracyRecord, RatioRecord, Report
from vitcompress.bench.report.run import read_report
from vitcompress.errors import InputError
from vitcompress.io.text import NOT_MEASURED, format_change, format_count, format_interval

COLUMNS = ("run", "accuracy", "parameters", "MACs", "speed", "checks")


class Cells(TypedDict):
    """A table with one row per run."""

    columns: list[str]
    rows: list[tuple[str, ...]]


class Comparison(TypedDict):
    """Reports by run folder, and a table of them. plot, pictures: paths of images drawn from them."""

    runs: dict[str, Report]
    table: Cells
    plot: NotRequired[str | None]
    pictures: NotRequired[list[str]]


class Point(NamedTuple):
    """A run in the plot."""

    run: str
    runtime: str
    ratio: RatioRecord
    accuracy: AccuracyRecord


def compare_runs(folders: Sequence[str | Path]) -> Comparison:
    """Compare each run with its own dense model. Raises ArtifactError for a folder without a report."""
    runs = {str(folder): read_report(folder) for folder in folders}
    rows = [(Path(name).name, *_cells(report)) for name, report in runs.items()]
    return {"runs": runs, "table": {"columns": list(COLUMNS), "rows": rows}}


def _cells(report: Report) -> tuple[str, ...]:
    accuracy, ratio, verify = _accuracy(report), _ratio(report), report.get("verify")
    dense, compressed = report["cost"]["dense"], report["cost"]["compressed"]
    counts = ((dense["params"], compressed["params"]), (dense["macs"], compressed["macs"]))
    return (
        format_accuracy(accuracy) if accuracy else NOT_MEASURED,
        *(f"{format_count(after)} ({format_change(before, after)})" for before, after in counts),
        f"{ratio['median']:.2f}x ({format_interval(ratio['ci95'])})" if ratio else NOT_MEASURED,
        "not run" if not verify else "passed" if verify["passed"] else "failed",
    )


def _accuracy(report: Report) -> AccuracyRecord | None:
    return (report.get("accuracy") or {}).get("compressed")


def _ratio(report: Report) -> RatioRecord | None:
    """Speed of the compressed over the dense model in the first runtime."""
    entries = report.get("bench") or ()
    return entries[0]["ratios"][0] if entries and entries[0]["ratios"] else None


def points(runs: Mapping[str, Report]) -> list[Point]:
    """The runs that have both an accuracy and a speed."""
    return [
        Point(Path(name).name, entries[0]["rows"][0]["runtime"], ratio, accuracy)
        for name, report in runs.items()
        if (entries := report.get("bench")) and (ratio := _ratio(report)) and (accuracy := _accuracy(report))
    ]


def plot(runs: Mapping[str, Report], path: Path) -> Path:
    """Plot accuracy against speed-up with their intervals, one point per run, to `path` (.png, .svg or .pdf).

    Raises:
        InputError: no run has both an accuracy and a speed, or `path` has another suffix.
    """
    check_path(path)
    shown = points(runs)
    if not shown:
        problem = "none of these runs has both an accuracy and a speed to plot"
        raise InputError(problem, hint="--structure-only runs have no accuracy")
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    for number, point in enumerate(shown):
        x, y = point.ratio["median"], 100 * point.accuracy["top1"]
        left, right = point.ratio["ci95"]
        low, high = (100 * end for end in point.accuracy["top1_ci95"])
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKS[number % len(MARKS)], "label": point.run}
        bar = None if left is None or right is None else [[x - left], [right - x]]  # None: too few rounds
        axes.errorbar([x], [y], xerr=bar, yerr=[[y - low], [high - y]], ls="none", capsize=3, **style)
    name, first = next(iter(runs.items()))
    if dense := (first.get("accuracy") or {}).get("dense"):
        axes.axhline(100 * dense["top1"], linestyle=":", color="grey", label=f"dense of {Path(name).name}")
    axes.axvline(1.0, linestyle=":", color="lightgrey")
    runtimes = " or ".join(dict.fromkeys(point.runtime for point in shown))
    axes.set(xlabel=f"times as fast as its dense model ({runtimes})", ylabel="top-1 on the test images, %")
    axes.set_title("bars: 95 % intervals", fontsize="small", loc="left")
    figure.legend(fontsize="small", loc="outside lower center", ncols=3)  # beside the axes, where it hides no interval
    return save_figure(figure, path)
