"""Measurements of UP-ViT, as tables and curves for the report."""

from operator import itemgetter
from pathlib import Path
from typing import Any

from vitcompress.io.files import read_json
from vitcompress.io.text import Columns, Table, natural_key
from vitcompress.methods.base import Chart, Line, StepReport, ranked, read_memo
from vitcompress.methods.upvit.ranking import least_first, too_few_images

AXIS = "KL, nats, summed over images"
KINDS = {"attn": "attention", "attn_pool": "attention", "mlp": "FFN", "sr": "reduction"}
ROUNDS: Columns = {
    "round": itemgetter(0),
    "removed (KL)": lambda row: _format_way(row[1], 0),
    "next best (KL)": lambda row: _format_way(row[1], 1),
}
Scored = tuple[str, list[float], list[int]]  # a component, scores of its channels, and the channels that are kept
CHANNELS: Columns = {
    "component": itemgetter(0),
    "channels": lambda row: len(row[1]),
    "kept": lambda row: len(row[2]),
    "sum of KL": lambda row: f"{sum(row[1]):.4g}",
    "share of it that is kept": lambda row: f"{100 * sum(row[1][c] for c in row[2]) / (sum(row[1]) or 1.0):.1f} %",
}


def report(folder: Path) -> StepReport:
    """Removed blocks, the share of each component's importance that is kept, and all scores."""
    paths = sorted(folder.glob("blocks-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    rounds, scored, proxy = [read_json(path) for path in paths], _scored(folder), read_memo(folder, "proxy")
    tables, charts = [], []
    if rounds:
        tables.append(Table.of("UP-ViT: blocks, one at a time", ROUNDS, enumerate(rounds, 1)))
        titles = [f"round {n}: {r['ways'][least_first(r['scores'])[0]]}" for n, r in enumerate(rounds, 1)]
        lines = [Line(t, range(len(r["ways"])), r["scores"]) for t, r in zip(titles, rounds, strict=True)]
        x = "ways to lose a block, in forward order (whole, hybrid, whole, ...)"
        charts.append(Chart("UP-ViT: the block with the lowest score is removed", x, AXIS, lines, log=True))
    if scored:
        tables.append(Table.of("UP-ViT: importance of channels", CHANNELS, scored))
    kinds: dict[str, list[Line]] = {}
    for name, scores, kept in scored:
        kinds.setdefault(KINDS.get(name.rpartition(".")[2], "residual"), []).append(ranked(name, scores, kept))
    for kind, lines in kinds.items():
        title, x = f"UP-ViT: {kind} channels", "share of the component's channels, best first"
        charts.append(Chart(title, x, AXIS, lines, log=True, by_depth=len(lines) > 1))
    return StepReport(tables, too_few_images(proxy["images"]) if proxy else [], charts)


def _format_way(record: Any, place: int) -> str:
    """The way to lose a block with the `place`-th lowest score; empty if there are fewer."""
    order = least_first(record["scores"])[: place + 1]
    return f"{record['ways'][order[place]]} ({record['scores'][order[place]]:.4g})" if place < len(order) else ""


def _scored(folder: Path) -> list[Scored]:
    """Exact scores by component in forward order, with estimates for channels that were not measured exactly."""
    kept = read_memo(folder, "kept") or {}
    exact = {path.stem.removeprefix("scores-"): read_json(path) for path in folder.glob("scores-*.json")}
    screens = {path.stem.removeprefix("screen-"): read_json(path) for path in folder.glob("screen-*.json")}
    screens |= read_memo(folder, "fisher") or {}
    scores = {name: _fill(values, screens.get(name, values)) for name, values in exact.items()} or screens
    return [
        (name, scores[name], kept.get(name) or kept.get(f"{name.removesuffix('.attn')}.qk") or [])
        for name in sorted(scores, key=natural_key)
    ]


def _fill(exact: list[float], screen: list[float]) -> list[float]:
    """`exact` with estimates in place of 0, the score of channels that were not measured.

    An estimate is the score of the screen times the ratio of both scores over the measured channels.
    """
    measured = [(score, rough) for score, rough in zip(exact, screen, strict=True) if score > 0]
    ratio = sum(score for score, _ in measured) / (sum(rough for _, rough in measured) or 1.0)
    return [score or ratio * rough for score, rough in zip(exact, screen, strict=True)]
