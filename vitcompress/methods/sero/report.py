"""The record of an exploration, and its tables and curves for the report."""

from pathlib import Path
from typing import Any

import numpy as np

from vitcompress.io.files import read_json
from vitcompress.methods.base import Chart, Line, StepReport, Table, ranked, table
from vitcompress.methods.sero.exploration import Exploration
from vitcompress.methods.sero.layout import KINDS
from vitcompress.plan import Plan

FILE = "exploration"
NAMES = {"qk": "q and k", "v": "v", "mlp": "FFN"}


def record(exploration: Exploration, delta: Plan, sparsity: float) -> dict[str, Any]:
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
    return {
        "layout": exploration.options.layout,
        "threshold": exploration.options.threshold,
        "sparsity": sparsity,
        "spaces": rows,
        "skipped": exploration.skipped,
        "revived": exploration.revived,
        "trace": exploration.trace,
        "counts": exploration.counts(),
    }


def report(folder: Path) -> StepReport:
    """Removed units by kind, by layer and by epoch, and the scores behind the last masks."""
    path = folder / f"{FILE}.json"
    if not path.is_file():
        return StepReport()
    data = read_json(path)
    remark = (
        f"SERo skipped {data['skipped']} refreshes of its masks because gradients were not finite; the masks before "
        "them stayed. With amp = 'bf16' or 'none', or a lower learning rate, none need be skipped"
    )
    tables = [_kinds(data), _widths(data["spaces"]), _trace(data["trace"])]
    charts = [_by_layer(data["spaces"]), _by_epoch(data), _by_score(data)]
    return StepReport(tables, [remark] if data["skipped"] else [], charts)


def _kinds(data: dict[str, Any]) -> Table:
    rows = [(kind, total, live, data["revived"][kind]) for kind, (live, total) in data["counts"].items() if total]
    rows.append(("all", *(sum(row[i] for row in rows) for i in (1, 2, 3))))
    cells = [(kind, total, live, _percent(live, total), revived) for kind, total, live, revived in rows]
    skipped = f", {data['skipped']} refreshes skipped" if data["skipped"] else ""
    title = f"SERo: units removed, {100 * data['sparsity']:g} % requested, layout {data['layout']}{skipped}"
    return table(title, "kind, units, live, removed, masked and revived", cells)


def _widths(spaces: list[dict[str, Any]]) -> Table:
    rows = [(row["space"], row["size"], row["live"], row["kept"], row["kept"] // row["heads"]) for row in spaces]
    return table("SERo: widths", "space, channels, live, kept, per head", rows)


def _trace(trace: list[dict[str, Any]]) -> Table:
    rows = [[t["epoch"] + 1, f"{100 * t['wanted']:.2f} %", *(_percent(*t[kind]) for kind in KINDS)] for t in trace]
    return table("SERo: removed at the end of each epoch", ", ".join(("epoch, requested", *KINDS)), rows)


def _percent(live: int, total: int) -> str:
    return f"{100 * (1 - live / total):.2f} %" if total else "none"


def _by_layer(spaces: list[dict[str, Any]]) -> Chart:
    lines = []
    for kind in KINDS:
        shares = [100 * row["live"] / row["size"] for row in spaces if row["kind"] == kind]
        lines.append(Line(NAMES[kind], range(len(shares)), shares))
    return Chart("SERo: live units", "layers of this kind, in forward order", "live, %", lines)


def _by_epoch(data: dict[str, Any]) -> Chart:
    trace = data["trace"]
    epochs = [row["epoch"] + 1 for row in trace]
    lines = [Line("requested, all", epochs, [100 * row["wanted"] for row in trace])]
    for kind in (kind for kind in KINDS if data["counts"][kind][1]):
        lines.append(Line(NAMES[kind], epochs, [100 * (1 - row[kind][0] / row[kind][1]) for row in trace]))
    return Chart("SERo: units removed", "epoch of the exploration", "removed at its end, %", lines)


def _by_score(data: dict[str, Any]) -> Chart:
    """Scores of all units of a kind, with the threshold if one number determined the masks."""
    lines = []
    for kind in KINDS:
        scores, live = list[float](), list[int]()
        for row in (row for row in data["spaces"] if row["kind"] == kind):
            live += [len(scores) + channel for channel in row["live_channels"]]
            scores += row["scores"]
        lines.append(ranked(NAMES[kind], scores, live))
    title = f"SERo: scores behind the last masks (layout {data['layout']}, threshold {data['threshold']})"
    title = title.replace("_", " ")
    level = None
    if (data["layout"], data["threshold"]) == ("ragged", "global"):
        level = min((y for line in lines for y, gone in zip(line.y, line.gone, strict=True) if not gone), default=None)
    return Chart(title, "share of the kind's units, best first", "score", lines, True, False, level, "threshold")
