"""What is known about an exported file: a record, and the sidecar `<file>.json` beside it that carries it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitcompress.checkpoint import read_json, write_json

FORMAT = 1


@dataclass(frozen=True)
class Exported:
    """A file that a runtime can run. `files`: SHA-256 of it and of its data files; `bytes` counts all of them."""

    path: Path
    format: str
    precision: str
    sha256: str
    bytes: int
    files: dict[str, str]
    opset: int
    opset_reason: str
    metadata: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": self.path.name}


@dataclass(frozen=True)
class Exporter:
    """One target format. `unavailable()` says why this machine cannot write it, None when it can.

    check(precision, opset): raises InputError for settings that the format does not offer, before any work.
    """

    name: str
    suffix: str
    unavailable: Callable[[], str | None]
    export: Callable[..., Exported]
    check: Callable[[str, int | None], None]


def sidecar_path(path: Path) -> Path:
    """`model.onnx` -> `model.onnx.json`"""
    return path.with_name(f"{path.name}.json")


def write_sidecar(exported: Exported) -> None:
    write_json(sidecar_path(exported.path), {"sidecar_format": FORMAT, **exported.to_dict()})


def read_sidecar(path: Path) -> dict[str, Any] | None:
    """What was recorded about the exported file `path`, None when nothing was."""
    sidecar = sidecar_path(path)
    return dict(read_json(sidecar)) if sidecar.is_file() else None
