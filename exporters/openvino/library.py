"""The OpenVINO library: loaded without its telemetry, with one `Core` per process, and its model files."""

import contextlib
import sys
from collections.abc import Iterator
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any

from vitcompress.errors import ArtifactError, MissingExtraError

TELEMETRY = "openvino_telemetry"
INFO = "vitcompress"  # key of our metadata in a model's rt_info
REMEDY = "pip install 'vitcompress[openvino]'"


def unavailable() -> str | None:
    """Why OpenVINO cannot be used here, or None."""
    return None if util.find_spec("openvino") else f"openvino is not installed ({REMEDY})"


@cache
def load() -> Any:
    """The package, imported as if its telemetry package were not installed.

    That package writes an identifier to the home folder and reports each import and each conversion over the network.
    Without it OpenVINO uses a stub of its own.
    """
    with _hide_module(TELEMETRY):
        import openvino  # noqa: TID251 - the only place that imports it
    return openvino


@contextlib.contextmanager
def _hide_module(name: str) -> Iterator[None]:
    """Importing the module `name` fails inside the block; code that has already imported it is not affected."""
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
    """The only `Core` of this process, which exists until the process ends.

    A core replaces the thread's alternate signal stack and restores the previous one when it is destroyed. With two
    cores, the second restores the stack of the first, whose memory is freed by then, and the next signal kills the
    process.
    """
    return load().Core()


def read_ir(path: Path) -> Any:
    """The model in `path`.

    Raises:
        MissingExtraError: OpenVINO is not installed.
        ArtifactError: a file is missing, or is not an OpenVINO model.
    """
    if unavailable():
        raise MissingExtraError("openvino", "openvino", need=path.name)
    if not path.is_file():
        raise ArtifactError(f"there is no file {path}", hint="`vitcompress export` writes one from a run folder")
    if not path.with_suffix(".bin").is_file():
        raise ArtifactError(f"{path} needs {path.stem}.bin beside it, which is missing", hint="copy both files")
    try:
        return core().read_model(str(path))
    except RuntimeError as error:
        raise ArtifactError(
            f"{path} is not an OpenVINO model: {error_text(error)}", hint="copy or export it again"
        ) from None


def read_metadata(model: Any) -> dict[str, str]:
    """The metadata that our exporter wrote into a model, each value as JSON text; empty for other models."""
    if not model.has_rt_info([INFO]):
        return {}
    return {key: str(value) for key, value in model.get_rt_info([INFO]).value.items()}


def error_text(error: Exception) -> str:
    """The last line of OpenVINO's message, which states the problem; earlier lines name places in its source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
