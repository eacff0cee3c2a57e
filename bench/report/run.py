"""The report of a run: read its file, and present it as tables and as one page of Markdown; the limit `--max-drop`."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vitcompress.bench.plots import structure
from vitcompress.bench.report import records
from vitcompress.bench.report.measurements import bench_table, describe_conditions, is_dense, speed_rows
from vitcompress.bench.report.snippet import TEMPLATES, snippet
from vitcompress.errors import ArtifactError, InputError
from vitcompress.exporters.sidecar import DENSE
from vitcompress.io import text
from vitcompress.io.files import read_record
from vitcompress.io.manifest import check_unchanged
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.text import NONE, NOT_MEASURED, Columns, Table, escape_markdown, format_percent
from vitcompress.io.validation import check_record
from vitcompress.models.cost import Cost
from vitcompress.recipe.schema import Published
from vitcompress.training.metrics import paired_interval

FILES = {"xml": "xml and bin"}  # an OpenVINO model consists of two files
ACCURACIES = dict[str, records.FileAccuracy | records.McNemarRecord]  # of AccuracyPair, with its other keys
Row = tuple[str, ...]


def read_report(folder: str | Path) -> records.Report:
    """The report of a run folder. Raises ArtifactError if there is none, or if it was changed."""
    path = RunFolder(Path(folder)).report
    check_unchanged(path.parent, path)
    if not path.is_file():
        hint = "give folders of finished runs; `vitcompress recipe` continues an unfinished one"
        if runs := sorted(path.parent.glob(f"*/{path.name}")):  # as in the folder of a study
            hint = f"give the run folders in it, such as {runs[0].parent}"
        raise ArtifactError(f"{folder} has no {path.name}", hint=hint)
    report: records.Report = read_record(path, records.Report)
    check_record(path, report.get("accuracy"), ACCURACIES | None)
    return report


def count_verdicts(verify: records.VerificationRecord) -> str:
    """`19 passed, 1 not run`"""
    counts = Counter(check["verdict"].replace("_", " ") for check in verify["checks"])
    return ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "not run") if counts[name])


def summary_table(report: records.Report) -> Table:
    """Accuracy, size and speed before and after, and the checks."""
    rows: list[Row] = list(_accuracy_rows(report))
    for artifact in report.get("artifacts") or ():
        if (accuracy := artifact["accuracy"]) and not is_dense(artifact["file"]):
            rows.append((f"accuracy of {artifact['file']}", "", format_accuracy(accuracy), ""))
    dense, compressed = report["cost"]["dense"], report["cost"]["compressed"]
    rows.append(_count_row("parameters", dense["params"], compressed["params"]))
    rows.append(_count_row("MACs per image", dense["macs"], compressed["macs"]))
    entries = report.get("bench") or ()
    rows += speed_rows(entries)
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
    after, change = format_accuracy(accuracy["compressed"]), points.get("the dense model", "")
    yield f"accuracy, test images{longer}", format_accuracy(accuracy["dense"]), after, change
    if control := accuracy.get("control"):
        yield f"accuracy, before: control (dense, {more})", format_accuracy(control), after, points["the control"]


def paired_tests(report: records.Report) -> Iterator[tuple[str, records.McNemarRecord]]:
    """The compressed model compared with the dense one and, if the run has it, with the control.

    Earlier versions did not record intervals; they follow from the counts.
    """
    accuracy = report.get("accuracy") or {}
    tests = {"the dense model": accuracy.get("mcnemar"), "the control": accuracy.get("control_mcnemar")}
    for name, test in tests.items():
        if test is not None:
            a, b, total = test["only_a"], test["only_b"], accuracy["compressed"]["total"]
            yield name, {**test, "difference": (b - a) / total, "difference_ci95": paired_interval(a, b, total)}


def interval_in_points(test: records.McNemarRecord) -> tuple[float, float]:
    """The 95 % interval of the difference in percentage points, both ends rounded outwards to two digits."""
    low, high = (round(1e4 * end, 6) for end in test["difference_ci95"])
    return math.floor(low) / 100, math.ceil(high) / 100


def describe_difference(test: records.McNemarRecord) -> str:
    """`-0.6 points (p = 0.59), loses at most 2.48 points (95 %)`: the lower end of the interval."""
    low, _ = interval_in_points(test)
    bound = f"{'loses at most' if low < 0 else 'gains at least'} {abs(low):.2f} points (95 %)"
    return f"{text.format_signed(100 * test['difference'])} points (p = {test['p_value']:.2g}), {bound}"


def list_drops(tests: Iterable[tuple[str, records.McNemarRecord]], limit: float | None) -> list[str]:
    """A sentence for each comparison whose 95 % interval does not exclude a loss of more than `limit` points."""
    return [
        f"{names}: {describe_difference(test)}; the limit of --max-drop is {limit:g} point{'s' * (limit != 1)}"
        f"{'; more test images narrow the interval' if -100 * test['difference'] <= limit else ''}"
        for names, test in tests
        if limit is not None and -100 * test["difference_ci95"][0] > limit
    ]


def list_run_drops(name: str, report: records.Report, limit: float | None) -> list[str]:
    """`list_drops` of a run. Raises InputError if its accuracy was not measured."""
    tests = [(f"{name} against {other}", test) for other, test in paired_tests(report)]
    if limit is not None and not tests:
        problem = f"--max-drop needs the accuracy of {name}, which was not measured"
        raise InputError(problem, hint="run the recipe without --structure-only, into another folder")
    return list_drops(tests, limit)


def cost_table(report: records.Report) -> Table:
    """Exact counts, MACs in both conventions."""
    dense, compressed = report["cost"]["dense"], report["cost"]["compressed"]
    keys = {"parameters": "params", "MACs": "macs", "MACs without attention products": "macs_linear"}
    counts = {name: (dense[key], compressed[key]) for name, key in keys.items()}
    rows = [(name, *(f"{count:,}" for count in pair), text.format_change(*pair)) for name, pair in counts.items()]
    return Table("Cost", ("", "dense", "compressed", "change"), tuple(rows))


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
    threads = f", threads {speed['threads']}" if speed and speed.get("threads") is not None else ""
    return f"{text.format_number(speed['images_per_second'])} (batch {speed['batch']}{threads})" if speed else unknown


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
    dense = " + ".join(map(text.format_shape, tensor["dense"].values()))
    forms: dict[str, list[str]] = {}
    for name in files:
        stored = tensor["files"].get(name)
        form = NONE if stored is None else f"{text.format_shape(stored['shape'])}, {stored['bytes']:,} B"
        forms.setdefault(form, []).append(name)
    for form, names in (forms or {NONE: []}).items():
        where = "all" if len(names) == len(files) > 1 else ", ".join(names) or NONE
        shapes = (NONE if shape is None else text.format_shape(shape) for shape in (tensor["planned"], tensor["torch"]))
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


def markdown(report: records.Report) -> str:
    """The report as one page."""
    title, summary = escape_markdown(report["recipe"]), escape_markdown(report.get("summary") or "")
    parts = [f"# {title}", summary, summary_table(report).markdown()]
    parts += [*_removed(report), "## Cost", cost_table(report).markdown()]
    if entries := report.get("bench"):
        parts += ["## Speed", bench_table(entries).markdown(), *describe_conditions(entries)]
    if artifacts := report.get("artifacts"):
        parts += ["## Exported files", artifact_table(artifacts).markdown()]
    if verify := report.get("verify"):
        parts += ["## Checks", check_table(verify["checks"]).markdown()]
        if weights := verify.get("weights"):
            parts += ["## Weights", weight_table(weights).markdown(), _bullets(describe_bytes(weights))]
    for table in report.get("tables") or ():
        parts += [f"## {escape_markdown(table['title'])}", Table(**table).markdown()]
    if published := report.get("published"):
        figures = _published_lines(published, report["cost"]["compressed"])
        parts += ["## As published by others, not measured here", _bullets(figures)]
    searched = [text for entry in artifacts or () if (text := entry.get("fp32_layers"))]
    if notes := [*dict.fromkeys([*(report.get("notes") or ()), *searched])]:  # earlier versions put them together
        parts += ["## Notes", _bullets(notes)]
    model = report.get("model") or {}
    input = model.get("input")  # the lines neither pad images nor read other channels
    described = input and input["crop_mode"] != "border" and input["crop_pct"] <= 1 and input["size"][0] in (1, 3)
    known = (entry for entry in artifacts or () if described and entry.get("format", "onnx") in TEMPLATES)
    # An engine's source saturates with the default settings of ONNX Runtime, and a file in fp8 only is such a source.
    if usable := [e for e in known if not e["file"].endswith(".onnx" if e["precision"] == "fp8" else ".engine.onnx")]:
        parts.append("## Use it without vitcompress")
        for entry in sorted(usable, key=lambda entry: is_dense(entry["file"])):
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
        pruned, dense = format_accuracy(start["pruned"]), format_accuracy(start["dense"])
        sentences.append(f"Directly after pruning, on held-out images: {pruned}; dense: {dense}.")
    removed, table = _bullets(lines) or "nothing", Table(**widths).markdown() if widths else ""
    return ["## What was removed", removed, table, escape_markdown(" ".join(sentences))]


def _published_lines(published: records.RecordOf[Published], cost: records.RecordOf[Cost]) -> Iterator[str]:
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
