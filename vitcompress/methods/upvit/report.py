"""What UP-ViT measured on its way, as tables and curves for the report."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vitcompress.io.files import read_json
from vitcompress.methods.base import Chart, Line, StepReport, ranked
from vitcompress.methods.upvit.heads import least_first
from vitcompress.methods.upvit.ranking import too_few


class Scored(NamedTuple):
    """Scores of a component's channels by number, and the channels that stay."""

    name: str
    scores: list[float]
    kept: list[int]


def _rounds(folder: Path) -> list[dict[str, Any]]:
    """One record per block that went: the ways in which one could go, and their scores."""
    paths = sorted(folder.glob("blocks-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return [read_json(path) for path in paths]


def _scored(folder: Path) -> Iterator[Scored]:
    """Exact scores by component, with estimates for channels that were not measured exactly."""
    kept = _read(folder / "kept.json")
    exact = {path.stem.removeprefix("scores-"): read_json(path) for path in folder.glob("scores-*.json")}
    screens = {path.stem.removeprefix("screen-"): read_json(path) for path in folder.glob("screen-*.json")}
    screens |= _read(folder / "fisher.json")
    for name in sorted(exact or screens, key=_forward):
        scores = (
            _estimated(exact[name], screens[name]) if name in exact and name in screens else (exact or screens)[name]
        )
        channels = kept.get(name) or kept.get(f"{name.removesuffix('attn')}qk") or []
        yield Scored(name, scores, channels)


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _estimated(exact: list[float], screen: list[float]) -> list[float]:
    """`exact` with estimates in place of 0, the score of a channel that was not measured.

    An estimate is the score of the screen times the ratio of both scores over the measured channels.
    """
    measured = [(score, rough) for score, rough in zip(exact, screen, strict=True) if score > 0]
    ratio = sum(score for score, _ in measured) / (sum(rough for _, rough in measured) or 1.0)
    return [score or ratio * rough for score, rough in zip(exact, screen, strict=True)]


def _forward(name: str) -> list[tuple[int, str]]:
    """Sort key that compares block numbers as numbers, not as text."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in name.split(".")]


def report(folder: Path) -> StepReport:
    return StepReport(tables(folder), remarks(folder), charts(folder))


def tables(folder: Path) -> list[dict[str, Any]]:
    """Which blocks went, and what share of each component's importance is left, from the step's `folder`."""
    found = []
    if rounds := _rounds(folder):
        rows = []
        for number, record in enumerate(rounds):
            order = least_first(record["scores"])[:2]
            told = [f"{record['ways'][i]} ({record['scores'][i]:.4g})" for i in order]
            rows.append([str(number + 1), *told, *[""] * (2 - len(told))])
        columns = ["round", "removed (KL)", "next best (KL)"]
        found.append({"title": "UP-ViT: blocks, one at a time", "columns": columns, "rows": rows})
    rows = []
    for name, scores, kept in _scored(folder):
        total = sum(scores) or 1.0
        share = f"{100 * sum(scores[c] for c in kept) / total:.1f} %"
        rows.append([name, str(len(scores)), str(len(kept)), f"{total:.4g}", share])
    if rows:
        columns = ["component", "channels", "kept", "sum of KL", "share of it that is kept"]
        found.append({"title": "UP-ViT: importance of channels", "columns": columns, "rows": rows})
    return found


def remarks(folder: Path) -> list[str]:
    """That the images were too few, if they were, from the step's `folder`."""
    path = folder / "proxy.json"
    return too_few(read_json(path)["images"]) if path.is_file() else []


def charts(folder: Path) -> list[Chart]:
    """Scores of every way to lose a block, and of the channels of each kind of component, from the step's `folder`."""
    found = []
    if rounds := _rounds(folder):
        lines = []
        for number, record in enumerate(rounds):
            ways, least = range(len(record["ways"])), least_first(record["scores"])[0]
            lines.append(Line(f"round {number + 1}: {record['ways'][least]}", ways, record["scores"]))
        words = "ways to lose a block, in forward order (whole, hybrid, whole, ...)"
        found.append(
            Chart("UP-ViT: the block whose loss costs least goes", words, "KL, nats, summed over images", lines, True)
        )
    kinds: dict[str, list[Line]] = {}
    for name, scores, kept in _scored(folder):
        kind = {"attn": "attention", "mlp": "FFN", "sr": "reduction"}.get(name.rpartition(".")[2], "residual")
        kinds.setdefault(kind, []).append(ranked(name, scores, kept))
    for kind, lines in kinds.items():
        title, words = f"UP-ViT: {kind} channels", "share of the component's channels, best first"
        found.append(Chart(title, words, "KL, nats, summed over images", lines, log=True, by_depth=len(lines) > 1))
    return found
