"""The record of an exploration, and its tables and curves for the report."""

from pathlib import Path
from typing import Any

import numpy as np

from vitcompress.io.files import read_json
from vitcompress.methods.base import Chart, Line, StepReport, ranked
from vitcompress.methods.sero.exploration import Exploration
from vitcompress.methods.sero.layout import KINDS
from vitcompress.plan import Plan

FILE = "exploration"
NAMES = {"qk": "q and k", "v": "v", "mlp": "FFN"}


def record(found: Exploration, delta: Plan, sparsity: float) -> dict[str, Any]:
    """What came out, as plain data. scores: of the last choice of masks. delta: what will be deployed."""
    gone = {s.name: () for s in found.spaces if (s.attention or s.name) in delta.removed}
    kept: dict[str, tuple[int, ...]] = {**delta.kept, **gone}
    rows = [
        {
            "space": space.name,
            "kind": space.kind,
            "size": space.size,
            "live": int(found.live[space.name].sum()),
            "live_channels": np.flatnonzero(found.live[space.name]).tolist(),
            "scores": found.scores[space.name],
            "kept": len(kept.get(space.name, range(space.size))),
            "heads": delta.heads.get(space.attention, space.heads),
        }
        for space in found.spaces
    ]
    more = {"skipped": found.skipped, "revived": found.revived, "trace": found.trace, "counts": found.counts()}
    rules = found.options.rules
    return {"layout": rules.layout, "threshold": rules.threshold, "sparsity": sparsity, "spaces": rows, **more}


def report(folder: Path) -> StepReport:
    return StepReport(tables(folder), remarks(folder), charts(folder))


def tables(folder: Path) -> list[dict[str, Any]]:
    """Achieved sparsity by kind, widths by layer, and the way there, from the step's `folder`."""
    path = folder / f"{FILE}.json"
    if not path.is_file():
        return []
    found = read_json(path)
    return [_kinds(found), _widths(found["spaces"]), _trace(found["trace"])]


def remarks(folder: Path) -> list[str]:
    """That gradients were not finite, if some were, from the step's `folder`."""
    path = folder / f"{FILE}.json"
    skipped = read_json(path)["skipped"] if path.is_file() else 0
    if not skipped:
        return []
    return [
        f"SERo skipped {skipped} refreshes of its masks because gradients were not finite; the masks before them "
        "stayed. With amp = 'bf16' or 'none', or a lower learning rate, none need be skipped"
    ]


def _kinds(found: dict[str, Any]) -> dict[str, Any]:
    rows = [(kind, total, live, found["revived"][kind]) for kind, (live, total) in found["counts"].items() if total]
    rows.append(("all", *(sum(row[i] for row in rows) for i in (1, 2, 3))))
    cells = [[kind, str(total), str(live), _percent(live, total), str(back)] for kind, total, live, back in rows]
    skipped = f", {found['skipped']} refreshes skipped" if found["skipped"] else ""
    title = f"SERo: units removed, {100 * found['sparsity']:g} % asked for, layout {found['layout']}{skipped}"
    return {"title": title, "columns": ["kind", "units", "live", "removed", "came back on the way"], "rows": cells}


def _widths(spaces: list[dict[str, Any]]) -> dict[str, Any]:
    columns = ["space", "channels", "live", "kept", "per head"]
    rows = [
        [row["space"], *(str(row[key]) for key in ("size", "live", "kept")), str(row["kept"] // row["heads"])]
        for row in spaces
    ]
    return {"title": "SERo: widths", "columns": columns, "rows": rows}


def _trace(trace: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [[str(t["epoch"] + 1), f"{100 * t['wanted']:.2f} %", *(_percent(*t[kind]) for kind in KINDS)] for t in trace]
    return {"title": "SERo: removed at the end of each epoch", "columns": ["epoch", "asked for", *KINDS], "rows": rows}


def _percent(live: int, total: int) -> str:
    return f"{100 * (1 - live / total):.2f} %" if total else "none"


# --------------------------------------------------------------------------------------------------------------- curves


def charts(folder: Path) -> list[Chart]:
    """Live share by layer and on the way there, and the scores that made the last masks, from the step's `folder`."""
    path = folder / f"{FILE}.json"
    if not path.is_file():
        return []
    found = read_json(path)
    return [_by_layer(found), _by_epoch(found), _by_score(found)]


def _by_layer(found: dict[str, Any]) -> Chart:
    lines = []
    for kind in KINDS:
        own = [row for row in found["spaces"] if row["kind"] == kind]
        lines.append(Line(NAMES[kind], range(len(own)), [100 * row["live"] / row["size"] for row in own]))
    return Chart("SERo: live units", "layers of this kind, in forward order", "live, %", lines)


def _by_epoch(found: dict[str, Any]) -> Chart:
    trace = found["trace"]
    epochs = [row["epoch"] + 1 for row in trace]
    lines = [Line("asked for, all", epochs, [100 * row["wanted"] for row in trace])]
    for kind in KINDS:
        if found["counts"][kind][1]:
            lines.append(Line(NAMES[kind], epochs, [100 * (1 - row[kind][0] / row[kind][1]) for row in trace]))
    return Chart("SERo: units removed", "epoch of the exploration", "removed at its end, %", lines)


def _by_score(found: dict[str, Any]) -> Chart:
    """Pooled by kind. A threshold stands in the picture where one number made the masks."""
    lines = []
    for kind in KINDS:
        scores, live = list[float](), list[int]()
        for row in (row for row in found["spaces"] if row["kind"] == kind):
            live += [len(scores) + channel for channel in row["live_channels"]]
            scores += row["scores"]
        lines.append(ranked(NAMES[kind], scores, live))
    plain = found["layout"] == "ragged" and found["threshold"] == "global"
    least = min((y for line in lines for y, gone in zip(line.y, line.gone, strict=True) if not gone), default=None)
    how = f"layout {found['layout']}, threshold {found['threshold'].replace('_', ' ')}"
    title = f"SERo: scores behind the last masks ({how})"
    level = least if plain else None
    return Chart(title, "share of the kind's units, best first", "score", lines, True, False, level, "threshold")
