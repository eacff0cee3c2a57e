"""OpenVINO itself: loaded without its telemetry, with one core for the whole process."""

import contextlib
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

TELEMETRY = "openvino_telemetry"


@cache
def load() -> Any:
    """The package.

    Where its telemetry package is installed, it writes an identifier to the home folder and reports each import and
    each conversion over the network; where that package is missing, it uses a stub of its own. So OpenVINO is imported
    as if the telemetry package were missing.
    """
    with _missing(TELEMETRY):
        import openvino  # noqa: TID251 - this is the one door
    return openvino


@contextlib.contextmanager
def _missing(name: str) -> Iterator[None]:
    """The module `name` cannot be imported inside the block; code that has imported it already keeps it."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


@cache
def core() -> Any:
    """The one core of this process, which ends with it.

    A core takes over the thread's alternate signal stack and gives back, at its end, the one that it found. Of two
    cores, the second restores the stack of the first one, whose memory is freed by then, and the next signal kills the
    process.
    """
    return load().Core()
