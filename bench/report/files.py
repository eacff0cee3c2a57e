"""Tables and sentences about exported files: accuracy, speed, size, and where their weights come from."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vitcompress.io.text import NONE, Table, format_rate, format_shape, shorten_paths


def remarks(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """What to beware of in several measurements, each remark once, with the runtimes that it holds for."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        names = [row["artifact"] for row in entry["rows"]]
        shown = dict(zip(names, shorten_paths(names), strict=True))
        for said in (*entry.get("notes", ()), *entry["warnings"]):
            name = next((name for name in shown if said.startswith((f"{name}, ", f"{name}: "))), "")
            words = shown.get(name, "") + said.removeprefix(name)
            found.setdefault(words, []).append(entry["rows"][0]["runtime"])
    return [f"- note ({', '.join(dict.fromkeys(runtimes))}): {words}" for words, runtimes in found.items()]


def artifacts(found: Iterable[Mapping[str, Any]]) -> Table:
    """One row per exported file, accuracy beside speed and hash; the entries of `artifacts` in report.json."""
    columns = ("file", "top-1", "images/s", "precision", "bytes", "answers checked here", "sha256")
    return Table("", columns, tuple(_artifact(entry) for entry in found))


def _artifact(entry: Mapping[str, Any]) -> tuple[str, ...]:
    right, speed = entry["accuracy"], entry["speed"]
    top1 = NONE if right is None else f"{100 * right['top1']:.1f} % ({right['correct']} of {right['total']})"
    fast = NONE if speed is None else f"{format_rate(speed['images_per_second'])} (batch {speed['batch']})"
    checked = "yes" if entry["verified"] else "no"
    return entry["file"], top1, fast, entry["precision"], f"{entry['bytes']:,}", checked, entry["sha256"][:12]


def weights(found: Mapping[str, Any]) -> Table:
    """The matrices that a plan changed, from the dense model to each file; `found` is `verify_weights.table`."""
    files = [entry["file"] for entry in found["files"]]
    groups: dict[tuple[str, ...], list[str]] = {}
    for tensor in found["tensors"]:
        if any(len(shape) > 1 for shape in tensor["dense"].values()):
            for way in _ways(tensor, files):
                groups.setdefault((_pattern(tensor["name"]), *way), []).append(tensor["name"])
    columns = ("weight", "change", "dense", "planned", "torch", "in the file", "files")
    return Table("weights", columns, tuple((_together(names), *way) for (_, *way), names in groups.items()))


def bytes_of(found: Mapping[str, Any]) -> tuple[str, ...]:
    """One sentence per file: its bytes and what they are."""
    return tuple(
        f"{entry['file']}: {entry['bytes']:,} bytes, {entry['of_model']:,} of them the tensors of the model "
        f"({entry['parameters']:,} parameters), {entry['of_constants']:,} constants, {entry['of_graph']:,} the graph"
        for entry in found["files"]
    )


def _ways(tensor: Mapping[str, Any], files: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Each form in which files hold a tensor, with the names of those that do."""
    dense = " + ".join(map(_sized, tensor["dense"].values()))
    forms: dict[str, list[str]] = {}
    for name in files:
        place = tensor["files"].get(name)
        form = NONE if place is None else f"{_sized(place['shape'])}, {place['bytes']:,} B"
        forms.setdefault(form, []).append(name)
    for form, names in (forms or {NONE: []}).items():
        told = "all" if len(names) == len(files) > 1 else ", ".join(names) or NONE
        yield tensor["change"], dense, _sized(tensor["planned"]), _sized(tensor["torch"]), form, told


def _sized(shape: Sequence[int] | None) -> str:
    return NONE if shape is None else format_shape(shape)


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _together(names: Sequence[str]) -> str:
    """`blocks.0.mlp.weight` and `blocks.3.mlp.weight` as `blocks.{0,3}.mlp.weight`."""
    parts = list(zip(*(name.split(".") for name in names), strict=True))
    if sum(len(set(part)) > 1 for part in parts) > 1:
        return f"{_pattern(names[0])} ({len(names)} of them)"
    return ".".join(part[0] if len(set(part)) == 1 else f"{{{','.join(part)}}}" for part in parts)
