"""Compare every tensor: its shape in the model with the plan, its values in an exported file with the model.

The plan states the shape of each tensor of the deployed model, by arithmetic on the shapes of the dense model. Each
tensor of a file must have the values of one tensor of the model, as they are or transposed, or be a constant of the
graph, as all of up to 64 values are. So no larger dense or masked weight or folded layer remains in a file unnoticed.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from vitcompress.errors import ArtifactError
from vitcompress.exporters.base import Contents, Stored
from vitcompress.exporters.options import EIGHT_BITS
from vitcompress.exporters.precision import HALF, in_fp32
from vitcompress.exporters.quantize.graph import read_quantization
from vitcompress.exporters.quantize.smooth import rescale
from vitcompress.exporters.uint8 import build_deployed, tensors_of
from vitcompress.families import family_of
from vitcompress.io.checks import Check, problem_check
from vitcompress.io.files import decode_json_values
from vitcompress.io.tensors import tensor_bytes
from vitcompress.io.text import format_shape
from vitcompress.models.arguments import shapes_of
from vitcompress.models.create import input_config
from vitcompress.surgery.shapes import PlannedTensor, Shape

WEIGHTS = "weights"  # name of the check of shapes, and first part of the names of those of files
SMALL = 64  # values: larger tensors are no scalars and shapes that a graph computes with
FEW = 16  # different values of a mask, at most
INDEX = (torch.int64, torch.int32, torch.bool)  # types that graphs index and select with


def shape_check(rows: Sequence[PlannedTensor], model: nn.Module) -> Check:
    """Check that `model` has the planned tensors, in the planned shapes, and no others."""
    shapes, planned = shapes_of(model.state_dict()), {row.name: row.planned for row in rows}
    pairs = {name: (planned.get(name), shapes.get(name)) for name in {**planned, **shapes}}
    texts = {name: ["none" if s is None else format_shape(s) for s in pair] for name, pair in pairs.items()}
    wrong = [f"{n}: {ours} planned, {theirs} in the model" for n, (ours, theirs) in texts.items() if ours != theirs]
    counts = (f"{sum(row.change == change for row in rows)} {change}" for change in ("sliced", "folded", "removed"))
    return problem_check(WEIGHTS, wrong, f"{len(shapes)} tensors have their planned shapes ({', '.join(counts)})")


@dataclass(frozen=True)
class FileTensors:
    """The tensors of an exported file.

    matches: tensor of the model -> tensor of the file with its values. constants: tensors that only the graph needs.
    problems: one phrase for each missing or unexpected tensor. size: bytes of the file and its data files.
    """

    matches: Mapping[str, Stored]
    constants: tuple[Stored, ...]
    problems: tuple[str, ...]
    size: int

    def check(self, name: str) -> Check:
        detail = f"{len(self.matches)} tensors have the values of the model, {len(self.constants)} are constants"
        return problem_check(name, self.problems, detail)

    def bytes_of(self, name: str, model: nn.Module) -> dict[str, str | int]:
        """The bytes of the file `name`: of the tensors of `model`, of constants, and of the graph."""
        places = {stored.place: stored.size for stored in self.matches.values()}
        others = {stored.place: stored.size for stored in self.constants if stored.place not in places}
        weights, constants = sum(places.values()), sum(others.values())
        parameters, graph = sum(p.numel() for p in model.parameters()), self.size - weights - constants
        parts = {"of_model": weights, "of_constants": constants, "of_graph": graph, "parameters": parameters}
        return {"file": name, "bytes": self.size, **parts}


def compare_tensors(model: nn.Module, contents: Contents, rows: Iterable[PlannedTensor] = ()) -> FileTensors:
    """Compare the tensors of a file with those of `model`, as a file with this metadata stores them.

    rows: of the plan, to name the dense tensor that has the shape of an unknown one. Raises ArtifactError for a damaged
    file, or one of another tool.
    """
    tensors = tensors_of(exported_module(model, contents.metadata))
    matches = _match(tensors, contents.tensors)
    missing = {name: tensor for name, tensor in tensors.items() if name not in matches}
    if settings := read_quantization(decode_json_values(contents.metadata)):  # other files store exact values
        matches |= _match_quantized(missing, contents.tensors, settings.half)
        missing = {name: tensor for name, tensor in missing.items() if name not in matches}
    limits = max((n for own in matches.values() for n in own.shape), default=0), max(input_config(model).size[1:])
    constants, unknown, gathered = list[Stored](), list[Stored](), set[str]()
    for stored in (stored for stored in contents.tensors if stored not in matches.values()):
        if source := _find_gathered(stored, missing, tensors):
            gathered.add(source)
        if source or _is_constant(stored, *limits):
            constants.append(stored)
        else:
            unknown.append(stored)
    dense = {name: shape for row in rows if row.change != "kept" for name, shape in row.dense.items()}
    problems = [f"{x.name} ({format_shape(x.shape)}) {_describe(x, matches, dense)}" for x in unknown]
    for name, tensor in missing.items():
        # Exporters omit biases of zero, and write buffers into the graph.
        if name not in gathered and isinstance(tensor, nn.Parameter) and (tensor != tensor.flatten()[0]).any():
            problems.append(f"{name} ({format_shape(tensor.shape)}) is not in the file")
    problems += [f"{name} is a long list of numbers in a node" for name in contents.lists]
    return FileTensors(matches, tuple(constants), tuple(problems), contents.size)


def exported_module(model: nn.Module, metadata: Mapping[str, str]) -> nn.Module:
    """The module whose tensors a file with this metadata stores: `model` in the file's precision and input type.

    Raises ArtifactError if another tool wrote the file.
    """
    known = decode_json_values(metadata)
    model = rescale(model, settings.factors) if (settings := read_quantization(known)) else model
    precision, layers, uint8 = known.get("precision", "fp32"), known.get("islands", []), known.get("input") == "uint8"
    precision = "fp32" if precision in EIGHT_BITS else precision  # compared after dequantization
    if precision not in ("fp32", *HALF) or not isinstance(layers, list):
        hint = "export it again: `vitcompress export DIR`"
        raise ArtifactError("the metadata of the file were not written by vitcompress", hint=hint)
    if precision == "fp32" and not uint8:
        return family_of(model).at_size(in_fp32(model), *input_config(model).size[1:])  # without a copy of fp32
    return build_deployed(model, input_config(model), precision, tuple(layers), uint8=uint8)


def _match(tensors: Mapping[str, Tensor], stored: Sequence[Stored]) -> dict[str, Stored]:
    """The stored tensor with the values of each tensor of the model.

    A file may store equal tensors once, or as often as the model has them.
    """

    def digest(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16).digest()

    places = defaultdict[tuple[bool, bytes], list[Stored]](list)
    for entry in stored:
        places[entry.index, digest(entry.read())].append(entry)
    matches = dict[str, Stored]()
    for name, tensor in tensors.items():
        for layout in (tensor, tensor.T) if tensor.dim() == 2 else (tensor,):
            if same := places.get((tensor.dtype in INDEX, digest(tensor_bytes(layout)))):
                matches[name] = same.pop(0) if len(same) > 1 else same[0]
                break
    return matches


def _match_quantized(tensors: Mapping[str, Tensor], stored: Sequence[Stored], half: Sequence[str]) -> dict[str, Stored]:
    """The stored tensor whose values are within half a step of each tensor of the model. half: those in fp16."""
    matches = dict[str, Stored]()
    for entry in stored:
        shapes, is_half = (entry.shape, entry.shape[::-1]), entry.size == 2 * prod(entry.shape)
        fits = (name for name, t in tensors.items() if tuple(t.shape) in shapes and (name in half) is is_half)
        # The tensor of the same name first: another one within this step, too, would then be missing for its own entry.
        names = sorted((name for name in fits if name not in matches), key=lambda own: not entry.name.startswith(own))
        if entry.dequantized is None or not names:
            continue
        values, largest_error = entry.dequantized()
        for name in names:
            tensor = tensors[name].detach().cpu().double().numpy()
            layouts = [layout for layout in (tensor, tensor.T) if layout.shape == values.shape]
            # Quotients are rounded in float32 before they are rounded to whole steps.
            rounding = 4 * np.finfo(np.float32).eps * np.abs(values)
            if any((np.abs(values - layout) <= largest_error + rounding).all() for layout in layouts):
                matches[name] = entry
                break
    return matches


def _find_gathered(stored: Stored, missing: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str | None:
    """The table whose position biases, table[index], `stored` repeats; in Swin some have the window mask."""
    count = prod(stored.shape)  # in fp32 if the attention core is, at any precision of the table
    for name, table in missing.items():
        index = tensors.get(f"{name.removesuffix('bias_table')}index")
        kinds = [kind for kind in (table.dtype, torch.float32) if stored.size == count * kind.itemsize]
        if not kinds or index is None:
            continue
        values = torch.frombuffer(bytearray(stored.read()), dtype=kinds[0])
        # torch.onnx computes results of up to 8,192 values in advance: the graph reshapes larger biases.
        rows = table.detach().cpu()[index.flatten().cpu()]
        for biases in (rows.flatten(), rows.T.flatten()) if count % rows.numel() == 0 else ():
            windows, masked = values.view(-1, rows.numel()), biases - 100.0  # by the window mask of timm's Swin
            if ((windows == biases) | (windows == masked)).all():
                return name
    return None


def _is_constant(stored: Stored, longest: int, side: int) -> bool:
    """Whether this is an index, a few values, or a mask of a few different values.

    A tensor of zeros alone is no constant: it is a masked layer. longest: axis of a weight; no scale has more values.
    side: of the image; an index with several axes has positions in it, as pooling in PVTv2 reads.
    """
    count = prod(stored.shape)
    if count <= SMALL or (stored.index and count == max(stored.shape) <= longest):
        return True
    width = stored.size // count
    if width not in (2, 4, 8) or stored.size != width * count:  # values of a byte or less are quantized weights
        return False
    values = np.unique(np.frombuffer(stored.read(), np.dtype(f"u{width}")))
    return bool(values[-1] < side) if stored.index else 1 < len(values) <= FEW


def _describe(stored: Stored, matches: Mapping[str, Stored], dense: Mapping[str, Shape]) -> str:
    """What is wrong with a stored tensor that matches none of the model."""
    values = stored.read()
    for name, other in matches.items():
        if other.size == stored.size and other.read() == values:
            return f"holds {name} a second time"
    same = next((name for name, shape in dense.items() if sorted(shape) == sorted(stored.shape)), None)
    return "is no weight of the model" + (f", but has the shape of the dense {same}" if same else "")


def weight_table(
    rows: Iterable[PlannedTensor], model: nn.Module, files: Mapping[str, FileTensors]
) -> dict[str, object]:
    """The record `weights` of verify.json: each tensor that the plan changed, in every file, and the bytes of files."""
    shapes, tensors = shapes_of(model.state_dict()), list[dict[str, object]]()
    for row in (row for row in rows if row.change != "kept"):
        matches = {name: file.matches[row.name] for name, file in files.items() if row.name in file.matches}
        stored = {name: {"tensor": own.name, "shape": own.shape, "bytes": own.size} for name, own in matches.items()}
        tensors.append({**asdict(row), "torch": shapes.get(row.name), "files": stored})
    return {"tensors": tensors, "files": [file.bytes_of(name, model) for name, file in files.items()]}
