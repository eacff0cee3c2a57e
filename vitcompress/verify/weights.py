"""From the plan to the bytes of a file: no weight is larger than was planned, and none is there that the model lacks.

plan -> torch: the sizes that the plan leaves, by arithmetic, against those of the model that is deployed. torch ->
file: every tensor in an exported file is, by its values, one of the model's, as it is or transposed, or is explained;
so a weight of the dense model, a masked one, or a pair that should be one cannot hide in the file. bytes: what is in
the file beside those tensors is no more than its graph and its constants take.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitcompress.errors import ArtifactError
from vitcompress.exporters.contents import Stored, contents, ir_metadata
from vitcompress.exporters.sidecar import exported_files
from vitcompress.exporters.uint8 import tensors_of
from vitcompress.io.checks import Check, compared, listed
from vitcompress.io.files import decoded
from vitcompress.io.text import sized
from vitcompress.models.create import create_on_meta
from vitcompress.plan import Plan
from vitcompress.surgery.shapes import PlannedTensor, Shape, planned_tensors
from vitcompress.verify.onnx import export_settings, stored_module

CHECK = "weights"
READABLE = (".onnx", ".xml")  # files whose tensors can be told from their bytes
SMALL = 64  # values: sizes and scales that a graph computes with
FEW = 16  # different values: a mask's
INDEX = (torch.int64, torch.int32, torch.bool)  # as graphs index and choose with
WIDTHS = (1, 2, 4, 8)  # bytes of one value


@dataclass(frozen=True)
class Account:
    """Where the bytes of an exported file go.

    found: tensor of the model -> what holds its values. constants: what the graph computes with beside them. wrong:
    what should not be there, or is not, a phrase each. size: of the file with its data files. graph: what of it no
    tensor takes.
    """

    found: Mapping[str, Stored]
    constants: tuple[Stored, ...]
    wrong: tuple[str, ...]
    size: int
    graph: int

    @property
    def of_model(self) -> int:
        """Bytes of the tensors that are the model's."""
        return sum({id(tensor): tensor.own for tensor in self.found.values()}.values())

    @property
    def of_constants(self) -> int:
        return sum(tensor.own for tensor in self.constants)


# ---------------------------------------------------------------------------------------------------------- plan, torch


def plan_rows(plan: Plan) -> tuple[PlannedTensor, ...]:
    """What the plan makes of every tensor of its dense model."""
    return planned_tensors(create_on_meta(plan.arch, plan.arch_args), plan)


def plan_check(rows: Sequence[PlannedTensor], model: nn.Module) -> Check:
    """Has every tensor of `model` the size that was planned, and is there no other?"""
    sizes = _sizes(model)
    changes = {change: sum(row.change == change for row in rows) for change in ("sliced", "folded", "removed")}
    told = ", ".join(f"{count} {change}" for change, count in changes.items())
    return listed(CHECK, _deviations(rows, sizes), f"{len(sizes)} tensors of the planned sizes ({told})")


def _sizes(model: nn.Module) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _deviations(rows: Iterable[PlannedTensor], sizes: Mapping[str, Shape]) -> Iterator[str]:
    wanted = {row.name: row.planned for row in rows}
    for name in dict.fromkeys((*wanted, *sizes)):
        if wanted.get(name) != sizes.get(name):
            yield f"{name}: {_sized(wanted.get(name))} planned, {_sized(sizes.get(name))} in the model"


def _sized(shape: Shape | None) -> str:
    return "none" if shape is None else sized(shape)


# ---------------------------------------------------------------------------------------------------------------- files


def account(stored: nn.Module, path: Path, rows: Iterable[PlannedTensor] = ()) -> Account:
    """Where the bytes of the file `path` go, which was exported from the module `stored` (precision and all).

    rows: what the plan changed, to tell which dense weight hides.

    Raises:
        ArtifactError: the file is damaged.
    """
    held = contents(path)
    tensors = tensors_of(stored)
    found, left = _by_value(tensors, held.tensors)
    missing = {name: tensor for name, tensor in tensors.items() if name not in found}
    sources = {id(tensor): source for tensor in left if (source := _source(tensor, missing))}
    constants = [tensor for tensor in left if id(tensor) in sources or _is_constant(tensor)]
    dense = {name: size for row in rows if row.change != "kept" for name, size in row.dense.items()}
    known = {id(tensor) for tensor in constants}
    foreign = [tensor for tensor in left if id(tensor) not in known]
    wrong = [f"{t.name} ({_sized(t.shape)}){_foreign(t, found, dense)}" for t in foreign]
    lost = [n for n, t in missing.items() if _is_needed(t) and n not in sources.values()]
    wrong += [f"{name} ({_sized(tuple(tensors[name].shape))}) is not in the file" for name in lost]
    wrong += [f"{name} is a long list of numbers in a node" for name in held.lists]
    return Account(found, tuple(constants), tuple(wrong), held.size, held.graph)


def _is_needed(tensor: Tensor) -> bool:
    """Whether a file must hold this tensor: exporters leave out biases of zero, and write buffers into the graph."""
    return isinstance(tensor, nn.Parameter) and bool((tensor != tensor.flatten()[0]).any())


def _by_value(tensors: Mapping[str, Tensor], held: Sequence[Stored]) -> tuple[dict[str, Stored], list[Stored]]:
    """The model's tensors with what holds the same values, and what is left of the file."""
    keys = {id(stored): (stored.index, _digest(stored.read())) for stored in held}
    places: dict[tuple[bool, bytes], list[Stored]] = {}
    for stored in held:
        places.setdefault(keys[id(stored)], []).append(stored)
    found = dict[str, Stored]()
    for name, tensor in tensors.items():
        turned = [tensor.T] if tensor.dim() == 2 else []
        ways = ((tensor.dtype in INDEX, _digest(data_of(way))) for way in (tensor, *turned))
        key = next((key for key in ways if key in places), None)
        if key is not None:  # the file may hold tensors of equal values once; what it holds too often is left over
            same = places[key]
            found[name] = same.pop(0) if len(same) > 1 else same[0]
    used = {id(stored) for stored in found.values()}
    told = {(keys[id(stored)], _sides(stored)) for stored in found.values()}
    again = {id(stored) for stored in held if not stored.own and (keys[id(stored)], _sides(stored)) in told}
    return found, [stored for stored in held if id(stored) not in used | again]


def _sides(stored: Stored) -> Shape:
    """The sizes of a tensor without those that are 1."""
    return tuple(size for size in stored.shape if size != 1)


def _source(stored: Stored, missing: Mapping[str, Tensor]) -> str | None:
    """The tensor of the model, not in the file itself, that `stored` is read from: both have the same set of values."""
    for name, tensor in missing.items():
        kind = np.dtype(f"u{tensor.element_size()}")
        if stored.size == _count(stored) * kind.itemsize >= tensor.nbytes:
            values, ours = np.frombuffer(stored.read(), kind), np.frombuffer(data_of(tensor), kind)
            if np.array_equal(np.unique(values), np.unique(ours)):
                return name
    return None


def _is_constant(stored: Stored) -> bool:
    """Whether this is a constant of the graph: indices, a few values, or a mask of few different ones.

    Weights are none of these. A tensor of zeros alone is no constant: it is a layer that was masked as a whole.
    """
    if stored.index or _count(stored) <= SMALL:
        return True
    width = stored.size // _count(stored)
    if width not in WIDTHS or stored.size != width * _count(stored):
        return False
    different = len(np.unique(np.frombuffer(stored.read(), np.dtype(f"u{width}"))))
    return 1 < different <= FEW


def _count(stored: Stored) -> int:
    return int(np.prod(stored.shape, dtype=np.int64))


def _foreign(stored: Stored, found: Mapping[str, Stored], dense: Mapping[str, Shape]) -> str:
    """What is wrong with a tensor that is not the model's."""
    values = _digest(stored.read())
    again = [name for name, other in found.items() if other.size == stored.size and _digest(other.read()) == values]
    same = [name for name, shape in dense.items() if sorted(shape) == sorted(stored.shape)]
    if again:
        return f" holds {again[0]} a second time"
    return f" is no weight of the model{f', but has the size of the dense {same[0]}' if same else ''}"


def data_of(tensor: Tensor) -> bytes:
    """The values of a tensor as bytes in C order."""
    data: bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def account_checks(found: Account, name: str) -> list[Check]:
    """Does the file hold the tensors of the model and no others, and no bytes that nothing explains?"""
    held = f"{len(found.found)} tensors of the model by their values, {len(found.constants)} constants"
    detail = (
        f"bytes beside the model's {found.of_model:,}; {found.graph:,} of the graph and {found.of_constants:,} of "
        f"constants explain them"
    )
    beside, explained = found.size - found.of_model, found.graph + found.of_constants
    return [
        listed(name, found.wrong, held),
        compared(f"{name}.bytes", float(beside), float(explained), detail),
    ]


# ---------------------------------------------------------------------------------------------------------------- table


def table(rows: Iterable[PlannedTensor], model: nn.Module, files: Mapping[str, Account]) -> dict[str, Any]:
    """As plain data: every tensor that the plan changed, from dense to each file, and where each file's bytes go."""
    sizes = _sizes(model)
    return {
        "tensors": [
            {
                "name": row.name,
                "change": row.change,
                "dense": {name: list(shape) for name, shape in row.dense.items()},
                "planned": None if row.planned is None else list(row.planned),
                "torch": list(sizes[row.name]) if row.name in sizes else None,
                "files": {name: _place(held.found[row.name]) for name, held in files.items() if row.name in held.found},
            }
            for row in rows
            if row.change != "kept"
        ],
        "files": [
            {
                "file": name,
                "bytes": held.size,
                "of_model": held.of_model,
                "of_constants": held.of_constants,
                "of_graph": held.graph,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
            }
            for name, held in files.items()
        ],
    }


def _place(stored: Stored) -> dict[str, Any]:
    return {"tensor": stored.name, "shape": list(stored.shape), "bytes": stored.size}


# --------------------------------------------------------------------------------------------------------------- folder


def weight_checks(model: nn.Module, plan: Plan, files: Iterable[Path]) -> tuple[list[Check], dict[str, Any]]:
    """Checks and table of `model`, the deployed one, and of the `files` that it was exported to."""
    rows = plan_rows(plan)
    checks, accounts = [plan_check(rows, model)], dict[str, Account]()
    for path in files:
        try:
            accounts[path.name] = account(as_exported(model, path), path, rows)
            checks += account_checks(accounts[path.name], f"{CHECK}.{path.name}")
        except ArtifactError as error:
            checks.append(Check(f"{CHECK}.{path.name}", "failed", detail=error.message))
    return checks, table(rows, model, accounts)


def readable_files(folder: Path, stem: str = "model") -> list[Path]:
    """The exported files of the deployed model, or of the `dense` one, whose tensors can be told from their bytes."""
    return exported_files(folder, stem, READABLE)


def as_exported(model: nn.Module, path: Path) -> nn.Module:
    """The module whose tensors the file `path` should hold: an IR keeps its weights in fp32 whatever it computes in."""
    if path.suffix == ".onnx":
        return stored_module(model, export_settings(path))
    told = decoded(ir_metadata(path))
    return stored_module(model, {"precision": "fp32", "islands": (), "uint8": told.get("input") == "uint8"})
