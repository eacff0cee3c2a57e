"""Measurements of UP-ViT, as tables and curves for the report."""

from pathlib import Path
from typing import Any, NamedTuple

from vitcompress.io.files import read_json
from vitcompress.methods.base import Chart, Line, StepReport, Table, ranked, table
from vitcompress.methods.upvit.heads import least_first
from vitcompress.methods.upvit.ranking import too_few_images

AXIS = "KL, nats, summed over images"


class Scored(NamedTuple):
    """Scores of a component's channels, and the channels that are kept."""

    name: str
    scores: list[float]
    kept: list[int]


def report(folder: Path) -> StepReport:
    """Removed blocks, the share of each component's importance that is kept, and all scores."""
    paths = sorted(folder.glob("blocks-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    rounds, scored, proxy = [read_json(path) for path in paths], _scored(folder), _read(folder / "proxy.json")
    tables, charts = [], []
    if rounds:
        tables.append(_block_table(rounds))
        charts.append(_block_chart(rounds))
    if scored:
        tables.append(_channel_table(scored))
    kinds: dict[str, list[Line]] = {}
    for name, scores, kept in scored:
        kind = {"attn": "attention", "mlp": "FFN", "sr": "reduction"}.get(name.rpartition(".")[2], "residual")
        kinds.setdefault(kind, []).append(ranked(name, scores, kept))
    for kind, lines in kinds.items():
        title, x = f"UP-ViT: {kind} channels", "share of the component's channels, best first"
        charts.append(Chart(title, x, AXIS, lines, log=True, by_depth=len(lines) > 1))
    return StepReport(tables, too_few_images(proxy["images"]) if proxy else [], charts)


def _scored(folder: Path) -> list[Scored]:
    """Exact scores by component, with estimates for channels that were not measured exactly."""
    kept = _read(folder / "kept.json")
    exact = {path.stem.removeprefix("scores-"): read_json(path) for path in folder.glob("scores-*.json")}
    screens = {path.stem.removeprefix("screen-"): read_json(path) for path in folder.glob("screen-*.json")}
    screens |= _read(folder / "fisher.json")
    scores = {name: _fill(values, screens.get(name, values)) for name, values in exact.items()} or screens
    return [
        Scored(name, scores[name], kept.get(name) or kept.get(f"{name.removesuffix('attn')}qk") or [])
        for name in sorted(scores, key=_forward_order)
    ]


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _fill(exact: list[float], screen: list[float]) -> list[float]:
    """`exact` with estimates in place of 0, the score of channels that were not measured.

    An estimate is the score of the screen times the ratio of both scores over the measured channels.
    """
    measured = [(score, rough) for score, rough in zip(exact, screen, strict=True) if score > 0]
    ratio = sum(score for score, _ in measured) / (sum(rough for _, rough in measured) or 1.0)
    return [score or ratio * rough for score, rough in zip(exact, screen, strict=True)]


def _forward_order(name: str) -> list[tuple[int, str]]:
    """Sort key that compares block numbers as numbers, not as text."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in name.split(".")]


def _block_table(rounds: list[dict[str, Any]]) -> Table:
    rows = []
    for number, record in enumerate(rounds):
        ways = [f"{record['ways'][i]} ({record['scores'][i]:.4g})" for i in least_first(record["scores"])[:2]]
        rows.append([number + 1, *ways, *[""] * (2 - len(ways))])
    return table("UP-ViT: blocks, one at a time", "round, removed (KL), next best (KL)", rows)


def _channel_table(scored: list[Scored]) -> Table:
    rows = []
    for name, scores, kept in scored:
        total = sum(scores) or 1.0
        share = f"{100 * sum(scores[c] for c in kept) / total:.1f} %"
        rows.append([name, len(scores), len(kept), f"{total:.4g}", share])
    return table(
        "UP-ViT: importance of channels", "component, channels, kept, sum of KL, share of it that is kept", rows
    )


def _block_chart(rounds: list[dict[str, Any]]) -> Chart:
    """Scores of all candidates."""
    lines = []
    for number, record in enumerate(rounds):
        least = record["ways"][least_first(record["scores"])[0]]
        lines.append(Line(f"round {number + 1}: {least}", range(len(record["ways"])), record["scores"]))
    x = "ways to lose a block, in forward order (whole, hybrid, whole, ...)"
    return Chart("UP-ViT: the block with the lowest score is removed", x, AXIS, lines, log=True)
