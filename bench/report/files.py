"""Exported files of a run folder: which measurements are of them, and tables of accuracy, speed, size and weights."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from vitcompress.bench.report import records
from vitcompress.exporters.sidecar import DENSE
from vitcompress.io.text import NONE, Columns, Table, format_percent, format_rate, format_shape, shorten_names

SETTINGS = ("runtime", "device", "precision", "threads", "input_type", "compile", "cuda_graph")


def match_rows(entries: Iterable[records.BenchRecord], names: Mapping[str, Sequence[str]]) -> list[records.BenchRecord]:
    """The part of each measurement that is about the files of a run folder, which it then calls by their names there.

    names: SHA-256 -> names, relative to the folder. A file that has changed since is not one of them.
    """
    matches = ((entry, [row for row in entry["rows"] if row.get("sha256") in names]) for entry in entries)
    return [_match_entry(entry, rows, names) for entry, rows in matches if rows]


def _match_entry(
    entry: records.BenchRecord, rows: Sequence[records.BenchRow], names: Mapping[str, Sequence[str]]
) -> records.BenchRecord:
    """`entry` with these `rows` alone, and with the ratios and texts that are about no others, under their new names.

    Of several names of equal files, an artifact gets its own, else one that contains its last part.
    """
    renamed = dict[str, str]()
    for row in rows:
        artifact, equal = row["artifact"], names[row["sha256"] or ""]
        renamed[artifact] = min(equal, key=lambda name: (name != artifact, Path(artifact).name not in Path(name).parts))
    artifacts = sorted({row["artifact"] for row in entry["rows"]}, key=len, reverse=True)
    named_in = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, artifacts))})(?!\.?[\w/-])")
    result: dict[str, Any] = {key: value for key, value in entry.items() if key != "ratio"}
    for key in ("warnings", "notes", "disturbed"):
        texts = [text for text in result.get(key, ()) if renamed.keys() >= set(named_in.findall(text))]
        result[key] = [named_in.sub(lambda match: renamed[match[1]], text) for text in texts]
    result["rows"] = [{**row, "artifact": renamed[row["artifact"]]} for row in rows]
    ratios = [ratio for ratio in entry.get("ratios", ()) if {ratio["a"], ratio["b"]} <= renamed.keys()]
    result["ratios"] = [{**ratio, "a": renamed[ratio["a"]], "b": renamed[ratio["b"]]} for ratio in ratios]
    if len(result["ratios"]) == 1:
        result["ratio"] = result["ratios"][0]
    return cast(records.BenchRecord, result)


def is_dense(artifact: str) -> bool:
    """Whether a name that is relative to a run folder is one of the dense model's: its files and its folders."""
    return any(part.startswith(DENSE) for part in Path(artifact).parts[-2:])


def pairs(entry: records.BenchRecord) -> Iterator[tuple[records.BenchRow, records.BenchRow, records.RatioRecord]]:
    """Rows and ratio of each dense and compressed artifact of a measurement that ran with the same settings."""
    rows = {(row["artifact"], row["batch"]): row for row in entry["rows"]}
    for ratio in entry["ratios"]:
        a, b = (rows[name, ratio["batch"]] for name in (ratio["a"], ratio["b"]))
        if is_dense(ratio["a"]) and not is_dense(ratio["b"]) and all(a.get(key) == b.get(key) for key in SETTINGS):
            yield a, b, ratio


def list_warnings(entries: Iterable[records.BenchRecord]) -> list[str]:
    """Warnings and notes of several measurements, each once with the runtimes that it applies to."""
    runtimes: dict[str, list[str]] = {}
    for entry in entries:
        names = [row["artifact"] for row in entry["rows"]]
        for text in (*entry["warnings"], *entry["notes"]):
            runtimes.setdefault(shorten_names(text, names), []).append(entry["rows"][0]["runtime"])
    return [f"- note ({', '.join(dict.fromkeys(names))}): {text}" for text, names in runtimes.items()]


def artifact_table(entries: Iterable[records.ArtifactRecord]) -> Table:
    """One row per exported file: format, size, agreement, accuracy, speed and hash."""
    columns: Columns = {
        "file": "{file}",
        "format": lambda entry: entry.get("format", NONE),
        "precision": lambda entry: entry["precision"] + " +uint8" * (entry.get("input") == "uint8"),
        "bytes": "{bytes:,}",
        "agrees with the model": lambda entry: entry.get("agreement") or ("yes" if entry["verified"] else "not run"),
        "top-1": lambda entry: format_accuracy(entry["accuracy"]),
        "images/s": lambda entry: format_speed(entry["speed"], NONE),
        "sha256": "{sha256:.12}",
    }
    return Table.of("", columns, entries)


def format_accuracy(accuracy: records.AccuracyRecord | None, unknown: str = NONE) -> str:
    return f"{format_percent(accuracy['top1'])} ({accuracy['correct']} of {accuracy['total']})" if accuracy else unknown


def format_speed(speed: records.SpeedRecord | None, unknown: str) -> str:
    return f"{format_rate(speed['images_per_second'])} (batch {speed['batch']})" if speed else unknown


def weight_table(weights: records.WeightsRecord) -> Table:
    """The matrices that a plan changed, from the dense model to each file; equal rows of several blocks are merged."""
    files = [entry["file"] for entry in weights["files"]]
    groups: dict[tuple[str, ...], list[str]] = {}
    for tensor in weights["tensors"]:
        if any(len(shape) > 1 for shape in tensor["dense"].values()):
            for cells in _tensor_rows(tensor, files):
                groups.setdefault((_pattern(tensor["name"]), *cells), []).append(tensor["name"])
    columns = ("weight", "change", "dense", "planned", "torch", "in the file", "files")
    return Table("weights", columns, tuple((_merge_names(names), *cells) for (_, *cells), names in groups.items()))


def describe_bytes(weights: records.WeightsRecord) -> list[str]:
    """One sentence per file: its size by content."""
    return [
        f"{entry['file']}: {entry['bytes']:,} bytes, {entry['of_model']:,} of them the tensors of the model "
        f"({entry['parameters']:,} parameters), {entry['of_constants']:,} constants, {entry['of_graph']:,} the graph"
        for entry in weights["files"]
    ]


def _tensor_rows(tensor: records.TensorRecord, files: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """One row per shape and size that files store the tensor in, with the names of these files."""
    dense = " + ".join(map(format_shape, tensor["dense"].values()))
    forms: dict[str, list[str]] = {}
    for name in files:
        stored = tensor["files"].get(name)
        form = NONE if stored is None else f"{format_shape(stored['shape'])}, {stored['bytes']:,} B"
        forms.setdefault(form, []).append(name)
    for form, names in (forms or {NONE: []}).items():
        where = "all" if len(names) == len(files) > 1 else ", ".join(names) or NONE
        shapes = (NONE if shape is None else format_shape(shape) for shape in (tensor["planned"], tensor["torch"]))
        yield tensor["change"], dense, *shapes, form, where


def _pattern(name: str) -> str:
    """`blocks.0.mlp` -> `blocks.*.mlp`"""
    return re.sub(r"\d+", "*", name)


def _merge_names(names: Sequence[str]) -> str:
    """`blocks.0.mlp.weight` and `blocks.3.mlp.weight` as `blocks.{0,3}.mlp.weight`."""
    parts = list(zip(*(name.split(".") for name in names), strict=True))
    if sum(len(set(part)) > 1 for part in parts) > 1:
        return f"{_pattern(names[0])} ({len(names)} of them)"
    return ".".join(part[0] if len(set(part)) == 1 else f"{{{','.join(part)}}}" for part in parts)
