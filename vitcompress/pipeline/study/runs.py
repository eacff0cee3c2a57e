"""The runs of a study: one recipe, one folder and one seed each. Each is an ordinary run of the pipeline."""

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path

from vitcompress.errors import VitcompressError
from vitcompress.io.progress import Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.pipeline.folder import dense_folder
from vitcompress.pipeline.job import RunOptions
from vitcompress.pipeline.run import run_recipe
from vitcompress.pipeline.study.spec import Row, Study
from vitcompress.recipe.schema import Recipe
from vitcompress.training.distributed import cpu_threads


@dataclass(frozen=True)
class Run:
    """One row with one seed. folder: its run folder, absolute."""

    row: Row
    seed: int
    folder: Path
    recipe: Recipe = field(repr=False)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_done(self) -> bool:
        return RunFolder(self.folder).report.is_file()

    @property
    def dense_folder(self) -> Path:
        """The folder of the dense model, which all runs with this seed share."""
        return dense_folder(self.recipe, self.folder)


Outcome = tuple[float, str | None]  # the duration of a run in seconds, and the error message if it failed


def create_runs(study: Study, folder: Path, seeds: int) -> tuple[Run, ...]:
    """All seeds of the first row, then of the second, ..., so that a study that is stopped early has complete rows.

    With several jobs, the dense models of different seeds are trained at the same time.
    """
    return tuple(
        Run(row, seed, folder / f"{row.name}-seed{seed}", replace(row.recipe, run=replace(row.recipe.run, seed=seed)))
        for row in study.rows
        for seed in range(seeds)
    )


def execute_runs(runs: Sequence[Run], jobs: int, progress: Progress) -> None:
    """Run what is not done, `jobs` runs at a time. A run that fails does not stop the others.

    Raises:
        VitcompressError: some runs failed; names them with the reason.
    """
    waiting = [run for run in runs if not run.is_done]
    if len(waiting) < len(runs):
        progress.note(f"{len(runs) - len(waiting)} of {len(runs)} runs are already done")
    failed: dict[str, list[str]] = {}
    outcomes = _run_here(waiting, progress) if jobs == 1 else _run_in_processes(waiting, jobs)
    for number, (run, (seconds, problem)) in enumerate(outcomes, len(runs) - len(waiting) + 1):
        if problem is not None:
            failed.setdefault(problem, []).append(run.name)
        progress.update("runs", number, len(runs))
        progress.note(f"{number} of {len(runs)}: {run.name} {'failed' if problem else 'done'} ({seconds:.0f} s)")
    if failed:
        lines = [f"{', '.join(names)}: {problem}" for problem, names in failed.items()]
        raise VitcompressError(
            "\n  ".join([f"{sum(map(len, failed.values()))} of {len(runs)} runs failed", *lines]),
            hint="the other runs are done; the same command repeats these",
        )


def _run_here(runs: Sequence[Run], progress: Progress) -> Iterator[tuple[Run, Outcome]]:
    for run in runs:
        progress.stage(f"{run.row.title}, seed {run.seed}")
        yield run, _execute(run, progress)


def _run_in_processes(runs: Sequence[Run], jobs: int) -> Iterator[tuple[Run, Outcome]]:
    context = multiprocessing.get_context("spawn")  # a forked torch may wait for threads that were not copied
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_exit_with_parent) as pool:
        futures = {pool.submit(_execute, run): run for run in runs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _execute(run: Run, progress: Progress | None = None) -> Outcome:
    """Start or continue one run. Errors are returned, so that the other runs continue."""
    start, problem = time.monotonic(), None
    try:
        with cpu_threads(run.recipe.run.threads):
            run_recipe(run.recipe, RunOptions(out=run.folder), progress)
    except VitcompressError as error:
        problem = error.message
    return time.monotonic() - start, problem


def _exit_with_parent() -> None:
    """Let this process end when its parent ends, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
