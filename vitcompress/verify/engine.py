"""What can be checked of an engine without running it: its bytes, its plan, and the ONNX file that it was built from.

An engine's format is not documented, but engines keep most matrices as they are: of a pair that was folded the product
must be found among its bytes, and neither of the two.

Whether the engine itself answers as the model does is asked where it can be run, by `exporters.agreement`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitcompress.errors import ArtifactError
from vitcompress.exporters.precision import HALF
from vitcompress.exporters.sidecar import mismatches, read_sidecar, sidecar_path
from vitcompress.io.checks import Check, compared, listed
from vitcompress.io.files import file_sha256
from vitcompress.io.tensors import load_tensors
from vitcompress.plan import Plan
from vitcompress.surgery.shapes import PlannedTensor
from vitcompress.verify.onnx import onnx_checks, plan_check
from vitcompress.verify.weights import CHECK, data_of, plan_rows

ALIKE = ("precision", "opset")  # what two engines must have in common for their sizes to be compared, and of the build:
BUILT_ALIKE = ("runtime_version", "sm", "batch", "tf32", "optimization_level", "hardware_compatible")
KNOWN = {field.name for field in fields(Check)}


def engine_checks(path: Path, model: nn.Module | None, digest: str, images: Tensor) -> Iterator[Check]:
    """Checks of the engine `path` being `model`, or only of its file where that is None (the dense model's engine)."""
    sidecar, name, known = sidecar_path(path), path.name, _known(path)
    missing = () if sidecar.is_file() else (f"{sidecar.name} is missing: nobody vouches for the engine",)
    yield listed(f"{name}.file", (*missing, *mismatches(path)), f"sha256 as in {sidecar.name}")
    if model is None or known is None:
        return
    yield from _source(path, model, digest, images, known)
    for check in known.get("build", {}).get("truth", ()):  # asked of the engine when it was built
        kept = {key: value for key, value in check.items() if key in KNOWN}
        yield Check(**{**kept, "name": f"{name}.{check['name'].removeprefix('engine.')}"})


def _known(path: Path) -> dict[str, Any] | None:
    """What is recorded of an engine, None where nothing is that can be used."""
    try:
        return read_sidecar(path)
    except ArtifactError:
        return None


def _source(path: Path, model: nn.Module, digest: str, images: Tensor, known: dict[str, Any]) -> Iterator[Check]:
    """The ONNX file that the engine was built from: the recorded one, and the model?"""
    source, name = path.with_name(f"{path.name}.onnx"), f"{path.name}.source"
    if not source.is_file():
        yield Check(name, "not_run", detail="the ONNX file that it was built from was not kept")
        return
    recorded = known.get("source", {}).get("sha256")
    wrong = [] if file_sha256(source) == recorded else [f"{source.name} is not the file that it was built from"]
    yield listed(name, wrong, f"built from {source.name}, sha256 {str(recorded)[:12]}")
    yield from onnx_checks(model, source, images, name=name)
    yield plan_check(source, digest, name)


def engine_weights(path: Path, model: nn.Module, plan: Plan, unfolded: Path) -> Iterator[Check]:
    """What the bytes of the engine `path` tell of the weights of `model`, the deployed one.

    unfolded: the weights before folding, as the run kept them.
    """
    known = _known(path)
    if known is None:
        return
    rows = [row for row in plan_rows(plan) if row.change == "folded" and len(row.planned or ()) == 2]
    if rows and unfolded.is_file():
        yield _folded(path, model, rows, load_tensors(unfolded), known)
    if not plan.kept:
        yield from _size(path, known)


def _folded(
    path: Path, model: nn.Module, rows: Sequence[PlannedTensor], before: dict[str, Tensor], known: dict[str, Any]
) -> Check:
    """The products of folded pairs are in the engine, in its own precision, and no layer of such a pair is."""
    name, engine = f"{CHECK}.{path.name}", path.read_bytes()
    kinds = {torch.float32, HALF.get(str(known.get("precision")), torch.float32)}  # an island is fp32
    after = model.state_dict()
    products = [row.name for row in rows if _holds(engine, after[row.name], kinds)]
    pairs = [part for row in rows for part in row.dense if part in before]
    left = [part for part in pairs if _holds(engine, before[part], kinds)]
    if not products and not left:
        why = f"none of {len(rows)} folded layers is found as it is: the engine keeps them in a form of its own"
        return Check(name, "not_run", detail=why)
    told = f"{len(products)} of {len(rows)} folded layers found as they are"
    told += f", none of the {len(pairs)} that they stand for" if pairs else "; what they stand for was not kept"
    return listed(name, (f"{part} was folded, and is in the engine" for part in left), told)


def _holds(engine: bytes, matrix: Tensor, kinds: set[torch.dtype]) -> bool:
    """Whether the values of a matrix, or of its transpose, lie in the engine in one of these types."""
    return any(data_of(way.to(kind)) in engine for kind in kinds for way in (matrix, matrix.T))


def _size(path: Path, known: dict[str, Any]) -> Iterator[Check]:
    """With layers removed and none narrowed, it must not be larger than the dense model's engine built alike."""
    dense = path.with_name(path.name.replace("model", "dense", 1))
    other = _known(dense)
    if dense == path or not dense.is_file() or other is None:
        return
    same = all(known.get(key) == other.get(key) for key in ALIKE)
    same &= all(known.get("build", {}).get(key) == other.get("build", {}).get(key) for key in BUILT_ALIKE)
    if same:
        size, limit = path.stat().st_size, dense.stat().st_size
        yield compared(f"{CHECK}.{path.name}.bytes", float(size), float(limit), f"bytes, against those of {dense.name}")
