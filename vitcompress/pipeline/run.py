"""Run a recipe: from the dense model to a verified, exported and measured compressed model."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitcompress.io.files import read_json
from vitcompress.io.progress import Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.pipeline.folder import check_folder, open_folder
from vitcompress.pipeline.job import RunOptions, apply_options, output_folder
from vitcompress.pipeline.preflight import check_formats, prepare
from vitcompress.pipeline.stages import STAGES, run_stages
from vitcompress.recipe.schema import Recipe
from vitcompress.training import distributed
from vitcompress.training.data import Splits


@dataclass(frozen=True)
class RunResult:
    """The run folder, the content of its report.json, and whether every check passed."""

    folder: Path
    report: dict[str, Any]
    passed: bool

    @property
    def pending(self) -> list[dict[str, Any]]:
        """The checks of exported files that need another machine. Empty in all processes but the first."""
        checks = self.report.get("verify", {}).get("checks", [])
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
    folder = output_folder(recipe, options)
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
                run_stages(job, [stage for stage in STAGES if stage.every_process])
            distributed.stop()
            if runtime.is_main:
                alone = replace(job, runtime=replace(runtime, rank=0, world_size=1))
                run_stages(alone, [stage for stage in STAGES if not stage.every_process])
    if not runtime.is_main:
        return RunResult(folder, {}, passed=True)
    report = read_json(RunFolder(folder).report)
    return RunResult(folder, report, bool(report["verify"]["passed"]))
