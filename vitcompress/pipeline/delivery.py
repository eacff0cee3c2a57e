"""From the recovered model to the report: fold, verify, judge, measure, report.

Each stage leaves its result in the run folder and does nothing when that result stands.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitcompress import surgery
from vitcompress.bench import recorded_speeds, structure, suite
from vitcompress.bench import report as reports
from vitcompress.errors import ArtifactError
from vitcompress.exporters.runtimes import RunnerOptions, open_runner
from vitcompress.exporters.sidecar import read_sidecar, sidecar_path
from vitcompress.io.checks import LEDGER
from vitcompress.io.files import read_json, write_json
from vitcompress.methods import METHODS
from vitcompress.methods.latency import elsewhere
from vitcompress.models.checkpoint import PLAN, load_model, load_model_files, read_plan, write_model
from vitcompress.models.cost import count_cost
from vitcompress.models.standard import WEIGHTS as STANDARD
from vitcompress.models.standard import save_standard
from vitcompress.pipeline.choices import chosen_by, chosen_on
from vitcompress.pipeline.exports import (
    all_exported,
    class_names,
    drop_failed,
    exported,
    island_remarks,
    plan_of,
    runnable,
)
from vitcompress.pipeline.job import Job
from vitcompress.pipeline.latency import measured_on
from vitcompress.plan import Plan
from vitcompress.training.loaders import EvalLoader
from vitcompress.training.metrics import calibration_images, guessed, judged, mcnemar
from vitcompress.verify import quarantine
from vitcompress.verify.fold import UNFOLDED, UNFOLDED_PLAN

REPORT, FOLDING, MISTAKES = reports.JSON, "folding.json", "mistakes.json"
VERIFIED_IMAGES = 64


def fold(job: Job) -> None:
    """Fold what can be folded, and save the deployed model as model.safetensors with plan.json."""
    if (job.folder / PLAN).is_file():
        return
    job.progress.stage("Fold")
    model = load_model_files(job.folder / UNFOLDED_PLAN, job.folder / UNFOLDED)
    plan = read_plan(job.folder / UNFOLDED_PLAN)
    # As a standard model it has the LayerScales of that model, and folding is what that model would gain as well.
    folding = surgery.Folding(plan, ()) if plan.standard else surgery.fold_linears(model, plan)
    if plan.standard:
        save_standard(job.folder, model, plan)
        job.progress.note(f"{STANDARD} loads strictly into timm's {plan.standard['arch']}")
    write_json(job.state / FOLDING, [asdict(record) for record in folding.records])
    write_model(job.folder, model, folding.plan)
    for line in _folded(folding.records):
        job.progress.note(line)


def _folded(records: Sequence[surgery.FoldRecord]) -> Iterator[str]:
    """One line per FFN, and one for all LayerScales."""
    scales = [record for record in records if record.reason == surgery.INTO_THE_LINEAR]
    for record in records:
        if record not in scales:
            verb = "folded" if record.folded else "left as it is"
            change = f"parameters {record.params_before} -> {record.params_after}"
            yield f"{record.module}: {verb}, {record.reason}; {change}"
    if scales:
        yield f"{len(scales)} LayerScales: folded, {surgery.INTO_THE_LINEAR}"


# ----------------------------------------------------------------------------------------------------- verify and judge


def verify(job: Job) -> None:
    """verify.json: everything that the run folder claims, checked on real images where there are any."""
    if not (job.folder / LEDGER).is_file():
        _verify(job)
    drop_failed(job)


def _verify(job: Job) -> None:
    job.progress.stage("Verify")
    found = quarantine.verify(job.folder, images=_images(job), dense=job.dense_folder, progress=job.progress)
    passed = Counter(check.name.split(".")[0] for check in found.checks if check.verdict == "passed")
    job.progress.note("passed: " + ", ".join(f"{name} ({count})" for name, count in passed.items()))
    for check in found.checks:
        if check.verdict != "passed":
            job.progress.note(f"{check.name}: {check.verdict.replace('_', ' ')}, {check.detail}")


def _images(job: Job) -> Tensor | None:
    """A few test images; all choices have been made by now."""
    if job.data is None:
        return None
    count = min(VERIFIED_IMAGES, len(job.data.test))
    return calibration_images(job.data.test, job.input, count, job.recipe.run.seed)


def judge(job: Job) -> None:
    """accuracy.json: dense, compressed and exported on the same test images, and whether the difference is real;
    mistakes.json: which images each gets wrong, so that runs can be compared image by image.
    """
    path = job.state / "accuracy.json"
    if job.data is None or path.is_file():
        return
    job.progress.stage("Judge on the test images")
    loader = EvalLoader(job.data.test, job.input, job.recipe.finetune.batch_size, job.runtime)
    found: dict[str, Any] = {}
    right: dict[str, np.ndarray] = {}
    for name, predict in _judged(job):
        accuracy, right[name] = judged(predict, loader, job.runtime)
        found[name] = accuracy.to_dict()
        job.progress.note(f"{name}: {found[name]['correct']} of {found[name]['total']} right")
    test = mcnemar(right["dense"], right["compressed"])
    found["mcnemar"] = asdict(test)
    write_json(job.state / MISTAKES, {name: np.flatnonzero(~mask).tolist() for name, mask in right.items()})
    write_json(path, found)


def _judged(job: Job) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """One after the other, so that one at a time is in memory."""
    for name, folder in (("dense", job.dense_folder), ("compressed", job.folder)):
        yield name, load_model(folder, job.runtime.device)
    for path, device in runnable(job, "model").values():
        with closing(open_runner(path, device=device)) as runner:
            yield path.name, runner


# -------------------------------------------------------------------------------------------------------------- measure


def bench(job: Job) -> None:
    """bench.json: dense against compressed, interleaved, in the exported formats and in torch."""
    path = job.folder / recorded_speeds.BENCH
    if path.is_file():
        return
    job.progress.stage("Measure dense against compressed")
    table, seed, found = job.recipe.bench, job.recipe.run.seed, []
    for before, after, where in _pairs(job):
        how = RunnerOptions(device=where)
        options = suite.BenchOptions(table.protocol, table.batch, table.warmup, table.runs, how, seed=seed)
        measured = suite.run((before, after), options, progress=job.progress).as_data()
        found.append(measured)
        for speed in reports.speeds(measured):
            job.progress.note(speed)
        for reason in measured["disturbed"]:
            job.progress.note(f"disturbed: {reason}; measure again with `vitcompress bench` when nothing else runs")
    write_json(path, found)


def _pairs(job: Job) -> Iterator[tuple[Path, Path, str | None]]:
    """Pairs of artifacts to measure against each other, dense first, and the device; None is that of the file."""
    dense, runtimes = runnable(job, "dense"), job.recipe.bench.runtimes
    for name, (after, device) in runnable(job, "model").items():
        if name in dense and (name != "onnx" or "onnxruntime" in runtimes):
            yield dense[name][0], after, device
    if "torch" in runtimes:
        yield job.dense_folder, job.folder, str(job.runtime.device)


# --------------------------------------------------------------------------------------------------------------- report


def report(job: Job) -> None:
    """report.json and report.md: all of the above in one place (keys: `bench.report`)."""
    plan = plan_of(job)
    accuracy, before = _read(job.state / "accuracy.json"), _read(job.state / "before_recovery.json")
    measured = _read(job.folder / recorded_speeds.BENCH)
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
    speed = recorded_speeds.speed(measured, known["sha256"])
    return {"file": path.name, **said, "accuracy": accuracy.get(path.name), "speed": speed}


def _tables(job: Job, number: int) -> list[dict[str, Any]]:
    return METHODS[job.recipe.steps[number].method].tables(job.step_folder(number))


def _remarks(job: Job) -> Iterator[str]:
    """What a reader must know to understand the report's figures."""
    for number, step in enumerate(job.recipe.steps):
        yield from METHODS[step.method].remarks(job.step_folder(number))
        if METHODS[step.method].timed(step.options) is not None:
            yield from _latency_at_the_end(job, step.options, job.step_folder(number))
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


def _latency_at_the_end(job: Job, options: Any, folder: Path) -> Iterator[str]:
    """The final latency for each step that aimed at one, where its runtime was measured again."""
    other = elsewhere(folder, options.latency_on, measured_on(job))
    planned = f" The widths were chosen by times taken elsewhere ({other})." if other else ""
    for entry in _read(job.folder / recorded_speeds.BENCH) or ():
        row = entry["rows"][1]
        if row["runtime"] == options.latency_on:
            yield (
                f"Latency aimed at: {options.amount:g} ms on {row['runtime']}; measured at the end: "
                f"{row['latency_ms']['p50']:.4g} ms (median, {row['protocol']}, batch {row['batch']}).{planned}"
            )
