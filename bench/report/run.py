"""The report of a run: read and write report.json, and present it as tables and as one page of Markdown."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from vitcompress.bench.plots import structure
from vitcompress.bench.report.files import artifact_table, describe_bytes, list_warnings, weight_table
from vitcompress.bench.report.records import (
    AccuracyRecord,
    BenchRecord,
    CostRecord,
    MemoryRecord,
    PublishedRecord,
    RatioRecord,
    Report,
    TableRecord,
    VerificationRecord,
)
from vitcompress.bench.report.snippet import snippet
from vitcompress.errors import ArtifactError
from vitcompress.io.files import read_json, write_json, write_text
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.text import (
    NOT_MEASURED,
    Table,
    format_change,
    format_count,
    format_interval,
    format_milliseconds,
    format_number,
    format_percent,
    format_rate,
    format_ratio,
    shorten_paths,
)

FILES = {"xml": "xml and bin"}  # an OpenVINO model consists of two files
Row = tuple[str, ...]


def write_report(folder: Path, report: Report) -> None:
    """report.json and report.md of a run folder."""
    write_text(RunFolder(folder).markdown, markdown(report))
    write_json(RunFolder(folder).report, dict(report))


def read_report(folder: str | Path) -> Report:
    """The report of a run folder. Raises ArtifactError if there is none."""
    path = RunFolder(Path(folder)).report
    if not path.is_file():
        raise ArtifactError(
            f"{folder} has no {path.name}",
            hint="give folders of finished runs; `vitcompress recipe` continues an unfinished one",
        )
    report: Report = read_json(path)
    return report


def format_accuracy(accuracy: AccuracyRecord) -> str:
    return f"{format_percent(accuracy['top1'])} ({accuracy['correct']} of {accuracy['total']})"


def describe_interval(ratio: RatioRecord) -> str:
    """`95 % interval 1.37 to 1.47: faster`; no verdict if there are too few rounds for an interval."""
    return f"{format_interval(ratio['ci95'])}{'' if ratio['ci95'][1] is None else ': ' + ratio['verdict']}"


def describe_speeds(entry: BenchRecord) -> list[str]:
    """`torch: 1.376 times as fast, 95 % interval 1.37 to 1.47: faster` for each ratio of a measurement."""
    runtime = entry["rows"][0]["runtime"]
    return [f"{runtime}: {ratio['median']:.3f} times as fast, {describe_interval(ratio)}" for ratio in entry["ratios"]]


def count_verdicts(verify: VerificationRecord) -> str:
    """`19 passed, 1 not run`"""
    counts = Counter(check["verdict"].replace("_", " ") for check in verify["checks"])
    return ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "not run") if counts[name])


# --------------------------------------------------------------------------------------------------------------- tables


def summary_table(report: Report) -> Table:
    """Accuracy, size and speed before and after, and the checks."""
    rows: list[Row] = [_accuracy_row(report)]
    for artifact in report.get("artifacts") or ():
        if accuracy := artifact["accuracy"]:
            rows.append((f"accuracy of {artifact['file']}", "", format_accuracy(accuracy), ""))
    dense, compressed = report["cost"]["dense"], report["cost"]["compressed"]
    rows.append(_count_row("parameters", dense["params"], compressed["params"]))
    rows.append(_count_row("MACs per image", dense["macs"], compressed["macs"]))
    entries = report.get("bench") or ()
    rows += [row for entry in entries for row in _speed_rows(entry)]
    rows += [] if entries else [(name, NOT_MEASURED, NOT_MEASURED, "") for name in ("latency", "throughput")]
    files = report.get("files") or {}
    for name, after in files.items():
        kind = name.removeprefix("model.")
        if kind != name and (before := files.get(f"dense.{kind}")):
            rows.append(_count_row(f"file size ({FILES.get(kind, kind)})", before, after, "B"))
    if verify := report.get("verify"):
        rows.append(("checks (verify.json)", "", count_verdicts(verify), ""))
    return Table("", ("", "before", "after", "change"), tuple(rows))


def _count_row(name: str, before: int, after: int, unit: str = "") -> Row:
    return name, f"{format_count(before)}{unit}", f"{format_count(after)}{unit}", format_change(before, after)


def _accuracy_row(report: Report) -> Row:
    accuracy = report.get("accuracy") or {}
    if "dense" not in accuracy or "compressed" not in accuracy:
        return "accuracy", NOT_MEASURED, NOT_MEASURED, ""
    dense, compressed = accuracy["dense"], accuracy["compressed"]
    points = f"{100 * (compressed['top1'] - dense['top1']):+.1f} points"
    if test := accuracy.get("mcnemar"):
        points += f" (p = {test['p_value']:.2g})"
    return "accuracy, test images", format_accuracy(dense), format_accuracy(compressed), points


def _speed_rows(entry: BenchRecord) -> Iterator[Row]:
    """Latency, throughput and speed-up of one interleaved measurement of two artifacts."""
    dense, compressed = entry["rows"][:2]
    ratio = entry["ratios"][0]
    where = f"{dense['runtime']} {dense['device']} {dense['precision']}, batch {dense['batch']}"
    before, after = dense["latency_ms"]["p50"], compressed["latency_ms"]["p50"]
    times = [f"{format_milliseconds(value)} ms" for value in (before, after)]
    yield f"latency, median ({where})", *times, format_change(before, after)
    before, after = dense["images_per_second"], compressed["images_per_second"]
    rates = [f"{format_rate(value)} images/s" for value in (before, after)]
    yield f"throughput ({where})", *rates, format_change(before, after)
    # The speed-up is a median over pairs of blocks, not the ratio of the figures above, and so has its own row.
    yield f"speed-up, in turns ({where})", "", f"{format_ratio(ratio['median'])}x", describe_interval(ratio)


def cost_table(report: Report) -> Table:
    """Exact counts, MACs in both conventions."""
    dense, compressed = report["cost"]["dense"], report["cost"]["compressed"]
    counts = {
        "parameters": (dense["params"], compressed["params"]),
        "MACs": (dense["macs"], compressed["macs"]),
        "MACs without attention products": (dense["macs_linear"], compressed["macs_linear"]),
    }
    rows = [(name, f"{a:,}", f"{b:,}", format_change(a, b)) for name, (a, b) in counts.items()]
    return Table("Cost", ("", "dense", "compressed", "change"), tuple(rows))


def bench_table(entries: Sequence[BenchRecord]) -> Table:
    """One row per artifact and runtime."""
    columns: Row = ("artifact", "runtime", "precision", "threads", "protocol", "images/s", "p50 ms", "p90 ms", "max ms")
    bench_rows = [row for entry in entries for row in entry["rows"]]
    peaks = [_format_peak(row["memory"]) for row in bench_rows]
    columns += ("peak MiB",) if any(peaks) else ()
    rows = []
    for row, name, peak in zip(bench_rows, shorten_paths([row["artifact"] for row in bench_rows]), peaks, strict=True):
        latency = row["latency_ms"]
        times = ["" if t is None else format_milliseconds(t) for t in (latency["p50"], latency["p90"], latency["max"])]
        modes = {"compile": row["compile"], "cuda graph": row["cuda_graph"], "transfers": row["transfers"]}
        modes["uint8"] = row.get("input_type") == "uint8"  # then normalization is timed too
        precision = row["precision"] + "".join(f" +{mode}" for mode, used in modes.items() if used)
        threads = "" if row["threads"] is None else str(row["threads"])
        settings = (f"{row['runtime']} {row['device']}", precision, threads, row["protocol"])
        memory = (peak,) if any(peaks) else ()
        rows.append((name, *settings, format_rate(row["images_per_second"]), *times, *memory))
    return Table("Speed", columns, tuple(rows))


def _format_peak(memory: MemoryRecord) -> str:
    """Peak memory in MiB; `+` marks the increase over Python and its libraries, other values are of a whole process."""
    start, peak = memory["process_start_bytes"], memory["process_peak_bytes"]
    return "" if peak is None else f"{'' if start is None else '+'}{(peak - (start or 0)) / 2**20:.0f}"


def verify_table(verify: VerificationRecord) -> Table:
    """Every check with its value and tolerance."""
    rows = []
    for check in verify["checks"]:
        figures = ["" if x is None else format_number(x) for x in (check["value"], check["tolerance"])]
        rows.append((check["name"], check["verdict"].replace("_", " "), *figures, check["detail"]))
    return Table("Checks", ("check", "verdict", "value", "tolerance", ""), tuple(rows))


# ------------------------------------------------------------------------------------------------------------- Markdown


def markdown(report: Report) -> str:
    """The report as one page."""
    parts = [f"# {report['recipe']}", report.get("summary") or "", summary_table(report).markdown()]
    parts += [*_removed(report), "## Cost", cost_table(report).markdown()]
    if entries := report.get("bench"):
        parts += ["## Speed", bench_table(entries).markdown(), *_conditions(entries)]
    if artifacts := report.get("artifacts"):
        parts += ["## Exported files", artifact_table(artifacts).markdown()]
    if verify := report.get("verify"):
        parts += ["## Checks", verify_table(verify).markdown()]
        if weights := verify.get("weights"):
            parts += ["## Weights", weight_table(weights).markdown(), _bullets(describe_bytes(weights))]
    for table in report.get("tables") or ():
        parts += [f"## {table['title']}", _table(table)]
    if published := report.get("published"):
        figures = _published_lines(published, report["cost"]["compressed"])
        parts += ["## As published by others, not measured here", _bullets(figures)]
    if notes := report.get("notes"):
        parts += ["## Notes", _bullets(notes)]
    model = report.get("model") or {}
    if "input" in model and "model.onnx" in (report.get("files") or {}):
        lines = snippet(model["input"], uint8=model.get("uint8", False))
        parts += ["## Use it without vitcompress", f"```python\n{lines}```"]
    if classes := model.get("classes"):
        unnamed = list(classes) == [str(number) for number in range(len(classes))]
        parts += ["## Classes", f"{len(classes)}, named by their numbers" if unnamed else ", ".join(classes)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(table: TableRecord) -> str:
    return Table("", tuple(table["columns"]), tuple(map(tuple, table["rows"]))).markdown()


def _removed(report: Report) -> list[str]:
    """Removed layers and channels, and how they were chosen."""
    plan, widths = report.get("plan"), report.get("widths")
    if not plan:
        return []
    lines = [*structure.describe_removed(plan), *(["channels, listed by block below"] if widths else [])]
    sentences = []
    if searched := report.get("searched"):
        sentences.append(f"Chosen on: {searched}.")
    if layers := report.get("layers"):
        sentences.append(f"How it was chosen: {layers}.")
    if teacher := report.get("teacher"):
        sentences.append(f"Teacher during recovery: {teacher}.")
    if start := report.get("before_recovery"):
        pruned, dense = format_accuracy(start["pruned"]), format_accuracy(start["dense"])
        sentences.append(f"Directly after pruning, on held-out images: {pruned}; dense: {dense}.")
    return ["## What was removed", _bullets(lines) or "nothing", _table(widths) if widths else "", " ".join(sentences)]


def _conditions(entries: Sequence[BenchRecord]) -> list[str]:
    """Machine, settings, ratios and warnings of the measurements."""
    machine, row = entries[0]["machine"], entries[0]["rows"][0]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    hardware = ", ".join([machine["cpu"], f"{machine['cpu_cores_usable']} cores", *machine["gpus"]])
    tf32 = "; ".join(f"{e['rows'][0]['runtime']}: TF32 {'on' if e['rows'][0]['tf32'] else 'off'}" for e in entries)
    settings = f"Measured on {hardware}; {versions}. Artifacts are interleaved; input: {row['input']}. {tf32}."
    ratios = [f"- {line}" for entry in entries for line in describe_speeds(entry)]
    return [settings, "\n".join([*ratios, *list_warnings(entries)])]


def _published_lines(published: PublishedRecord, cost: CostRecord) -> Iterator[str]:
    """`parameters: 54.9 M (counted here: 54.87 M)` for each published figure, then source and remarks."""
    linear = published.get("macs_linear", False)
    macs = "MACs per image without attention products" if linear else "MACs per image"
    counted_macs = cost["macs_linear" if linear else "macs"] / 1e9
    figures = (
        ("top-1", published.get("top1"), "{:g} %", ""),
        ("parameters", published.get("params_m"), "{:g} M", f" (counted here: {cost['params'] / 1e6:.2f} M)"),
        (macs, published.get("macs_g"), "{:g} G", f" (counted here: {counted_macs:.2f} G)"),
        ("throughput", published.get("images_per_second"), "{:,g} images/s", ""),
        ("speed-up", published.get("speedup"), "{:g}x", ""),
    )
    for name, value, form, counted in figures:
        if value is not None:
            yield f"{name}: {form.format(value)}{counted}"
    remarks = {
        "source": published.get("source"),
        "hardware": published.get("hardware"),
        "why the counts differ": published.get("deviation"),
        "note": published.get("note"),
    }
    yield from (f"{name}: {text}" for name, text in remarks.items() if text)
