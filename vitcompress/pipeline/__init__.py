"""From a recipe to a verified, exported and measured model.

    dense model -> [ score -> plan ] x steps -> recover by training -> fold -> export -> verify -> measure -> report

Every stage leaves its result in the run folder and is skipped when that result stands, so the same command continues a
run that was stopped.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitcompress import distributed
from vitcompress.checkpoint import read_json
from vitcompress.pipeline import delivery, stages
from vitcompress.pipeline.outlook import dry_run
from vitcompress.pipeline.preflight import Job, RunOptions, prepare
from vitcompress.progress import Progress
from vitcompress.recipe import Recipe

__all__ = ["RunOptions", "RunResult", "dry_run", "run"]


@dataclass(frozen=True)
class RunResult:
    """The run folder, the content of its report.json, and whether every check passed."""

    folder: Path
    report: dict[str, Any]
    passed: bool


def run(recipe: Recipe, options: RunOptions | None = None, progress: Progress | None = None) -> RunResult:
    """Run `recipe` to its end, or continue it.

    Under torchrun every process calls this; training is shared, what follows it is done by the first process, and the
    others return an empty report.

    Raises:
        InputError: what the user gave is wrong; nothing was written.
        VitcompressError: the work itself failed; the same call continues it.
    """
    try:
        job = prepare(recipe, options or RunOptions(), progress or Progress())
        if job.runtime.broadcast((job.folder / delivery.REPORT).is_file()):
            job.progress.note(f"all is done: {job.folder}; --fresh starts over")
        else:
            _work(job)
    finally:
        distributed.stop()
    if not job.runtime.is_main:
        return RunResult(job.folder, {}, passed=True)
    report = read_json(job.folder / delivery.REPORT)
    return RunResult(job.folder, report, bool(report["verify"]["passed"]))


def _work(job: Job) -> None:
    with distributed.cpu_threads(job.recipe.run.threads):
        dense = stages.dense_model(job)
        plan = stages.plan_steps(job, dense)
        stages.recover(job, dense, plan)
    if not job.runtime.is_main:
        return
    compressed = stages.fold(job, plan)
    delivery.export(job, dense, compressed)
    delivery.verify(job)
    delivery.judge(job, dense, compressed)
    delivery.bench(job)
    delivery.report(job, dense, compressed)
