"""The folders of a run: which folder a run may use, how it is locked and cleared, and which one has the dense model.

Only files that runs and exports write are ever removed, and only from folders whose recipe.toml begins with `HEADER`.
"""

import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from vitcompress.errors import InputError, OutputError, RecipeError
from vitcompress.exporters.runtimes import exported_files
from vitcompress.exporters.sidecar import DENSE, usable_sidecar
from vitcompress.io.files import convert_write_errors, lock_file, write_text
from vitcompress.io.log_file import log_warnings
from vitcompress.io.manifest import record_changes
from vitcompress.io.progress import SILENT, Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.text import describe_differences
from vitcompress.recipe.load import build_recipe, dense_key, load_recipe_of_run, parse_toml
from vitcompress.recipe.schema import Recipe

HEADER = "# The recipe of this run, every setting spelled out."
STRUCTURE_ONLY = "# Structure only: nothing was trained or scored."
UNFINISHED = ".*.part"  # files and folders that are being written
ELSEWHERE = "choose another folder with --out"


def recipe_text(recipe: Recipe, *, structure_only: bool) -> str:
    """The content of recipe.toml: equal for runs that do the same."""
    return "\n".join([HEADER, *[STRUCTURE_ONLY] * structure_only, "", recipe.to_toml()])


def check_folder(folder: Path, recipe: Recipe, *, structure_only: bool, fresh: bool) -> None:
    """Raise OutputError if `folder` cannot be written, or contains anything but a run of `recipe`.

    fresh: the run starts over, so a run of any recipe is allowed, unless `recipe` reads its files.
    """
    tables = (recipe.model.weights, recipe.model.class_names, recipe.data.path)
    inputs = (*tables, recipe.finetune.teacher, recipe.finetune.teacher_weights)
    try:
        _check_content(RunFolder(folder), recipe_text(recipe, structure_only=structure_only), fresh)
        for path in (Path(text).resolve() for text in inputs if fresh and text and Path(text).is_absolute()):
            if path == folder or {path, *path.parents} & {*_old_files(folder)}:
                raise OutputError(f"--fresh would remove {path}, which this run reads", hint=ELSEWHERE)
    except OSError as error:
        raise OutputError(f"{folder} cannot be read: {error.strerror}", hint=ELSEWHERE) from None
    check_writable(folder)


def _check_content(files: RunFolder, expected: str, fresh: bool) -> None:
    folder = files.path
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file", hint=ELSEWHERE)
    if link := next((path for path in folder.rglob("*") if path.is_symlink()), None):
        raise OutputError(f"{link} is a link; a run writes and removes files only in its folder", hint=ELSEWHERE)
    if not files.recipe.is_file():
        # A run that was killed before it wrote its recipe leaves its lock, and perhaps a part of the recipe.
        lock = RunFolder(files.state).lock
        state = {files.state} if files.state.is_dir() and {*files.state.iterdir()} <= {lock} else set()
        left = {*folder.glob(f".{files.recipe.name}{UNFINISHED[1:]}"), *state}
        if folder.is_dir() and {*folder.iterdir()} - left:
            raise OutputError(f"{folder} is not empty and not a run folder", hint=ELSEWHERE)
        return
    text = files.recipe.read_text(encoding="utf-8", errors="replace")
    if fresh and not text.startswith(HEADER):
        raise OutputError(f"{files.recipe} was not written by a run, so nothing here is replaced", hint=ELSEWHERE)
    if fresh or text == expected:
        return
    if (text := _rewrite(text, expected, moved=not files.report.is_file())) != expected:
        message = f"{folder} contains a run of another recipe ({'; '.join(changed := difference(text, expected))})"
        add = "add exported files with `vitcompress export`" if files.report.is_file() else "finish this run first"
        other = f", or {add}" if all(line.startswith("export.") for line in changed) else ""
        raise OutputError(message, hint=f"{ELSEWHERE}{other}, or start over here with --fresh (of a study: remove it)")


def _rewrite(text: str, expected: str, *, moved: bool) -> str:
    """The recipe.toml `text` as this version writes it, with defaults for new options and the summary of `expected`.

    moved: a file of weights and its images may be at another place: `dense.check_source` compares what they contain.
    """
    with suppress(RecipeError):
        recipe, here = (build_recipe("of the run", parse_toml("of the run", each)) for each in (text, expected))
        model, data = recipe.model, recipe.data
        if moved and Path(model.weights).is_absolute() and Path(here.model.weights).is_absolute():
            model, data = replace(model, weights=here.model.weights), replace(data, path=here.data.path)
        recipe = replace(recipe, summary=here.summary, model=model, data=data)
        return recipe_text(recipe, structure_only=STRUCTURE_ONLY in text)
    return text


def difference(there: str, here: str) -> list[str]:
    """The first settings that differ between two recipe texts, by their full names."""
    try:
        changed = describe_differences(tomllib.loads(there), tomllib.loads(here))
    except tomllib.TOMLDecodeError:
        return ["its recipe.toml is not readable"]
    kinds = ["structure only" if STRUCTURE_ONLY in text else "a whole run" for text in (there, here)]
    return changed or ["written by another version" if kinds[0] == kinds[1] else f"{kinds[0]} there, {kinds[1]} here"]


def check_writable(folder: Path) -> None:
    """Raise OutputError if `folder` cannot be created or written. Leaves nothing behind."""
    parent = nearest_existing(folder)
    if not parent.is_dir():
        raise OutputError(f"{parent} is a file, so {folder} cannot be created", hint=ELSEWHERE)
    with convert_write_errors(parent), tempfile.TemporaryFile(dir=parent):
        pass


def nearest_existing(folder: Path) -> Path:
    """`folder`, or else the first of its parents that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


@contextmanager
def claim_folder(folder: Path, progress: Progress | None = None) -> Iterator[None]:
    """Lock `folder` for the work of this process. The operating system releases the lock when the process ends.

    progress: reports that this process waits for another one; None does not wait. Raises OutputError if another process
    uses the folder, and `progress` is None.
    """
    lock = FileLock(RunFolder(folder).lock)
    with convert_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            locked = lock.acquire(timeout=0)
        except Timeout:
            if progress is None:
                remedy = "wait for it, or choose another folder"
                raise OutputError(f"another process is working in {folder}", hint=remedy) from None
            progress.note(f"another run is working in {folder}: waiting for it")
            locked = lock.acquire()
    with locked:
        yield


@contextmanager
def claim_run(folder: Path, progress: Progress = SILENT) -> Iterator[None]:
    """Lock `folder` for an export, a check or measurements of what it contains, after those that other processes began.

    Raises OutputError if a run is working in it. This is only known with a writable lock file of the run.
    """
    files, waits = RunFolder(folder), "waiting for another process that works with the files of this folder"
    lock = RunFolder(files.state).lock
    usable = os.access(lock, os.W_OK) and not (lock.is_symlink() or lock.parent.is_symlink())
    with lock_file(files.plan, lambda: progress.note(waits)), claim_folder(lock.parent) if usable else nullcontext():
        yield


@contextmanager
def open_folder(folder: Path, recipe: Recipe, *, structure_only: bool, fresh: bool) -> Iterator[None]:
    """Lock `folder` and write recipe.toml; with `fresh`, first remove the files of an earlier run.

    Raises OutputError, before any change, if another process uses the folder or has used it since `check_folder`.
    """
    files, text = RunFolder(folder), recipe_text(recipe, structure_only=structure_only)
    with claim_folder(files.state):  # the lock of a run is in its state folder
        _check_content(files, text, fresh)
        for path in _old_files(folder) if fresh else ():
            _remove(path)
        remove_unfinished(folder)
        if not files.recipe.is_file() or files.recipe.read_text(encoding="utf-8") != text:
            with record_changes(folder):
                write_text(files.recipe, text)
        with log_warnings(files.warnings):
            yield


def _old_files(folder: Path) -> list[Path]:
    """The files of a run, the manifest first, with the exports of any names that have a sidecar: verify counts them."""
    files = RunFolder(folder)
    paths = [path for model in (DENSE, "model") for path in exported_files(folder, model) if usable_sidecar(path)]
    own = (path.with_name(name) for path in paths for name in (*usable_sidecar(path)["files"], f"{path.name}.json"))
    return [files.manifest, *own, *files.run_files()]


def remove_unfinished(folder: Path) -> None:
    """Remove files and folders that a killed process was writing."""
    for path in sorted(folder.rglob(UNFINISHED), reverse=True):  # the content of a folder before the folder
        _remove(path)


def _remove(path: Path) -> None:
    with convert_write_errors(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def dense_folder(recipe: Recipe, folder: Path) -> Path:
    """The folder of the dense model of the run in `folder`: shared by runs that train it alike, else inside `folder`.

    The name of a shared folder is a hash of all training options.
    """
    shared = recipe.model.weights == "train"
    return folder.parent / f"dense-{dense_key(recipe)}" if shared else RunFolder(folder).dense


def dense_folder_of_run(folder: Path) -> Path:
    """The folder of the dense model according to the recipe.toml in `folder`; inside `folder` without such a file."""
    files = RunFolder(folder)
    return dense_folder(load_recipe_of_run(files.recipe), folder.resolve()) if files.recipe.is_file() else files.dense


def dense_folder_to_verify(folder: Path) -> Path | None:
    """`dense_folder_of_run`; None if recipe.toml cannot be used, and there is a manifest, which has its hash."""
    dense = None
    with suppress(InputError) if RunFolder(folder).manifest.exists() else nullcontext():
        dense = dense_folder_of_run(folder)
    return dense
