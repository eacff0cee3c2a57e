"""What is said of the files that are deployed: how right, how fast and how large they are, and whence their weights."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Columns = tuple[str, ...]
Rows = tuple[tuple[str, ...], ...]
NONE = "-"


def rate(per_second: float) -> str:
    """Three digits where that is more than whole numbers show: 2.94, 1,234."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def milliseconds(value: float) -> str:
    """Four digits, three below one: 0.891, 26.64, 7,240."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" if value >= 1 else f"{value:.3g}"


def times(ratio: float, digits: int = 2) -> str:
    return f"{ratio:.{digits}f}" if ratio < 10 else f"{ratio:,.1f}"


def between(ends: Sequence[float | None], digits: int = 2) -> str:
    """The 95 % interval of a ratio as `timing.ratio` gives it: without an upper end it has none."""
    low, high = ends
    if low is None or high is None:
        return "no interval: that takes 6 rounds"
    return f"95 % interval {times(low, digits)} to {times(high, digits)}"


def compared(ratio: Mapping[str, Any]) -> str:
    """`model.onnx is 1.507 times as fast as dense.onnx (95 % interval 1.451 to 1.563)`"""
    figures = times(ratio["median"], 3), between(ratio["ci95"], 3)
    return f"{ratio['b']} is {figures[0]} times as fast as {ratio['a']} ({figures[1]})"


def short(names: Sequence[str]) -> list[str]:
    """Paths by as few of their last parts as tell them from each other: `a/model.onnx` and `b/model.onnx`."""
    return [_shortest(name, set(names) - {name}) for name in names]


def _shortest(name: str, others: Iterable[str]) -> str:
    parts = Path(name).parts
    for count in range(1, len(parts)):
        tail = parts[-count:]
        if not any(Path(other).parts[-count:] == tail for other in others):
            return str(Path(*tail))
    return name


def remarks(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """What to beware of in several measurements, each remark once, with the runtimes that it holds for."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        names = [row["artifact"] for row in entry["rows"]]
        shown = dict(zip(names, short(names), strict=True))
        for said in (*entry.get("notes", ()), *entry["warnings"]):
            name = next((name for name in shown if said.startswith((f"{name}, ", f"{name}: "))), "")
            words = shown.get(name, "") + said.removeprefix(name)
            found.setdefault(words, []).append(entry["rows"][0]["runtime"])
    return [f"- note ({', '.join(dict.fromkeys(runtimes))}): {words}" for words, runtimes in found.items()]


def artifacts(found: Iterable[Mapping[str, Any]]) -> tuple[Columns, Rows]:
    """One row per exported file, accuracy beside speed and hash; the entries of `artifacts` in report.json."""
    columns = ("file", "top-1", "images/s", "precision", "bytes", "answers checked here", "sha256")
    return columns, tuple(_artifact(entry) for entry in found)


def _artifact(entry: Mapping[str, Any]) -> tuple[str, ...]:
    right, speed = entry["accuracy"], entry["speed"]
    top1 = NONE if right is None else f"{100 * right['top1']:.1f} % ({right['correct']} of {right['total']})"
    fast = NONE if speed is None else f"{rate(speed['images_per_second'])} (batch {speed['batch']})"
    checked = "yes" if entry["verified"] else "no"
    return entry["file"], top1, fast, entry["precision"], f"{entry['bytes']:,}", checked, entry["sha256"][:12]


def weights(found: Mapping[str, Any]) -> tuple[Columns, Rows]:
    """The matrices that a plan changed, from the dense model to each file; `found` is `verify_weights.table`."""
    files = [entry["file"] for entry in found["files"]]
    groups: dict[tuple[str, ...], list[str]] = {}
    for tensor in found["tensors"]:
        if any(len(shape) > 1 for shape in tensor["dense"].values()):
            groups.setdefault((_pattern(tensor["name"]), *_way(tensor, files)), []).append(tensor["name"])
    columns = ("weight", "change", "dense", "planned", "torch", *files)
    return columns, tuple((_together(names), *way) for (_, *way), names in groups.items())


def bytes_of(found: Mapping[str, Any]) -> tuple[str, ...]:
    """One sentence per file: its bytes and what they are."""
    return tuple(
        f"{entry['file']}: {entry['bytes']:,} bytes, {entry['of_model']:,} of them the tensors of the model "
        f"({entry['parameters']:,} parameters), {entry['of_constants']:,} constants, {entry['of_graph']:,} the graph"
        for entry in found["files"]
    )


def _way(tensor: Mapping[str, Any], files: Sequence[str]) -> tuple[str, ...]:
    dense = " + ".join(map(_sized, tensor["dense"].values()))
    held = [tensor["files"].get(name) for name in files]
    places = (NONE if place is None else f"{_sized(place['shape'])}, {place['bytes']:,} B" for place in held)
    return tensor["change"], dense, _sized(tensor["planned"]), _sized(tensor["torch"]), *places


def _sized(shape: Sequence[int] | None) -> str:
    return NONE if shape is None else "x".join(map(str, shape)) or "scalar"


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _together(names: Sequence[str]) -> str:
    """`blocks.0.mlp.weight` and `blocks.3.mlp.weight` as `blocks.{0,3}.mlp.weight`."""
    parts = list(zip(*(name.split(".") for name in names), strict=True))
    if sum(len(set(part)) > 1 for part in parts) > 1:
        return f"{_pattern(names[0])} ({len(names)} of them)"
    return ".".join(part[0] if len(set(part)) == 1 else f"{{{','.join(part)}}}" for part in parts)
