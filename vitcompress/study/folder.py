"""The folder of a study: checked to be this study's, and used by one process at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vitcompress.errors import OutputError
from vitcompress.io.files import read_json, write_json
from vitcompress.pipeline.folder import ELSEWHERE, check_folder, sole_user
from vitcompress.study.design import Study
from vitcompress.study.runs import Run

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
