"""From the fine-tuned model to measurements: fold, verify, evaluate, bench."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import numpy as np
from torch import nn

from vitcompress import surgery
from vitcompress.bench import suite
from vitcompress.bench.report.measurements import describe_speedup, match_rows
from vitcompress.bench.report.run import ACCURACIES
from vitcompress.exporters.runtimes import Runner, RunnerOptions, open_runner, runtime_of
from vitcompress.io.files import file_sha256, read_record, write_json
from vitcompress.io.run_folder import RunFolder
from vitcompress.models.checkpoint import load_model, load_model_files, read_plan, write_model
from vitcompress.pipeline.export import quarantine_failed, runnable_files
from vitcompress.pipeline.job import Job
from vitcompress.pipeline.report import list_names
from vitcompress.training.data import images_digest
from vitcompress.training.loaders import EVAL_BATCH, EvalLoader
from vitcompress.training.metrics import PAIRED_TESTS, evaluate_images, mcnemar, random_images
from vitcompress.verify.folder import image_count, verify_folder


def fold_model(job: Job) -> None:
    """Fold linear layers, and save the deployed model as model.safetensors with plan.json."""
    if not job.runtime.is_main:
        return
    job.progress.stage("Fold")
    files = job.files
    model, plan = load_model_files(files.unfolded_plan, files.unfolded), read_plan(files.unfolded_plan)
    plan, records = surgery.fold_linears(model, plan)
    write_json(files.folding, list(map(asdict, records)))
    write_model(job.folder, model, plan)
    if plan.standard:
        job.progress.note(f"{files.standard.name} loads strictly into timm's {plan.standard['arch']}")
    ffns = [record for record in records if record.reason != surgery.INTO_THE_LINEAR]
    for record in ffns:
        verb, change = "folded" if record.folded else "not folded", f"{record.params_before} -> {record.params_after}"
        job.progress.note(f"{record.module}: {verb}, {record.reason}; parameters {change}")
    if scales := len(records) - len(ffns):
        job.progress.note(f"{scales} LayerScales: folded, {surgery.INTO_THE_LINEAR}")


def verify_run(job: Job) -> None:
    """Check the run folder on test images, or on noise without data. Moves exported files that fail away."""
    # `vitcompress verify` may have checked a stopped run, on noise
    done = job.data is None or job.files.recorded_outputs.is_file()
    if not (done and job.files.verification.is_file()):
        job.progress.stage("Verify")
        data, seed = job.data, job.recipe.run.seed
        images = None if data is None else random_images(data.test, job.input, image_count(job.base), seed)
        result = verify_folder(job.folder, images, job.dense_folder, job.progress)
        files = [path.name for path in job.folder.iterdir()]  # checks of a file begin with its name, which has dots
        names = [check.name for check in result.checks if check.verdict == "passed"]
        passed = Counter(next((f for f in files if name.startswith(f"{f}.")), name.split(".")[0]) for name in names)
        job.progress.note("passed: " + ", ".join(f"{name} ({count})" for name, count in passed.items()))
        for check in result.checks:
            if check.verdict != "passed":
                job.progress.note(f"{check.name}: {check.verdict.replace('_', ' ')}, {check.detail}")
    quarantine_failed(job)


def evaluate_models(job: Job) -> None:
    """accuracy.json: the dense, compressed and exported models on the same test images, with McNemar's test.

    mistakes.json: which images each model classifies wrongly, to compare runs image by image. Only what they lack is
    evaluated: after a control was added to a finished run, they have all other models, and files of later exports.
    """
    if job.data is None:
        return
    loader = EvalLoader(job.data.test, job.input, EVAL_BATCH, job.runtime)
    digest, top1 = images_digest(job.data.classes, job.data.test), dict[str, np.ndarray]()
    wrong = read_record(job.files.mistakes, dict[str, list[int]]) or {}
    known = (read_record(job.files.accuracy, ACCURACIES) or {}).items()
    accuracies = {k: v for k, v in known if k in wrong and v.get("images_digest") == digest}
    for name, model in _models(job, accuracies):
        if not top1:
            job.progress.stage("Evaluate on the test images")
        predict = model.predict if isinstance(model, Runner) else model
        accuracy, correct, top1[name] = evaluate_images(predict, loader, job.runtime)
        own = {"sha256": model.describe()["sha256"]} if isinstance(model, Runner) else {}
        if own and "compressed" in top1:
            own["flips"] = int((top1[name] != top1["compressed"]).sum())
        wrong[name] = np.flatnonzero(~correct).tolist()
        accuracies[name] = {**accuracy.to_dict(), "images_digest": digest, **own}
        job.progress.note(f"{name}: {accuracy.correct} of {accuracy.total} correct")
    masks = {name: ~np.isin(np.arange(len(job.data.test)), images) for name, images in wrong.items()}
    tests = {k: mcnemar(masks[a], masks["compressed"]) for k, a in PAIRED_TESTS.items() if a in masks}
    if top1:
        write_json(job.files.mistakes, wrong)
        write_json(job.files.accuracy, {**accuracies, **tests})


def _models(job: Job, known: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[str, nn.Module | Runner]]:
    """Those that are not `known`, one after the other, so that only one is in memory."""
    for name, folder in {"dense": job.dense_folder, "compressed": job.folder, "control": job.files.control}.items():
        if name not in known and RunFolder(folder).plan.is_file():
            yield name, load_model(folder, job.runtime.device)
    for path, device in runnable_files(job, "model").values():
        if known.get(path.name, {}).get("sha256") != file_sha256(path):
            with closing(open_runner(path, device=device)) as runner:
                yield path.name, runner


def bench_models(job: Job) -> None:
    """bench.json: dense and compressed model, measured interleaved, in the exported formats and in torch."""
    table, results = job.recipe.bench, []
    for dense, compressed, device in _pairs(job):
        job.progress.stage(f"Measure {compressed.name} against {dense.name}")
        runner = RunnerOptions(device=device)
        options = suite.BenchOptions(table.protocol, table.batch, table.warmup, table.runs, runner)
        result = suite.run((dense, compressed), options, job.progress).to_dict()
        results.append(result)
        for ratio in result["ratios"]:
            job.progress.note(f"{result['rows'][0]['runtime']}: {describe_speedup(ratio)}")
        for reason in result["disturbed"]:
            job.progress.note(f"disturbed: {reason}; repeat with `vitcompress bench` when nothing else runs")
    write_json(job.files.benchmark, match_rows(results, list_names(job.folder)))


def _pairs(job: Job) -> Iterator[tuple[Path, Path, str | None]]:
    """Dense and compressed artifact of one format, and the device; None: that of the file."""
    dense, chosen = runnable_files(job, "dense"), job.recipe.bench.runtimes
    for name, (path, device) in runnable_files(job, "model").items():
        if name in dense and (chosen is None or runtime_of(name) in chosen):
            yield dense[name][0], path, device
    if chosen is None or "torch" in chosen:
        yield job.dense_folder, job.folder, str(job.runtime.device)
