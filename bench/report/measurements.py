"""Measurements of speed: read, matched to the files of a run folder, and presented as rows, tables and sentences."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from vitcompress.bench.report import records
from vitcompress.exporters.onnx.providers import DEFAULTS
from vitcompress.exporters.sidecar import DENSE
from vitcompress.io import text
from vitcompress.io.files import read_json
from vitcompress.io.text import Columns, Table, escape_markdown, join_names, shorten_names
from vitcompress.io.validation import check_record

SETTINGS = ("runtime", "provider", "device", "precision", "threads", "input_type", "compile", "cuda_graph", "transfers")
Pair = tuple[records.BenchRow, records.BenchRow, records.RatioRecord]  # dense, compressed
SPEED_KEYS = records.SpeedRecord.__annotations__.keys()


def read_benchmarks(path: Path) -> list[records.BenchRecord]:
    """The measurements in a bench.json, or in a file with the output of `vitcompress bench --json`.

    Raises ArtifactError if the file is missing, or has other contents.
    """
    content = read_json(path)
    entries: list[records.BenchRecord] = content if isinstance(content, list) else [content]
    hint = "give the output of `vitcompress bench --json`"
    check_record(path, entries, list[records.BenchRecord], "contains no measurement", hint)
    return entries


def _undisturbed_first(entries: Iterable[records.BenchRecord]) -> list[records.BenchRecord]:
    return sorted(entries, key=lambda entry: bool(entry.get("disturbed")))


def find_speed(
    entries: Iterable[records.BenchRecord], sha256: str | None, settings: Mapping[str, object] | None = None
) -> records.SpeedRecord | None:
    """The latest measurement, best an undisturbed one, of the file with this hash. settings: values of its row."""
    rows: list[dict[str, object]] = [dict(row) for entry in _undisturbed_first(entries) for row in entry["rows"]]
    same = [row for row in rows if row.get("sha256") == sha256 and (settings or {}).items() <= row.items()]
    return cast(records.SpeedRecord, {key: same[0][key] for key in SPEED_KEYS}) if sha256 and same else None


def describe_speedup(ratio: records.RatioRecord) -> str:
    """`1.42x (95 % interval 1.37 to 1.47): faster`; no verdict if there are too few rounds for an interval."""
    verdict = "" if ratio["ci95"][1] is None else f": {ratio['verdict']}"
    return f"{text.format_speedup(ratio, '95 % interval ')}{verdict}"


def match_rows(entries: Iterable[records.BenchRecord], names: Mapping[str, Sequence[str]]) -> list[records.BenchRecord]:
    """The part of each measurement that is about the files of a run folder, which it then calls by their names there.

    names: SHA-256 -> names, relative to the folder. A file that has changed since is not one of them.
    """
    matches = ((entry, [row for row in entry["rows"] if (row.get("sha256") or "") in names]) for entry in entries)
    return [_match_entry(entry, rows, names) for entry, rows in matches if rows]


def _match_entry(
    entry: records.BenchRecord, rows: Sequence[records.BenchRow], names: Mapping[str, Sequence[str]]
) -> records.BenchRecord:
    """`entry` with these `rows` alone, and with the ratios, verdict and texts about no others, under their new names.

    Of several names of equal files, an artifact gets its own, else one that contains its last part.
    """
    renamed = dict[str, str]()
    for row in rows:
        artifact, equal = row["artifact"], names[row["sha256"] or ""]
        renamed[artifact] = min(equal, key=lambda name: (name != artifact, Path(artifact).name not in Path(name).parts))
    artifacts = sorted({row["artifact"] for row in entry["rows"]}, key=len, reverse=True)
    named_in = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, artifacts))})(?!\.?[\w/-])")
    result: dict[str, Any] = {**entry}
    for key in ("warnings", "notes", "disturbed"):
        lines = [line for line in result.get(key, ()) if renamed.keys() >= set(named_in.findall(line))]
        result[key] = [named_in.sub(lambda match: renamed[match[1]], line) for line in lines]
    result["rows"] = [{**row, "artifact": renamed[row["artifact"]]} for row in rows]
    ratios = [ratio for ratio in entry.get("ratios", ()) if {ratio["a"], ratio["b"]} <= renamed.keys()]
    result["ratios"] = [{**ratio, "a": renamed[ratio["a"]], "b": renamed[ratio["b"]]} for ratio in ratios]
    result["passed"] = not too_slow(ratios, entry.get("fail_under"))
    return cast(records.BenchRecord, result)


def too_slow(ratios: Iterable[records.RatioRecord], limit: float | None) -> list[records.RatioRecord]:
    """The ratios whose interval has its lower end below the `limit`, if there is one."""
    return [ratio for ratio in ratios if (ratio["ci95"][0] or 0.0) < (limit or 0.0)]


def is_dense(artifact: str) -> bool:
    """Whether a name that is relative to a run folder is one of the dense model's: its files and its folders."""
    return any(part.startswith(DENSE) for part in Path(artifact).parts[-2:])


def replaces(new: records.BenchRecord, old: records.BenchRecord) -> bool:
    """Whether `new` repeats the rows and ratios of `old`, with settings and protocol, and is no more disturbed."""

    def contents(entry: records.BenchRecord) -> Iterator[tuple[object, ...]]:
        for first, row, ratio in _pair_ratios(entry):
            base, own = (tuple(map(r.get, ("artifact", "protocol", *SETTINGS))) for r in (first, row))
            yield from [(own,), (base, own)] if ratio else [(own,)]

    return {*contents(new)} >= {*contents(old)} and bool(new["disturbed"]) <= bool(old["disturbed"])


def pairs(entries: Iterable[records.BenchRecord]) -> list[Pair]:
    """Dense and compressed artifacts with the same settings: with an interval first, of these undisturbed ones."""
    result = list[Pair]()
    for entry in _undisturbed_first(entries):
        for first, row, ratio in _pair_ratios(entry):
            same = all(first.get(key) == row.get(key) for key in SETTINGS)
            if ratio and same and is_dense(ratio["a"]) and not is_dense(ratio["b"]):
                result.append((first, row, ratio))
    return sorted(result, key=lambda pair: pair[2]["ci95"][1] is None)


def list_warnings(entries: Iterable[records.BenchRecord]) -> list[str]:
    """Warnings and notes, each once with its runtimes; lines that begin with an artifact's name are about it alone."""
    lines = list[tuple[str, str]]()
    for entry in entries:
        artifacts = [row["artifact"] for row in entry["rows"]]
        for line in (*entry["warnings"], *entry["notes"]):
            about = [row for row in entry["rows"] if re.match(re.escape(row["artifact"]) + "[,:] ", line)]
            lines += [(shorten_names(line, artifacts), row["runtime"]) for row in about or entry["rows"]]
    return [f"- note ({names}): {line}" for line, names in join_names(lines).items()]


def speed_rows(entries: Iterable[records.BenchRecord]) -> Iterator[tuple[str, ...]]:
    """Latency, throughput and ratio of dense and compressed artifacts: of equal settings, the first of `pairs`."""
    best: dict[tuple[Any, ...], Any] = {}
    for pair in pairs(entries):
        best.setdefault((pair[0]["artifact"], pair[1]["artifact"], pair[2]["batch"], *map(pair[0].get, SETTINGS)), pair)
    several = len({dense["threads"] for dense, *_ in best.values()}) > 1
    labels = [describe_setting(dense, threads=several) for dense, *_ in best.values()]
    for label, (dense, compressed, ratio) in zip(labels, best.values(), strict=True):
        where = f"{dense['artifact']} and {compressed['artifact']}, " * (labels.count(label) > 1) + label
        times = [row["latency_ms"]["p50"] for row in (dense, compressed)]
        rates = [row["images_per_second"] for row in (dense, compressed)]
        yield f"latency, median ({where})", *(f"{text.format_number(t, 4)} ms" for t in times), ""
        yield f"throughput ({where})", *(f"{text.format_number(rate)} images/s" for rate in rates), ""
        # The speed-up is a median over pairs of blocks, not the ratio of the figures above, and so has its own row.
        yield f"speed-up ({where})", "", "", describe_speedup(ratio)


def describe_setting(row: records.BenchRow, *, threads: bool = True) -> str:
    """`onnxruntime cpu fp32, threads 2, batch 256`"""
    count = f", threads {row['threads']}" * (threads and row["threads"] is not None)
    return f"{row['runtime']} {row['device']} {_format_precision(row)}{count}, batch {row['batch']}"


def bench_table(entries: Sequence[records.BenchRecord]) -> Table:
    """One row per artifact and runtime; its speed-up is over the first artifact at the same batch size."""
    rows: list[dict[str, Any]] = [{**row, "ratio": ratio} for entry in entries for _, row, ratio in _pair_ratios(entry)]
    names = text.shorten_paths(row["artifact"] for row in rows)
    columns: Columns = {
        "artifact": lambda row: names[row["artifact"]],
        "runtime": "{runtime} {device}",
        "precision": _format_precision,
        "threads": lambda row: "" if row["threads"] is None else row["threads"],
        "protocol": "{protocol}",
        "images/s": lambda row: text.format_number(row["images_per_second"]),
        "p50 ms": lambda row: text.format_number(row["latency_ms"]["p50"], 4),
        "p90 ms": lambda row: "" if (p90 := row["latency_ms"]["p90"]) is None else text.format_number(p90, 4),
        "max ms": lambda row: text.format_number(row["latency_ms"]["max"], 4),
        "speed-up (95 %)": lambda row: text.format_speedup(row["ratio"]) if row["ratio"] else "",
    }
    if any(_format_peak(row["memory"]) for row in rows):
        columns = {**columns, "peak MiB": lambda row: _format_peak(row["memory"])}
    return Table.of("Speed", columns, rows)


def _pair_ratios(
    entry: records.BenchRecord,
) -> Iterator[tuple[records.BenchRow, records.BenchRow, records.RatioRecord | None]]:
    """For each row the first one of its batch size, the row itself, and its ratio over the first, None for the first.

    `suite.run` writes the batch sizes one after the other, each with the same artifacts in the same order. Names do not
    identify them: variants share one. Each batch size has one ratio less than rows.
    """
    rows, ratios = entry["rows"], entry.get("ratios", ())
    batches, rest = max(1, len(rows) - len(ratios)), iter(ratios)
    artifacts = len(rows) // batches
    return ((rows[n - n % artifacts], row, next(rest) if n % artifacts else None) for n, row in enumerate(rows))


def _format_precision(row: records.BenchRow) -> str:
    modes = {"compile": row["compile"], "cuda graph": row["cuda_graph"], "transfers": row["transfers"]}
    modes[str(row["provider"])] = row["provider"] not in (None, DEFAULTS.get(row["device"].partition(":")[0]))
    modes["uint8"] = row.get("input_type") == "uint8"  # then normalization is timed too
    return row["precision"] + "".join(f" +{mode}" for mode, used in modes.items() if used)


def _format_peak(memory: records.MemoryRecord) -> str:
    """Peak memory in MiB; `+` marks the increase over Python and its libraries, other values are of a whole process."""
    start, peak = memory["process_start_bytes"], memory["process_peak_bytes"]
    return "" if peak is None else f"{'' if start is None else '+'}{(peak - (start or 0)) / 2**20:.0f}"


def describe_conditions(entries: Sequence[records.BenchRecord]) -> list[str]:
    """Machines, settings and warnings of the measurements, each once with the runtimes that it applies to."""
    rows = ((_describe_settings(entry["machine"], row), row["runtime"]) for entry in entries for row in entry["rows"])
    settings = [f"- {names}: {line}" for line, names in join_names(rows).items()]
    return ["Artifacts are interleaved.", "\n".join(map(escape_markdown, [*settings, *list_warnings(entries)]))]


def _describe_settings(machine: records.MachineRecord, row: records.BenchRow) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    hardware = ", ".join([machine["cpu"], f"{machine['cpu_cores_usable']} cores", *machine["gpus"]])
    return f"{hardware}; {versions}; input: {row['input']}; TF32 {'on' if row['tf32'] else 'off'}"
