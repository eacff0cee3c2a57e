"""Run a recipe: check everything that can fail, then run the stages."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from vitcompress.bench.report.records import CheckRecord, Report
from vitcompress.bench.report.run import read_report
from vitcompress.errors import CheckFailedError
from vitcompress.io.manifest import record_changes
from vitcompress.io.progress import Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.pipeline.folder import check_folder, dense_folder, open_folder
from vitcompress.pipeline.job import RunOptions, apply_options
from vitcompress.pipeline.preflight import check_formats, prepare
from vitcompress.pipeline.stages import LATER_STAGES, SHARED_STAGES, run_stages
from vitcompress.recipe.schema import Recipe
from vitcompress.training import distributed
from vitcompress.training.data import Splits
from vitcompress.verify import verify_folder


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
        commands = [(check["command"] or "").replace("DIR", str(self.folder)) for check in checks]
        pairs = zip(checks, commands, strict=True)
        return [{**check, "command": text} for check, text in pairs if text.startswith("vitcompress verify ")]


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
        if runtime.broadcast(options.is_done(RunFolder(folder))):
            progress.note(f"all is done: {folder}; --fresh starts over")
            unlisted = runtime.is_main and not RunFolder(folder).manifest.is_file()
            if unlisted and read_report(folder).get("manifest"):  # stopped before it wrote its last file
                progress.stage("Verify")
                if not verify_folder(folder, dense=dense_folder(recipe, folder), progress=progress, adopt=True).passed:
                    hint = f"`vitcompress verify {folder}` lists the checks"
                    raise CheckFailedError(f"{folder} has no manifest, and a check failed", hint=hint)
        else:
            job = prepare(recipe, options, runtime, progress, data)
            if runtime.is_main:
                stack.enter_context(open_folder(folder, recipe, **kind))
                stack.enter_context(record_changes(folder))  # a manifest is there if only some files were removed
            runtime.barrier()
            with distributed.cpu_threads(recipe.run.threads):
                run_stages(job, SHARED_STAGES)
            distributed.stop()
            if runtime.is_main:
                run_stages(replace(job, runtime=replace(runtime, rank=0, world_size=1)), LATER_STAGES)
    return RunResult(folder, read_report(folder) if runtime.is_main else cast(Report, {}))
