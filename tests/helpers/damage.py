"""Damage exported files, as a faulty exporter or a person with an editor would."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from vitcompress.exporters.sidecar import amend_sidecar
from vitcompress.io.files import file_sha256


def add_unused_weight(path: Path) -> None:
    """Add a weight to the ONNX file `path` that its graph does not read; its sidecar has the new hash."""
    stored = onnx.load(str(path))
    stored.graph.initializer.append(numpy_helper.from_array(np.random.default_rng(0).random((48, 16)), "left_over"))
    onnx.save(stored, str(path))
    amend_sidecar(path, files={path.name: file_sha256(path)})


def edits(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Descriptions and copies of `data` with one key, at any depth, removed or of another type."""
    for keys, value in list(_places(data)):
        name = ".".join(map(str, keys))
        yield f"{name} removed", _changed(data, keys, None)
        for wrong in (
            "text" if isinstance(value, int) else 7,
            ["text"] if isinstance(value, dict) else {"a": "b"},
            None,
        ):
            yield f"{name} = {wrong!r}", _changed(data, keys, (wrong,))


def _places(value: Any, keys: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if keys:
        yield keys, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from _places(part, (*keys, key))


def _changed(data: dict[str, Any], keys: tuple[str | int, ...], value: tuple[Any] | None) -> dict[str, Any]:
    copy: Any = deepcopy(data)
    inner = copy
    for key in keys[:-1]:
        inner = inner[key]
    if value is None:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value[0]
    return dict(copy)
