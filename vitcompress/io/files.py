"""Atomic writes, folder locks, JSON and hashes."""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import stat
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from vitcompress.errors import ArtifactError, InputError, OutputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Where signatures are required, SHA-256 of the only files that runners open, by resolved path; elsewhere empty. Nothing
# is written beside these files, as that would invalidate the signatures.
signed_files: ContextVar[Mapping[Path, str]] = ContextVar("signed_files", default={})  # noqa: B039 - is never changed
# Called with the path of a file just before it is replaced or removed: `manifest.record_changes` sets it, so that all
# functions that write files keep the manifest of a folder right without knowing of it.
changing: ContextVar[Callable[[Path], object]] = ContextVar("changing", default=lambda path: None)
_locked: ContextVar[frozenset[Path]] = ContextVar("locked", default=frozenset())
LARGEST = 2**28  # bytes of a text file
DEEPEST = 32  # levels of tables and lists; files of vitcompress have up to 8
LARGEST_INT = 2**63 - 1


def user_path(path: str | Path) -> Path:
    """`path` of a user or a recipe, with its `~` or `~user` replaced. Raises InputError for a NUL character."""
    if "\0" in str(path):
        raise InputError(f"the path {path} contains a NUL character", hint="leave it out")
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises RuntimeError for an unknown user


def write_file(path: Path, fill: Callable[[Path], object]) -> None:
    """Write atomically: `fill(temporary)` writes a file beside `path`, which then replaces `path`.

    Raises OutputError if the folder cannot be written or the disk is full; then nothing was changed.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with convert_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.touch()
            mode = stat.S_IMODE(beside.stat().st_mode)  # of the umask; safetensors creates files for the owner only
            fill(beside)
            with beside.open("r+b") as file:  # Windows syncs only files opened for writing
                os.fsync(file.fileno())
            beside.chmod(mode)
            changing.get()(path)
            beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


@contextlib.contextmanager
def convert_write_errors(path: Path) -> Iterator[None]:
    """Convert errors of this block, which writes `path`, to OutputError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # Files are written to a temporary folder first; the error must name the folder around it.
        shown = next((part.parent for part in path.parents if part.name.endswith(".part")), path)
        named = Path(str(getattr(error, "filename", None) or shown))
        if named.parent == shown.parent and not named.name.endswith(".part"):
            shown = named  # a file written with it: a sidecar, a folder
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            message = f"the disk is full: {shown} could not be written"
            hint = "free some space and run the same command again; a recipe continues where it stopped"
            raise OutputError(message, hint=hint) from None
        from_system = re.search(r"([^:]+) \(os error \d+\)", str(error))  # safetensors adds a place in its code
        reason = getattr(error, "strerror", None) or (from_system[1].strip() if from_system else str(error))
        hint = "choose another folder, or make this one writable"
        raise OutputError(f"{shown} cannot be written: {reason}", hint=hint) from None


def write_bytes(path: Path, data: bytes) -> None:
    write_file(path, lambda beside: beside.write_bytes(data))


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, data: Any) -> None:
    """Raises ValueError for NaN and infinity, which JSON lacks."""
    write_text(path, format_json(data, allow_nan=False) + "\n")


def format_json(data: Any, **options: Any) -> str:
    """Indented JSON with every array of numbers on one line. options: of `json.dumps`."""
    text = json.dumps(data, indent=1, **options)
    # A line break cannot be inside a JSON string, so this matches whole arrays only.
    return re.sub(r'\[\n[^][{}"]*\n *\]', lambda array: f"[{' '.join(array[0][1:-1].split())}]", text)


@contextlib.contextmanager
def lock_file(path: Path, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Lock a file or a folder against other processes: a folder to read, change and write back a file in it.

    Locks `path` itself, which needs no lock file and may be read-only. Where this block is inside one of the same lock,
    `path` does not exist, or the system or the disk does not support locks, this does nothing. on_wait(): called if
    another process has locked it.
    """
    key = path.resolve()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            if fcntl is not None and key not in _locked.get():
                handle = os.open(path, os.O_RDONLY)
                stack.callback(os.close, handle)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    on_wait()
                    fcntl.flock(handle, fcntl.LOCK_EX)
                stack.callback(_locked.reset, _locked.set(_locked.get() | {key}))
        yield


def read_text(path: Path, encoding: str = "utf-8-sig") -> str:
    """The text of a file. Raises ValueError if it is not UTF-8, OSError if it is missing, too large or no file."""
    if path.exists() and not path.is_file():
        kind = "folder" if path.is_dir() else "pipe or a device"  # which may have no end
        raise OSError(errno.EINVAL, f"it is a {kind}, not a file")
    if path.stat().st_size > LARGEST:
        raise OSError(errno.EFBIG, f"it has more than {LARGEST:,} bytes")
    return path.read_bytes().decode(encoding)  # Windows editors write a mark in front


def parse_plain(parse: Callable[[str], Any], text: str, *, finite: bool = False) -> Any:
    """`parse(text)`, of JSON or TOML. Raises ValueError if it is neither, nested too deeply, or has huge integers.

    finite: reject NaN and infinity, too.
    """
    try:
        data = parse(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None
    level = [data]
    for _ in range(DEEPEST):
        if any(isinstance(value, int) and abs(value) > LARGEST_INT for value in level):
            raise ValueError("an integer has more than 64 bits")
        if finite and not all(math.isfinite(value) for value in level if isinstance(value, float)):
            raise ValueError("a number is not finite")
        tables = [list(value.values()) if isinstance(value, dict) else value for value in level]
        level = [inner for table in tables if isinstance(table, list) for inner in table]
    if level:
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    return data


def read_json(path: Path, parse: Callable[[str], Any] = json.loads, encoding: str = "utf-8-sig") -> Any:
    """Raises ArtifactError if `path` is missing, not JSON, or no file that `read_text` and `parse_plain` accept."""
    try:
        return parse_plain(parse, read_text(path, encoding), finite=True)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}", hint="check the path") from None
    except ValueError as error:
        raise ArtifactError(f"{path} cannot be read as JSON: {error}", hint="create or copy it again") from None


def read_record(path: Path, kind: Any = Any) -> Any:
    """The content of a JSON file; None if there is none. Raises ArtifactError if it is not of the type `kind`."""
    from vitcompress.io.validation import check_record  # imports pydantic

    return check_record(path, read_json(path), kind) if path.is_file() else None


def decode_json_values(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Metadata with JSON values decoded. Other values, which other tools may write, stay text."""
    data: dict[str, Any] = dict(metadata)
    for key, text in metadata.items():
        with contextlib.suppress(ValueError):
            data[key] = parse_plain(json.loads, text)
    return data


def json_key(data: Any) -> str:
    """12 hex digits of the SHA-256 of JSON data; the order of its keys has no effect."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_changed_files(sidecar: Path, names: Collection[str] | None = None) -> dict[str, str]:
    """One sentence for each file that is missing or whose SHA-256 is not the one in the sidecar's `files`.

    names: of the files to check; None: all.
    """
    data = read_json(sidecar)
    files = data.get("files") if isinstance(data, dict) else None
    if not isinstance(files, dict):
        return {sidecar.name: f"{sidecar.name} does not list its files"}
    wrong = {}
    for name, recorded in ((name, files[name]) for name in files if names is None or name in names):
        path = sidecar.parent / name
        actual = file_sha256(path) if path.is_file() else "missing"
        if actual != recorded:
            wrong[name] = f"{name}: sha256 is {actual[:12]}, {sidecar.name} records {str(recorded)[:12]}"
    return wrong
