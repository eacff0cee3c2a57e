"""A study: methods side by side on one data set, several seeds, the same training for all.

    study (TOML) -> one ordinary run per row and seed -> speed of all models in turns -> tables, pairs, pictures

Every run is a recipe carried out by `pipeline`, in a folder of its own, and is continued like any other run. The
training may be done on a busy machine and the measuring later, by the same call.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitcompress.bench import study_pictures
from vitcompress.errors import InputError, MissingExtraError
from vitcompress.io.progress import Progress
from vitcompress.pipeline.folder import is_done
from vitcompress.study.design import Study, load_study
from vitcompress.study.folder import check, opened
from vitcompress.study.outlook import outlook
from vitcompress.study.results import write
from vitcompress.study.runs import Run, carry_out, runs_of
from vitcompress.study.speed import measured
from vitcompress.training.data import check_named

__all__ = ["Run", "Study", "StudyOptions", "dry_run", "load_study", "run"]


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


def dry_run(study: Study, options: StudyOptions, progress: Progress | None = None) -> dict[str, Any]:
    """Every row's cost and epochs, and what is missing here; nothing is written.

    Raises:
        InputError: a row that cannot work.
    """
    runs = _runs(study, options)
    found = outlook(study, runs, progress or Progress())
    return {"study": study.name, "folder": str(_folder(study, options)), "runs": len(runs), **found}


def run(study: Study, options: StudyOptions, progress: Progress | None = None) -> dict[str, Any]:
    """Train what is not trained, measure what is not measured, write tables and pictures; the content of study.json.

    Raises:
        InputError: what the user gave is wrong; nothing was written.
        VitcompressError: runs failed, which were and why; the others stand, and the same call continues.
    """
    progress = progress or Progress()
    runs = _runs(study, options)
    folder = _folder(study, options)
    check(folder, study, runs)
    ahead = [run for run in runs if not is_done(run.folder)]
    for one in ahead:
        check_named(one.recipe.data)
    if missing := outlook(study, ahead, progress)["missing"]:
        raise InputError("; ".join(missing), hint="`vitcompress study NAME --dry-run` shows what a study needs")
    with opened(folder, study):
        carry_out(runs, options.jobs, progress)
        speed = measured(folder, study, runs, options.speed, progress)
        found = write(folder, study, runs, speed)
    try:
        study_pictures.draw(found, folder / "pictures")
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
