"""report.json, report.md and report.html: the results of all stages, and of later commands, in one place."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from vitcompress import surgery
from vitcompress.bench.accuracy import EvaluateOptions, Evaluation, select_data
from vitcompress.bench.plots import structure
from vitcompress.bench.report import page, records
from vitcompress.bench.report import run as reports
from vitcompress.bench.report.measurements import find_speed, is_dense, match_rows, read_benchmarks, replaces
from vitcompress.bench.report.records import ArtifactRecord, BenchRecord, FileAccuracy, Report
from vitcompress.errors import InputError, VitcompressError, first_line
from vitcompress.exporters.runtimes import exported_files
from vitcompress.exporters.sidecar import DENSE, find_mismatches, usable_sidecar
from vitcompress.io.files import file_sha256, lock_file, read_record, signed_files, user_path, write_json
from vitcompress.io.manifest import check_unchanged, find_changes, read_manifest, record_changes
from vitcompress.io.progress import Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.methods import latency
from vitcompress.methods.base import Choice, read_memo
from vitcompress.methods.table import find_method
from vitcompress.models.checkpoint import read_plan
from vitcompress.models.cost import count_cost
from vitcompress.pipeline.folder import dense_folder_of_run
from vitcompress.pipeline.job import Job
from vitcompress.pipeline.latency import measured_on
from vitcompress.recipe.load import load_recipe_of_run
from vitcompress.recipe.schema import Recipe
from vitcompress.training.metrics import guessed
from vitcompress.verify.outputs import AGREEMENT


def describe_choice(recipe: Recipe, *, searched: bool) -> str:
    """How the steps choose what to remove: a search, a publication, at random.

    searched: False describes the choice without training and scoring.
    """
    origins = [(name, choice.by if searched else choice.unscored or choice.by) for _, name, choice in _choices(recipe)]
    if len(distinct := {origin for _, origin in origins}) > 1:
        return ", ".join(f"{method}: {origin}" for method, origin in origins)
    return "".join(distinct)


def describe_measured_models(recipe: Recipe) -> str | None:
    """The model that each search measured; None without a search."""
    choices, texts = list(_choices(recipe)), []
    for number, method, choice in choices:
        if choice.on:
            received = f"{recipe.model.name} after step {number}" if number else f"the dense {recipe.model.name}"
            texts.append((f"{method}: " if len(choices) > 1 else "") + choice.on.format(received))
    return "; ".join(texts) or None


def _choices(recipe: Recipe) -> Iterator[tuple[int, str, Choice]]:
    """Number, method and choice of each step that chooses what to remove."""
    for number, step in enumerate(recipe.steps):
        if (choice := find_method(step.method).describe(step.options).choice) is not None:
            yield number, step.method, choice


def write_report(job: Job) -> None:
    """The report of a finished run (keys: `bench.report.records`)."""
    files, plan, recipe = job.files, read_plan(job.files.plan), job.recipe
    models = {"dense": job.blank, "compressed": surgery.apply_to_copy(job.blank, plan)}
    searched, source = not job.options.structure_only, read_manifest(job.dense_folder).get("source", {})
    report = {
        "recipe": recipe.name,
        "summary": recipe.summary,
        "model": {
            "arch": plan.arch,
            "arch_args": dict(plan.arch_args),
            "weights": recipe.model.weights,
            **{"weights_sha256" if key == "sha256" else key: value for key, value in source.items()},
            "input": vars(job.input),
            "classes": list(job.class_names),
            "uint8": recipe.export.uint8,
        },
        "plan": json.loads(plan.to_json()),
        "plan_sha256": plan.digest,
        "widths": vars(widths) if (widths := structure.width_table(plan)) else None,
        "cost": {name: vars(count_cost(model, job.input.size)) for name, model in models.items()},
        "extra_epochs": job.extra_epochs,
        **{stage: read_record(getattr(files, stage)) for stage in ("before_recovery", "recovery", "folding")},
        "searched": describe_measured_models(recipe) if searched else None,
        "layers": describe_choice(recipe, searched=searched),
        "teacher": recipe.finetune.teacher if job.extra_epochs and recipe.finetune.distillation != "none" else None,
        "published": recipe.published and asdict(recipe.published),
        "tables": [vars(table) for step in job.steps for table in step.method.report(step.files.path).tables],
        "notes": list(_remarks(job)),
        "manifest": True,
    }
    page.write_report(job.folder, current_report(job.folder, cast(Report, report)))


def refresh_report(folder: Path, progress: Progress) -> Report:
    """The report of a run folder as its files are now; its files are written again if it has changed.

    A report that cannot be updated stays as it is, with a note. Raises ArtifactError if there is none.
    """
    report = before = reports.read_report(folder)
    files = RunFolder(folder)
    with _note_errors(folder, progress), record_changes(folder):
        read = files.accuracy, files.mistakes, files.benchmark, files.verification
        check_unchanged(folder, *read, *folder.glob("*.json"))
        report = current_report(folder, before)
        same = json.loads(json.dumps(report)) == before and files.html.is_file() and files.markdown.is_file()
        if not (same or signed_files.get()):
            page.write_report(folder, report)
    return report


def refresh_reports(
    artifacts: Iterable[str | Path], progress: Progress, change: Callable[[RunFolder], object] = lambda _: None
) -> None:
    """`refresh_report` for the folders of finished runs with these artifacts, each after a `change` of its files."""
    for files in dict.fromkeys(map(RunFolder.of, artifacts)):
        if files.report.is_file() and not signed_files.get():  # a change would end the signature
            with _note_errors(files.path, progress):
                with record_changes(files.path), lock_file(files.path):
                    change(files)
                refresh_report(files.path, progress)


@contextmanager
def _note_errors(folder: Path, progress: Progress) -> Iterator[None]:
    """Turn errors of this block, which updates a report, into notes: the result of the command stays valid."""
    try:
        yield
    except (VitcompressError, OSError) as error:  # OSError: a file is missing
        progress.note(f"the report of {folder} was not updated: {first_line(error)}")


def read_reports(folders: Sequence[str], bench: Path | None, progress: Progress) -> dict[str, Report]:
    """The reports of run folders as they are now. bench: output of `vitcompress bench --json`, whose measurements of
    their files come before those in the folders. Raises InputError if it has none.
    """
    extra = read_benchmarks(bench) if bench else []
    runs: dict[str, Report] = {folder: reports.read_report(Path(folder)) for folder in folders}
    own = {folder: match_rows(extra, list_names(Path(folder), report)) for folder, report in runs.items() if extra}
    if bench and not any(own.values()):
        message = f"{bench} has no measurement of the present files of {', '.join(folders)}"
        raise InputError(message, hint="`vitcompress bench DIR/dense.onnx DIR/model.onnx --json` measures them")
    for folder in folders:  # after all were read: if one cannot be used, nothing changes
        report = refresh_report(Path(folder), progress)
        for problem in find_changes(Path(folder), RunFolder(Path(folder)).weights).values():
            progress.note(f"the figures of {folder} may be those of other weights: {problem}")
        new, recorded = own.get(folder, []), report.get("bench") or ()
        runs[folder] = {**report, "bench": [*new, *(entry for entry in recorded if entry not in new)] or None}
    return runs


def current_report(folder: Path, report: Report) -> Report:
    """`report` with what follows from the files that are in the folder now.

    An accuracy or a speed is shown only for the file that it was measured on, by its hash.
    """
    files, names = RunFolder(folder), list_names(folder, report)
    hashes = {name: sha256 for sha256, equal in names.items() for name in equal}
    dense = os.path.relpath(RunFolder(dense_folder_of_run(folder.resolve())).weights, folder.resolve())
    recorded = cast(dict[str, Any], read_record(files.accuracy, reports.ACCURACIES) or report.get("accuracy") or {})
    accuracy = {k: v for k, v in recorded.items() if "." not in k or v.get("sha256") == hashes.get(k, "")}
    measured = match_rows(read_record(files.benchmark, list[BenchRecord]) or report.get("bench") or (), names)
    paths = [path for model in (DENSE, "model") for path in exported_files(folder, model)]
    artifacts = [entry for path in paths if (entry := _artifact(path, hashes[path.name], accuracy, measured))]
    return {
        **report,
        "dense_sha256": hashes.get(dense),
        "accuracy": cast(Any, accuracy or None),
        "bench": measured or None,
        "artifacts": artifacts,
        "files": {entry["file"]: entry["bytes"] for entry in artifacts},
        "verify": read_record(files.verification, records.VerificationRecord) or report.get("verify"),
    }


def list_names(folder: Path, report: Report | None = None) -> dict[str, list[str]]:
    """SHA-256 -> names, relative to the run folder, of the exported files and the weights of both models.

    report: with the hash of the dense model's weights, which may be gone.
    """
    folder, names = folder.resolve(), dict[str, list[str]]()
    dense = RunFolder(dense_folder_of_run(folder)).weights
    exports = [*exported_files(folder, "model"), *exported_files(folder, DENSE), *exported_files(dense.parent, "model")]
    hashes = {path: file_sha256(path) for path in (*exports, RunFolder(folder).weights, dense) if path.is_file()}
    if report and (recorded := report.get("dense_sha256")):
        hashes.setdefault(dense, recorded)
    for path, sha256 in hashes.items():
        names.setdefault(sha256, []).append(os.path.relpath(path, folder))
    return names


def _artifact(
    path: Path, sha256: str, accuracy: Mapping[str, FileAccuracy], measured: Sequence[BenchRecord]
) -> ArtifactRecord | None:
    """An exported file with its agreement, accuracy and speed; None without a valid sidecar."""
    if not (sidecar := usable_sidecar(path)):
        return None
    stored = {key: sidecar[key] for key in ("format", "bytes", "precision", "verified")}
    agreement = describe_agreement(path.name, sidecar)
    if find_mismatches(path):
        stored["verified"], agreement = False, "the file has changed"
    record = {
        "file": path.name,
        "sha256": sha256,
        **stored,
        "input": "uint8" if "uint8" in sidecar["metadata"].get("input", "") else "float32",
        "batch": sidecar["build"].get("batch"),
        "variable_batch": sidecar["build"].get("variable_batch", False),
        "agreement": agreement,
        "fp32_layers": _describe_fp32_layers(path.name, search) if (search := sidecar.get("islands_search")) else None,
        "accuracy": accuracy.get(path.name),
        "speed": find_speed(measured, sha256, {"transfers": False}),
    }
    return cast(ArtifactRecord, record)


def _describe_fp32_layers(name: str, search: Mapping[str, Any]) -> str:
    """A sentence about the layers that a search keeps in fp32."""
    proxy = ", which is a proxy for the GPU" if search["proxy"] else ""
    layers, count = ", ".join(search["chosen"]) or "nothing", len(search["tries"])
    return f"{name} keeps {layers} in fp32. Sets tried: {count}, evaluated by {search['judge']}{proxy}."


def describe_agreement(name: str, sidecar: Mapping[str, Any]) -> str:
    """`passed, 540 of 540 images (5 in another class)`: the counts in the detail of its check."""
    verification = sidecar.get("verification") or {"verdict": "not_run", "checks": ()}
    flips = (check["detail"] for check in verification["checks"] if check["name"] == f"{AGREEMENT}{name}.flips")
    counts = [re.sub(r"agrees with the model: |, 95 % [^)]*|;.*", "", text) for text in flips]
    return ", ".join([verification["verdict"].replace("_", " "), *counts])


def record_bench(artifacts: Iterable[str | Path], measured: BenchRecord, progress: Progress) -> None:
    """Put a measurement first in bench.json of each run folder with its files, and drop those that it repeats."""

    def add(files: RunFolder) -> None:
        names = list_names(files.path, reports.read_report(files.path))
        if own := match_rows([measured], names):
            old = match_rows(read_record(files.benchmark, list[BenchRecord]) or (), names)
            write_json(files.benchmark, [*own, *(entry for entry in old if not replaces(own[0], entry))])

    refresh_reports(artifacts, progress, add)


def record_accuracy(artifacts: Sequence[str], result: Evaluation, options: EvaluateOptions, progress: Progress) -> None:
    """Add the accuracies of exported files, on the test images of their own run, to its report."""
    data = select_data(artifacts, options)
    used = data.source, data.path and str(user_path(data.path).resolve()), data.test_split

    def add(files: RunFolder) -> None:
        names, own = list_names(files.path, reports.read_report(files.path)), load_recipe_of_run(files.recipe).data
        accuracy = read_record(files.accuracy, reports.ACCURACIES) or {}
        known = {entry.get("images_digest") for entry in accuracy.values() if "total" in entry}
        digest = result["rows"][0]["images_digest"]
        if not (known == {digest} if known else used == (own.source, own.path, own.test_split)):
            progress.note(f"not in the report of {files.path}: other images than those of the run")
            return
        mistakes = read_record(files.mistakes, dict[str, list[int]]) or {}
        for row in result["rows"]:
            new, wrong = {k: v for k, v in row.items() if k in FileAccuracy.__annotations__}, row["mistakes"]
            for name in names.get(row["sha256"] or "", ()):
                if "/" not in name and name != files.weights.name:
                    repeated = (accuracy.get(name, {}).get("sha256"), mistakes.get(name)) == (row["sha256"], wrong)
                    accuracy[name] = {**accuracy[name], **new} if repeated else new  # with the number of flips
                    mistakes[name] = wrong
        write_json(files.mistakes, mistakes)
        write_json(files.accuracy, accuracy)

    refresh_reports(artifacts, progress, add)


def _remarks(job: Job) -> Iterator[str]:
    """What a reader must know to understand the figures of the report."""
    for step in job.steps:
        yield from read_memo(step.files.path, latency.RECORD) or ()
        yield from step.method.report(step.files.path).remarks
        if goal := latency.goal_of(step.options):
            here = measured_on(job.runtime.device, job.recipe.run.threads)
            other = latency.other_machine(step.files.path, goal.runtime, here)
            planned = f" The widths were chosen by times from another machine or setting ({other})." if other else ""
            batch = goal.batch or job.recipe.bench.batch or 1
            end = f"not measured at the end with batch {batch}"
            for row in (row for entry in read_record(job.files.benchmark) or () for row in entry["rows"]):
                if (row["runtime"], row["batch"]) == (goal.runtime, batch) and not is_dense(row["artifact"]):
                    ms, about = row["latency_ms"]["p50"], f"{row['artifact']}, {row['protocol']}, batch {batch}"
                    end = f"measured at the end: {ms:.4g} ms (median, {about})"
            yield f"Latency target: {goal}; {end}.{planned}"
    if job.options.structure_only:
        yield (
            "Nothing was trained or scored: cost and speed are those of this structure, accuracy is not known. To "
            "train it, run the recipe without --structure-only, into another folder (--out) or this one (--fresh)."
        )
    if job.recipe.model.weights == "random":
        yield "The weights are random."
    if "distilled" in job.base.arch and not job.options.structure_only and job.recipe.model.weights == "hub":
        yield "The dense weights were distilled from a RegNetY, so results that start from them used an extra model."
    dense = (read_record(job.files.accuracy) or {}).get("dense")
    if dense and job.data is not None and guessed(dense["correct"], job.data.test.labels):
        yield "The dense model is no better than guessing, so these accuracies do not show what pruning costs."
    yield from job.notes()
    if job.runtime.device.type == "cpu":
        yield "Measured on a CPU: ratios do not carry over to other hardware."
