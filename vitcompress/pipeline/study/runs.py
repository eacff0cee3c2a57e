"""The runs of a study: one recipe, one folder, one seed each, carried out by the pipeline and by nothing else."""

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
from vitcompress.pipeline import job
from vitcompress.pipeline.dense_folder import dense_folder
from vitcompress.pipeline.folder import is_done
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
    def dense_folder(self) -> Path:
        """Where the dense model lies that this run and all of its seed start from."""
        return dense_folder(self.recipe, self.folder)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: seconds it took now, and what went wrong, if anything did."""

    seconds: float
    problem: str | None = None


def runs_of(study: Study, folder: Path, seeds: int) -> tuple[Run, ...]:
    """All seeds of the first row, then of the second: what is stopped early has whole rows. Dense models of different
    seeds are so trained at the same time, not waited for.
    """
    return tuple(
        Run(row, seed, folder / f"{row.name}-seed{seed}", replace(row.recipe, run=replace(row.recipe.run, seed=seed)))
        for row in study.rows
        for seed in range(seeds)
    )


def carry_out(runs: Sequence[Run], jobs: int, progress: Progress) -> None:
    """Do what is not done, `jobs` runs at a time; runs that fail do not keep the others from ending.

    Raises:
        VitcompressError: which runs failed, and why.
    """
    waiting = [run for run in runs if not is_done(run.folder)]
    if len(waiting) < len(runs):
        progress.note(f"{len(runs) - len(waiting)} of {len(runs)} runs are done already")
    failed: dict[str, list[str]] = {}
    ended = one_by_one(waiting, progress) if jobs == 1 else side_by_side(waiting, jobs)
    for number, (run, outcome) in enumerate(ended, len(runs) - len(waiting) + 1):
        if outcome.problem is not None:
            failed.setdefault(outcome.problem, []).append(run.name)
        words = "failed" if outcome.problem else "done"
        progress.update("runs", number, len(runs))
        progress.note(f"{number} of {len(runs)}: {run.name} {words} ({outcome.seconds:.0f} s)")
    if failed:
        lines = [f"{', '.join(names)}: {problem}" for problem, names in failed.items()]
        raise VitcompressError(
            "\n  ".join([f"{sum(map(len, failed.values()))} of {len(runs)} runs failed", *lines]),
            hint="the others stand; the same command tries these again",
        )


def one_by_one(runs: Sequence[Run], progress: Progress) -> Iterator[tuple[Run, Outcome]]:
    """In this process, with all that a run tells."""
    for run in runs:
        progress.stage(f"{run.row.title}, seed {run.seed}")
        yield run, attempt(run, progress)


def side_by_side(runs: Sequence[Run], jobs: int) -> Iterator[tuple[Run, Outcome]]:
    """In `jobs` processes of their own, which end with this one however it ends."""
    context = multiprocessing.get_context("spawn")  # a forked torch may wait for threads that it does not have
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=end_with_parent) as pool:
        begun = {pool.submit(attempt, run): run for run in runs}
        try:
            for future in as_completed(begun):
                yield begun[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def attempt(run: Run, progress: Progress | None = None) -> Outcome:
    """Carry out one run, or continue it. An error must not end the other runs, so it is returned, not raised."""
    began = time.monotonic()
    try:
        with cpu_threads(run.recipe.run.threads):
            run_recipe(run.recipe, job.RunOptions(out=run.folder), progress)
    except VitcompressError as error:
        return Outcome(time.monotonic() - began, error.message)
    return Outcome(time.monotonic() - began)


def end_with_parent() -> None:
    """Let this process end when the one that started it does, even by SIGKILL: nothing would use its results."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
