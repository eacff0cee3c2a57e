"""The run folder: what lies in it, whether it may be used, how it is opened.

Only what a run wrote is ever removed: a folder is a run's when its recipe.toml begins with `HEADER`, and starting over
removes only files that runs write.
"""

import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from vitcompress.bench.report import recorded
from vitcompress.bench.report import run as reports
from vitcompress.errors import OutputError, RecipeError
from vitcompress.io.checks import LEDGER
from vitcompress.io.files import write_text, writing
from vitcompress.io.progress import Progress
from vitcompress.io.text import differences
from vitcompress.models.checkpoint import PLAN
from vitcompress.recipe.load import parsed, recipe_of
from vitcompress.recipe.schema import Recipe
from vitcompress.verify.quarantine import FAILED

RECIPE = "recipe.toml"
HEADER = "# The recipe of this run, every setting spelled out."
STRUCTURE_ONLY = "# Structure only: nothing was trained or scored."
STATE, LOCK = "state", ".lock"
# What a run leaves, in the order in which starting over takes it away: without a report the run is not done, and
# without its recipe the folder would be nobody's.
LEFT_BY_RUNS = (
    reports.JSON,
    reports.MARKDOWN,
    LEDGER,
    recorded.BENCH,
    "model.*",
    "standard.*",
    "model-*.*",  # exported again in another precision
    "dense.*",
    FAILED,  # exported files that do not answer as the model does
    PLAN,
    "log.jsonl",
    "tensorboard",
    f"{STATE}/*",
    RECIPE,
)
PARTS = ".*.part"  # files and folders that are being written
# Weights of the dense model and of the compressed one before and after folding, their exports, and one that is being
# written. Training adds a resume state with optimiser, average and best weights, twice while one replaces the other.
BYTES_PER_PARAMETER, BYTES_OF_TRAINING = 4 * 6, 4 * 10
# A step that slices, folds or trains keeps the model that it was given, and the weights that it left.
BYTES_PER_STEP = 4 * 2
ELSEWHERE = "choose another folder with --out"


def written_recipe(recipe: Recipe, *, structure_only: bool) -> str:
    """recipe.toml: equal for runs that do the same."""
    return "\n".join([HEADER, *[STRUCTURE_ONLY] * structure_only, "", recipe.to_toml()])


@contextmanager
def sole_user(folder: Path, progress: Progress | None = None) -> Iterator[None]:
    """No other process works in `folder` inside this block. The lock ends with the process that holds it.

    progress: wait for the other one, and say so there; None does not wait.

    Raises:
        OutputError: another process works in the folder, and waiting was not asked for.
    """
    lock = FileLock(folder / LOCK)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        alone = _acquired(lock)
    if not alone:
        if progress is None:
            raise OutputError(f"another process is working in {folder}", hint="wait for it, or choose another folder")
        progress.note(f"another run is working in {folder}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _acquired(lock: FileLock) -> bool:
    """Take `lock` unless another process holds it; whether it was free."""
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    return True


def is_done(folder: Path) -> bool:
    return (folder / reports.JSON).is_file()


def check_folder(folder: Path, recipe: Recipe, *, structure_only: bool, fresh: bool) -> None:
    """Raise OutputError when `folder` is taken by something else or cannot be written."""
    try:
        _check_free(folder, written_recipe(recipe, structure_only=structure_only), fresh)
    except OSError as error:
        raise OutputError(f"{folder} cannot be read: {error.strerror}", hint=ELSEWHERE) from None
    check_writable(folder)


def _check_free(folder: Path, wanted: str, fresh: bool) -> None:
    path = folder / RECIPE
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file", hint=ELSEWHERE)
    if not path.is_file():
        if folder.is_dir() and not all(map(_left_by_a_beginning, folder.iterdir())):
            raise OutputError(f"{folder} is not empty and not a run folder", hint=ELSEWHERE)
        return
    found = path.read_text(encoding="utf-8", errors="replace")
    if fresh and not found.startswith(HEADER):
        raise OutputError(f"{path} was not written by a run, so nothing here is replaced", hint=ELSEWHERE)
    if not fresh and found != wanted and _spelled_out(found) != wanted:
        raise OutputError(
            f"{folder} holds a run of another recipe ({difference(found, wanted)})",
            hint=f"{ELSEWHERE}, or --fresh to start over in this one",
        )


def _left_by_a_beginning(path: Path) -> bool:
    """Whether a run that was killed before its recipe was written left this: it has locked the folder then."""
    locked = path.name == STATE and path.is_dir() and {inner.name for inner in path.iterdir()} <= {LOCK}
    return locked or path.match(f".{RECIPE}.*.part")


def _spelled_out(text: str) -> str:
    """A run's recipe as this version writes it: what an earlier one did not know yet has its default there."""
    try:
        return written_recipe(recipe_of(RECIPE, parsed(RECIPE, text)), structure_only=STRUCTURE_ONLY in text)
    except RecipeError:
        return text


def difference(there: str, here: str) -> str:
    """The first settings that differ between two recipe texts, by their full names."""
    try:
        told = differences(tomllib.loads(there), tomllib.loads(here))
    except tomllib.TOMLDecodeError:
        return "its recipe.toml is not readable"
    if not told:
        kinds = ["structure only" if STRUCTURE_ONLY in text else "a whole run" for text in (there, here)]
        return "written by another version" if kinds[0] == kinds[1] else f"{kinds[0]} there, {kinds[1]} here"
    return "; ".join(told)


def check_writable(folder: Path) -> None:
    """Raise OutputError when `folder` cannot be made or written; nothing is left by looking."""
    parent = nearest_existing(folder)
    if not parent.is_dir():
        raise OutputError(f"{parent} is a file, so {folder} cannot be made", hint=ELSEWHERE)
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise OutputError(f"{parent} cannot be written: {error.strerror}", hint=ELSEWHERE) from None


def check_disk(folder: Path, params: int, *, trains: bool, keeping: int) -> None:
    """Raise OutputError when the disk has too little room for weights, exports and, if it `trains`, resume state.

    keeping: how many steps leave a model behind.
    """
    parent = nearest_existing(folder)
    per_parameter = BYTES_PER_PARAMETER + BYTES_OF_TRAINING * trains + BYTES_PER_STEP * keeping
    need, free = params * per_parameter, shutil.disk_usage(parent).free
    if free < need:
        raise OutputError(
            f"{parent} has {_size(free)} free, this run needs about {_size(need)}",
            hint=f"free some space, or {ELSEWHERE}",
        )


def nearest_existing(folder: Path) -> Path:
    """`folder`, or the closest of its parents that there is."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


@contextmanager
def opened(folder: Path, recipe: Recipe, *, structure_only: bool, fresh: bool) -> Iterator[None]:
    """Lock `folder`, and put the recipe of this run into it; with `fresh` remove the results of an earlier run first.

    Raises:
        OutputError: another process works in the folder, or it is another's by now; nothing in it was touched.
    """
    wanted = written_recipe(recipe, structure_only=structure_only)
    with sole_user(folder / STATE):
        _check_free(folder, wanted, fresh)  # again: another process may have used it since
        if fresh:
            _clear(folder)
        sweep(folder)
        if not (folder / RECIPE).is_file():
            write_text(folder / RECIPE, wanted)
        yield


def sweep(folder: Path) -> None:
    """Remove what a killed process was writing."""
    for path in sorted(folder.rglob(PARTS), reverse=True):  # what lies inside goes first
        _remove(path)


def _clear(folder: Path) -> None:
    for pattern in LEFT_BY_RUNS:
        for path in sorted(folder.glob(pattern)):
            if path.name != LOCK:  # it is ours
                _remove(path)


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        raise OutputError(f"{path} cannot be removed: {error.strerror}", hint=ELSEWHERE) from None
