"""Pictures of a study: accuracy against cost and speed; by row and seed, which layers went and how wide the rest is."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from vitcompress.bench.plots.figure import COLOURS, MARKS, new_figure, save
from vitcompress.bench.plots.run import LEFT, draw_layers, draw_widths, state_patches
from vitcompress.bench.plots.structure import Structure, structure_of
from vitcompress.plan import Plan

FAR_BELOW = 10.0  # points
TICKS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 7, 10)
Draw = Callable[[Any, Structure], None]


def draw(found: Mapping[str, Any], into: Path) -> list[Path]:
    """Draw the study `found` (the content of study.json, which says all that is drawn) into the folder `into`.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    written = [save(accuracy_figure(found), into / "accuracy.png")]
    structures: dict[str, list[Structure]] = {}
    for run in found["runs"]:
        structures.setdefault(run["row"], []).append(structure_of(_plan(found["model"], run)))
    kinds: tuple[tuple[str, Draw, Callable[[Structure], bool]], ...] = (
        ("layers", draw_layers, _lost_layers),
        ("widths", draw_widths, _lost_channels),
    )
    for curve, rows in grouped(found["rows"]).items():
        for kind, draw_one, lost in kinds:
            shown = {row["title"]: structures[row["row"]] for row in rows if any(map(lost, structures[row["row"]]))}
            if shown:
                written.append(save(grid_figure(shown, draw_one), into / f"{_slug(curve)}-{kind}.png"))
    return written


def _plan(model: Mapping[str, Any], run: Mapping[str, Any]) -> Plan:
    """The plan of a run, but for which channels it keeps: a picture shows how many, and a study records no more."""
    kept = {space: tuple(range(count)) for space, count in run["kept"].items()}
    same = {key: run[key] for key in ("removed", "heads")}
    return Plan(model["arch"], model["arch_args"], folded=tuple(run["folded"]), kept=kept, **same)


def grouped(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Method -> its rows and those of curves compared with it, but not of those that all methods are compared with."""
    methods = _methods(rows)
    found: dict[str, list[Mapping[str, Any]]] = {curve: [] for curve in methods}
    for row in rows:
        of = row["curve"] if row["curve"] in methods else next(iter(row["against"]), "")
        if of in found:
            found[of].append(row)
    return found


def _methods(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Curves that are held against the roots, which are held against nothing."""
    roots = {row["curve"] for row in rows if not row["against"]}
    return list(dict.fromkeys(row["curve"] for row in rows if set(row["against"]) & roots))


def _slug(name: str) -> str:
    """`HetDPT+` as `hetdpt_plus`."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower().replace("+", " plus")).strip("_")


def _lost_layers(structure: Structure) -> bool:
    return any(layer is not None and layer.state != "kept" for of in structure.layers.values() for layer in of)


def _lost_channels(structure: Structure) -> bool:
    """Whether a width is neither whole nor gone with its layer."""
    widths = [width for of in structure.widths.values() for width in of if width is not None]
    return any(0 < width.left < width.of for width in widths)


def grid_figure(shown: Mapping[str, Sequence[Structure]], draw_one: Draw) -> Any:
    """One line per row of the study, one column per seed."""
    first = next(iter(shown.values()))[0]
    lines = len(first.layers if draw_one is draw_layers else first.widths)
    columns = max(map(len, shown.values()))
    figure = new_figure((1.6 + 0.42 * len(first.blocks)) * columns, 0.4 + (0.85 + 0.27 * lines) * len(shown))
    figure.get_layout_engine().set(h_pad=0.08)  # inches: titles stand apart from the row above
    grid = figure.subplots(len(shown), columns, squeeze=False)
    for line, (title, structures) in zip(grid, shown.items(), strict=True):
        for seed, (axes, structure) in enumerate(zip(line, structures, strict=False)):
            draw_one(axes, structure)
            if legend := axes.get_legend():
                legend.remove()
            axes.set_title(f"{title}, seed {seed}", fontsize="small", loc="left")
            axes.set_xlabel("")
            axes.tick_params(labelsize="small")
    figure.supxlabel("block of the dense model", fontsize="small")
    if draw_one is draw_layers:
        figure.legend(handles=state_patches(), loc="outside upper left", ncols=3, fontsize="small", frameon=False)
    else:
        figure.suptitle(f"{LEFT} (hatched: the layer is gone)", fontsize="small", x=0.01, ha="left")
    return figure


# ------------------------------------------------------------------------------------------------------------ accuracy


def accuracy_figure(found: Mapping[str, Any]) -> Any:
    """Mean accuracy, with a bar from the worst to the best seed, against MACs and, where measured, against speed.

    Methods are strong lines through their budgets; what they are held against has their colour, and hollow marks. Rows
    that fell far below the rest are told at the lower edge.
    """
    seeds = {row["row"]: _seeds(found, row["row"]) for row in found["rows"]}
    sides = [("macs_ratio", "MACs, share of the dense model's")]
    sides += [("speedup", "times as fast as the dense model")] if found["speed"] else []
    figure = new_figure(3.4 + 5.2 * len(sides), 5.4)
    for axes, (key, label) in zip(figure.subplots(1, len(sides), squeeze=False)[0], sides, strict=True):
        for style, rows in _curves(found["rows"]):
            _errorbars(axes, rows, key, style, seeds)
        axes.axhline(100 * found["dense"]["top1_mean"], color="grey", ls=":", lw=1, label="dense")
        axes.set(xlabel=label, ylabel="top-1 on the test images, %", xscale="log")
        ends = [1.0, *(row[key] for row in found["rows"])]
        ticks = [tick for tick in TICKS if min(ends) <= tick <= max(ends)]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        _without_collapsed(axes, found["rows"], key, seeds)
    figure.axes[0].invert_xaxis()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    title = "bars: worst to best seed\nhollow: held against the filled\none of the same colour"
    figure.legend(
        handles, labels, loc="outside right upper", fontsize="small", frameon=False, title=title, title_fontsize="small"
    )
    return figure


def _curves(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[dict[str, Any], list[Mapping[str, Any]]]]:
    """How each curve is drawn, and its rows from the most costly on."""
    methods = _methods(rows)
    styles = {curve: (COLOURS[n % len(COLOURS)], MARKS[n % len(MARKS)]) for n, curve in enumerate(methods)}
    rivals: dict[str, int] = {}
    for curve in dict.fromkeys(row["curve"] for row in rows):
        own = sorted((row for row in rows if row["curve"] == curve), key=lambda row: -row["macs"])
        if curve in methods:
            colour, mark = styles[curve]
            yield {"color": colour, "marker": mark, "ms": 6, "ls": "-", "label": curve}, own
        elif not own[0]["against"]:
            yield {"color": "black", "marker": "*", "ms": 11, "ls": "none", "label": own[0]["title"]}, own
        else:
            of = own[0]["against"][0]
            rivals[of] = rivals.get(of, 0) + 1
            style = {"marker": MARKS[rivals[of] % len(MARKS)], "mfc": "white", "ms": 5, "ls": ":", "lw": 0.6}
            yield {"color": styles[of][0] if of in styles else "grey", "label": curve, **style}, own


def _seeds(found: Mapping[str, Any], row: str) -> list[float]:
    """Top-1 of every seed of a row, percent."""
    return [100 * run["correct"] / run["total"] for run in found["runs"] if run["row"] == row]


def _errorbars(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    key: str,
    style: Mapping[str, Any],
    seeds: Mapping[str, Sequence[float]],
) -> None:
    means = [fmean(seeds[row["row"]]) for row in rows]
    below = [mean - min(seeds[row["row"]]) for mean, row in zip(means, rows, strict=True)]
    above = [max(seeds[row["row"]]) - mean for mean, row in zip(means, rows, strict=True)]
    axes.errorbar([row[key] for row in rows], means, yerr=[below, above], capsize=2, elinewidth=0.7, **style)


def _without_collapsed(
    axes: Any, rows: Sequence[Mapping[str, Any]], key: str, seeds: Mapping[str, Sequence[float]]
) -> None:
    """Limit the vertical axis to rows that are not far below the rest, and name the others."""
    least = median(min(of) for of in seeds.values()) - FAR_BELOW
    shown = [value for of in seeds.values() if min(of) >= least for value in of]
    room = 0.08 * (max(shown) - min(shown)) or 1.0
    axes.set_ylim(min(shown) - room, max(shown) + room)
    for row in rows:
        of = seeds[row["row"]]
        if min(of) < least:
            words = f"{row['curve']}:\n{', '.join(f'{value:.0f}' for value in sorted(of))} %"
            beside = {"xytext": (-4, 3), "textcoords": "offset points", "ha": "right", "fontsize": 8}
            axes.annotate(words, (row[key], min(shown) - room), **beside)
