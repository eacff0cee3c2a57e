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
    each conversion over the network; where that package is missing, it uses a stub of its own. So it is kept from it.
    """
    with _missing(TELEMETRY):
        import openvino  # noqa: TID251 - this is the one door
    return openvino


@contextlib.contextmanager
def _missing(name: str) -> Iterator[None]:
    """The module `name` cannot be imported inside the block; what others have imported already stays theirs."""
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

    A core takes over the thread's alternate signal stack and gives back, at its end, the one that it found. Of two,
    the second gives back the first one's: memory that is no longer there, and the next signal kills the process.
    """
    return load().Core()
