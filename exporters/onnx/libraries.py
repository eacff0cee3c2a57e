"""The native libraries of ONNX Runtime's execution providers: load them, and report what is missing."""

import contextlib
import importlib
import io
import logging
import os
import re
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from vitcompress.errors import GPU_ERROR, OUT_OF_MEMORY, ArtifactError, DeviceError, OutputError, first_line
from vitcompress.io.hardware import package_versions

MISSING = re.compile(r"(\S+): cannot open shared object file")
SOURCE_LOCATION = re.compile(r"(?:^|(?<=Status Message: ))/\S+:\d+ .*?\)(?: const)? ")
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
CAPTURE_LOCK = threading.RLock()
BUILDS = ("onnxruntime-gpu", "onnxruntime")  # the distributions of ONNX Runtime, for CUDA and for the CPU only
INSTALL = "pip install 'onnxruntime-gpu!=1.27.*' (with a GPU) or pip install onnxruntime (without)"


@cache
def load_onnxruntime() -> Any:
    """The package of either build, imported at its first use. Logs an error if both are installed.

    Raises DeviceError if there is none, or if it cannot be imported: 1.27 of the build for CUDA needs CUDA 13.
    """
    conflict = find_conflict()
    try:
        import onnxruntime
    except (ImportError, AttributeError) as error:  # AttributeError: files of two builds
        raise DeviceError(f"ONNX Runtime cannot be imported: {first_line(error)}", hint=conflict or INSTALL) from None
    if conflict:
        logging.getLogger("vitcompress").error(conflict)  # the command line hides warnings
    return onnxruntime


def unavailable() -> str | None:
    """Why ONNX Runtime cannot be used here, and the remedy; None if it can."""
    try:
        load_onnxruntime()
    except DeviceError as error:
        return error.sentence()
    return None


def find_conflict() -> str | None:
    """A message that both builds are installed, with the remedy; None if at most one is."""
    builds = [" ".join(build) for build in package_versions(BUILDS).items()]
    if len(builds) < 2:
        return None
    remedy = f"pip uninstall -y {' '.join(BUILDS)}, then {INSTALL}"
    return f"{' and '.join(builds)} are both installed and overwrite each other: {remedy}"


@cache
def load_cuda() -> None:
    """Load CUDA's libraries from their packages: the provider itself searches only the system's paths."""
    with contextlib.redirect_stdout(io.StringIO()):  # what is missing is reported when the session is created
        load_onnxruntime().preload_dlls()


@cache
def load_tensorrt() -> None:
    load_cuda()
    with contextlib.suppress(ImportError, OSError):
        importlib.import_module("tensorrt")  # loads its libraries


def prepare_cache(folder: Path) -> Path:
    """Create the folder in which a provider stores what it builds, unless it exists.

    Raises OutputError if it cannot be created, or if other users can write there: its files are executed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        message = f"the cache folder {folder} cannot be created: {error.strerror}"
        raise OutputError(message, hint="choose another --engine-cache") from None
    if os.name == "posix" and (status.st_uid != os.geteuid() or status.st_mode & WRITABLE_BY_OTHERS):
        message = f"others can write to the cache folder {folder}, whose files are executed"
        raise OutputError(message, hint=f"chmod go-w {folder}, or choose a folder of your own")
    return folder.resolve()


@contextlib.contextmanager
def capture_stderr() -> Iterator[list[str]]:
    """Capture the lines that native libraries write to the process's standard error, if any, until the block ends.

    All threads share one standard error: a second block waits.
    """
    lines: list[str] = []
    with CAPTURE_LOCK, contextlib.ExitStack() as stack:
        try:
            stderr = os.dup(2)
        except OSError:
            yield lines
            return
        stack.callback(os.close, stderr)
        file = stack.enter_context(tempfile.TemporaryFile())
        flush = (lambda: None) if sys.stderr is None else sys.stderr.flush
        flush()
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            flush()
            os.dup2(stderr, 2)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


def missing_library(lines: list[str]) -> str | None:
    """The missing library that a provider's messages name, as a phrase; None if they name none."""
    match = MISSING.search("\n".join(lines))
    return match and f"{match[1]} is missing"


@contextlib.contextmanager
def run_errors(what: str) -> Iterator[None]:
    """Raise ArtifactError that ONNX Runtime cannot run `what`, unless its error is about this machine."""
    try:
        yield
    except Exception as error:  # ONNX Runtime's exceptions have no other common base class
        if OUT_OF_MEMORY.search(str(error)) or GPU_ERROR.search(str(error)):
            raise
        message = f"ONNX Runtime cannot run {what}: {error_text(error)}"
        raise ArtifactError(message, hint="export it again, with a dynamic batch") from None


def error_text(error: Exception) -> str:
    """The first line of ONNX Runtime's error, without locations in its source."""
    return SOURCE_LOCATION.sub("", first_line(error))
