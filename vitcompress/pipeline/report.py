"""Write the report of a run: costs, accuracy, speed, files and how each step chose."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitcompress import surgery
from vitcompress.bench.plots import structure
from vitcompress.bench.report import recorded
from vitcompress.bench.report import run as reports
from vitcompress.errors import ArtifactError
from vitcompress.exporters.sidecar import read_sidecar, sidecar_path
from vitcompress.io.checks import LEDGER
from vitcompress.io.files import read_json
from vitcompress.methods import find_method
from vitcompress.methods.base import Choice, LatencyTarget
from vitcompress.methods.latency import elsewhere
from vitcompress.models.cost import count_cost
from vitcompress.pipeline.export import all_exported, class_names, exported, island_remarks, plan_of
from vitcompress.pipeline.finalize import FOLDING
from vitcompress.pipeline.job import Job
from vitcompress.pipeline.latency import measured_on
from vitcompress.plan import Plan
from vitcompress.recipe.schema import Recipe
from vitcompress.training.metrics import guessed


def chosen_by(recipe: Recipe, *, searched: bool) -> str:
    """Where it comes from, in a few words: a publication, a search, or only its amount where nothing is chosen."""
    found = [(method, choice.by if searched else choice.unscored or choice.by) for _, method, choice in _made(recipe)]
    if len({origin for _, origin in found}) <= 1:
        return "".join(origin for _, origin in found[:1])
    return ", ".join(f"{method}: {origin}" for method, origin in found)


def chosen_on(recipe: Recipe) -> str | None:
    """What each search looked at, None where nothing was searched for."""
    made = list(_made(recipe))
    told = [(method, choice.on.format(_given(recipe, number))) for number, method, choice in made if choice.on]
    return "; ".join(f"{method}: {on}" if len(made) > 1 else on for method, on in told) or None


def _made(recipe: Recipe) -> Iterator[tuple[int, str, Choice]]:
    """Number, method and choice of each step that makes one."""
    for number, step in enumerate(recipe.steps):
        if (choice := find_method(step.method).describe(step.options).choice) is not None:
            yield number, step.method, choice


def _given(recipe: Recipe, number: int) -> str:
    """The model that step `number` is given."""
    return f"{recipe.model.name} as step {number} left it" if number else f"the dense {recipe.model.name}"


# --------------------------------------------------------------------------------------------------------------- report


def write_report(job: Job) -> None:
    """report.json and report.md: all of the above in one place (keys: `bench.report`)."""
    plan = plan_of(job)
    accuracy, before = _read(job.state / "accuracy.json"), _read(job.state / "before_recovery.json")
    measured = _read(job.folder / recorded.BENCH)
    reports.write(
        job.folder,
        {
            "recipe": job.recipe.name,
            "summary": job.recipe.summary,
            "model": _model(job, plan),
            "plan": json.loads(plan.to_json()),
            "plan_sha256": plan.digest,
            "widths": structure.widths(plan),
            "cost": _cost(job, plan),
            "accuracy": accuracy,
            "before_recovery": before,
            "recovery": _read(job.state / "recovery.json"),
            "bench": measured,
            "artifacts": [_artifact(path, accuracy or {}, measured or []) for path in exported(job, "model")],
            "files": {path.name: _size(path) for path in all_exported(job)},
            "verify": read_json(job.folder / LEDGER),
            "folding": _read(job.state / FOLDING),
            "searched": None if job.structure_only else chosen_on(job.recipe),
            "layers": chosen_by(job.recipe, searched=not job.structure_only),
            "teacher": None if job.structure_only else job.recipe.finetune.teacher,
            "published": None if job.recipe.published is None else asdict(job.recipe.published),
            "tables": [table for number in range(len(job.recipe.steps)) for table in _tables(job, number)],
            "notes": list(_remarks(job)),
        },
    )


def _model(job: Job, plan: Plan) -> dict[str, Any]:
    """What the model is, and what it takes."""
    return {
        "arch": plan.arch,
        "arch_args": dict(plan.arch_args),
        "weights": job.recipe.model.weights,
        "input": job.input.to_dict(),
        "classes": list(class_names(job)),
        "uint8": job.recipe.export.uint8,
    }


def _cost(job: Job, plan: Plan) -> dict[str, Any]:
    """Parameters and MACs before and after."""
    both = {"dense": job.blank, "compressed": surgery.apply_to_copy(job.blank, plan)}
    return {name: count_cost(model, job.input.size).to_dict() for name, model in both.items()}


def _read(path: Path) -> Any:
    """What an earlier stage left, None where it did not run."""
    return read_json(path) if path.is_file() else None


def _size(path: Path) -> int:
    """Bytes of an exported file and the data files beside it, as its sidecar counts them."""
    return int(_known(path)["bytes"])


def _known(path: Path) -> dict[str, Any]:
    found = read_sidecar(path)
    if found is None:
        raise ArtifactError(f"{sidecar_path(path)} is missing", hint="run the recipe again")
    return found


def _artifact(path: Path, accuracy: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An exported file with what was found of it: how right and how fast it is."""
    known = _known(path)
    said = {key: known[key] for key in ("sha256", "bytes", "precision", "verified")}
    speed = recorded.speed(measured, known["sha256"])
    return {"file": path.name, **said, "accuracy": accuracy.get(path.name), "speed": speed}


def _tables(job: Job, number: int) -> list[dict[str, Any]]:
    return list(find_method(job.recipe.steps[number].method).report(job.step_folder(number)).tables)


def _remarks(job: Job) -> Iterator[str]:
    """What a reader must know to understand the report's figures."""
    for number, step in enumerate(job.recipe.steps):
        method = find_method(step.method)
        yield from method.report(job.step_folder(number)).remarks
        if (target := method.describe(step.options).latency) is not None:
            yield from _latency_at_the_end(job, target, job.step_folder(number))
    if job.structure_only:
        yield (
            "Nothing was trained or scored: cost and speed are those of this structure, accuracy is not known. To "
            "train it, run the recipe without --structure-only, into another folder (--out) or this one (--fresh)."
        )
    if job.recipe.model.weights == "random":
        yield "The weights are random."
    if job.recipe.published is not None and not job.structure_only and job.recipe.model.weights == "hub":
        yield (
            "The dense weights of distilled DeiT were themselves trained with a RegNetY teacher, so no result that "
            "starts from them was reached without an extra model."
        )
    dense = (_read(job.state / "accuracy.json") or {}).get("dense")
    if dense and job.data is not None and guessed(dense["correct"], job.data.test.labels):
        yield "The dense model is no better than guessing: these accuracies say nothing about pruning."
    yield from island_remarks(job)
    yield from job.onnx_elsewhere()
    if job.runtime.device.type == "cpu":
        yield "Measured on a CPU: ratios to other hardware do not carry over."


def _latency_at_the_end(job: Job, target: LatencyTarget, folder: Path) -> Iterator[str]:
    """The final latency for each step that aimed at one, where its runtime was measured again."""
    other = elsewhere(folder, target.runtime, measured_on(job))
    planned = f" The widths were chosen by times taken elsewhere ({other})." if other else ""
    for entry in _read(job.folder / recorded.BENCH) or ():
        row = entry["rows"][1]
        if row["runtime"] == target.runtime:
            yield (
                f"Latency aimed at: {target.ms:g} ms on {row['runtime']}; measured at the end: "
                f"{row['latency_ms']['p50']:.4g} ms (median, {row['protocol']}, batch {row['batch']}).{planned}"
            )
