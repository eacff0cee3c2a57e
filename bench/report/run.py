"""What a run found, for people: one table, one page of Markdown, and the JSON behind both.

The input is plain data, the content of report.json. Every key but `recipe` and `cost` may be missing or None.

    recipe, summary        name and sentence of the recipe
    model                  {arch, arch_args, input: InputConfig as data, classes: [names], uint8: files take bytes}
    plan                   the plan as data, `plan_sha256` its digest
    widths                 {title, columns, rows} as of `structure.widths`, None where the plan cuts none
    cost                   {dense, compressed}: {params, macs (attention products counted), macs_linear (not counted)}
    accuracy               {dense, compressed, FILE}: Accuracy.to_dict(); mcnemar: {only_a, only_b, p_value}
    before_recovery        {dense, pruned}: Accuracy.to_dict() on held-out images, right after pruning
    recovery               {epochs, kept_epoch, kept, heldout}: which weights the recovery ended with
    bench                  [Bench.as_data()]: dense first, compressed second, one entry per runtime
    artifacts              one record per exported file of the compressed model: file, sha256, bytes, precision,
                           verified, its accuracy (Accuracy.to_dict()) and speed (bench.recorded_speeds.speed) or None
    files                  {"dense.onnx": bytes, "model.onnx": bytes}
    verify                 {passed, checks}
    folding                one record per module that was or could have been folded
    searched               what was looked at to choose the layers; `layers`: what they come from, in words
    teacher                what taught during recovery, None when nothing did
    published              figures of others, quoted as they were published: top1, params_m, macs_g, images_per_second,
                           speedup, hardware, source, note
    tables                 what the methods measured: [{title, columns, rows}], cells are text
    notes                  sentences that a reader should know
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitcompress.bench.plots import structure
from vitcompress.bench.report import published
from vitcompress.bench.report.files import artifacts, bytes_of, remarks, weights
from vitcompress.bench.report.snippet import snippet
from vitcompress.errors import ArtifactError
from vitcompress.io.files import read_json, write_json, write_text
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

JSON, MARKDOWN = "report.json", "report.md"
FILES = {"xml": "xml and bin"}  # an OpenVINO model is two files


def write(folder: Path, report: Mapping[str, Any]) -> None:
    """report.json and report.md of a run folder."""
    write_text(folder / MARKDOWN, markdown(report))
    write_json(folder / JSON, dict(report))


def read(folder: str | Path) -> dict[str, Any]:
    """The report of a run folder. Raises ArtifactError where there is none."""
    path = Path(folder) / JSON
    if not path.is_file():
        raise ArtifactError(
            f"{folder} has no {JSON}",
            hint="give folders of finished runs; `vitcompress recipe` continues an unfinished one",
        )
    report: dict[str, Any] = read_json(path)
    return report


# -------------------------------------------------------------------------------------------------------------- figures


def counted(accuracy: Mapping[str, Any]) -> str:
    return f"{format_percent(accuracy['top1'])} ({accuracy['correct']} of {accuracy['total']})"


def interval(ratio: Mapping[str, Any]) -> str:
    return format_interval(ratio["ci95"])


def judged(ratio: Mapping[str, Any]) -> str:
    """`95 % interval 1.37 to 1.47: faster`; no verdict where too few rounds give no interval."""
    return f"{interval(ratio)}{'' if ratio['ci95'][1] is None else ': ' + ratio['verdict']}"


def speeds(entry: Mapping[str, Any]) -> list[str]:
    """`torch: 1.376 times as fast, 95 % interval 1.37 to 1.47: faster` of each ratio of a measurement."""
    runtime = entry["rows"][0]["runtime"]
    return [f"{runtime}: {ratio['median']:.3f} times as fast, {judged(ratio)}" for ratio in entry["ratios"]]


# --------------------------------------------------------------------------------------------------------------- tables


def summary_table(report: Mapping[str, Any]) -> Table:
    """What a manager wants to know: before, after, change."""
    rows = [_accuracy_row(report.get("accuracy") or {})]
    rows += [
        (f"accuracy of {entry['file']}", "", counted(entry["accuracy"]), "")
        for entry in report.get("artifacts") or ()
        if entry["accuracy"]
    ]
    cost = report["cost"]
    for name, key in (("parameters", "params"), ("MACs per image", "macs")):
        before, after = cost["dense"][key], cost["compressed"][key]
        rows.append((name, format_count(before), format_count(after), format_change(before, after)))
    rows += [row for entry in report.get("bench") or () for row in _speed_rows(entry)]
    if not report.get("bench"):
        rows += [(name, NOT_MEASURED, NOT_MEASURED, "") for name in ("latency", "throughput")]
    rows += _file_rows(report.get("files") or {})
    if verify := report.get("verify"):
        rows.append(("checks (verify.json)", "", verdicts(verify), ""))
    return Table("", ("", "before", "after", "change"), tuple(rows))


def _accuracy_row(accuracy: Mapping[str, Any]) -> tuple[str, str, str, str]:
    if not {"dense", "compressed"} <= set(accuracy):
        return "accuracy", NOT_MEASURED, NOT_MEASURED, ""
    dense, compressed = accuracy["dense"], accuracy["compressed"]
    points = f"{100 * (compressed['top1'] - dense['top1']):+.1f} points"
    if test := accuracy.get("mcnemar"):
        points += f" (p = {test['p_value']:.2g})"
    return "accuracy, test images", counted(dense), counted(compressed), points


def _speed_rows(entry: Mapping[str, Any]) -> Iterable[tuple[str, str, str, str]]:
    """Latency, throughput and speed-up of one interleaved measurement of two artifacts."""
    dense, compressed = entry["rows"][:2]
    ratio = entry["ratios"][0]
    where = f"{dense['runtime']} {dense['device']} {dense['precision']}, batch {dense['batch']}"
    before, after = dense["latency_ms"]["p50"], compressed["latency_ms"]["p50"]
    shown = [f"{format_milliseconds(value)} ms" for value in (before, after)]
    yield f"latency, median ({where})", shown[0], shown[1], format_change(before, after)
    before, after = dense["images_per_second"], compressed["images_per_second"]
    shown = [f"{format_rate(value)} images/s" for value in (before, after)]
    yield f"throughput ({where})", shown[0], shown[1], format_change(before, after)
    # A row of its own: it comes from pairs of neighbouring rounds and not from the two figures above.
    yield f"speed-up, in turns ({where})", "", f"{format_ratio(ratio['median'])}x", judged(ratio)


def _file_rows(files: Mapping[str, int]) -> Iterable[tuple[str, str, str, str]]:
    for name, after in files.items():
        kind = name.removeprefix("model.")
        before = files.get(f"dense.{kind}")
        if kind != name and before:
            yield (
                f"file size ({FILES.get(kind, kind)})",
                f"{format_count(before)}B",
                f"{format_count(after)}B",
                format_change(before, after),
            )


def verdicts(verify: Mapping[str, Any]) -> str:
    """`19 passed, 1 not run`"""
    counts = Counter(check["verdict"].replace("_", " ") for check in verify["checks"])
    return ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "not run") if counts[name])


def cost_table(report: Mapping[str, Any]) -> Table:
    """Exact counts, in both conventions for MACs."""
    names = {"params": "parameters", "macs": "MACs", "macs_linear": "MACs without attention products"}
    dense, compressed = report["cost"]["dense"], report["cost"]["compressed"]
    rows = [(names[k], f"{dense[k]:,}", f"{compressed[k]:,}", format_change(dense[k], compressed[k])) for k in names]
    return Table("Cost", ("", "dense", "compressed", "change"), tuple(rows))


def bench_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """One row per artifact and runtime."""
    columns: tuple[str, ...] = ("artifact", "runtime", "precision", "threads", "protocol", "images/s")
    columns += ("p50 ms", "p90 ms", "max ms")
    rows, measured = [], [row for entry in entries for row in entry["rows"]]
    peaks = [_peak(row.get("memory") or {}) for row in measured]
    columns += ("peak MiB",) if any(peaks) else ()
    names = shorten_paths([row["artifact"] for row in measured])
    for row, name, peak in zip(measured, names, peaks, strict=True):
        latency = [row["latency_ms"].get(key) for key in ("p50", "p90", "max")]
        shown = ["" if value is None else format_milliseconds(value) for value in latency]
        how = "".join(f" +{name.replace('_', ' ')}" for name in ("compile", "cuda_graph", "transfers") if row.get(name))
        how += " +uint8" if row.get("input_type") == "uint8" else ""  # its normalisation is timed, too
        where = f"{row['runtime']} {row['device']}"
        about = (name, where, f"{row['precision']}{how}", "" if row["threads"] is None else str(row["threads"]))
        held = (peak,) if any(peaks) else ()
        rows.append((*about, row["protocol"], format_rate(row["images_per_second"]), *shown, *held))
    return Table("Speed", columns, tuple(rows))


def _peak(memory: Mapping[str, Any]) -> str:
    """MiB at the peak: `+` is what came on top of Python and its libraries, without it a whole process is meant."""
    start, peak = memory.get("process_start_bytes"), memory.get("process_peak_bytes")
    return "" if peak is None else f"{'' if start is None else '+'}{(peak - (start or 0)) / 2**20:.0f}"


def verify_table(verify: Mapping[str, Any]) -> Table:
    """Each verdict with value and tolerance."""
    figures = [
        (c, *("" if c[k] is None else format_number(c[k]) for k in ("value", "tolerance"))) for c in verify["checks"]
    ]
    rows = [(c["name"], c["verdict"].replace("_", " "), value, limit, c["detail"]) for c, value, limit in figures]
    return Table("Checks", ("check", "verdict", "value", "tolerance", ""), tuple(rows))


# ------------------------------------------------------------------------------------------------------------- Markdown


def markdown(report: Mapping[str, Any]) -> str:
    """The report as one page."""
    head = [f"# {report['recipe']}", report.get("summary") or "", summary_table(report).markdown()]
    parts = [*head, *_removed(report), "## Cost", cost_table(report).markdown()]
    if report.get("bench"):
        parts += ["## Speed", bench_table(report["bench"]).markdown(), *_measured_on(report["bench"])]
    if files := report.get("artifacts"):
        parts += ["## Exported files", artifacts(files).markdown()]
    if verify := report.get("verify"):
        parts += ["## Checks", verify_table(verify).markdown(), *_weights(verify.get("weights"))]
    for table in report.get("tables") or ():
        parts += [
            f"## {table['title']}",
            Table("", tuple(table["columns"]), tuple(map(tuple, table["rows"]))).markdown(),
        ]
    parts += [*_published(report), *_notes(report)]
    about = report.get("model") or {}
    if about.get("input") and "model.onnx" in (report.get("files") or {}):
        lines = snippet(about["input"], uint8=about.get("uint8", False))
        parts += ["## Use it without vitcompress", f"```python\n{lines}```"]
    if classes := about.get("classes"):
        nameless = list(classes) == [str(number) for number in range(len(classes))]
        parts += ["## Classes", f"{len(classes)}, named by their numbers" if nameless else ", ".join(classes)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _removed(report: Mapping[str, Any]) -> list[str]:
    """Which layers went, what stands in their place, and how they were chosen."""
    if not (plan := report.get("plan")):
        return []
    lines = [f"- {line}" for line in structure.stand_ins(plan)]
    widths = report.get("widths")
    lines += ["- channels, as told below of each block"] if widths else []
    told = {
        "searched": "Chosen on: {}.",
        "layers": "How it was chosen: {}.",
        "teacher": "Teacher during recovery: {}.",
    }
    facts = [text.format(report[key]) for key, text in told.items() if report.get(key)]
    if start := report.get("before_recovery"):
        pruned, dense = counted(start["pruned"]), counted(start["dense"])
        facts.append(f"Right after pruning, on held-out images: {pruned}; dense: {dense}.")
    table = [Table("", tuple(widths["columns"]), tuple(map(tuple, widths["rows"]))).markdown()] if widths else []
    return ["## What was removed", "\n".join(lines) or "nothing", *table, " ".join(facts)]


def _measured_on(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The machine, the settings, the ratios and the warnings."""
    machine, row = entries[0]["machine"], entries[0]["rows"][0]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    where = ", ".join([machine["cpu"], f"{machine['cpu_cores_usable']} cores", *machine["gpus"]])
    settings = f"Measured on {where}; {versions}. Artifacts took turns; input: {row['input']}."
    tf32 = "; ".join(f"{e['rows'][0]['runtime']}: TF32 {'on' if e['rows'][0]['tf32'] else 'off'}" for e in entries)
    ratios = (f"- {said}" for entry in entries for said in speeds(entry))
    return [f"{settings} {tf32}.", "\n".join([*ratios, *remarks(entries)])]


def _weights(found: Mapping[str, Any] | None) -> list[str]:
    """What the plan changed, from the dense model to the bytes of each file."""
    if not found:
        return []
    lines = "\n".join(f"- {line}" for line in bytes_of(found))
    return ["## Weights", weights(found).markdown(), lines]


def _published(report: Mapping[str, Any]) -> list[str]:
    lines = [f"- {line}" for line in published.lines(report.get("published") or {}, report["cost"]["compressed"])]
    return ["## As published by others, not measured here", "\n".join(lines)] if lines else []


def _notes(report: Mapping[str, Any]) -> list[str]:
    notes = report.get("notes") or ()
    return ["## Notes", "\n".join(f"- {note}" for note in notes)] if notes else []
