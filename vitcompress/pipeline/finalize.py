"""From the recovered model to measurements: fold, verify, evaluate, bench."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitcompress import surgery
from vitcompress.bench import suite
from vitcompress.bench.report import recorded
from vitcompress.bench.report import run as reports
from vitcompress.exporters.runtimes import RunnerOptions, open_runner
from vitcompress.io.checks import LEDGER
from vitcompress.io.files import write_json
from vitcompress.models.checkpoint import PLAN, load_model, load_model_files, read_plan, write_model
from vitcompress.models.standard import WEIGHTS as STANDARD
from vitcompress.models.standard import save_standard
from vitcompress.pipeline.export import (
    drop_failed,
    runnable,
)
from vitcompress.pipeline.job import Job
from vitcompress.training.loaders import EvalLoader
from vitcompress.training.metrics import calibration_images, judged, mcnemar
from vitcompress.verify import quarantine
from vitcompress.verify.fold import UNFOLDED, UNFOLDED_PLAN

REPORT, FOLDING, MISTAKES = reports.JSON, "folding.json", "mistakes.json"
VERIFIED_IMAGES = 64


def fold_model(job: Job) -> None:
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


def bench_models(job: Job) -> None:
    """bench.json: dense against compressed, interleaved, in the exported formats and in torch."""
    path = job.folder / recorded.BENCH
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
