"""Run a study: methods side by side on one data set, several seeds, the same training for all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitcompress.bench.plots.study import draw
from vitcompress.errors import InputError, MissingExtraError, OutputError
from vitcompress.io.files import read_json, write_json
from vitcompress.io.progress import Progress
from vitcompress.pipeline.folder import ELSEWHERE, check_folder, is_done, sole_user
from vitcompress.pipeline.study.dry_run import outlook
from vitcompress.pipeline.study.results import write
from vitcompress.pipeline.study.runs import Run, carry_out, runs_of
from vitcompress.pipeline.study.spec import Study
from vitcompress.pipeline.study.speed import measured
from vitcompress.training.data import check_named

MARK = "of_study.json"


def check(folder: Path, study: Study, runs: Sequence[Run]) -> None:
    """Raise OutputError when `folder` is taken by something else, holds other runs, or cannot be written."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file", hint=ELSEWHERE)
    mark = folder / MARK
    if not mark.is_file() and folder.is_dir() and any(folder.iterdir()):
        raise OutputError(f"{folder} is not empty and not the folder of a study", hint=ELSEWHERE)
    if mark.is_file() and (found := read_json(mark)["study"]) != study.name:
        raise OutputError(f"{folder} holds the study {found!r}, not {study.name!r}", hint=ELSEWHERE)
    for run in runs:
        check_folder(run.folder, run.recipe, structure_only=False, fresh=False)


@contextmanager
def opened(folder: Path, study: Study) -> Iterator[None]:
    """Lock the study's folder, which is made if need be. Raises OutputError when another process works in it."""
    with sole_user(folder):
        write_json(folder / MARK, {"study": study.name})
        yield


@dataclass(frozen=True)
class StudyOptions:
    """out: the study's folder, None for runs/study-NAME. jobs: runs at a time, in processes of their own beyond one.

    speed: `now` measures what was not yet measured in this composition, `later` leaves that for another call, `again`
    measures anew.
    """

    out: Path | None = None
    seeds: int = 3
    jobs: int = 1
    speed: Literal["now", "later", "again"] = "now"


def dry_run_study(study: Study, options: StudyOptions, progress: Progress | None = None) -> dict[str, Any]:
    """Every row's cost and epochs, and what is missing here; nothing is written.

    Raises:
        InputError: a row that cannot work.
    """
    runs = _runs(study, options)
    found = outlook(study, runs, progress or Progress())
    return {"study": study.name, "folder": str(_folder(study, options)), "runs": len(runs), **found}


def run_study(study: Study, options: StudyOptions, progress: Progress | None = None) -> dict[str, Any]:
    """Train what is not trained, measure what is not measured, write tables and pictures; the content of study.json.

    Raises:
        InputError: what the user gave is wrong; nothing was written.
        VitcompressError: runs failed, which were and why; the others stand, and the same call continues.
    """
    progress = progress or Progress()
    runs = _runs(study, options)
    folder = _folder(study, options)
    check(folder, study, runs)
    ahead = [run_study for run_study in runs if not is_done(run_study.folder)]
    for one in ahead:
        check_named(one.recipe.data)
    if missing := outlook(study, ahead, progress)["missing"]:
        raise InputError("; ".join(missing), hint="`vitcompress study NAME --dry-run` shows what a study needs")
    with opened(folder, study):
        carry_out(runs, options.jobs, progress)
        speed = measured(folder, study, runs, options.speed, progress)
        found = write(folder, study, runs, speed)
    try:
        draw(found, folder / "pictures")
    except MissingExtraError as error:
        progress.note(f"no pictures: {error.message}: {error.hint}")
    return found


def _runs(study: Study, options: StudyOptions) -> tuple[Run, ...]:
    for name, value in (("seeds", options.seeds), ("jobs", options.jobs)):
        if value < 1:
            raise InputError(f"{name} must be 1 or more, got {value}", hint=f"give --{name} 1 or more")
    return runs_of(study, _folder(study, options), options.seeds)


def _folder(study: Study, options: StudyOptions) -> Path:
    return (options.out or Path("runs") / f"study-{study.name}").resolve()
