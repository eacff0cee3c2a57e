"""report.json and report.md: the results of all stages in one place."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from vitcompress import surgery
from vitcompress.bench.plots import structure
from vitcompress.bench.report import run as reports
from vitcompress.bench.report.records import AccuracyRecord, ArtifactRecord, BenchRecord, Report
from vitcompress.errors import ArtifactError
from vitcompress.exporters.sidecar import read_sidecar, sidecar_path
from vitcompress.io.files import read_json
from vitcompress.methods import find_method
from vitcompress.methods.base import Choice
from vitcompress.methods.latency import other_machine
from vitcompress.models.checkpoint import read_plan
from vitcompress.models.cost import count_cost
from vitcompress.pipeline.export import class_names, describe_fp32_layers, exported_paths
from vitcompress.pipeline.job import Job, JobStep
from vitcompress.pipeline.latency import measured_on
from vitcompress.recipe.schema import Recipe
from vitcompress.training.metrics import guessed


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
