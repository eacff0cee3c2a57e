"""Check a TensorRT engine without running it: its source, the folded layers in it, and its layers.

The format of engines is not documented, but engines store most matrices unchanged: the product of a folded pair must
be among the bytes of the engine, and neither matrix of the pair.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor, nn

from vitcompress.exporters.precision import HALF
from vitcompress.exporters.sidecar import usable_sidecar
from vitcompress.exporters.tensorrt.export import source_path
from vitcompress.io.checks import Check, problem_check
from vitcompress.io.files import file_sha256
from vitcompress.io.tensors import load_tensors, tensor_bytes
from vitcompress.surgery.shapes import PlannedTensor
from vitcompress.verify.outputs import PlannedOriginal
from vitcompress.verify.weights import WEIGHTS


def engine_checks(path: Path, original: PlannedOriginal) -> Iterator[Check]:
    """Compare the engine `path` with its model. Without a usable sidecar, nothing can be compared."""
    if not (sidecar := usable_sidecar(path)):
        return
    source, name, recorded = source_path(path), f"{path.name}.source", sidecar["source"].get("sha256")
    if source.is_file():
        wrong = [] if file_sha256(source) == recorded else [f"the engine was not built from this {source.name}"]
        yield problem_check(name, wrong, f"built from {source.name}, sha256 {str(recorded)[:12]}")
    else:
        yield Check(name, "not_run", detail="the ONNX file that the engine was built from was not kept", applies=False)
    folded = [row for row in original.rows if row.change == "folded" and len(row.planned or ()) == 2]
    if folded and original.unfolded is not None and original.unfolded.is_file():
        yield _folded_check(path, original.model, folded, load_tensors(original.unfolded), str(sidecar["precision"]))


def inspector_checks(path: Path) -> Iterator[Check]:
    """The checks of the engine's layers, which the inspector of TensorRT made when the engine was built."""
    for check in usable_sidecar(path).get("build", {}).get("truth", ()):
        known = {field.name: check[field.name] for field in fields(Check) if field.name in check}
        yield Check(**{**known, "name": f"{path.name}.{check['name'].removeprefix('engine.')}"})


def _folded_check(
    path: Path, model: nn.Module, rows: Sequence[PlannedTensor], before: Mapping[str, Tensor], precision: str
) -> Check:
    """Check that the engine stores the products of folded pairs, in its precision, and no layer of such a pair."""
    name, engine = f"{WEIGHTS}.{path.name}", path.read_bytes()
    dtypes = {torch.float32, HALF.get(precision, torch.float32)}

    def stores(matrix: Tensor) -> bool:
        return any(tensor_bytes(layout.to(dtype)) in engine for dtype in dtypes for layout in (matrix, matrix.T))

    after = model.state_dict()
    products = sum(stores(after[row.name]) for row in rows)
    pairs = [part for row in rows for part in row.dense if part in before]
    left = [part for part in pairs if stores(before[part])]
    if not products and not left:
        detail = f"the engine stores none of {len(rows)} folded layers unchanged, but in an undocumented format"
        return Check(name, "not_run", detail=detail)
    others = f"none of the {len(pairs)} layers that they replace" if pairs else "the layers before folding are missing"
    detail = f"{products} of {len(rows)} folded layers are in the engine, {others}"
    return problem_check(name, (f"{part} was folded, but is in the engine" for part in left), detail)
