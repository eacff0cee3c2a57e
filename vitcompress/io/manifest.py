"""manifest.json: size and SHA-256 of every file of a finished run folder, or of a saved model.

It detects damage and edits. It proves no origin: whoever can write the folder can write this file.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vitcompress.errors import ArtifactError, InputError
from vitcompress.io.files import changing, file_sha256, find_changed_files, lock_file, read_json, write_text
from vitcompress.io.hardware import package_versions
from vitcompress.io.run_folder import RunFolder
from vitcompress.plan import Plan

FORMAT = 1
PACKAGES = ("vitcompress", "torch", "timm", "onnx", "onnxruntime", "onnxruntime-gpu")
AMENDED = {".json", ".md", ".html"}  # suffixes of files that commands read and write back; others they replace
REMEDY = (
    "restore it from a copy; or accept the folder as it is: move manifest.json away, if it is there, and run "
    "`vitcompress verify DIR --adopt`, which checks everything else"
)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`, with `files` (path in the folder: SHA-256) and `bytes`; empty if it has none of ours.

    Raises ArtifactError if it was changed, and InputError if it has a newer format.
    """
    path = RunFolder(folder).manifest
    if not path.exists() and not path.is_symlink():
        return {}
    # Read once, as another process may replace it, and as text, because `_to_text` compares every byte.
    data, text = read_json(path, lambda text: [json.loads(text), text], encoding="utf-8")
    if isinstance(data, dict) and not {"sha256", "plan_sha256"} & data.keys():  # such as that of a web application
        return {}
    intact = isinstance(data, dict) and _to_text(data) == text and not path.is_symlink()
    if intact and data.get("format") != FORMAT:
        message = f"{path} has format {data.get('format')}, this version reads {FORMAT}"
        raise InputError(message, hint="update vitcompress")
    if not intact or not all(isinstance(data.get(key), dict) for key in ("files", "bytes")):
        raise ArtifactError(f"{path} is not as it was written: its own SHA-256 is another", hint=REMEDY)
    return dict(data)


def _to_text(data: Mapping[str, Any]) -> str:
    """The content of manifest.json, with the SHA-256 of itself; later formats keep this rule."""
    rest = {key: value for key, value in data.items() if key != "sha256"}
    return json.dumps({**rest, "sha256": hashlib.sha256(json.dumps(rest).encode()).hexdigest()}, indent=1) + "\n"


def write_manifest(folder: Path, **more: object) -> None:
    """Write manifest.json for all files in `folder`, which must contain a plan. more: to record. Raises OutputError."""
    plan = Plan.from_json(RunFolder(folder).plan.read_text(encoding="utf-8")).digest
    about = {"format": FORMAT, "plan_sha256": plan, "versions": package_versions(PACKAGES), **more}
    _write(folder, {**about, "bytes": {}, "files": {}}, set(_states(folder)), set())


def _write(folder: Path, manifest: Mapping[str, Any], written: set[str], removed: set[str]) -> None:
    """Write `manifest` with new entries for some files and without others."""
    entries = {key: {n: v for n, v in manifest[key].items() if n not in removed} for key in ("bytes", "files")}
    for name in written:
        with suppress(FileNotFoundError):  # another process has removed it
            entries["files"][name], entries["bytes"][name] = file_sha256(path := folder / name), path.stat().st_size
    entries = {key: dict(sorted(values.items())) for key, values in entries.items()}
    write_text(RunFolder(folder).manifest, _to_text({**manifest, **entries}))


def find_changes(folder: Path, *paths: Path) -> dict[str, str]:
    """What is wrong with each listed file that was changed, removed or replaced by a link, by its path in `folder`.

    paths: the files to check; none: all. Empty without a manifest. Raises as `read_manifest`.
    """
    listed = set(read_manifest(folder).get("files", ()))
    names = listed & {path.relative_to(folder).as_posix() for path in paths} if paths else listed
    problems = find_changed_files(RunFolder(folder).manifest, names) if names else {}
    linked = (name for name in names - problems.keys() if (folder / name).resolve() != folder.resolve() / name)
    return problems | {name: f"{name} is a link, or in a folder that is one" for name in linked}


def check_unchanged(folder: Path, *paths: Path) -> None:
    """Raise ArtifactError if one of these files of `folder` is not as its manifest records."""
    if changes := list(find_changes(folder, *paths).values()):
        more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
        raise ArtifactError(f"{folder} is not as it was written: {changes[0]}{more}", hint=REMEDY)


@contextmanager
def record_changes(folder: Path) -> Iterator[None]:
    """Update the manifest of `folder` with the files that this block writes and removes. Without one, do nothing.

    A file has no entry while it changes: a process that is killed leaves none that contradicts a file, and the next
    block adds those that are missing. The entry of a text file that was edited before the block stays: the block may
    write the edited text back, and `verify` must still report it.
    """
    # edited: files that differ from their entries -> the difference. before: the state of each file (`_states`).
    manifest, edited, before = dict[str, Any](), dict[str, str](), _states(folder)
    with suppress(ArtifactError):
        manifest = read_manifest(folder)
        if texts := [folder / name for name in before if Path(name).suffix in AMENDED]:
            edited = find_changes(folder, *texts)

    def remove_entry(path: Path) -> None:
        if manifest and path.is_relative_to(folder):
            name = path.relative_to(folder).as_posix()
            with lock_file(folder):
                if name not in edited and name in (now := read_manifest(folder)).get("files", ()):
                    _write(folder, now, set(), {name})

    token = changing.set(remove_entry)
    try:
        yield
    finally:
        changing.reset(token)
        if manifest:
            after, listed = _states(folder), manifest["files"]
            changed = {name for name, state in after.items() if before.get(name) != state or name not in listed}
            added = read_manifest(folder).get("files", {}).keys() - listed.keys()  # by a block inside of this one
            written, removed = changed - edited.keys(), (before.keys() | added) - after.keys()
            if written or removed:
                with lock_file(folder):
                    _write(folder, read_manifest(folder) or manifest, written, removed)


def _states(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every file that a manifest lists, with what changes when it is written: inode, size, time."""
    states = dict[str, tuple[int, int, int]]()
    for path in RunFolder(folder).files():
        with suppress(FileNotFoundError):  # another process has removed it
            stat = path.stat()
            states[path.relative_to(folder).as_posix()] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return states
