"""Run a study: methods side by side on one data set, several seeds, the same training for all."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitcompress.bench import timing
from vitcompress.bench.plots.study import draw
from vitcompress.errors import InputError, MissingExtraError, OutputError
from vitcompress.io.files import read_json, write_json
from vitcompress.io.progress import Progress
from vitcompress.pipeline.dry_run import dry_run_recipe
from vitcompress.pipeline.folder import ELSEWHERE, check_folder, lock_folder
from vitcompress.pipeline.job import RunOptions
from vitcompress.pipeline.study.results import write_results
from vitcompress.pipeline.study.runs import Run, create_runs, execute_runs
from vitcompress.pipeline.study.spec import Study
from vitcompress.pipeline.study.speed import measure_speed
from vitcompress.training.data import check_named

MARK = "of_study.json"  # tells which study a folder belongs to


@dataclass(frozen=True)
class StudyOptions:
    """out: the study's folder; None is runs/study-NAME. jobs: number of runs at a time, each in its own process.

    speed: `now` measures what has not been measured for these models, `later` leaves it to another call, `again`
    repeats it.
    """

    out: Path | None = None
    seeds: int = 3
    jobs: int = 1
    speed: Literal["now", "later", "again"] = "now"

    def folder(self, study: Study) -> Path:
        return (self.out or Path("runs") / f"study-{study.name}").resolve()

    def runs(self, study: Study) -> tuple[Run, ...]:
        for name, value in (("seeds", self.seeds), ("jobs", self.jobs)):
            if value < 1:
                raise InputError(f"{name} must be 1 or more, got {value}", hint=f"use --{name} 1 or more")
        return create_runs(study, self.folder(study), self.seeds)


def dry_run_study(study: Study, options: StudyOptions, progress: Progress | None = None) -> dict[str, Any]:
    """Cost and epochs of every row, and what is missing here. Writes nothing.

    Raises:
        InputError: a row that cannot work.
    """
    runs = options.runs(study)
    rows = estimate_rows(study, runs, progress or Progress())
    return {"study": study.name, "folder": str(options.folder(study)), "runs": len(runs), **rows}


def run_study(study: Study, options: StudyOptions, progress: Progress | None = None) -> dict[str, Any]:
    """Train and measure what is missing, write tables and plots. Returns the content of study.json.

    Raises:
        InputError: the input is wrong; nothing was written.
        VitcompressError: some runs failed; the others are done, and the same call continues.
    """
    progress = progress or Progress()
    runs, folder = options.runs(study), options.folder(study)
    _check_folder(folder, study, runs)
    remaining = [run for run in runs if not run.is_done]
    for run in remaining:
        check_named(run.recipe.data)
    if missing := estimate_rows(study, remaining, progress)["missing"]:
        raise InputError("; ".join(missing), hint="`vitcompress study NAME --dry-run` shows what a study needs")
    with lock_folder(folder):
        write_json(folder / MARK, {"study": study.name})
        execute_runs(runs, options.jobs, progress)
        speed = measure_speed(folder, study, runs, options.speed, progress)
        result = write_results(folder, study, runs, speed)
    try:
        draw(result, folder / "pictures")
    except MissingExtraError as error:
        progress.note(f"no plots: {error.message}: {error.hint}")
    return result


def estimate_rows(study: Study, runs: Sequence[Run], progress: Progress) -> dict[str, Any]:
    """The cost of a structure of each row's size (a method may choose a somewhat different one), its epochs, what is
    missing on this machine, and notes.

    Raises:
        InputError: a row that cannot work, or a protocol that measures nothing.
    """
    timing.protocol(study.speed.protocol, **study.speed.changes)
    rows, missing, notes = [], dict[str, None](), dict[str, None]()
    first_seeds = dict[str, Run]()
    for run in runs:
        first_seeds.setdefault(run.row.name, run)
    for number, (name, run) in enumerate(first_seeds.items()):
        progress.update("rows checked", number, len(first_seeds), name)
        try:
            plan = dry_run_recipe(run.recipe, RunOptions(out=run.folder))
        except InputError as error:
            raise InputError(f"row {name}: {error.message}", hint=error.hint) from None
        missing |= dict.fromkeys(plan["missing"])
        notes |= dict.fromkeys(plan["notes"])
        dense, compressed = plan["cost"]["dense"], plan["cost"]["compressed"]
        rows.append(
            {
                "row": name,
                "title": run.row.title,
                "epochs": study.epochs,
                "recovery": run.recipe.finetune.epochs,
                "params": compressed["params"],
                "macs": compressed["macs"],
                "macs_ratio": compressed["macs"] / dense["macs"],
            }
        )
    progress.update("rows checked", len(first_seeds), len(first_seeds))
    return {"rows": rows, "missing": list(missing), "notes": list(notes)}


def _check_folder(folder: Path, study: Study, runs: Sequence[Run]) -> None:
    """Raise OutputError if `folder` contains anything but these runs of this study, or cannot be written."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file", hint=ELSEWHERE)
    mark = folder / MARK
    if not mark.is_file() and folder.is_dir() and any(folder.iterdir()):
        raise OutputError(f"{folder} is not empty and not the folder of a study", hint=ELSEWHERE)
    if mark.is_file() and (other := read_json(mark)["study"]) != study.name:
        raise OutputError(f"{folder} contains the study {other!r}, not {study.name!r}", hint=ELSEWHERE)
    for run in runs:
        check_folder(run.folder, run.recipe, structure_only=False, fresh=False)
