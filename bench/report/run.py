"""The report of a run: read its file, and present it as tables and as one page of Markdown."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from vitcompress.bench.plots import structure
from vitcompress.bench.report import files, records
from vitcompress.bench.report.loss import describe_difference, paired_tests
from vitcompress.bench.report.snippet import TEMPLATES, snippet
from vitcompress.errors import ArtifactError
from vitcompress.exporters.sidecar import DENSE
from vitcompress.io import text
from vitcompress.io.files import read_json
from vitcompress.io.manifest import check_unchanged
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.text import NOT_MEASURED, Columns, Table, escape_markdown
from vitcompress.models.cost import Cost
from vitcompress.recipe.schema import Published

FILES = {"xml": "xml and bin"}  # an OpenVINO model consists of two files
SPEED_KEYS = records.SpeedRecord.__annotations__.keys()
RESTORE = "restore it, or run the recipe again"
ACCURACIES = dict[str, records.FileAccuracy | records.McNemarRecord]  # of AccuracyPair, with its other keys
Row = tuple[str, ...]


def read_report(folder: str | Path) -> records.Report:
    """The report of a run folder. Raises ArtifactError if there is none, or if it was changed."""
    path = RunFolder(Path(folder)).report
    check_unchanged(path.parent, path)
    if not path.is_file():
        hint = "give folders of finished runs; `vitcompress recipe` continues an unfinished one"
        raise ArtifactError(f"{folder} has no {path.name}", hint=hint)
    report: records.Report = check_record(path, read_json(path), records.Report)
    check_record(path, report.get("accuracy"), ACCURACIES | None)
    return report


def read_benchmarks(path: Path) -> list[records.BenchRecord]:
    """The measurements in a bench.json, or in a file with the output of `vitcompress bench --json`.

    Raises ArtifactError if the file is missing, or has other contents.
    """
    content = read_json(path)
    entries: list[records.BenchRecord] = content if isinstance(content, list) else [content]
    hint = "give the output of `vitcompress bench --json`"
    check_record(path, entries, list[records.BenchRecord], "contains no measurement", hint)
    return entries


_adapter = cache(TypeAdapter)  # building one takes longer than checking a record


def check_record(path: Path, data: Any, kind: Any, problem: str = "has other contents", hint: str = RESTORE) -> Any:
    """`data`, read from `path`. Raises ArtifactError with `problem` and `hint` if it is not of the type `kind`."""
    try:
        _adapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ArtifactError(f"{path} {problem}: {place}: {first['msg'].lower()}", hint=hint) from None
    return data


def find_speed(
    entries: Iterable[records.BenchRecord], sha256: str | None, settings: Mapping[str, object] | None = None
) -> records.SpeedRecord | None:
    """The first, latest measurement of the file with this hash, or None. settings: values that its row must have."""
    rows: list[dict[str, object]] = [dict(row) for entry in entries for row in entry["rows"]]
    same = [row for row in rows if row.get("sha256") == sha256 and (settings or {}).items() <= row.items()]
    return cast(records.SpeedRecord, {key: same[0][key] for key in SPEED_KEYS}) if sha256 and same else None


def describe_speedup(ratio: records.RatioRecord) -> str:
    """`1.42x (95 % interval 1.37 to 1.47): faster`; no verdict if there are too few rounds for an interval."""
    verdict = "" if ratio["ci95"][1] is None else f": {ratio['verdict']}"
    return f"{text.format_ratio(ratio['median'])}x ({text.format_interval(ratio['ci95'])}){verdict}"


def count_verdicts(verify: records.VerificationRecord) -> str:
    """`19 passed, 1 not run`"""
    counts = Counter(check["verdict"].replace("_", " ") for check in verify["checks"])
    return ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "not run") if counts[name])


def summary_table(report: records.Report) -> Table:
    """Accuracy, size and speed before and after, and the checks."""
    rows: list[Row] = list(_accuracy_rows(report))
    for artifact in report.get("artifacts") or ():
        if (accuracy := artifact["accuracy"]) and not files.is_dense(artifact["file"]):
            rows.append((f"accuracy of {artifact['file']}", "", files.format_accuracy(accuracy), ""))
    dense, compressed = report["cost"]["dense"], report["cost"]["compressed"]
    rows.append(_count_row("parameters", dense["params"], compressed["params"]))
    rows.append(_count_row("MACs per image", dense["macs"], compressed["macs"]))
    entries = report.get("bench") or ()
    rows += _speed_rows(entries)
    rows += [] if entries else [(name, NOT_MEASURED, NOT_MEASURED, "") for name in ("latency", "throughput")]
    sizes = report.get("files") or {}
    for name, after in sizes.items():
        kind = name.removeprefix("model")
        if kind != name and (before := sizes.get(f"{DENSE}{kind}")):
            kind = kind.lstrip(".-")
            rows.append(_count_row(f"file size ({FILES.get(kind, kind)})", before, after, "B"))
    if verify := report.get("verify"):
        rows.append(("checks (verify.json)", "", count_verdicts(verify), ""))
    return Table("", ("", "before", "after", "change"), tuple(rows))


def _count_row(name: str, before: int, after: int, unit: str = "") -> Row:
    counts = text.format_count(before, like=after), text.format_count(after, like=before)
    return name, *(f"{count}{unit}" for count in counts), text.format_change(before, after)


def _accuracy_rows(report: records.Report) -> Iterator[Row]:
    """The compressed model against the dense one, and against the control."""
    accuracy, epochs = report.get("accuracy") or {}, report.get("extra_epochs")
    if "dense" not in accuracy or "compressed" not in accuracy:
        yield "accuracy", NOT_MEASURED, NOT_MEASURED, ""
        return
    points = {name: describe_difference(test) for name, test in paired_tests(report)}
    more = f"{epochs} more epoch{'s' * (epochs != 1)}"
    longer = "" if epochs is None or "control" in accuracy else f" (compressed: {more} of training)"
    after, change = files.format_accuracy(accuracy["compressed"]), points.get("the dense model", "")
    yield f"accuracy, test images{longer}", files.format_accuracy(accuracy["dense"]), after, change
    if control := accuracy.get("control"):
        yield f"accuracy, before: control (dense, {more})", files.format_accuracy(control), after, points["the control"]


def _speed_rows(entries: Iterable[records.BenchRecord]) -> Iterator[Row]:
    """Latency and throughput of each pair of a dense and a compressed artifact that were interleaved, and one ratio.

    Of measurements of one pair with the same settings, the latest that was not disturbed, else the latest.
    """
    best: dict[tuple[Any, ...], tuple[bool, Any]] = {}
    for entry in entries:
        disturbed = bool(entry.get("disturbed"))
        for pair in files.pairs(entry):
            key = pair[0]["artifact"], pair[1]["artifact"], pair[2]["batch"], *map(pair[0].get, files.SETTINGS)
            if key not in best or (best[key][0] and not disturbed):
                best[key] = disturbed, pair
    for _, (dense, compressed, ratio) in best.values():
        where = f"{dense['runtime']} {dense['device']} {_format_precision(dense)}, batch {dense['batch']}"
        times = [row["latency_ms"]["p50"] for row in (dense, compressed)]
        rates = [row["images_per_second"] for row in (dense, compressed)]
        yield f"latency, median ({where})", *(f"{text.format_milliseconds(t)} ms" for t in times), ""
        yield f"throughput ({where})", *(f"{text.format_rate(rate)} images/s" for rate in rates), ""
        # The speed-up is a median over pairs of blocks, not the ratio of the figures above, and so has its own row.
        yield f"speed-up ({where})", "", "", describe_speedup(ratio)


def cost_table(report: records.Report) -> Table:
    """Exact counts, MACs in both conventions."""
    dense, compressed = report["cost"]["dense"], report["cost"]["compressed"]
    keys = {"parameters": "params", "MACs": "macs", "MACs without attention products": "macs_linear"}
    counts = {name: (dense[key], compressed[key]) for name, key in keys.items()}
    rows = [(name, *(f"{count:,}" for count in pair), text.format_change(*pair)) for name, pair in counts.items()]
    return Table("Cost", ("", "dense", "compressed", "change"), tuple(rows))


def bench_table(entries: Sequence[records.BenchRecord]) -> Table:
    """One row per artifact and runtime; its speed-up is over the first artifact at the same batch size."""
    rows: list[dict[str, Any]] = [{**row, "ratio": ratio} for entry in entries for row, ratio in _pair_ratios(entry)]
    names = text.shorten_paths(row["artifact"] for row in rows)
    columns: Columns = {
        "artifact": lambda row: names[row["artifact"]],
        "runtime": "{runtime} {device}",
        "precision": _format_precision,
        "threads": lambda row: "" if row["threads"] is None else row["threads"],
        "protocol": "{protocol}",
        "images/s": lambda row: text.format_rate(row["images_per_second"]),
        "p50 ms": lambda row: text.format_milliseconds(row["latency_ms"]["p50"]),
        "p90 ms": lambda row: "" if (p90 := row["latency_ms"]["p90"]) is None else text.format_milliseconds(p90),
        "max ms": lambda row: text.format_milliseconds(row["latency_ms"]["max"]),
        "speed-up (95 %)": lambda row: text.format_speedup(row["ratio"]) if row["ratio"] else "",
    }
    if any(_format_peak(row["memory"]) for row in rows):
        columns = {**columns, "peak MiB": lambda row: _format_peak(row["memory"])}
    return Table.of("Speed", columns, rows)


def _pair_ratios(entry: records.BenchRecord) -> Iterator[tuple[records.BenchRow, records.RatioRecord | None]]:
    """Each row with its ratio, None for the first artifact; the rows of each batch size are in the same order."""
    rows, ratios = entry["rows"], entry.get("ratios", ())
    artifacts, rest = len(rows) // max(1, len(rows) - len(ratios)), iter(ratios)
    return ((row, next(rest) if number % artifacts else None) for number, row in enumerate(rows))


def _format_precision(row: records.BenchRow) -> str:
    modes = {"compile": row["compile"], "cuda graph": row["cuda_graph"], "transfers": row["transfers"]}
    modes["uint8"] = row.get("input_type") == "uint8"  # then normalization is timed too
    return row["precision"] + "".join(f" +{mode}" for mode, used in modes.items() if used)


def _format_peak(memory: records.MemoryRecord) -> str:
    """Peak memory in MiB; `+` marks the increase over Python and its libraries, other values are of a whole process."""
    start, peak = memory["process_start_bytes"], memory["process_peak_bytes"]
    return "" if peak is None else f"{'' if start is None else '+'}{(peak - (start or 0)) / 2**20:.0f}"


def check_table(checks: Iterable[records.CheckRecord], detail: str | Callable[[Any], str] = "{detail}") -> Table:
    """Every check with its value, tolerance and `detail`."""
    columns: Columns = {
        "check": "{name}",
        "verdict": lambda check: check["verdict"].replace("_", " "),
        "value": lambda check: "" if check["value"] is None else text.format_number(check["value"]),
        "tolerance": lambda check: "" if check["tolerance"] is None else text.format_number(check["tolerance"]),
        "detail": detail,
    }
    return Table.of("", columns, checks)


def markdown(report: records.Report) -> str:
    """The report as one page."""
    title, summary = escape_markdown(report["recipe"]), escape_markdown(report.get("summary") or "")
    parts = [f"# {title}", summary, summary_table(report).markdown()]
    parts += [*_removed(report), "## Cost", cost_table(report).markdown()]
    if entries := report.get("bench"):
        parts += ["## Speed", bench_table(entries).markdown(), *_conditions(entries)]
    if artifacts := report.get("artifacts"):
        parts += ["## Exported files", files.artifact_table(artifacts).markdown()]
    if verify := report.get("verify"):
        parts += ["## Checks", check_table(verify["checks"]).markdown()]
        if weights := verify.get("weights"):
            parts += ["## Weights", files.weight_table(weights).markdown(), _bullets(files.describe_bytes(weights))]
    for table in report.get("tables") or ():
        parts += [f"## {escape_markdown(table['title'])}", Table(**table).markdown()]
    if published := report.get("published"):
        figures = _published_lines(published, report["cost"]["compressed"])
        parts += ["## As published by others, not measured here", _bullets(figures)]
    if notes := report.get("notes"):
        parts += ["## Notes", _bullets(notes)]
    model = report.get("model") or {}
    described = "input" in model and model["input"]["crop_mode"] != "border"  # the lines do not pad images
    if usable := [entry for entry in artifacts or () if described and entry.get("format", "onnx") in TEMPLATES]:
        parts.append("## Use it without vitcompress")
        for entry in sorted(usable, key=lambda entry: files.is_dense(entry["file"])):
            parts += [f"### {escape_markdown(entry['file'])}", f"```python\n{snippet(model['input'], entry)}```"]
    if classes := model.get("classes"):
        unnamed = list(classes) == [str(number) for number in range(len(classes))]
        listed = "named by their numbers" if unnamed else escape_markdown(", ".join(classes))
        parts += ["## Classes", f"{len(classes)}: {listed}"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {escape_markdown(line)}" for line in lines)


def _removed(report: records.Report) -> list[str]:
    """Removed layers and channels, and how they were chosen."""
    plan, widths = report.get("plan"), report.get("widths")
    if not plan:
        return []
    lines = [*structure.describe_removed(plan), *(["channels, listed by block below"] if widths else [])]
    searched, layers, teacher = report.get("searched"), report.get("layers"), report.get("teacher")
    chosen = {"Chosen on": searched, "How it was chosen": layers, "Teacher during recovery": teacher}
    sentences = [f"{label}: {value}." for label, value in chosen.items() if value]
    if start := report.get("before_recovery"):
        pruned, dense = files.format_accuracy(start["pruned"]), files.format_accuracy(start["dense"])
        sentences.append(f"Directly after pruning, on held-out images: {pruned}; dense: {dense}.")
    removed, table = _bullets(lines) or "nothing", Table(**widths).markdown() if widths else ""
    return ["## What was removed", removed, table, escape_markdown(" ".join(sentences))]


def _conditions(entries: Sequence[records.BenchRecord]) -> list[str]:
    """Machine, settings, ratios and warnings of the measurements."""
    machine, row = entries[0]["machine"], entries[0]["rows"][0]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    hardware = ", ".join([machine["cpu"], f"{machine['cpu_cores_usable']} cores", *machine["gpus"]])
    tf32 = [f"{e['rows'][0]['runtime']}: TF32 {'on' if e['rows'][0]['tf32'] else 'off'}" for e in entries]
    about = "; ".join(dict.fromkeys(tf32))
    settings = f"Measured on {hardware}; {versions}. Artifacts are interleaved; input: {row['input']}. {about}."
    return [escape_markdown(settings), "\n".join(map(escape_markdown, files.list_warnings(entries)))]


def _published_lines(published: records.Stored[Published], cost: records.Stored[Cost]) -> Iterator[str]:
    """`parameters: 54.9 M (counted here: 54.87 M)` for each published figure, then source and remarks."""
    linear = published.get("macs_linear", False)
    macs = "MACs per image without attention products" if linear else "MACs per image"
    counted_macs = cost["macs_linear" if linear else "macs"] / 1e9
    lines = {
        "top1": "top-1: {:g} %",
        "params_m": f"parameters: {{:g}} M (counted here: {cost['params'] / 1e6:.2f} M)",
        "macs_g": f"{macs}: {{:g}} G (counted here: {counted_macs:.2f} G)",
        "images_per_second": "throughput: {:,g} images/s",
        "speedup": "speed-up: {:g}x",
        "source": "source: {}",
        "hardware": "hardware: {}",
        "deviation": "why the counts differ: {}",
        "note": "note: {}",
    }
    figures: dict[str, object] = {**published}
    yield from (line.format(figures[key]) for key, line in lines.items() if figures.get(key) not in (None, ""))
