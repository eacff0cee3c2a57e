"""The results of a study: speed, rows, comparisons of rows, and tables of both; speed.json, study.json, study.md."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, geometric_mean, stdev
from typing import Any, Literal, cast

import numpy as np

from vitcompress.bench import suite
from vitcompress.bench.report.records import BenchRecord
from vitcompress.bench.report.run import read_report
from vitcompress.errors import ArtifactError, CheckFailedError
from vitcompress.exporters.onnx.export import ONNX
from vitcompress.exporters.runtimes import RunnerOptions, open_runner
from vitcompress.exporters.sidecar import DENSE, sidecar_path
from vitcompress.io.files import file_sha256, read_record, write_json, write_text
from vitcompress.io.manifest import check_unchanged, record_changes
from vitcompress.io.progress import Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.text import NOT_MEASURED, Columns, Table, escape_markdown, format_count, format_percent
from vitcompress.pipeline.export_folder import export_folder, verify_export
from vitcompress.pipeline.folder import dense_folder
from vitcompress.pipeline.study.spec import Row, Run, Study
from vitcompress.training.metrics import mcnemar

SPEED, JSON, MARKDOWN = "speed.json", "study.json", "study.md"
COUNTS = ("correct", "total")  # test images
SIGNIFICANT = 0.05  # a corrected p-value below it counts as a difference
HOW_PAIRS_ARE_COMPARED = (
    "The difference for every seed, and McNemar's exact test over the test images of all seeds together. All seeds use "
    "the same images, and models of one seed start from one dense model, so the p-value holds for these images and "
    "seeds only. It is corrected for the number of pairs (Holm 1979). `verdict`: a difference of the same sign for "
    "every seed with a corrected p-value below 0.05, else `within noise`."
)


class Speed(BenchRecord):
    """Content of speed.json: a benchmark with names of runs instead of files; the first row is the dense model."""

    models: dict[str, str]  # name -> SHA-256 of its file
    settings: dict[str, object]  # of the study's [speed]


def measure_speed(
    folder: Path, study: Study, runs: Sequence[Run], when: Literal["now", "later", "again"], progress: Progress
) -> Speed | None:
    """Write speed.json; None if nothing is to be measured yet.

    One that has the same settings and includes these files is used; a new one includes all rows of the earlier one.
    """
    path = folder / SPEED
    folders = {DENSE: dense_folder(runs[0].recipe, runs[0].folder), **{run.name: run.folder for run in runs}}
    files = {name: RunFolder(folder).exported("model", ONNX.suffix) for name, folder in folders.items()}
    for file, run in zip(files.values(), (runs[0], *runs), strict=True):
        if file.is_file() and sidecar_path(file).is_file():
            check_unchanged(file.parent, file, sidecar_path(file))
        elif not RunFolder(file.parent).plan.is_file():  # the other folders have been checked
            hint = f"remove {runs[0].folder}: the same command trains it again"
            raise ArtifactError(f"the dense model of all rows is missing: {file.parent}", hint=hint)
        else:
            progress.stage(f"Export {file.parent.name}")
            export = run.recipe.export.only({"opset", "uint8"})  # in fp32: runs export files in other precisions
            with record_changes(runs[0].folder), record_changes(file.parent):  # the dense model may be in the first run
                outcome = verify_export(file.parent, export_folder(file.parent, options=export, out=file))
            if outcome.verdict == "failed":
                raise CheckFailedError(f"{file} does not match its model, see {outcome.path}: {outcome.reason}")
    models = {name: file_sha256(file) for name, file in files.items()}
    settings, known = asdict(study.speed), read_record(path, Speed)
    if known and when != "again" and settings == known["settings"] and models.items() <= known["models"].items():
        return cast(Speed, known)
    if when == "later":
        progress.note("speed is not measured yet; the same command without --speed later measures it")
        return None
    others = {n: RunFolder(folder / n).exported("model", ONNX.suffix) for n in known["models"]} if known else {}
    files |= {n: file for n, file in others.items() if file.is_file() and file_sha256(file) == known["models"][n]}
    progress.stage(f"Measure {len(files)} models interleaved")
    table, runner = study.speed, RunnerOptions(threads=study.speed.threads)
    options = suite.BenchOptions(table.protocol, table.batch, table.warmup, table.runs, runner)
    with ExitStack() as stack:
        runners = [stack.enter_context(closing(open_runner(file, runner))) for file in files.values()]
        for opened, name in zip(runners, files, strict=True):
            opened.name = name
        result = suite.compare(runners, options, progress).to_dict()
    speed = cast(Speed, {"models": {n: file_sha256(f) for n, f in files.items()}, "settings": settings, **result})
    write_json(path, speed)
    return speed


def write_results(folder: Path, study: Study, runs: Sequence[Run], speed: Speed | None) -> dict[str, Any]:
    """Write study.json and study.md; returns the content of study.json, which has no paths."""
    reports: list[dict[str, Any]] = [dict(read_report(run.folder)) for run in runs]
    records = [_run_record(run, report, speed) for run, report in zip(runs, reports, strict=True)]
    of_files, of_models = dict[str, list[np.ndarray]](), dict[str, list[np.ndarray]]()
    for run, record in zip(runs, records, strict=True):
        check_unchanged(run.folder, path := RunFolder(run.folder).mistakes)
        wrong = read_record(path, dict[str, list[int]]) or {}
        if missing := {run.evaluated, "compressed"} - wrong.keys():
            raise ArtifactError(f"{path} has no entry {min(missing)}", hint=f"restore it, or remove {run.folder}")
        for masks, name in ((of_files, run.evaluated), (of_models, "compressed")):
            masks.setdefault(run.row.name, []).append(~np.isin(np.arange(record["total"]), wrong[name]))
    curves = {row.curve for row in study.rows}
    rows = [_row_record(row, [record for record in records if record["row"] == row.name], curves) for row in study.rows]
    for row in rows if any(record["flips"] is not None for record in records) else ():
        test = mcnemar(np.concatenate(of_models[row["row"]]), np.concatenate(of_files[row["row"]]))
        row |= {"only_model": test["only_a"], "only_file": test["only_b"], "p_value": test["p_value"]}
    dense = {run.seed: report["accuracy"]["dense"] for run, report in zip(runs, reports, strict=True)}
    seeds = [{"seed": seed, **{key: accuracy[key] for key in COUNTS}} for seed, accuracy in dense.items()]
    result = {
        "study": study.name,
        "summary": study.summary,
        "epochs": study.epochs,
        "model": {key: reports[0]["plan"][key] for key in ("arch", "arch_args")},  # the dense model of all rows
        "seeds": len(seeds),
        "dense": {"seeds": seeds, **_spread(seeds), "cost": reports[0]["cost"]["dense"]},
        "rows": rows,
        "pairs": compare_rows(rows, of_files),
        "runs": records,
        "speed": speed,
    }
    write_text(folder / MARKDOWN, markdown(result))
    write_json(folder / JSON, result)
    return result


def _run_record(run: Run, report: dict[str, Any], speed: Speed | None) -> dict[str, Any]:
    """One row with one seed: counts, cost, speed relative to the dense model, what was removed and kept."""
    if run.evaluated not in report["accuracy"]:  # the file was exported again
        file = shlex.quote(str(run.folder / run.evaluated))
        message = f"the report of {run.folder} has no accuracy of the present {run.evaluated}"
        raise ArtifactError(message, hint=f"`vitcompress evaluate {file}` counts it; then repeat this command")
    if not report["verify"]["passed"]:
        raise CheckFailedError(f"a check of {run.folder} failed", hint="see its report.md; --rows leaves rows out")
    accuracy, cost, plan = report["accuracy"][run.evaluated], report["cost"], report["plan"]
    ratio = next((r for r in speed["ratios"] if r["b"] == run.name), None) if speed else None
    return {
        "run": run.name,
        "row": run.row.name,
        "seed": run.seed,
        **{key: accuracy[key] for key in COUNTS},
        "flips": accuracy.get("flips"),
        "params": cost["compressed"]["params"],
        "macs": cost["compressed"]["macs"],
        "macs_ratio": cost["compressed"]["macs"] / cost["dense"]["macs"],
        "before_recovery": report["before_recovery"] and report["before_recovery"]["pruned"]["top1"],
        "speedup": None if ratio is None else {"median": ratio["median"], "ci95": ratio["ci95"]},
        **{key: plan[key] for key in ("removed", "folded", "heads")},
        "kept": {space: len(channels) for space, channels in plan["kept"].items()},
    }


def _spread(seeds: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Mean and sample standard deviation (None for one seed) of top-1 over seeds, as shares."""
    shares = [seed["correct"] / seed["total"] for seed in seeds]
    return {"top1_mean": fmean(shares), "top1_std": stdev(shares) if len(shares) > 1 else None}


def _row_record(row: Row, seeds: Sequence[dict[str, Any]], curves: set[str]) -> dict[str, Any]:
    """One row over all seeds: sums of counts, means of the rest, the geometric mean of speed-ups. curves: of rows."""
    before = [seed["before_recovery"] for seed in seeds if seed["before_recovery"] is not None]
    speedups = [seed["speedup"]["median"] for seed in seeds if seed["speedup"]]
    flips = [seed["flips"] for seed in seeds]
    return {
        "row": row.name,
        "curve": row.curve,
        "title": row.title,
        "against": [curve for curve in row.against if curve in curves],
        **{key: sum(seed[key] for seed in seeds) for key in COUNTS},
        **_spread(seeds),
        **{key: fmean(seed[key] for seed in seeds) for key in ("params", "macs", "macs_ratio")},
        "macs_ratio_range": [end(seed["macs_ratio"] for seed in seeds) for end in (min, max)],
        "speedup": geometric_mean(speedups) if speedups else None,
        "speedup_range": [min(speedups), max(speedups)] if speedups else None,
        "before_recovery": fmean(before) if len(before) == len(seeds) else None,
        "recovery_epochs": row.recipe.finetune.epochs,
        "precision": row.recipe.export.precision,
        "flips": None if None in flips else sum(flips),
    }


def compare_rows(rows: Sequence[dict[str, Any]], correct: Mapping[str, Sequence[np.ndarray]]) -> list[dict[str, Any]]:
    """Every row compared with the row of nearest MACs on each of its `against` curves; see HOW_PAIRS_ARE_COMPARED.

    correct: row name -> for every seed, a mask of the correctly classified test images.
    """
    pairs = list[dict[str, Any]]()
    for row in rows:
        for curve in row["against"]:
            rival = min((r for r in rows if r["curve"] == curve), key=lambda other: abs(other["macs"] - row["macs"]))
            if {row["row"], rival["row"]} in ({pair["row"], pair["against"]} for pair in pairs):
                continue  # of a curve that is listed twice, or of rows that name each other
            masks = [correct[one["row"]] for one in (row, rival)]
            differences = [float(a.mean() - b.mean()) for a, b in zip(*masks, strict=True)]
            test = mcnemar(*map(np.concatenate, masks))
            pair = {
                "row": row["row"],
                "against": rival["row"],
                "macs_ratio": [row["macs_ratio"], rival["macs_ratio"]],
                "differences": differences,
                "mean": fmean(differences),
                "std": stdev(differences) if len(differences) > 1 else None,
                "only_row": test["only_a"],
                "only_against": test["only_b"],
                "p_value": test["p_value"],
            }
            pairs.append(pair)
    for pair, adjusted in zip(pairs, correct_p_values([pair["p_value"] for pair in pairs]), strict=True):
        same_sign = len({np.sign(difference) for difference in pair["differences"]}) == 1
        better = "better" if pair["mean"] > 0 else "worse"
        pair |= {"p_holm": adjusted, "verdict": better if same_sign and adjusted < SIGNIFICANT else "within noise"}
    return pairs


def correct_p_values(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979, Scandinavian Journal of Statistics 6)."""
    order, corrected = np.argsort(p_values, kind="stable"), np.zeros(len(p_values))
    scaled = np.arange(len(order), 0, -1) * np.asarray(p_values)[order]
    corrected[order] = np.maximum.accumulate(np.minimum(1.0, scaled))
    return list(map(float, corrected))


def row_table(study: dict[str, Any]) -> Table:
    """One line per row of the study, the dense model first.

    `before recovery` is the held-out accuracy of the pruned model before the final fine-tuning, but after the training
    of a step that trains. `accuracy` is on the test images. `flips` are test images that the exported file puts into
    another class than its model in fp32, with McNemar's p-value of both.
    """
    columns: Columns = {
        "row": "{title}",
        "before recovery": lambda row: "" if row["before_recovery"] is None else format_percent(row["before_recovery"]),
        "accuracy": _format_accuracy,
        "correct": "{correct} of {total}",
        "parameters": lambda row: format_count(row["params"]),
        "MACs": lambda row: format_count(row["macs"]),
        "MACs ratio": lambda row: _format_spread(row["macs_ratio"], row["macs_ratio_range"]),
        "speed-up": lambda row: _format_spread(row["speedup"], row["speedup_range"]),
        "flips (p)": lambda row: "" if row["flips"] is None else f"{row['flips']} ({row['p_value']:.2g})",
    }
    if all(row["flips"] is None for row in study["rows"]):
        columns = {title: value for title, value in columns.items() if title != "flips (p)"}
    dense, speed = study["dense"], "1" if study["speed"] else NOT_MEASURED
    correct, total = (sum(seed[key] for seed in dense["seeds"]) for key in COUNTS)
    sizes = (format_count(dense["cost"][key]) for key in ("params", "macs"))
    first = ("dense", "", _format_accuracy(dense), f"{correct} of {total}", *sizes, "1", speed, "")[: len(columns)]
    title = f"{study['study']} (seeds: {study['seeds']}, epochs of each run: {study['epochs']})"
    return Table(title, tuple(columns), (first, *Table.of("", columns, study["rows"]).rows))


def pair_table(study: dict[str, Any]) -> Table:
    """One line per comparison; the difference of their accuracies in percentage points."""
    titles = {row["row"]: row["title"] for row in study["rows"]}
    columns: Columns = {
        "row": lambda pair: titles[pair["row"]],
        "against": lambda pair: titles[pair["against"]],
        "MACs ratios": "{macs_ratio[0]:.2f} / {macs_ratio[1]:.2f}",
        "points": lambda pair: f"{100 * pair['mean']:+z.1f}{_format_deviation(pair['std'])}",
        "only one correct": "{only_row} / {only_against}",
        "p (Holm)": "{p_holm:.2g}",
        "verdict": "{verdict}",
    }
    return Table.of("Pairs", columns, study["pairs"])


def markdown(study: dict[str, Any]) -> str:
    """The study as one page."""
    parts = [f"# Study: {escape_markdown(study['study'])}", escape_markdown(study["summary"])]
    parts += [row_table(study).markdown(), "## Pairs", pair_table(study).markdown(), HOW_PAIRS_ARE_COMPARED]
    return "\n\n".join(parts) + "\n"


def _format_accuracy(row: dict[str, Any]) -> str:
    return format_percent(row["top1_mean"]).replace(" %", f"{_format_deviation(row['top1_std'])} %")


def _format_deviation(share: float | None) -> str:
    return "" if share is None else f" ± {100 * share:.1f}"


def _format_spread(value: float | None, ends: Sequence[float]) -> str:
    """`0.55`, or `0.55 (0.53 to 0.57)` if seeds differ in the digits shown."""
    if value is None:
        return NOT_MEASURED
    low, high = (f"{end:.2f}" for end in ends)
    return f"{value:.2f}" if low == high else f"{value:.2f} ({low} to {high})"
