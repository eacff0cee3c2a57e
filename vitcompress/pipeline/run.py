"""Run a recipe: from the dense model to a verified, exported and measured compressed model."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from vitcompress.bench.report.records import CheckRecord, Report
from vitcompress.bench.report.run import read_report
from vitcompress.io.progress import Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.pipeline import dense, finalize, prune, report
from vitcompress.pipeline.export import export_models
from vitcompress.pipeline.folder import check_folder, open_folder
from vitcompress.pipeline.job import Job, RunOptions, Work, apply_options
from vitcompress.pipeline.preflight import check_formats, prepare
from vitcompress.recipe.schema import Recipe
from vitcompress.training import distributed
from vitcompress.training.data import Splits


@dataclass(frozen=True)
class Stage:
    """A part of the work. Stages hand over their results as files, so each of them can be the first of a resumed run.

    output(job): the file that `run` writes last; if it exists, there is nothing to do. None: the stage runs always, and
    skips by itself what exists. estimate(job): its rows of a dry run. every_process: under torchrun, all processes take
    part; other stages are run by the first process when the others have ended.
    """

    title: str
    run: Callable[[Job], None]
    output: Callable[[Job], Path] | None
    estimate: Callable[[Job], Iterable[Work]]
    every_process: bool = False


STAGES = (
    Stage("dense model", dense.create_dense, dense.dense_plan, dense.estimate_dense, every_process=True),
    Stage("prune", prune.prune, lambda job: job.steps[-1].files.plan, prune.estimate_steps, every_process=True),
    Stage("fine-tune", prune.recover, lambda job: job.files.unfolded_plan, prune.estimate_recovery, every_process=True),
    Stage("fold", finalize.fold_model, lambda job: job.files.plan, lambda job: [Work("fold")]),
    Stage("export", export_models, None, lambda job: [Work(f"export {name}") for name in job.recipe.export.formats]),
    Stage("verify", finalize.verify_run, None, lambda job: [Work("verify")]),
    Stage("evaluate", finalize.evaluate_models, lambda job: job.files.accuracy, finalize.estimate_evaluation),
    Stage("measure", finalize.bench_models, lambda job: job.files.benchmark, finalize.estimate_bench),
    Stage("report", report.write_report, lambda job: job.files.report, lambda job: [Work("report")]),
)


def run_stages(job: Job, *, every_process: bool) -> None:
    """Run those stages whose output does not exist; of several processes the first one decides."""
    for stage in STAGES:
        if stage.every_process == every_process:
            output = stage.output and stage.output(job)
            if job.runtime.broadcast(output is not None and output.is_file()):
                job.progress.note(f"{stage.title}: already done, {output}")
            else:
                stage.run(job)


@dataclass(frozen=True)
class RunResult:
    """The run folder and the content of its report.json, which is empty in all processes but the first."""

    folder: Path
    report: Report

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        verify = self.report.get("verify")
        return verify is None or verify["passed"]

    @property
    def pending(self) -> list[CheckRecord]:
        """The checks of exported files that need another machine."""
        checks = (self.report.get("verify") or {"checks": ()})["checks"]
        return [check for check in checks if (check["command"] or "").startswith(f"vitcompress verify {self.folder}")]


def run_recipe(
    recipe: Recipe, options: RunOptions | None = None, progress: Progress | None = None, data: Splits | None = None
) -> RunResult:
    """Run `recipe`, or continue an interrupted run of it.

    Under torchrun, every process calls this function. Training is shared, the first process does the rest, and the
    others return an empty report.

    Args:
        data: images to use instead of those of `recipe.data`.

    Raises:
        InputError: the input is wrong; nothing was written.
        VitcompressError: a stage failed; the same call continues the run.
    """
    options, progress = options or RunOptions(), progress or Progress()
    recipe = apply_options(recipe, options, data)
    folder = options.folder(recipe)
    kind = {"structure_only": options.structure_only, "fresh": options.fresh}
    check_folder(folder, recipe, **kind)
    check_formats(recipe)
    with ExitStack() as stack:
        stack.callback(distributed.stop)
        runtime = distributed.start(recipe.run.device, recipe.run.amp, recipe.data.workers)
        if runtime.broadcast(RunFolder(folder).report.is_file() and not options.fresh):
            progress.note(f"all is done: {folder}; --fresh starts over")
        else:
            job = prepare(recipe, options, runtime, progress, data)
            if runtime.is_main:
                stack.enter_context(open_folder(folder, recipe, **kind))
            runtime.barrier()
            with distributed.cpu_threads(recipe.run.threads):
                run_stages(job, every_process=True)
            distributed.stop()
            if runtime.is_main:
                run_stages(replace(job, runtime=replace(runtime, rank=0, world_size=1)), every_process=False)
    return RunResult(folder, read_report(folder) if runtime.is_main else cast(Report, {}))
