"""Run a study: methods side by side on one data set, several seeds, the same training for all."""

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any, Literal

from vitcompress.bench.plots.study import draw
from vitcompress.errors import InputError, MissingExtraError, OutputError, VitcompressError, first_line
from vitcompress.exporters.onnx.providers import CPU, PROVIDERS, resolve_precision
from vitcompress.io.files import read_record, write_json
from vitcompress.io.progress import SILENT, Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.pipeline.dry_run import dry_run_recipe
from vitcompress.pipeline.folder import ELSEWHERE, check_folder, claim_folder
from vitcompress.pipeline.job import RunOptions, apply_options
from vitcompress.pipeline.run import run_recipe
from vitcompress.pipeline.study.results import measure_speed, write_results
from vitcompress.pipeline.study.spec import Run, Study
from vitcompress.training.data import check_named
from vitcompress.training.distributed import cpu_threads
from vitcompress.verify.files import rejected_exports

MARK = "of_study.json"  # tells which study a folder belongs to


@dataclass(frozen=True)
class StudyOptions:
    """out: the study's folder; None is runs/study-NAME. jobs: number of runs at a time, each in its own process.

    speed: `now` measures models that have not been measured, `later` leaves it to another call, `again` repeats it.
    """

    out: Path | None = None
    seeds: int = 3
    jobs: int = 1
    speed: Literal["now", "later", "again"] = "now"

    def folder(self, study: Study) -> Path:
        return (self.out or Path("runs") / f"study-{study.name}").resolve()

    def runs(self, study: Study) -> tuple[Run, ...]:
        """All seeds of the first row, then of the second, ..., so that a study that is stopped early has complete rows.

        With several jobs, the dense models of different seeds are trained at the same time.
        """
        rows = [replace(row, recipe=apply_options(row.recipe, RunOptions())) for row in study.rows]  # as runs record it
        pairs, folder = product(rows, range(self.seeds)), self.folder(study)
        recipes = ((row, seed, replace(row.recipe, run=replace(row.recipe.run, seed=seed))) for row, seed in pairs)
        return tuple(Run(row, seed, folder / f"{row.name}-seed{seed}", recipe) for row, seed, recipe in recipes)


@dataclass(frozen=True)
class StudyDryRun:
    """rows: cost of a structure of each row's size (a method may choose a somewhat different one), and its epochs.

    runs: their number. missing, notes: see `DryRun`.
    """

    study: str
    folder: str
    runs: int
    rows: list[dict[str, str | float]]
    missing: list[str]
    notes: list[str]


def run_study(study: Study, options: StudyOptions, progress: Progress = SILENT) -> dict[str, Any]:
    """Train and measure what is missing, write tables and plots. Returns the content of study.json.

    Raises InputError if the input is wrong; nothing was written. Raises VitcompressError if some runs failed; the
    others are done, and the same call continues.
    """
    runs, folder = options.runs(study), options.folder(study)
    other = (read_record(folder / MARK, dict[str, str]) or {}).get("study")
    if other != study.name and any(folder.glob("[!.]*")):  # a study that was killed may have left its lock alone
        what = f"contains the study {other!r}, not {study.name!r}"
        raise OutputError(f"{folder} {what if other else 'is not empty and not the folder of a study'}", hint=ELSEWHERE)
    for run in runs:
        check_folder(run.folder, run.recipe, structure_only=False, fresh=False)
    remaining = [run for run in runs if not run.is_done]
    check_named(runs[0].recipe.data)  # of all rows
    if remaining and (missing := dry_run_study(study, options, progress, remaining).missing):
        raise InputError("; ".join(missing), hint="`vitcompress study NAME --dry-run` shows what a study needs")
    with claim_folder(folder):
        write_json(folder / MARK, {"study": study.name})
        execute_runs(runs, options.jobs, progress)
        result = write_results(folder, study, runs, measure_speed(folder, study, runs, options.speed, progress))
    try:
        draw(result, folder / "pictures")
    except MissingExtraError as error:
        progress.note(f"no plots: {error.sentence(': ')}")
    return result


def dry_run_study(
    study: Study, options: StudyOptions, progress: Progress = SILENT, runs: Sequence[Run] | None = None
) -> StudyDryRun:
    """Cost and epochs of every row, and what is missing here. Writes nothing. runs: those to check; default: all.

    Raises InputError for a row that cannot work.
    """
    runs = options.runs(study) if runs is None else runs
    rows, missing, notes = list[dict[str, str | float]](), dict[str, list[str]](), dict[str, None]()
    first_seeds = [next(of_row) for _, of_row in groupby(runs, lambda run: run.row.name)]
    for number, run in enumerate(first_seeds):
        name = run.row.name
        progress.update("rows checked", number, len(first_seeds), name)
        try:
            resolve_precision("its file", run.recipe.export.precision, None, PROVIDERS[CPU])  # where speed is measured
            plan = dry_run_recipe(run.recipe, RunOptions(out=run.folder))
        except InputError as error:
            raise InputError(f"row {name}: {error.message}", hint=error.hint) from None
        missing |= {problem: [*missing.get(problem, ()), name] for problem in plan.missing}
        notes |= dict.fromkeys(plan.notes)
        if not plan.cost:  # the data is missing
            continue
        dense, cost = plan.cost["dense"], plan.cost["compressed"]
        epochs = {"epochs": study.epochs, "recovery": run.recipe.finetune.epochs}
        sizes = {"params": cost.params, "macs": cost.macs, "macs_ratio": cost.macs / dense.macs}
        rows.append({"row": name, "title": run.row.title, **epochs, **sizes})
    progress.update("rows checked", len(first_seeds), len(first_seeds))
    # A problem of all rows, such as missing data, needs no names.
    problems = [t if len(own) == len(first_seeds) else f"row {', '.join(own)}: {t}" for t, own in missing.items()]
    return StudyDryRun(study.name, str(options.folder(study)), len(runs), rows, problems, list(notes))


Outcome = tuple[Run, float, str | None, str]  # a run, its seconds, and the error message and traceback of a failure


def execute_runs(runs: Sequence[Run], jobs: int, progress: Progress) -> None:
    """Run what is not done, `jobs` runs at a time. A run that fails does not stop the others.

    Raises VitcompressError, with names and reasons, if some runs failed.
    """
    waiting = [run for run in runs if not (run.is_done and RunFolder(run.folder).manifest.is_file())]
    if len(waiting) < len(runs):
        progress.note(f"{len(runs) - len(waiting)} of {len(runs)} runs are already done")
    failed = dict[str, tuple[list[str], str]]()
    outcomes = (_execute(run, progress) for run in waiting) if jobs == 1 else _run_in_processes(waiting, jobs)
    for number, (run, seconds, problem, trace) in enumerate(outcomes, len(runs) - len(waiting) + 1):
        if problem is not None:
            failed.setdefault(problem, ([], trace))[0].append(run.name)
        progress.update("runs", number, len(runs))
        progress.note(f"{number} of {len(runs)}: {run.name} {'failed' if problem else 'done'} ({seconds:.0f} s)")
    if failed:
        lines = [f"{', '.join(names)}: {problem}" for problem, (names, _) in failed.items()]
        hint = "the same command repeats these; if one has a report, remove its folder first, or leave it out (--rows)"
        message = "\n  ".join([f"{sum(len(n) for n, _ in failed.values())} of {len(runs)} runs failed", *lines])
        error = VitcompressError(message, hint=hint)
        error.add_note("\n".join(trace for _, trace in failed.values()))  # shown with --debug
        raise error


def _run_in_processes(runs: Sequence[Run], jobs: int) -> Iterator[Outcome]:
    context = multiprocessing.get_context("spawn")  # a forked torch may wait for threads that were not copied
    others = {*multiprocessing.active_children()}
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_exit_with_parent) as pool:
        try:
            for future in as_completed([pool.submit(_execute, run) for run in runs]):
                yield future.result()
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in {*multiprocessing.active_children()} - others:
                worker.terminate()  # it may be in a run, and has the next one in its queue
            if not isinstance(error, BrokenProcessPool):
                raise
            message = "the process of a run was killed, probably for lack of memory"
            raise VitcompressError(message, hint="the same command with fewer --jobs continues the study") from None


def _execute(run: Run, progress: Progress = SILENT) -> Outcome:
    """Start or continue one run. Errors are returned, so that the other runs continue."""
    start, problem, trace = time.monotonic(), None, ""
    progress.stage(f"{run.row.title}, seed {run.seed}")
    try:
        with cpu_threads(run.recipe.run.threads):
            run_recipe(run.recipe, RunOptions(out=run.folder), progress)
        if not run.is_done:
            problem = "; ".join(rejected_exports(run.folder).values()) or f"{run.evaluated} is missing: restore it"
    except Exception as error:  # noqa: BLE001 - such as too little memory for this run
        problem = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, VitcompressError):
            problem = error.sentence()
        trace = traceback.format_exc()
    return run, time.monotonic() - start, problem, trace


def _exit_with_parent() -> None:
    """Let this process end when its parent ends, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
