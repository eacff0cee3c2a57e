"""Files: written beside their target and moved into place; one clear message where one cannot be written or read."""

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from vitcompress.errors import ArtifactError, OutputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def write_file(path: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write a file beside `path`, make it durable, and move it into place. On failure nothing is left.

    Raises:
        OutputError: the folder cannot be written or the disk is full.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with convert_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.touch()
            mode = stat.S_IMODE(beside.stat().st_mode)  # what the umask gives; safetensors keeps files to the owner
            fill(beside)
            with beside.open("r+b") as file:  # Windows syncs only what it may write
                os.fsync(file.fileno())
            beside.chmod(mode)
            beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


@contextlib.contextmanager
def convert_write_errors(path: Path) -> Iterator[None]:
    """Turn what goes wrong in this block while `path` is written into an OutputError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise _output_error(path, error) from None


def _output_error(path: Path, error: Exception) -> OutputError:
    # What is being written lies in a folder that nobody will find again: the one around it is meant.
    shown = next((part.parent for part in path.parents if part.name.endswith(".part")), path)
    named = Path(str(getattr(error, "filename", None) or shown))
    if named.parent == shown.parent and not named.name.endswith(".part"):
        shown = named  # a file that goes with it: a sidecar, a folder
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
    if full:
        return OutputError(
            f"the disk is full: {shown} could not be written",
            hint="free some space and run the same command again; a recipe continues where it stopped",
        )
    from_system = re.search(r"([^:]+) \(os error \d+\)", str(error))  # safetensors tells where in its code, too
    reason = getattr(error, "strerror", None) or (from_system[1].strip() if from_system else str(error))
    return OutputError(f"{shown} cannot be written: {reason}", hint="choose another place, or make this one writable")


def write_bytes(path: Path, data: bytes) -> None:
    write_file(path, lambda beside: beside.write_bytes(data))


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, data: Any) -> None:
    """Raises ValueError for NaN and infinity, which JSON does not have."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a lock on `folder` while a file in it is read, changed and written back, so that no change is lost.

    The folder itself is locked, so that no lock file stays behind. One process must not lock it twice: it would wait
    for itself. Where the system or the disk cannot lock, nothing is locked.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            if fcntl is not None:
                handle = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, handle)
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def read_json(path: Path) -> Any:
    """Raises ArtifactError when `path` is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}", hint="check the path") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} cannot be read as JSON: {error}", hint="write or copy it again") from None


def decode_json_values(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Metadata values that are JSON, as data; files of other tools may hold anything."""
    found: dict[str, Any] = {}
    for key, text in metadata.items():
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_changed_files(sidecar: Path) -> list[str]:
    """The files beside `sidecar` that are missing or not what it recorded under `files`, a sentence each."""
    data = read_json(sidecar)
    files = data.get("files") if isinstance(data, dict) else None
    if not isinstance(files, dict):
        return [f"{sidecar.name} does not say which files it describes"]
    wrong = []
    for name, recorded in files.items():
        path = sidecar.parent / name
        actual = file_sha256(path) if path.is_file() else "missing"
        if actual != recorded:
            wrong.append(f"{name}: sha256 is {actual[:12]}, {sidecar.name} says {str(recorded)[:12]}")
    return wrong
