"""Pictures of what a run chose: which layers went, how much of each width is left in which block, and why."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vitcompress.bench.plots.figure import COLOURS, MARKS, new_figure, save
from vitcompress.bench.plots.structure import LAYERS, WIDTHS, Structure, Width, structure_of
from vitcompress.errors import ArtifactError
from vitcompress.methods import METHODS
from vitcompress.methods.base import Chart, Line
from vitcompress.models.checkpoint import PLAN, read_plan
from vitcompress.plan import Plan
from vitcompress.verify.slice import STEPS

STATES = {"kept": "#4c78a8", "replaced": "#f2b45c", "removed": "#f4f4f4"}
CELL, MARGIN = 0.5, 2.2  # inches: a block's width, and what names and colour bar need
COLUMNS = 2  # of curves
LEFT = "channels left, % of the dense model's"
ALL = "all"


def draw(folders: Sequence[str | Path], into: str | Path) -> list[Path]:
    """Draw run folders into files in `into`: the structure of each, and a picture of the curves that a step kept.

    Raises:
        ArtifactError: a folder without a plan; nothing is drawn then.
        MissingExtraError: matplotlib is not installed.
    """
    found = []
    runs = dict(zip(_names(folders), map(Path, folders), strict=True))
    plans = {name: _plan(folder) for name, folder in runs.items()}
    for name, folder in runs.items():
        figure = structure_figure(structure_of(plans[name]), name)
        found.append(save(figure, Path(into) / f"{name}-structure.png"))
        for step, charts in _charts(folder):
            found.append(
                save(charts_figure(charts, f"{name}, {step} (faint: removed)"), Path(into) / f"{name}-{step}.png")
            )
    return found


def _names(folders: Sequence[str | Path]) -> list[str]:
    """The folders' own names, with as many of the folders around them as tell them apart."""
    parts = [Path(folder).resolve().parts for folder in dict.fromkeys(map(str, folders))]
    for depth in range(1, 1 + max(map(len, parts))):
        names = ["-".join(part.strip("/\\:") for part in path[-depth:]) for path in parts]
        if len(set(names)) == len(names):
            break
    return names


def _plan(folder: Path) -> Plan:
    path = folder / PLAN
    if not path.is_file():
        raise ArtifactError(f"{folder} has no {PLAN}", hint="give the folder of a finished run")
    return read_plan(path)


def _charts(folder: Path) -> Iterator[tuple[str, list[Chart]]]:
    """Steps by name, with the curves that they kept."""
    for path in sorted(folder.glob(STEPS)):
        method = METHODS.get(path.name.split("-", 2)[2])
        if method is not None and (charts := method.report(path).charts):
            yield path.name, charts


# ------------------------------------------------------------------------------------------------------------ structure


def structure_figure(structure: Structure, title: str) -> Any:
    """Layers above, widths below, the blocks of the dense model from left to right."""
    rows = [len(structure.layers), len(structure.widths)]
    figure = new_figure(MARGIN + CELL * (len(structure.blocks) + 2), 1.6 + 0.36 * sum(rows))
    above, below = figure.subplots(2, 1, height_ratios=rows)
    draw_layers(above, structure)
    draw_widths(below, structure)
    figure.suptitle(title)
    return figure


def draw_layers(axes: Any, structure: Structure) -> None:
    """One square per layer: kept, replaced by what computes less, or removed."""
    for row, layers in enumerate(structure.layers.values()):
        for column, layer in enumerate(layers):
            if layer is not None:
                _square(axes, column, row, STATES[layer.state], layer.word, hatch=layer.state == "removed")
        count = sum(layer is not None and layer.state == "kept" for layer in layers)
        _square(axes, len(layers) + 0.5, row, "white", f"{count}/{sum(layer is not None for layer in layers)}")
    _grid(axes, structure, [LAYERS[kind] for kind in structure.layers])
    axes.set_title("layers", fontsize="medium", loc="left")
    axes.legend(
        handles=state_patches(), loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize="small", frameon=False
    )


def state_patches() -> list[Any]:
    """What the squares of layers mean, for a legend."""
    from matplotlib.patches import Patch

    return [Patch(fc=c, ec="grey", hatch="///" * (s == "removed"), label=s) for s, c in STATES.items()]


def draw_widths(axes: Any, structure: Structure) -> None:
    """One square per width, its number and shade the share in percent that is left."""
    from matplotlib import colormaps

    for row, (kind, widths) in enumerate(structure.widths.items()):
        everything = Width(*structure.total(kind))
        for column, width in [*enumerate(widths), (len(widths) + 0.5, everything)]:
            if width is None:
                continue
            share = width.left / width.of if width.of else 0.0
            word = "linear" if width.linear else f"{100 * share:.0f}"
            shade = "#f4f4f4" if width.left == 0 else colormaps["YlGnBu"](0.1 + 0.75 * share)
            dark = share > 0.6 and width.left > 0
            _square(axes, column, row, shade, word, hatch=width.left == 0 and not width.linear, dark=dark)
    _grid(axes, structure, [WIDTHS[kind] for kind in structure.widths])
    axes.set_title(LEFT, fontsize="medium", loc="left")
    axes.set_xlabel("block")


def _square(
    axes: Any, column: float, row: int, colour: Any, word: str = "", *, hatch: bool = False, dark: bool = False
) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((column, row), 1, 1, fc=colour, ec="grey", lw=0.6, hatch="///" if hatch else None))
    box = {"fc": "#f4f4f4", "ec": "none", "pad": 0.8} if hatch and word else None
    style = {"ha": "center", "va": "center", "fontsize": 7}
    axes.text(column + 0.5, row + 0.5, word, color="white" if dark else "black", bbox=box, **style)


def _grid(axes: Any, structure: Structure, names: Sequence[str]) -> None:
    count = len(structure.blocks)
    axes.set(xlim=(-0.1, count + 1.6), ylim=(len(names) + 0.1, -0.1))
    axes.set_yticks([row + 0.5 for row in range(len(names))], names)
    numbers = [re.split("[._]", path)[-1] for path in structure.blocks]
    axes.set_xticks([*(n + 0.5 for n in range(count)), count + 1.0], [*numbers, ALL], fontsize="small")
    axes.tick_params(length=0)
    for edge in axes.spines.values():
        edge.set_visible(False)
    for number in range(1, len(structure.stages)):  # stages part here
        axes.axvline(sum(structure.stages[:number]), color="black", lw=1.6)


# --------------------------------------------------------------------------------------------------------------- curves


def charts_figure(charts: Sequence[Chart], title: str) -> Any:
    """All of a step's curves, two in a row."""
    columns = min(COLUMNS, len(charts))
    rows = -(-len(charts) // columns)
    figure = new_figure(6 * columns, 0.4 + 3.6 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, chart in zip(grid, charts, strict=False):
        draw_chart(axes, chart)
    for axes in grid[len(charts) :]:
        axes.set_axis_off()
    figure.suptitle(title)
    return figure


def draw_chart(axes: Any, chart: Chart) -> None:
    """Curves, strong where channels or layers stay and faint where they went."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    groups = list(dict.fromkeys(line.group or line.name for line in chart.lines))
    told = set[str]()
    for number, line in enumerate(chart.lines):
        group = line.group or line.name
        share = number / max(1, len(chart.lines) - 1)
        place = groups.index(group)
        colour = colormaps["viridis"](0.9 * share) if chart.by_depth else COLOURS[place % len(COLOURS)]
        known = chart.by_depth or group in told or len(groups) > len(MARKS)
        if _draw_line(axes, line, colour, MARKS[place % len(MARKS)], None if known else group):
            told.add(group)
    if chart.level is not None:
        axes.axhline(chart.level, color="black", lw=0.8, ls="--", label=chart.level_name)
    if chart.log:
        axes.set_yscale("log")
    axes.set(xlabel=chart.x, ylabel=chart.y)
    if all(float(x).is_integer() for line in chart.lines for x in line.x):  # blocks, epochs, counts
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(chart.title, fontsize="medium")
    if chart.by_depth:
        _add_depth_bar(axes)
    elif axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def _add_depth_bar(axes: Any) -> None:
    """The colours of the first block to the last, in place of a legend."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap

    shades = ListedColormap([colormaps["viridis"](0.9 * n / 255) for n in range(256)])
    bar = axes.figure.colorbar(ScalarMappable(cmap=shades), ax=axes, ticks=[0, 1], pad=0.02, aspect=30)
    bar.ax.set_yticklabels(["first block", "last"], fontsize="small")


def _draw_line(axes: Any, line: Line, colour: Any, shape: str, label: str | None) -> bool:
    """Draw what stays strong, under `label`, and all of it faint; whether anything stays."""
    gone = list(line.gone) or [False] * len(line.y)
    few = shape if len(line.y) <= 40 else None
    if any(gone):
        axes.plot(line.x, line.y, color=colour, lw=0.8, alpha=0.35, marker=few, ms=3, mfc="white")
    if not all(gone):
        stay = [float("nan") if out else y for y, out in zip(line.y, gone, strict=True)]
        axes.plot(line.x, stay, color=colour, lw=1.6, marker=few, ms=4, label=label)
    if line.mark:
        _mark_end(axes, line, colour, shape)
    return not all(gone)


def _mark_end(axes: Any, line: Line, colour: Any, shape: str) -> None:
    """The line's last point, filled, with its words above and white around them, as they lie on other lines."""
    from matplotlib.patheffects import withStroke

    end = (line.x[-1], line.y[-1])
    axes.plot(*end, color=colour, marker=shape, ms=6, mec="black", zorder=4)
    about = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center", "va": "bottom", "zorder": 5}
    around = [withStroke(linewidth=2.5, foreground="white")]
    axes.annotate(line.mark, end, fontsize="small", weight="bold", path_effects=around, **about)
