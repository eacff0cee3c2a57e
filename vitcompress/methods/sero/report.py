"""The record of an exploration, and its tables and curves for the report."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitcompress.io.text import Columns, Table
from vitcompress.methods.base import Chart, Line, StepReport, ranked, read_memo
from vitcompress.methods.sero.exploration import Exploration
from vitcompress.plan import Plan

FILE = "exploration"
CLOSE = 0.01  # difference of the removed share from the requested one at which it counts as met
NAMES = {"qk": "q and k", "v": "v", "mlp": "FFN"}


def _removed(live: int, total: int) -> str:
    return f"{100 * (1 - live / total):.2f} %" if total else "none"


WIDTHS: Columns = {
    "space": "{space}",
    "channels": "{size}",
    "live": "{live}",
    "kept": "{kept}",
    "per head": lambda row: row["kept"] // row["heads"],
}
UNITS: Columns = {
    "kind": "{kind}",
    "units": "{units}",
    "live": "{live}",
    "removed": lambda row: _removed(row["live"], row["units"]),
    "masked and revived": "{revived}",
}
EPOCHS: Columns = {
    "epoch": lambda row: row["epoch"] + 1,
    "requested": lambda row: f"{100 * row['wanted']:.2f} %",
    **{kind: partial(lambda kind, epoch: _removed(*epoch[kind]), kind) for kind in NAMES},
}


def record(exploration: Exploration, delta: Plan) -> dict[str, object]:
    """The result as plain data. scores: those behind the last masks. delta: the plan that is deployed."""
    removed = {s.name: () for s in exploration.spaces if (s.attention or s.name) in delta.removed}
    kept: dict[str, tuple[int, ...]] = {**delta.kept, **removed}
    rows = [
        {
            "space": space.name,
            "kind": space.kind,
            "size": space.size,
            "live": int(exploration.live[space.name].sum()),
            "live_channels": np.flatnonzero(exploration.live[space.name]).tolist(),
            "scores": exploration.scores[space.name],
            "kept": len(kept.get(space.name, range(space.size))),
            "heads": delta.heads.get(space.attention, space.heads),
        }
        for space in exploration.spaces
    ]
    settings = {name: getattr(exploration.options, name) for name in ("layout", "threshold", "sparsity")}
    results = {name: getattr(exploration, name) for name in ("skipped", "revived", "trace")}
    return {**settings, "spaces": rows, **results, "counts": exploration.counts()}


def report(folder: Path) -> StepReport:
    """Removed units by kind, by layer and by epoch, and the scores behind the last masks."""
    if (data := read_memo(folder, FILE)) is None:
        return StepReport()
    skipped, counts = data["skipped"], {kind: live for kind, live in data["counts"].items() if live[1]}
    kinds = [{"kind": k, "units": n, "live": live, "revived": data["revived"][k]} for k, (live, n) in counts.items()]
    kinds.append({"kind": "all", **{key: sum(row[key] for row in kinds) for key in ("units", "live", "revived")}})
    title = f"SERo: units removed, {100 * data['sparsity']:g} % requested, layout {data['layout']}"
    tables = [
        Table.of(title + (f", {skipped} refreshes skipped" if skipped else ""), UNITS, kinds),
        Table.of("SERo: widths", WIDTHS, data["spaces"]),
        Table.of("SERo: removed at the end of each epoch", EPOCHS, data["trace"]),
    ]
    skips = (
        f"SERo skipped {skipped} refreshes of its masks because gradients were not finite; the masks before "
        "them stayed. With amp = 'bf16' or 'none', or a lower learning rate, none need be skipped"
    )
    live, units, wanted = kinds[-1]["live"], kinds[-1]["units"], data["sparsity"]
    less = (
        f"SERo removed {_removed(live, units)} of the units, {100 * wanted:g} % were requested: with threshold = "
        "'per_layer' each layer keeps round_to channels of a head, tied heads keep 16; lower round_to, or untie them"
    )
    is_less = data["layout"] != "ragged" and 1 - live / units < wanted - CLOSE
    return StepReport(tables, [skips] * bool(skipped) + [less] * is_less, _charts(data))


def _charts(data: Any) -> list[Chart]:
    """Live units by layer, removed units by epoch, and scores of all units with the threshold, if one number is it."""
    trace, layers, scored = data["trace"], list[Line](), list[Line]()
    epochs = [row["epoch"] + 1 for row in trace]
    removed = [Line("requested, all", epochs, [100 * row["wanted"] for row in trace])]
    for kind, name in NAMES.items():
        rows = [row for row in data["spaces"] if row["kind"] == kind]
        layers.append(Line(name, range(len(rows)), [100 * row["live"] / row["size"] for row in rows]))
        if data["counts"][kind][1]:
            removed.append(Line(name, epochs, [100 * (1 - row[kind][0] / row[kind][1]) for row in trace]))
        scores, live = list[float](), list[int]()
        for row in rows:
            live += [len(scores) + channel for channel in row["live_channels"]]
            scores += row["scores"]
        scored.append(ranked(name, scores, live))
    level = None
    if (data["layout"], data["threshold"]) == ("ragged", "global"):
        points = (point for line in scored for point in zip(line.y, line.gone, strict=True))
        level = min((score for score, gone in points if not gone), default=None)
    title = f"SERo: scores behind the last masks (layout {data['layout']}, threshold {data['threshold']})"
    x = "share of the kind's units, best first"
    return [
        Chart("SERo: live units", "layers of this kind, in forward order", "live, %", layers),
        Chart("SERo: units removed", "epoch of the exploration", "removed at its end, %", removed),
        Chart(title.replace("_", " "), x, "score", scored, log=True, level=level),
    ]
