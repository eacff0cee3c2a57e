"""Run a recipe: from the dense model to a verified, exported and measured one."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitcompress.bench.report.run import JSON as REPORT
from vitcompress.io.files import read_json
from vitcompress.io.progress import Progress
from vitcompress.pipeline.dense import dense_model
from vitcompress.pipeline.dense_folder import dense_folder
from vitcompress.pipeline.export import export_models
from vitcompress.pipeline.finalize import bench_models, fold_model, judge, verify
from vitcompress.pipeline.folder import RECIPE, check_folder, is_done, opened
from vitcompress.pipeline.job import Job, RunOptions, alone, effective, folder_of
from vitcompress.pipeline.preflight import check_formats, prepare
from vitcompress.pipeline.prune import take_steps
from vitcompress.pipeline.recover import recover
from vitcompress.pipeline.report import write_report
from vitcompress.recipe.load import load_recipe
from vitcompress.recipe.schema import Recipe
from vitcompress.training import distributed


@dataclass(frozen=True)
class RunResult:
    """The run folder, the content of its report.json, and whether every check passed."""

    folder: Path
    report: dict[str, Any]
    passed: bool

    @property
    def elsewhere(self) -> list[dict[str, Any]]:
        """The checks that could not run here but can on another machine; all but the first process know of none.

        A file that was not asked for is no such check: what it lacks is an export.
        """
        checks = self.report.get("verify", {}).get("checks", [])
        return [check for check in checks if (check["command"] or "").startswith(f"vitcompress verify {self.folder}")]


def run_recipe(recipe: Recipe, options: RunOptions | None = None, progress: Progress | None = None) -> RunResult:
    """Run `recipe` to its end, or continue it.

    Under torchrun every process calls this; training is shared, what follows it is done by the first process, and the
    others return an empty report.

    Raises:
        InputError: what the user gave is wrong; nothing was written.
        VitcompressError: the work itself failed; the same call continues it.
    """
    options, progress = options or RunOptions(), progress or Progress()
    recipe = effective(recipe, options)
    folder = folder_of(recipe, options)
    how = {"structure_only": options.structure_only, "fresh": options.fresh}
    check_folder(folder, recipe, **how)
    check_formats(recipe)
    with ExitStack() as stack:
        stack.callback(distributed.stop)
        runtime = distributed.start(recipe.run.device, recipe.run.amp, recipe.data.workers)
        if runtime.broadcast(is_done(folder) and not options.fresh):
            progress.note(f"all is done: {folder}; --fresh starts over")
        else:
            job = prepare(recipe, options, runtime, progress)
            if runtime.is_main:
                stack.enter_context(opened(folder, recipe, **how))
            runtime.barrier()
            with distributed.cpu_threads(recipe.run.threads):
                _train(job)
            distributed.stop()
            if runtime.is_main:
                _deliver(alone(job))
    if not runtime.is_main:
        return RunResult(folder, {}, passed=True)
    report = read_json(folder / REPORT)
    return RunResult(folder, report, bool(report["verify"]["passed"]))


def dense_of(folder: Path) -> Path | None:
    """Where the dense model of the run in `folder` lies, as its recipe.toml tells; None where there is no such file."""
    path = folder / RECIPE
    return dense_folder(load_recipe(str(path)), folder.resolve()) if path.is_file() else None


def _train(job: Job) -> None:
    """What processes share."""
    dense = dense_model(job)
    recover(job, dense, take_steps(job, dense))


def _deliver(job: Job) -> None:
    """What the first process does when the others have left. Each part loads what it needs, one model at a time."""
    fold_model(job)
    export_models(job)
    verify(job)
    judge(job)
    bench_models(job)
    write_report(job)
