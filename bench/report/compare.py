"""Several runs side by side: one table, and a plot of accuracy against speed."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from vitcompress.bench.plots.figure import COLORS, MARKS, new_figure, save_figure, wrap
from vitcompress.bench.report.measurements import describe_setting, pairs
from vitcompress.bench.report.records import AccuracyRecord, RatioRecord, Report
from vitcompress.bench.report.run import count_verdicts, format_accuracy
from vitcompress.errors import InputError
from vitcompress.io.text import NOT_MEASURED, Table, format_change, format_count, format_speedup, shorten_paths

COUNTS: dict[str, Literal["params", "macs"]] = {"parameters": "params", "MACs": "macs"}
COLUMNS = ("run", "dense model", "accuracy", *COUNTS, "speed-up (95 %)", "measured in", "checks")
Cells = dict[str, str]  # by column; those that a row lacks are empty
Point = tuple[str, str, RatioRecord | None, AccuracyRecord]  # of a plot: name, setting of the measurement, and results


class Comparison(TypedDict):
    """Reports by run folder, and a table with one row per run, control and dense model. not_plotted: why a run is not
    in the plot, by folder. plot, pictures: paths of images drawn from them.
    """

    runs: dict[str, Report]
    table: Table
    not_plotted: dict[str, str]
    plot: NotRequired[str | None]
    pictures: NotRequired[list[str]]


def compare_runs(runs: Mapping[str, Report]) -> Comparison:
    """Compare each run, by its folder, with its own dense model."""
    groups, names = dense_models(runs), shorten_paths(runs)
    largest = {name: max(report["cost"]["dense"][key] for report in runs.values()) for name, key in COUNTS.items()}
    rows = list[Cells]()
    for dense, members in groups.items():
        rows.append({"run": dense, **_dense_cells(members[0][1], "dense", largest)})
        for run, report in members:
            rows.append({"run": names[run], "dense model": dense, **_compressed_cells(report, largest)})
            if _accuracy(report, "control"):
                extra = report.get("extra_epochs")
                name = f"{names[run]}: control (dense, +{extra} epoch{'s' * (extra != 1)})"
                rows.append({"run": name, "dense model": dense, **_dense_cells(report, "control", largest)})
    columns = [column for column in COLUMNS if column != "dense model" or len(groups) > 1]
    cells = [tuple(row.get(column, "") for column in columns) for row in rows]
    left_out = {run: reason for run, report in runs.items() if (reason := _gap(report))}
    return {"runs": dict(runs), "table": Table("", columns, cells), "not_plotted": left_out}


def dense_models(runs: Mapping[str, Report]) -> dict[str, list[tuple[str, Report]]]:
    """The runs of each dense model: `dense`, or `dense A`, `dense B`, ... if they start from several.

    Equal are those with the same weights, by hash, preprocessing and test images; without a hash, of equal accuracy.
    """
    groups: dict[str, list[tuple[str, Report]]] = {}
    for name, report in runs.items():
        accuracy: Mapping[str, object] = _accuracy(report, "dense") or {}
        known = report.get("dense_sha256") or accuracy, accuracy.get("images_digest")
        key = json.dumps([known, (report.get("model") or {}).get("input"), report["cost"]["dense"]])
        groups.setdefault(key, []).append((name, report))
    titles = [f"dense {chr(65 + n)}" if n < 26 else f"dense {n + 1}" for n in range(len(groups))]
    return dict(zip(titles if len(groups) > 1 else ["dense"], groups.values(), strict=True))


def _dense_cells(report: Report, model: Literal["dense", "control"], largest: Mapping[str, int]) -> Cells:
    """A dense model, or the control, which has its architecture. Counts have the unit of the `largest`."""
    counts = {name: format_count(report["cost"]["dense"][key], largest[name]) for name, key in COUNTS.items()}
    accuracy = format_accuracy(_accuracy(report, model), NOT_MEASURED)
    return {"accuracy": accuracy, **counts, "speed-up (95 %)": "1x", "measured in": _speed(report)[0]}


def _compressed_cells(report: Report, largest: Mapping[str, int]) -> Cells:
    (setting, ratio), verify = _speed(report), report.get("verify")
    cells = {"accuracy": format_accuracy(_accuracy(report), NOT_MEASURED), "measured in": setting}
    cells["speed-up (95 %)"] = format_speedup(ratio) if ratio else NOT_MEASURED
    cells["checks"] = count_verdicts(verify) if verify else "not run"
    for name, key in COUNTS.items():
        dense, compressed = report["cost"]["dense"][key], report["cost"]["compressed"][key]
        cells[name] = f"{format_count(compressed, largest[name])} ({format_change(dense, compressed)})"
    return cells


def _accuracy(report: Report, model: Literal["dense", "compressed", "control"] = "compressed") -> AccuracyRecord | None:
    return (report.get("accuracy") or {}).get(model)


def _speed(report: Report) -> tuple[str, RatioRecord | None]:
    """Setting and speed of the compressed over the dense model."""
    return next(((describe_setting(a), ratio) for a, _, ratio in pairs(report.get("bench") or ())), ("", None))


def _gap(report: Report) -> str:
    """Why a run is not in the plot; empty if it is."""
    accuracy = "" if _accuracy(report) else "its accuracy is not known"
    hint = "give --bench FILE, or export DIR with and without --dense, and measure both files"
    speed = "" if _speed(report)[1] else f"its speed was not measured together with that of its dense model ({hint})"
    return "; ".join(filter(None, (accuracy, speed)))


def points(runs: Mapping[str, Report]) -> Iterator[Point]:
    """The runs that have both an accuracy and a speed, each after its dense model, which has no ratio."""
    groups, names = dense_models(runs), shorten_paths(runs)
    for dense, members in groups.items():
        if accuracy := next((known for _, report in members if (known := _accuracy(report, "dense"))), None):
            yield dense, "", None, accuracy
        for name, report in members:
            speed, own = _speed(report), _accuracy(report)
            if speed[1] and own:
                yield f"{names[name]}{f' ({dense})' if len(groups) > 1 else ''}", *speed, own


def plot(runs: Mapping[str, Report], path: Path) -> Path:
    """Plot accuracy against speed-up with their intervals to `path` (.png, .svg or .pdf): runs and dense models.

    Raises InputError if no run has both an accuracy and a speed, or `path` has another suffix.
    """
    shown = list(points(runs))
    if not any(ratio for _, _, ratio, _ in shown):
        reasons = "; ".join(f"{Path(name).name}: {_gap(report)}" for name, report in runs.items())
        raise InputError(f"none of these runs has both an accuracy and a speed to plot: {reasons}")
    common = {setting for _, setting, _, _ in shown} - {""}
    where = f" ({common.pop()})" if len(common) == 1 else ""  # else beside each run
    figure = new_figure(7, 4 + 0.2 * len(shown))
    axes = figure.subplots()
    for number, (name, setting, ratio, accuracy) in enumerate(shown):
        x, y = ratio["median"] if ratio else 1.0, 100 * accuracy["top1"]
        left, right = ratio["ci95"] if ratio else (None, None)
        low, high = (100 * end for end in accuracy["top1_ci95"])
        style = {"color": COLORS[number % len(COLORS)], "marker": MARKS[number % len(MARKS)]}
        label = f"{name}, {setting}" if ratio and not where else name
        style["label"] = wrap(label, 6.4)  # inches, beside the mark
        style |= {} if ratio else {"color": "gray", "mfc": "white"}
        bar = None if left is None or right is None else [[x - left], [right - x]]  # None: too few rounds
        axes.errorbar([x], [y], xerr=bar, yerr=[[y - low], [high - y]], ls="none", capsize=3, **style)
    axes.axvline(1.0, linestyle=":", color="lightgray")
    axes.set(xlabel=f"times as fast as its dense model{where}", ylabel="top-1 on the test images, %")
    axes.set_title("bars: 95 % intervals", fontsize="small", loc="left")
    figure.legend(fontsize="small", loc="outside lower center")  # where it hides no interval
    return save_figure(figure, path)
