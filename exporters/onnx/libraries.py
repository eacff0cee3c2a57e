"""The native libraries behind ONNX Runtime's execution providers: loading them, and saying what is missing."""

import contextlib
import importlib
import io
import os
import re
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from importlib import util
from pathlib import Path

import onnxruntime as ort

from vitcompress.errors import DeviceError, OutputError, first_line

RTX = "NvTensorRTRTXExecutionProvider"
PLUGIN = "onnxruntime_ep_nv_tensorrt_rtx"  # the package that brings it
MISSING = re.compile(r"(\S+): cannot open shared object file")
PLACE = re.compile(r"^/\S+:\d+ .*?\)(?: const)? ")
WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
CATCHING = threading.RLock()


@cache
def load_cuda() -> None:
    """Libraries of CUDA out of their packages: the provider itself looks for them on the system's paths only."""
    with contextlib.redirect_stdout(io.StringIO()):  # what is missing is told when the session is made
        ort.preload_dlls()


@cache
def load_tensorrt() -> None:
    load_cuda()
    with contextlib.suppress(ImportError, OSError):
        importlib.import_module("tensorrt")  # loads its libraries


@cache
def load_rtx() -> None:
    """Register the provider that its package brings.

    Raises:
        DeviceError: the package is damaged, or made for another ONNX Runtime.
    """
    load_cuda()
    try:
        plugin = importlib.import_module(PLUGIN)
        ort.register_execution_provider_library(RTX, plugin.get_library_path())
    except Exception as error:  # noqa: BLE001 - whatever becomes of a library that cannot be loaded
        raise DeviceError(
            f"{RTX} cannot be loaded: {missing([str(error)]) or said_by(error)}",
            hint="pip install --upgrade onnxruntime-ep-nv-tensorrt-rtx onnxruntime-gpu (libcuda.so.1: NVIDIA's driver)",
        ) from None


def rtx_installed() -> bool:
    return util.find_spec(PLUGIN) is not None


def prepared_cache(folder: Path) -> Path:
    """The folder in which a provider may keep what it builds, made where it is not there.

    What lies in it is executed, so nobody else may be able to write there.

    Raises:
        OutputError: it cannot be made, or others can write there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = folder.stat()
    except OSError as error:
        raise OutputError(
            f"the cache folder {folder} cannot be made: {error.strerror}", hint="name another one with --engine-cache"
        ) from None
    if os.name == "posix" and (about.st_uid != os.geteuid() or about.st_mode & WRITTEN_BY_OTHERS):
        raise OutputError(
            f"others can write to the cache folder {folder}, and what lies there is executed",
            hint=f"chmod go-w {folder}, or name a folder of your own",
        )
    return folder.resolve()


@contextlib.contextmanager
def native_errors() -> Iterator[list[str]]:
    """What libraries write to the standard error of the process itself, as lines, once the block is over.

    All threads share one standard error: a second block waits. A process without a standard error has nothing written
    to it.
    """
    said: list[str] = []
    with CATCHING, contextlib.ExitStack() as stack:
        try:
            kept = os.dup(2)
        except OSError:
            yield said
            return
        stack.callback(os.close, kept)
        caught = stack.enter_context(tempfile.TemporaryFile())
        _flush()
        os.dup2(caught.fileno(), 2)
        try:
            yield said
        finally:
            _flush()
            os.dup2(kept, 2)
            caught.seek(0)
            said += caught.read().decode(errors="replace").splitlines()


def _flush() -> None:
    """Write out what Python has buffered for its standard error, if the process has one."""
    if sys.stderr is not None:
        sys.stderr.flush()


def missing(said: list[str]) -> str | None:
    """The missing library that kept a provider from loading, read from what was written; None if none is named."""
    found = next((found[1] for line in said if (found := MISSING.search(line))), None)
    return None if found is None else f"{found} is missing"


def said_by(error: Exception) -> str:
    """The first line of what ONNX Runtime raised, without the place in its source."""
    return PLACE.sub("", first_line(error))
