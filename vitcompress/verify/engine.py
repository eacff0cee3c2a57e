"""Check a TensorRT engine without running it: its source, the folded layers in it, its size, and its layers.

The format of engines is not documented, but engines store most matrices unchanged: the product of a folded pair must
be among the bytes of the engine, and neither matrix of the pair.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitcompress.errors import ArtifactError
from vitcompress.exporters.precision import HALF
from vitcompress.exporters.sidecar import read_sidecar
from vitcompress.exporters.tensorrt.export import source_path
from vitcompress.io.checks import Check, limit_check, problem_check
from vitcompress.io.files import file_sha256
from vitcompress.io.tensors import load_tensors
from vitcompress.plan import Plan
from vitcompress.surgery.shapes import PlannedTensor
from vitcompress.verify.weights import CHECK, tensor_bytes

# The settings that two engines must share for their sizes to be compared.
SETTINGS = ("precision", "opset")
BUILD_SETTINGS = ("runtime_version", "sm", "batch", "tf32", "optimization_level", "hardware_compatible")
FIELDS = {field.name for field in fields(Check)}


def engine_checks(
    path: Path, model: nn.Module, plan: Plan, rows: Sequence[PlannedTensor], unfolded: Path | None
) -> Iterator[Check]:
    """Compare the engine `path` with `model`. Without a usable sidecar, nothing can be compared.

    rows: tensors of the plan. unfolded: weights before folding, as the run keeps them.
    """
    if (sidecar := _read(path)) is None:
        return
    yield _source_check(path, sidecar)
    folded = [row for row in rows if row.change == "folded" and len(row.planned or ()) == 2]
    if folded and unfolded is not None and unfolded.is_file():
        yield _folded_check(path, model, folded, load_tensors(unfolded), sidecar)
    if not plan.kept:
        yield from _size_checks(path, sidecar)


def inspector_checks(path: Path) -> Iterator[Check]:
    """The checks of the engine's layers, which the inspector of TensorRT made when the engine was built."""
    for check in (_read(path) or {}).get("build", {}).get("truth", ()):
        known = {key: value for key, value in check.items() if key in FIELDS}
        yield Check(**{**known, "name": f"{path.name}.{check['name'].removeprefix('engine.')}"})


def _read(path: Path) -> dict[str, Any] | None:
    """The sidecar, None if it is missing or cannot be used."""
    try:
        return read_sidecar(path)
    except ArtifactError:
        return None


def _source_check(path: Path, sidecar: dict[str, Any]) -> Check:
    source, name = source_path(path), f"{path.name}.source"
    if not source.is_file():
        return Check(name, "not_run", detail="the ONNX file that the engine was built from was not kept")
    recorded = sidecar["source"].get("sha256")
    wrong = [] if file_sha256(source) == recorded else [f"the engine was not built from this {source.name}"]
    return problem_check(name, wrong, f"built from {source.name}, sha256 {str(recorded)[:12]}")


def _folded_check(
    path: Path, model: nn.Module, rows: Sequence[PlannedTensor], before: dict[str, Tensor], sidecar: dict[str, Any]
) -> Check:
    """Check that the engine stores the products of folded pairs, in its precision, and no layer of such a pair."""
    name, engine = f"{CHECK}.{path.name}", path.read_bytes()
    dtypes = {torch.float32, HALF.get(str(sidecar["precision"]), torch.float32)}

    def stores(matrix: Tensor) -> bool:
        return any(tensor_bytes(layout.to(dtype)) in engine for dtype in dtypes for layout in (matrix, matrix.T))

    after = model.state_dict()
    products = sum(stores(after[row.name]) for row in rows)
    pairs = [part for row in rows for part in row.dense if part in before]
    left = [part for part in pairs if stores(before[part])]
    if not products and not left:
        detail = f"the engine stores none of {len(rows)} folded layers unchanged, but in an undocumented format"
        return Check(name, "not_run", detail=detail)
    replaced = (
        f"none of the {len(pairs)} layers that they replace" if pairs else "the layers before folding are missing"
    )
    detail = f"{products} of {len(rows)} folded layers are in the engine, {replaced}"
    return problem_check(name, (f"{part} was folded, but is in the engine" for part in left), detail)


def _size_checks(path: Path, sidecar: dict[str, Any]) -> Iterator[Check]:
    """With layers removed and none narrowed, an engine is not larger than the dense one with the same settings."""
    dense = path.with_name(path.name.replace("model", "dense", 1))
    other = _read(dense) if dense != path and dense.is_file() else None
    if other is None or any(sidecar.get(key) != other.get(key) for key in SETTINGS):
        return
    if all(sidecar["build"].get(key) == other["build"].get(key) for key in BUILD_SETTINGS):
        size, most = float(path.stat().st_size), float(dense.stat().st_size)
        yield limit_check(f"{CHECK}.{path.name}.bytes", size, most, f"bytes, at most those of {dense.name}")
