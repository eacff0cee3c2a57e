"""Plots of a study: accuracy against cost and speed; removed layers and remaining widths of each row and seed."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from vitcompress.bench.plots.figure import COLORS, MARKS, new_figure, save_figure, wrap
from vitcompress.bench.plots.run import TITLES, Panel, draw_panel, state_patches
from vitcompress.bench.plots.structure import Structure, describe_structure
from vitcompress.plan import Plan

FAR_BELOW = 10.0  # points
LEGEND = 2.4  # inches, without its marks
Row = Mapping[str, Any]  # a row of a study, see pipeline.study.results


def draw(study: Row, into: Path) -> list[Path]:
    """Draw a study.json into `into`, and remove earlier pictures. Raises MissingExtraError without matplotlib."""
    paths = [save_figure(accuracy_figure(study), into / "accuracy.png")]
    seeds: dict[str, list[Structure]] = {}  # row -> its structure with each seed
    for run in study["runs"]:
        # A study records how many channels each space keeps, not which.
        kept = {space: tuple(range(count)) for space, count in run["kept"].items()}
        edits = {"removed": run["removed"], "folded": tuple(run["folded"]), "heads": run["heads"]}
        plan = Plan(study["model"]["arch"], study["model"]["arch_args"], kept=kept, **edits)
        seeds.setdefault(run["row"], []).append(describe_structure(plan))
    for curve, rows in grouped(study["rows"]).items():
        name = re.sub(r"\W+", "_", curve.lower().replace("+", " plus")).strip("_")  # HetDPT+ -> hetdpt_plus
        while any(path.name.startswith(f"{name}-") for path in paths):  # of another curve: "a b", "A-B"
            name += "_2"
        for panel in TITLES:
            shown = {row["title"]: seeds[row["row"]] for row in rows if any(_lost(s, panel) for s in seeds[row["row"]])}
            if shown:
                paths.append(save_figure(grid_figure(shown, panel), into / f"{name}-{panel}.png"))
    for old in {path for panel in TITLES for path in into.glob(f"*-{panel}.png")} - {*paths}:
        old.unlink()
    return paths


def grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Method -> its rows and those of curves compared with it, except the curves that all methods are compared with."""
    groups: dict[str, list[Row]] = {curve: [] for curve in _methods(rows)}
    for row in rows:
        method = row["curve"] if row["curve"] in groups else next(iter(row["against"]), "")
        if method in groups:
            groups[method].append(row)
    return groups


def _methods(rows: Sequence[Row]) -> list[str]:
    """Curves that are compared with a baseline; a baseline is compared with nothing."""
    baselines = {row["curve"] for row in rows if not row["against"]}
    return list(dict.fromkeys(row["curve"] for row in rows if set(row["against"]) & baselines))


def _lost(structure: Structure, panel: Panel) -> bool:
    """Whether a layer was replaced or removed, or a width is neither complete nor removed with its layer."""
    if panel == "layers":
        return any(layer is not None and layer.state != "kept" for row in structure.layers.values() for layer in row)
    return any(width is not None and 0 < width.kept < width.dense for row in structure.widths.values() for width in row)


def grid_figure(shown: Mapping[str, Sequence[Structure]], panel: Panel) -> Any:
    """One line per row of the study, one column per seed."""
    first = next(iter(shown.values()))[0]
    lines = len(first.layers if panel == "layers" else first.widths)
    columns = max(map(len, shown.values()))
    width, height = 1.6 + 0.42 * len(first.blocks), 0.85 + 0.27 * lines
    # A title that is wider than its blocks would narrow those of all columns.
    titles = [wrap(f"{title}, seed", width - 0.7) for title in shown]
    figure = new_figure(width * columns, 0.4 + height * len(shown) + 0.16 * "".join(titles).count("\n"))
    figure.get_layout_engine().set(h_pad=0.08)  # inches, between a title and the row above
    grid = figure.subplots(len(shown), columns, squeeze=False)
    for line, title, structures in zip(grid, titles, shown.values(), strict=True):
        for seed, (axes, structure) in enumerate(zip(line, structures, strict=False)):
            draw_panel(axes, structure, panel)
            axes.set_title(f"{title} {seed}", fontsize="small", loc="left")
            axes.tick_params(labelsize="small")
    figure.supxlabel("block of the dense model", fontsize="small")
    if panel == "layers":
        figure.legend(handles=state_patches(), loc="outside upper left", ncols=3, fontsize="small", frameon=False)
    else:
        figure.suptitle(f"{TITLES[panel]} (hatched: the layer is removed)", fontsize="small", x=0.01, ha="left")
    return figure


def accuracy_figure(study: Row) -> Any:
    """Mean accuracy, with a bar from the worst to the best seed, against MACs and, if measured, against speed.

    Methods are strong lines through their budgets; the curves that they are compared with have their color and hollow
    marks. Rows far below the rest are named at the lower edge.
    """
    from matplotlib.ticker import MaxNLocator, NullLocator  # a logarithmic axis of less than a decade has few ticks

    seeds: dict[str, list[float]] = {}  # top-1 of every seed of a row, percent
    for run in study["runs"]:
        seeds.setdefault(run["row"], []).append(100 * run["correct"] / run["total"])
    rows: list[Row] = study["rows"]
    sides = [("macs_ratio", "MACs, share of the dense model's")]
    sides += [("speedup", "times as fast as the dense model")] if study["speed"] else []
    figure = new_figure(3.4 + 5.2 * len(sides), 5.4)
    for axes, (key, label) in zip(figure.subplots(1, len(sides), squeeze=False)[0], sides, strict=True):
        for style, curve in _curves(rows):
            style["label"] = wrap(style["label"], LEGEND)
            tops = [seeds[row["row"]] for row in curve]
            means = [fmean(top) for top in tops]
            ends = [[abs(fmean(top) - end(top)) for top in tops] for end in (min, max)]  # abs: the mean is rounded
            axes.errorbar([row[key] for row in curve], means, yerr=ends, capsize=2, elinewidth=0.7, **style)
        axes.axhline(100 * study["dense"]["top1_mean"], color="gray", ls=":", lw=1, label="dense")
        axes.set(xlabel=label, ylabel="top-1 on the test images, %", xscale="log")
        axes.xaxis.set(major_locator=MaxNLocator("auto"), major_formatter="{x:g}", minor_locator=NullLocator())
        _limit_to_majority(axes, study, key, seeds)
    figure.axes[0].invert_xaxis()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    title = "bars: worst to best seed\nhollow: compared with the filled\none of the same color"
    style = {"loc": "outside right upper", "fontsize": "small", "frameon": False, "title_fontsize": "small"}
    figure.legend(handles, labels, title=title, **style)
    return figure


def _curves(rows: Sequence[Row]) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """Style of each curve, and its rows from the highest cost on."""
    styles = {curve: (COLORS[n % len(COLORS)], MARKS[n % len(MARKS)]) for n, curve in enumerate(_methods(rows))}
    rivals: dict[str, int] = {}
    baselines = iter("*" + MARKS[::-1])  # methods use them from the first on
    for curve in dict.fromkeys(row["curve"] for row in rows):
        own = sorted((row for row in rows if row["curve"] == curve), key=lambda row: -row["macs"])
        if curve in styles:
            color, mark = styles[curve]
            yield {"color": color, "marker": mark, "ms": 6, "ls": "-", "label": curve}, own
        elif not own[0]["against"]:
            style = {"color": "black", "marker": next(baselines, "*"), "ms": 11, "ls": "none"}
            yield {"label": own[0]["title"] if len(own) == 1 else curve, **style}, own
        else:
            method = own[0]["against"][0]
            rivals[method] = rivals.get(method, 0) + 1
            style = {"marker": MARKS[rivals[method] % len(MARKS)], "mfc": "white", "ms": 5, "ls": ":", "lw": 0.6}
            yield {"color": styles[method][0] if method in styles else "gray", "label": curve, **style}, own


def _limit_to_majority(axes: Any, study: Row, key: str, seeds: Mapping[str, Sequence[float]]) -> None:
    """Limit the vertical axis to the dense model and rows that are not far below the rest, and name the others."""
    limit = median(min(tops) for tops in seeds.values()) - FAR_BELOW
    shown = [100 * study["dense"]["top1_mean"], *(t for tops in seeds.values() if min(tops) >= limit for t in tops)]
    margin = 0.08 * (max(shown) - min(shown)) or 1.0
    axes.set_ylim(min(shown) - margin, max(shown) + margin)
    for row in study["rows"]:
        if min(seeds[row["row"]]) < min(shown) - margin:
            tops = ", ".join(f"{value:.0f}" for value in sorted(seeds[row["row"]]))
            text = f"{wrap(row['curve'], LEGEND)}:\n{tops} %"
            place = {"xytext": (-4, 3), "textcoords": "offset points", "ha": "right", "fontsize": 8}
            axes.annotate(text, (row[key], min(shown) - margin), **place)
