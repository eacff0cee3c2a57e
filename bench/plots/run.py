"""Plots of a run: removed layers, remaining width of each block, and the measurements that each step chose by."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from vitcompress.bench.plots.figure import COLORS, MARKS, new_figure, save_figure, wrap
from vitcompress.bench.plots.structure import LAYERS, WIDTHS, Layer, Structure, Width, describe_structure
from vitcompress.io.plugins import plugin_names
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.text import shorten_paths
from vitcompress.methods.base import Chart, Line
from vitcompress.methods.table import METHODS, find_method
from vitcompress.models.checkpoint import read_plan

GRAY = "#f4f4f4"
STATES = {"kept": "#4c78a8", "replaced": "#f2b45c", "removed": GRAY}
CELL, MARGIN = 0.5, 2.2  # inches: width of a block, and of names and color bar
COLUMNS = 2  # of charts
Panel = Literal["layers", "widths"]
TITLES: dict[Panel, str] = {"layers": "layers", "widths": "remaining channels, % of the dense model's"}


def draw(folders: Sequence[str | Path], into: str | Path) -> list[Path]:
    """Draw run folders into files in `into`: the structure of each run, and the charts of each of its steps.

    Raises PlanError if a folder has no plan (nothing is drawn), and MissingExtraError without matplotlib.
    """
    paths, runs = [], dict[str, Any]()
    for path, short in shorten_paths(str(Path(folder).resolve()) for folder in folders).items():
        name = "-".join(part.strip("/\\:") for part in Path(short).parts)
        while name in runs:  # of another run: a/b, a-b
            name += "_2"
        runs[name] = RunFolder(Path(path)), read_plan(RunFolder(Path(path)).plan)
    for name, (folder, plan) in runs.items():
        figure = structure_figure(describe_structure(plan), name)
        paths.append(save_figure(figure, Path(into) / f"{name}-structure.png"))
        for step in folder.steps():
            method = step.name.split("-", 2)[2]
            if method in (*METHODS, *plugin_names("methods")) and (charts := find_method(method).report(step).charts):
                figure = charts_figure(charts, f"{name}, {step.name} (faint: removed)")
                paths.append(save_figure(figure, Path(into) / f"{name}-{step.name}.png"))
    return paths


def structure_figure(structure: Structure, title: str) -> Any:
    """Layers above, widths below, the blocks of the dense model from left to right."""
    rows = [len(structure.layers), len(structure.widths)]
    figure = new_figure(MARGIN + CELL * (len(structure.blocks) + 2), 1.6 + 0.36 * sum(rows))
    above, below = figure.subplots(2, 1, height_ratios=rows)
    draw_panel(above, structure, "layers")
    draw_panel(below, structure, "widths")
    legend = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 3, "fontsize": "small", "frameon": False}
    above.legend(handles=state_patches(), **legend)
    below.set_xlabel("block")
    figure.suptitle(wrap(title, 0.7 * figure.get_figwidth()))  # in a larger font
    return figure


def draw_panel(axes: Any, structure: Structure, panel: Panel) -> None:
    """One square per layer (kept, replaced, removed) or width (remaining share in percent); last column: total."""
    from matplotlib.patches import Rectangle

    rows = _rows(structure, panel)
    count = len(structure.blocks)
    for row, cells in enumerate(rows.values()):
        for column, cell in zip([*range(count), count + 0.5], cells, strict=True):
            if cell is not None:
                text, color, hatched, ink = _style(cell)
                hatch = "///" if hatched else None
                axes.add_patch(Rectangle((column, row), 1, 1, fc=color, ec="gray", lw=0.6, hatch=hatch))
                box = {"fc": GRAY, "ec": "none", "pad": 0.8} if hatched and text else None
                style = {"ha": "center", "va": "center", "fontsize": 7, "color": ink}
                axes.text(column + 0.5, row + 0.5, text, bbox=box, **style)
    axes.set(xlim=(-0.1, count + 1.6), ylim=(len(rows) + 0.1, -0.1))
    axes.set_yticks([row + 0.5 for row in range(len(rows))], list(rows))
    numbers = [re.split("[._]", path)[-1] for path in structure.blocks]
    axes.set_xticks([*(n + 0.5 for n in range(count)), count + 1.0], [*numbers, "total"], fontsize="small")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for start in structure.stage_starts[1:]:
        axes.axvline(start, color="black", lw=1.6)
    axes.set_title(TITLES[panel], fontsize="medium", loc="left")


def _rows(structure: Structure, panel: Panel) -> dict[str, list[Layer | Width | str | None]]:
    """Name of each kind -> its layers or widths by block, and their sum."""
    if panel == "widths":
        return {WIDTHS[kind]: [*row, structure.total(kind)] for kind, row in structure.widths.items()}
    states = {kind: [layer.state for layer in row if layer] for kind, row in structure.layers.items()}
    sums = {kind: f"{own.count('kept')}/{len(own)}" for kind, own in states.items()}
    return {LAYERS[kind]: [*row, sums[kind]] for kind, row in structure.layers.items()}


def _style(cell: Layer | Width | str) -> tuple[str, Any, bool, str]:
    """Text and color of a square, whether it is hatched, and the color of the text."""
    from matplotlib import colormaps

    if isinstance(cell, str):
        return cell, "white", False, "black"
    if isinstance(cell, Layer):
        return cell.word, STATES[cell.state], cell.state == "removed", "black"
    share = cell.kept / cell.dense if cell.dense else 0.0
    text = "linear" if cell.linear else f"{100 * share:.0f}"
    color = colormaps["YlGnBu"](0.1 + 0.75 * share) if cell.kept else GRAY
    return text, color, not cell.kept and not cell.linear, "white" if share > 0.6 else "black"


def state_patches() -> list[Any]:
    """Legend entries for the states of layers."""
    from matplotlib.patches import Patch

    return [Patch(fc=c, ec="gray", hatch="///" * (s == "removed"), label=s) for s, c in STATES.items()]


def charts_figure(charts: Sequence[Chart], title: str) -> Any:
    """All charts of a step, two per row."""
    columns = min(COLUMNS, len(charts))
    rows = -(-len(charts) // columns)
    figure = new_figure(6 * columns, 0.4 + 3.6 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, chart in zip(grid, charts, strict=False):
        _draw_chart(axes, chart)
    for axes in grid[len(charts) :]:
        axes.set_axis_off()
    figure.suptitle(wrap(title, 0.7 * figure.get_figwidth()))
    return figure


def _draw_chart(axes: Any, chart: Chart) -> None:
    """Curves, strong for kept channels or layers and faint for removed ones."""
    from matplotlib import cm, colormaps, colors
    from matplotlib.ticker import MaxNLocator

    groups = list(dict.fromkeys(line.group or line.name for line in chart.lines))
    for number, line in enumerate(chart.lines):
        group = line.group or line.name
        place, depth = groups.index(group), number / max(1, len(chart.lines) - 1)
        color = colormaps["viridis"](0.9 * depth) if chart.by_depth else COLORS[place % len(COLORS)]
        label = None if chart.by_depth or len(groups) > len(MARKS) else group
        _draw_line(axes, line, color, MARKS[place % len(MARKS)], label)
    if chart.level is not None:
        axes.axhline(chart.level, color="black", lw=0.8, ls="--", label="threshold")
    if chart.log:
        axes.set_yscale("log")
    axes.set(xlabel=chart.x, ylabel=chart.y)
    if all(float(x).is_integer() for line in chart.lines for x in line.x):  # blocks, epochs, counts
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(chart.title, fontsize="medium")
    if chart.by_depth:  # a color bar from the first block to the last
        shades = colors.ListedColormap([colormaps["viridis"](0.9 * n / 255) for n in range(256)])
        bar = axes.figure.colorbar(cm.ScalarMappable(cmap=shades), ax=axes, ticks=[0, 1], pad=0.02, aspect=30)
        bar.ax.set_yticklabels(["first block", "last"], fontsize="small")
    elif by_label := {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}:
        axes.legend(by_label.values(), by_label.keys(), fontsize="small")


def _draw_line(axes: Any, line: Line, color: Any, marker: str, label: str | None) -> None:
    """Draw the line faint, and its kept part strong under `label`."""
    from matplotlib.patheffects import withStroke

    gone = list(line.gone) or [False] * len(line.y)
    points = marker if len(line.y) <= 40 else None
    if any(gone):
        axes.plot(line.x, line.y, color=color, lw=0.8, alpha=0.35, marker=points, ms=3, mfc="white")
    if not all(gone):
        kept = [float("nan") if out else y for y, out in zip(line.y, gone, strict=True)]
        axes.plot(line.x, kept, color=color, lw=1.6, marker=points, ms=4, label=label)
    if line.mark:  # the last point, with its text above other lines
        end = (line.x[-1], line.y[-1])
        axes.plot(*end, color=color, marker=marker, ms=6, mec="black", zorder=4)
        place = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center", "va": "bottom", "zorder": 5}
        outline = [withStroke(linewidth=2.5, foreground="white")]
        axes.annotate(line.mark, end, fontsize="small", weight="bold", path_effects=outline, **place)
