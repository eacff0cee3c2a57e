"""Run a recipe: check everything that can fail, then run the stages, from the dense model to the report."""

import shlex
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from vitcompress.bench.report.records import CheckRecord, Report
from vitcompress.bench.report.run import read_report
from vitcompress.errors import CheckFailedError
from vitcompress.io.manifest import record_changes, write_manifest
from vitcompress.io.progress import SILENT, Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.pipeline import dense, finalize, prune, report
from vitcompress.pipeline.calibration import train_quantized
from vitcompress.pipeline.export import export_models
from vitcompress.pipeline.folder import check_folder, claim_run, dense_folder, open_folder, remove_unfinished
from vitcompress.pipeline.job import Job, RunOptions, apply_options
from vitcompress.pipeline.preflight import check_formats, prepare
from vitcompress.recipe.load import load_recipe
from vitcompress.recipe.schema import Recipe
from vitcompress.training import distributed
from vitcompress.training.data import Splits
from vitcompress.verify.folder import verify_folder


@dataclass(frozen=True)
class Stage:
    """A part of the work. Stages hand over their results as files, so each of them can be the first of a resumed run.

    output(job): the file that `run` writes last; if it exists, there is nothing to do. None: the stage runs always, and
    skips by itself what exists.
    """

    title: str
    run: Callable[[Job], object]
    output: Callable[[Job], Path] | None


# Under torchrun, all processes take part in the first stages; the first process runs the others when they have ended.
SHARED_STAGES = (
    Stage("dense model", dense.create_dense, lambda job: RunFolder(job.dense_folder).manifest),
    Stage("check the dense model", dense.check_dense, None),
    Stage("prune", prune.run_steps, lambda job: job.steps[-1].files.plan),
    Stage("fine-tune", prune.recover, lambda job: job.files.unfolded_plan),
    Stage("fold", finalize.fold_model, lambda job: job.files.plan),
    Stage("train in eight bits", train_quantized, lambda job: job.files.trained_ranges),
    Stage("control", prune.train_control, lambda job: RunFolder(job.files.control).plan),
)
LATER_STAGES = (
    Stage("export", export_models, None),
    Stage("verify", finalize.verify_run, None),
    Stage("evaluate", finalize.evaluate_models, None),
    Stage("measure", finalize.bench_models, lambda job: job.files.benchmark),
    Stage("report", report.write_report, lambda job: job.files.report),
    Stage("manifest", lambda job: write_manifest(job.folder), lambda job: job.files.manifest),
)


def run_stages(job: Job, stages: Iterable[Stage]) -> None:
    """Run the `stages` whose output does not exist; of several processes the first one decides."""
    for stage in stages:
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
        commands = [(check["command"] or "").replace("DIR", shlex.quote(str(self.folder))) for check in checks]
        pairs = zip(checks, commands, strict=True)
        return [{**check, "command": text} for check, text in pairs if text.startswith("vitcompress verify ")]


def _complete_manifest(folder: Path, recipe: Recipe, progress: Progress) -> None:
    """Write the manifest of a run that was stopped just before. Raises CheckFailedError if a check of the run fails."""
    with record_changes(folder):  # adds the files of a process that was killed
        if RunFolder(folder).manifest.is_file() or not read_report(folder).get("manifest"):
            return
    with claim_run(folder):
        remove_unfinished(folder)
    progress.stage("Verify")
    if not verify_folder(folder, dense=dense_folder(recipe, folder), progress=progress, adopt=True).passed:
        hint = f"`vitcompress verify {shlex.quote(str(folder))}` lists the checks"
        raise CheckFailedError(f"{folder} has no manifest, and a check failed", hint=hint)


@torch.inference_mode(False)  # it trains, also if the caller has disabled gradients
def run_recipe(
    recipe: Recipe | str | Path,
    options: RunOptions | None = None,
    progress: Progress | None = None,
    data: Splits | None = None,
) -> RunResult:
    """Run `recipe`, or continue an interrupted run of it.

    Under torchrun, every process calls this function. Training is shared, the first process does the rest, and the
    others return an empty report.

    Args:
        recipe: of `load_recipe`, or what it takes: a name, or a TOML file.
        progress: an object of a subclass of `vitcompress.io.progress.Progress`; None: silent.
        data: images to use instead of those of `recipe.data`.

    Raises:
        InputError: the input is wrong; nothing was written.
        VitcompressError: a stage failed; the same call continues the run.
    """
    options, progress = options or RunOptions(), progress or SILENT
    recipe = apply_options(recipe if isinstance(recipe, Recipe) else load_recipe(recipe), options, data)
    folder = options.folder(recipe)
    kind = {"structure_only": options.structure_only, "fresh": options.fresh}
    check_formats(recipe)
    check_folder(folder, recipe, **kind)
    with ExitStack() as stack:
        runtime = distributed.start(recipe.run.device, recipe.run.amp, recipe.data.workers)
        stack.callback(runtime.stop)
        stack.enter_context(runtime.no_autocast())
        if runtime.broadcast(options.is_done(RunFolder(folder))):
            dense.check_finished(recipe, folder)
            progress.note(f"all is done: {folder}; --fresh starts over")
            if options.expect is not None:
                dense.check_dense(prepare(recipe, options, runtime, progress, data))
            if runtime.is_main:
                _complete_manifest(folder, recipe, progress)
        else:
            job = prepare(recipe, options, runtime, progress, data)
            if runtime.is_main:
                stack.enter_context(open_folder(folder, recipe, **kind))
                stack.enter_context(record_changes(folder))  # a manifest is there if only some files were removed
            runtime.barrier()
            with distributed.cpu_threads(recipe.run.threads):
                run_stages(job, SHARED_STAGES)
            runtime.stop()
            if runtime.is_main:
                run_stages(replace(job, runtime=replace(runtime, rank=0, world_size=1)), LATER_STAGES)
    return RunResult(folder, read_report(folder) if runtime.is_main else cast(Report, {}))
