"""From the fine-tuned model to measurements and the report: fold, verify, evaluate, bench."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from vitcompress import surgery
from vitcompress.bench import suite, timing
from vitcompress.bench.plots import structure
from vitcompress.bench.report import run as reports
from vitcompress.bench.report.records import AccuracyRecord, ArtifactRecord, BenchRecord, Report
from vitcompress.errors import ArtifactError
from vitcompress.exporters.runtimes import RunnerOptions, open_runner
from vitcompress.exporters.sidecar import read_sidecar, sidecar_path
from vitcompress.io.files import read_json, write_json
from vitcompress.methods import find_method
from vitcompress.methods.base import Choice
from vitcompress.methods.latency import other_machine
from vitcompress.models.checkpoint import load_model, load_model_files, read_plan, write_model
from vitcompress.models.cost import count_cost
from vitcompress.models.standard import save_standard
from vitcompress.pipeline.export import (
    class_names,
    describe_fp32_layers,
    exported_paths,
    quarantine_failed,
    runnable_files,
)
from vitcompress.pipeline.job import Job, JobStep, Work
from vitcompress.pipeline.latency import measured_on
from vitcompress.recipe.schema import Recipe
from vitcompress.training.loaders import EvalLoader
from vitcompress.training.metrics import calibration_images, evaluate_images, guessed, mcnemar
from vitcompress.verify import verify_folder

VERIFIED_IMAGES = 64


def fold_model(job: Job) -> None:
    """Fold linear layers, and save the deployed model as model.safetensors with plan.json."""
    job.progress.stage("Fold")
    files = job.files
    model, plan = load_model_files(files.unfolded_plan, files.unfolded), read_plan(files.unfolded_plan)
    # A standard model keeps its LayerScales: timm's model has them.
    folding = surgery.Folding(plan, ()) if plan.standard else surgery.fold_linears(model, plan)
    if plan.standard:
        save_standard(job.folder, model, plan)
        job.progress.note(f"{files.standard.name} loads strictly into timm's {plan.standard['arch']}")
    write_json(files.folding, [asdict(record) for record in folding.records])
    write_model(job.folder, model, folding.plan)
    for line in _describe_folds(folding.records):
        job.progress.note(line)


def _describe_folds(records: Sequence[surgery.FoldRecord]) -> Iterator[str]:
    """One line per FFN, and one for all LayerScales."""
    for record in records:
        if record.reason != surgery.INTO_THE_LINEAR:
            verb = "folded" if record.folded else "not folded"
            change = f"parameters {record.params_before} -> {record.params_after}"
            yield f"{record.module}: {verb}, {record.reason}; {change}"
    if scales := sum(record.reason == surgery.INTO_THE_LINEAR for record in records):
        yield f"{scales} LayerScales: folded, {surgery.INTO_THE_LINEAR}"


def verify_run(job: Job) -> None:
    """Check the run folder on test images, or on noise without data. Removes exported files that fail."""
    if not job.files.verification.is_file():
        job.progress.stage("Verify")
        images = None
        if job.data is not None:
            count = min(VERIFIED_IMAGES, len(job.data.test))
            images = calibration_images(job.data.test, job.input, count, job.recipe.run.seed)
        result = verify_folder(job.folder, images, job.dense_folder, job.progress)
        passed = Counter(check.name.split(".")[0] for check in result.checks if check.verdict == "passed")
        job.progress.note("passed: " + ", ".join(f"{name} ({count})" for name, count in passed.items()))
        for check in result.checks:
            if check.verdict != "passed":
                job.progress.note(f"{check.name}: {check.verdict.replace('_', ' ')}, {check.detail}")
    quarantine_failed(job)


def evaluate_models(job: Job) -> None:
    """accuracy.json: the dense, compressed and exported models on the same test images, with McNemar's test.

    mistakes.json: which images each model classifies wrongly, to compare runs image by image.
    """
    if job.data is None:
        return
    job.progress.stage("Evaluate on the test images")
    loader = EvalLoader(job.data.test, job.input, job.recipe.finetune.batch_size, job.runtime)
    accuracies, correct = dict[str, dict[str, object]](), dict[str, np.ndarray]()
    for name, predict in _models(job):
        accuracy, correct[name] = evaluate_images(predict, loader, job.runtime)
        accuracies[name] = accuracy.to_dict()
        job.progress.note(f"{name}: {accuracy.correct} of {accuracy.total} correct")
    test = asdict(mcnemar(correct["dense"], correct["compressed"]))
    write_json(job.files.mistakes, {name: np.flatnonzero(~mask).tolist() for name, mask in correct.items()})
    write_json(job.files.accuracy, {**accuracies, "mcnemar": test})


def estimate_evaluation(job: Job) -> Iterator[Work]:
    if not job.options.structure_only:
        yield Work("evaluate on the test images", images=None if job.data is None else len(job.data.test))


def _models(job: Job) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """One after the other, so that only one is in memory."""
    for name, folder in (("dense", job.dense_folder), ("compressed", job.folder)):
        yield name, load_model(folder, job.runtime.device)
    for path, device in runnable_files(job, "model").values():
        with closing(open_runner(path, device=device)) as runner:
            yield path.name, runner


def bench_models(job: Job) -> None:
    """bench.json: dense and compressed model, measured interleaved, in the exported formats and in torch."""
    job.progress.stage("Measure dense against compressed")
    table, results = job.recipe.bench, []
    for dense, compressed, device in _pairs(job):
        runner, seed = RunnerOptions(device=device), job.recipe.run.seed
        options = suite.BenchOptions(table.protocol, table.batch, table.warmup, table.runs, runner, seed=seed)
        result = suite.run((dense, compressed), options, progress=job.progress).to_dict()
        results.append(result)
        for line in reports.describe_speeds(result):
            job.progress.note(line)
        for reason in result["disturbed"]:
            job.progress.note(f"disturbed: {reason}; repeat with `vitcompress bench` when nothing else runs")
    write_json(job.files.benchmark, results)


def estimate_bench(job: Job) -> Iterator[Work]:
    table = job.recipe.bench
    protocol = timing.protocol(table.protocol, **table.changes)
    yield Work(f"measure ({protocol.name}, batch {protocol.batch})")


def _pairs(job: Job) -> Iterator[tuple[Path, Path, str | None]]:
    """Dense and compressed artifact of one format, and the device; None: that of the file."""
    dense, runtimes = runnable_files(job, "dense"), job.recipe.bench.runtimes
    for name, (path, device) in runnable_files(job, "model").items():
        if name in dense and (name != "onnx" or "onnxruntime" in runtimes):
            yield dense[name][0], path, device
    if "torch" in runtimes:
        yield job.dense_folder, job.folder, str(job.runtime.device)


def describe_choice(recipe: Recipe, *, searched: bool) -> str:
    """How the steps choose what to remove: a search, a publication, at random.

    searched: False describes the choice without training and scoring.
    """
    origins = [
        (method, choice.by if searched else choice.unscored or choice.by) for _, method, choice in _choices(recipe)
    ]
    if len({origin for _, origin in origins}) <= 1:
        return "".join(origin for _, origin in origins[:1])
    return ", ".join(f"{method}: {origin}" for method, origin in origins)


def describe_measured_models(recipe: Recipe) -> str | None:
    """The model that each search measured; None without a search."""
    choices, texts = list(_choices(recipe)), []
    for number, method, choice in choices:
        if choice.on:
            received = f"{recipe.model.name} after step {number}" if number else f"the dense {recipe.model.name}"
            texts.append(f"{method}: " * (len(choices) > 1) + choice.on.format(received))
    return "; ".join(texts) or None


def _choices(recipe: Recipe) -> Iterator[tuple[int, str, Choice]]:
    """Number, method and choice of each step that chooses what to remove."""
    for number, step in enumerate(recipe.steps):
        if (choice := find_method(step.method).describe(step.options).choice) is not None:
            yield number, step.method, choice


def write_report(job: Job) -> None:
    """report.json and report.md: the results of all stages in one place (keys: `bench.report.run`)."""
    files, plan, recipe = job.files, read_plan(job.files.plan), job.recipe
    accuracy, measured = _read(files.accuracy), _read(files.benchmark)
    models = {"dense": job.blank, "compressed": surgery.apply_to_copy(job.blank, plan)}
    searched = not job.options.structure_only
    report = {
        "recipe": recipe.name,
        "summary": recipe.summary,
        "model": {
            "arch": plan.arch,
            "arch_args": dict(plan.arch_args),
            "weights": recipe.model.weights,
            "input": job.input.to_dict(),
            "classes": list(class_names(job)),
            "uint8": recipe.export.uint8,
        },
        "plan": json.loads(plan.to_json()),
        "plan_sha256": plan.digest,
        "widths": structure.width_table(plan),
        "cost": {name: count_cost(model, job.input.size).to_dict() for name, model in models.items()},
        "accuracy": accuracy,
        "before_recovery": _read(files.before_recovery),
        "recovery": _read(files.recovery),
        "bench": measured,
        "artifacts": [_artifact(path, accuracy or {}, measured or []) for path in exported_paths(job, "model")],
        "files": {path.name: _sidecar(path)["bytes"] for path in exported_paths(job)},
        "verify": read_json(files.verification),
        "folding": _read(files.folding),
        "searched": describe_measured_models(recipe) if searched else None,
        "layers": describe_choice(recipe, searched=searched),
        "teacher": recipe.finetune.teacher if searched else None,
        "published": recipe.published and asdict(recipe.published),
        "tables": [vars(table) for step in job.steps for table in step.method.report(step.files.path).tables],
        "notes": list(_remarks(job)),
    }
    reports.write_report(job.folder, cast(Report, report))


def _read(path: Path) -> Any:
    """The output of an earlier stage; None if it did not run."""
    return read_json(path) if path.is_file() else None


def _sidecar(path: Path) -> dict[str, Any]:
    sidecar = read_sidecar(path)
    if sidecar is None:
        raise ArtifactError(f"{sidecar_path(path)} is missing", hint="run the recipe again")
    return sidecar


def _artifact(path: Path, accuracy: Mapping[str, AccuracyRecord], measured: Sequence[BenchRecord]) -> ArtifactRecord:
    """An exported file with its accuracy and its speed."""
    sidecar = _sidecar(path)
    stored = {key: sidecar[key] for key in ("sha256", "bytes", "precision", "verified")}
    speed = reports.find_speed(measured, sidecar["sha256"])
    return cast(ArtifactRecord, {"file": path.name, **stored, "accuracy": accuracy.get(path.name), "speed": speed})


def _remarks(job: Job) -> Iterator[str]:
    """What a reader must know to understand the figures of the report."""
    for step in job.steps:
        yield from step.method.report(step.files.path).remarks
        yield from _measured_latency(job, step)
    if job.options.structure_only:
        yield (
            "Nothing was trained or scored: cost and speed are those of this structure, accuracy is not known. To "
            "train it, run the recipe without --structure-only, into another folder (--out) or this one (--fresh)."
        )
    if job.recipe.model.weights == "random":
        yield "The weights are random."
    if job.recipe.published is not None and not job.options.structure_only and job.recipe.model.weights == "hub":
        yield (
            "The dense weights of distilled DeiT were themselves trained with a RegNetY teacher, so no result that "
            "starts from them was reached without an extra model."
        )
    dense = (_read(job.files.accuracy) or {}).get("dense")
    if dense and job.data is not None and guessed(dense["correct"], job.data.test.labels):
        yield "The dense model is no better than guessing, so these accuracies do not show what pruning costs."
    yield from describe_fp32_layers(job)
    yield from job.onnx_notes()
    if job.runtime.device.type == "cpu":
        yield "Measured on a CPU: ratios do not carry over to other hardware."


def _measured_latency(job: Job, step: JobStep) -> Iterator[str]:
    """The final latency on the runtime for which `step` has a latency target, if the benchmark measured it."""
    target = step.info.latency
    if target is None:
        return
    other = other_machine(step.files.path, target.runtime, measured_on(job))
    planned = f" The widths were chosen by times from another machine or setting ({other})." if other else ""
    for entry in _read(job.files.benchmark) or ():
        row = entry["rows"][1]
        if row["runtime"] == target.runtime:
            yield (
                f"Latency target: {target.ms:g} ms on {row['runtime']}; measured at the end: "
                f"{row['latency_ms']['p50']:.4g} ms (median, {row['protocol']}, batch {row['batch']}).{planned}"
            )
