"""Several runs side by side: one table, and accuracy against speed as a plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitcompress.bench.plots.figure import COLOURS, MARKS, check_path, new_figure, save
from vitcompress.bench.report import run as reports
from vitcompress.bench.report.run import counted, interval
from vitcompress.errors import InputError
from vitcompress.io.text import NOT_MEASURED, Table, format_change, format_count

COLUMNS = ("run", "accuracy", "parameters", "MACs", "speed", "checks")


def run(folders: Sequence[str | Path]) -> dict[str, Any]:
    """The reports of run folders as data: `runs`, and one `table`.

    Raises:
        ArtifactError: a folder without a report.
    """
    found = {str(folder): reports.read(folder) for folder in folders}
    shown = table(found)
    return {"runs": found, "table": {"columns": list(shown.columns), "rows": list(map(list, shown.rows))}}


def table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row per run: what it costs, against its own dense model."""
    return Table("", COLUMNS, tuple((Path(name).name, *_cells(report)) for name, report in found.items()))


def _cells(report: Mapping[str, Any]) -> tuple[str, ...]:
    accuracy, cost = report.get("accuracy") or {}, report["cost"]
    sizes = [
        f"{format_count(cost['compressed'][k])} ({format_change(cost['dense'][k], cost['compressed'][k])})"
        for k in ("params", "macs")
    ]
    ratio = _ratio(report)
    speed = f"{ratio['median']:.2f}x ({interval(ratio)})" if ratio else NOT_MEASURED
    verify = report.get("verify")
    verdict = "not run" if not verify else "passed" if verify["passed"] else "failed"
    return counted(accuracy["compressed"]) if "compressed" in accuracy else NOT_MEASURED, *sizes, speed, verdict


def _ratio(report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Compressed against dense in the first runtime that was measured."""
    entries = report.get("bench") or ()
    return entries[0]["ratios"][0] if entries and entries[0]["ratios"] else None


def points(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the plot shows: speed against the run's own dense model and accuracy, both with 95 % intervals."""
    shown = []
    for name, report in found.items():
        ratio, accuracy = _ratio(report), (report.get("accuracy") or {}).get("compressed")
        if ratio and accuracy:
            runtime = report["bench"][0]["rows"][0]["runtime"]
            figures = {"speedup": ratio["median"], "speedup_ci95": ratio["ci95"], "runtime": runtime}
            shown.append({"run": Path(name).name, **figures, **{k: accuracy[k] for k in ("top1", "top1_ci95")}})
    return shown


def plot(found: Mapping[str, Mapping[str, Any]], path: Path) -> Path:
    """Accuracy against speed-up with both intervals, one point per run, as an image at `path` (.png, .svg, .pdf).

    Raises:
        InputError: no run has both, or another kind of image.
    """
    check_path(path)
    shown = points(found)
    if not shown:
        raise InputError(
            "none of these runs has both an accuracy and a speed to plot", hint="--structure-only runs have no accuracy"
        )
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    for number, point in enumerate(shown):
        x, y = point["speedup"], 100 * point["top1"]
        (left, right), (low, high) = point["speedup_ci95"], [100 * end for end in point["top1_ci95"]]
        across = [[x - left], [(x if right is None else right) - x]]
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKS[number % len(MARKS)], "label": point["run"]}
        axes.errorbar([x], [y], xerr=across, yerr=[[y - low], [high - y]], ls="none", capsize=3, **style)
    for name, report in list(found.items())[:1]:
        if dense := (report.get("accuracy") or {}).get("dense"):
            axes.axhline(100 * dense["top1"], linestyle=":", color="grey", label=f"dense of {Path(name).name}")
    axes.axvline(1.0, linestyle=":", color="lightgrey")
    where = " or ".join(dict.fromkeys(point["runtime"] for point in shown))
    axes.set(xlabel=f"times as fast as its dense model ({where})", ylabel="top-1 on the test images, %")
    axes.set_title("bars: 95 % intervals", fontsize="small", loc="left")
    figure.legend(fontsize="small", loc="outside lower center", ncols=3)  # beside the axes: it must hide no interval
    return save(figure, path)
