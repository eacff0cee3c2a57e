"""What the steps of a run have measured, as tables of the report."""

from pathlib import Path
from typing import Any

from vitcompress.checkpoint import read_json
from vitcompress.methods.upvit.regroup import least_first


def tables(folder: Path) -> list[dict[str, Any]]:
    """Which blocks went, and what share of each component's importance is left, from the step's `folder`."""
    return [*_blocks(folder), *_channels(folder)]


def _blocks(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for number, record in enumerate(read_json(path) for path in sorted(folder.glob("blocks-*.json"))):
        order = least_first(record["scores"])[:2]
        told = [f"{record['ways'][i]} ({record['scores'][i]:.4g})" for i in order]
        rows.append([str(number + 1), *told, *[""] * (2 - len(told))])
    columns = ["round", "removed (KL)", "next best (KL)"]
    return [{"title": "UP-ViT: blocks, one at a time", "columns": columns, "rows": rows}] if rows else []


def _channels(folder: Path) -> list[dict[str, Any]]:
    kept = read_json(folder / "kept.json") if (folder / "kept.json").is_file() else {}
    rows = []
    for path in sorted(folder.glob("scores-*.json")):
        name, scores = path.stem.removeprefix("scores-"), read_json(path)
        channels = kept.get(name) or kept.get(f"{name.removesuffix('attn')}qk") or []
        total = sum(scores) or 1.0
        share = sum(scores[c] for c in channels) / total
        rows.append([name, str(len(scores)), str(len(channels)), f"{total:.4g}", f"{100 * share:.1f} %"])
    columns = ["component", "channels", "kept", "sum of KL", "share of it that is kept"]
    return [{"title": "UP-ViT: importance of channels", "columns": columns, "rows": rows}] if rows else []
