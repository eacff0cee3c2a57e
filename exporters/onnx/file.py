"""Read ONNX files that are not trusted: the model, its tensors, and facts about its graph. Nothing is executed."""

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import torch
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped,unused-ignore]
from onnx import numpy_helper

from vitcompress.errors import ArtifactError, first_line
from vitcompress.exporters.base import Contents, Stored
from vitcompress.io.text import format_shape

IDLE = ("Identity", "Dropout")
PRODUCTS = ("MatMul", "Gemm", "Conv")
# Operator -> the attribute that changes outputs less than low precisions do, and its default.
SETTINGS: dict[str, tuple[str, object]] = {"LayerNormalization": ("epsilon", 1e-5), "Gelu": ("approximate", "none")}
INDEX = (onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL)
LARGEST_SIZE = 2**14  # of an input
LONGEST_LIST = 64  # numbers or characters in an attribute of a node


@dataclass(frozen=True)
class Facts:
    """Facts about a graph.

    weights: sorted shapes of the constant operands of all matrix products and convolutions. Those of linear layers are
        (smaller, larger), because exporters store them in either order.
    layers: number of those in `SETTINGS` by `layer_name`. no_work: nodes that return their input. zero_products: those
        with a constant of zeros.
    """

    operators: Counter[str]
    layers: Counter[str]
    weights: tuple[tuple[int, ...], ...]
    no_work: tuple[str, ...]
    zero_products: tuple[str, ...]


def read_onnx(path: Path) -> Any:
    """The model protobuf of `path`; its external data stays on disk.

    Raises ArtifactError for a file that is not ONNX, with impossible sizes, or with external data elsewhere.
    """
    try:
        model = onnx.load(str(path), load_external_data=False)
        if not model.ir_version or not model.graph.node or not model.graph.output:
            raise ValueError("it has no graph")
        for value in model.graph.input:  # ONNX Runtime takes negative sizes for dynamic ones
            sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            if wrong := [size for size in sizes if not 0 <= size <= LARGEST_SIZE]:
                raise ValueError(f"its input {value.name:.60} has a size {wrong[0]}, not in 0 to {LARGEST_SIZE}")
    except (DecodeError, ValueError, OSError) as error:
        raise ArtifactError(f"{path} is not an ONNX file: {error}", hint="copy or export it again") from None
    for tensor in _find_messages(model, onnx.TensorProto):
        if tensor.data_type not in onnx.helper.get_all_tensor_dtypes():
            message = f"{path} stores the tensor {tensor.name:.60} in the type {tensor.data_type}, which is unknown"
            raise ArtifactError(message, hint="copy or export it again")
        _check_location(path, tensor)
    return model


def _check_location(path: Path, tensor: Any) -> None:
    """External data must be in the model's own folder; otherwise a file could read any other file of this machine."""
    if (place := location(tensor)) is None:
        return
    folder = path.resolve().parent
    if not place or "\0" in place or Path(place).is_absolute() or not (folder / place).resolve().is_relative_to(folder):
        message = f"{path} stores the tensor {tensor.name} in {place!r}, outside its own folder"
        raise ArtifactError(message, hint="do not run it; export it again from a source that you trust")
    if not os.path.isfile(folder / place):  # noqa: PTH113 - the name may be too long
        raise ArtifactError(f"{path} needs the file {place} beside it, which is missing", hint="copy both files")


def _find_messages(message: Any, kind: type) -> Iterator[Any]:
    """Every message of a `kind` inside a protobuf, at any depth, as in nested graphs, functions and sparse tensors."""
    for field, value in message.ListFields():
        for part in () if field.message_type is None else (value,) if isinstance(value, Message) else value:
            if isinstance(part, kind):
                yield part
            yield from _find_messages(part, kind)


def location(tensor: Any) -> str | None:
    """The file that holds a tensor's values, empty if it is not specified; None for values inside the model."""
    return _external(tensor).get("location", "") if tensor.data_location == onnx.TensorProto.EXTERNAL else None


def _external(tensor: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def metadata(model: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def read_contents(path: Path) -> Contents:
    """The tensors of the ONNX file `path`. Raises ArtifactError like `read_onnx`, and for damaged tensors."""
    model = read_onnx(path)
    tensors, stored = list(_find_messages(model, onnx.TensorProto)), []
    named = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = [node for node in model.graph.node if node.input and _decodes(node, named)]
    scales = {name for node in nodes for name in node.input[1:]}
    quantized = {node.input[0]: partial(_dequantize, node, named, path.parent) for node in nodes}
    for number, tensor in enumerate(tensors):
        place = number if location(tensor) is None else tuple(sorted(_external(tensor).items()))
        values, shape = lambda tensor=tensor: _read_array(tensor, path.parent).tobytes(), tuple(tensor.dims)
        size = math.prod(shape) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        index = tensor.data_type in INDEX or tensor.name in scales
        stored.append(Stored(tensor.name, shape, size, place, values, index, quantized.get(tensor.name)))
    attributes = _find_messages(model, onnx.AttributeProto)
    lists = (a.name for a in attributes if max(map(len, (a.floats, a.ints, a.s, b"".join(a.strings)))) > LONGEST_LIST)
    size = sum((path.parent / name).stat().st_size for name in {path.name, *filter(None, map(location, tensors))})
    opset = next((entry.version for entry in model.opset_import if not entry.domain), 0)
    uint8 = any(value.type.tensor_type.elem_type == onnx.TensorProto.UINT8 for value in model.graph.input)
    return Contents(tuple(stored), size, {**metadata(model), "opset": str(opset)}, tuple(lists), uint8)


def _decodes(node: Any, named: Mapping[str, Any]) -> bool:
    """Whether `node` computes values from a stored tensor that has fewer bits, with stored parameters."""
    is_stored = named.keys() >= {*node.input}
    half = is_stored and named[node.input[0]].data_type == onnx.TensorProto.FLOAT16
    return is_stored and (node.op_type == "DequantizeLinear" or (node.op_type == "Cast" and half))


def _dequantize(node: Any, named: Mapping[str, Any], folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The values that DequantizeLinear, or Cast from fp16, gives a tensor, and half the distances between them."""
    stored, *others = (_read_array(named[name], folder) for name in node.input)
    axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
    if any(values.shape not in ((), (1,), stored.shape[axis:][:1]) for values in others):
        message = f"the scale of {node.input[0]} does not fit its shape {format_shape(stored.shape)}"
        raise ArtifactError(message, hint="copy or export the file again")
    shape = [-1 if number == axis % stored.ndim else 1 for number in range(stored.ndim)]
    fitted = (values.astype(np.float64).reshape(shape if values.ndim else []) for values in others)
    scale, zero = next(fitted, np.array(1.0)), next(fitted, np.array(0.0))
    return represented_values(stored, scale, zero)


def represented_values(stored: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(`stored` - `zero`) * `scale`, and half the distance from each of these values to the next one."""
    values = stored.astype(np.float64)
    if "int" in stored.dtype.name:  # NumPy has no kind for int4
        return (values - zero) * scale, 0.5 * scale
    about = torch.finfo(getattr(torch, stored.dtype.name))
    sizes = np.maximum(np.abs(values), about.smallest_normal)
    return (values - zero) * scale, 2.0 ** np.floor(np.log2(sizes)) * about.eps / 2 * scale


def _read_array(tensor: Any, folder: Path) -> np.ndarray:
    if location(tensor) is not None:  # onnx loads external data into the protobuf: let it be a copy, which is freed
        tensor, source = onnx.TensorProto(), tensor
        tensor.CopyFrom(source)
    try:
        values: np.ndarray = numpy_helper.to_array(tensor, base_dir=str(folder))
    except (ValueError, OSError, onnx.checker.ValidationError) as error:  # the last for links to external data
        message = f"the tensor {tensor.name} cannot be read: {first_line(error)}"
        raise ArtifactError(message, hint="copy or export the file again") from None
    return values


def graph_facts(path: Path) -> Facts:
    """Facts about the graph of `path`. Raises ArtifactError like `read_onnx`."""
    read_onnx(path)
    nodes = list(onnx_ir.load(path).graph)
    operands = (value for node in nodes if node.op_type in PRODUCTS for value in node.inputs[1:2] if value)
    weights = (_source(value).const_value for value in operands)
    factors = [(node, value) for node in nodes if node.op_type in ("Mul", *PRODUCTS) for value in node.inputs[:2]]
    empty_pads = [node for node in nodes if node.op_type == "Pad" and any(map(is_zero, node.inputs[1:2]))]
    return Facts(
        operators=Counter(node.op_type for node in nodes),
        layers=Counter(_layer_name(node) for node in nodes if node.op_type in SETTINGS),
        weights=tuple(sorted(weight_key(weight.shape.numpy()) for weight in weights if weight is not None)),
        no_work=tuple(node.name or node.op_type for node in nodes if node.op_type in IDLE or node in empty_pads),
        zero_products=tuple(str(node.name or value.name) for node, value in factors if value and is_zero(value)),
    )


def layer_name(operator: str, value: object) -> str:
    """An operator with the value of its attribute in `SETTINGS`: `LayerNormalization with epsilon 1e-06`."""
    return f"{operator} with {SETTINGS[operator][0]} {f'{value:.6g}' if isinstance(value, float) else value}"


def _layer_name(node: onnx_ir.Node) -> str:
    name, default = SETTINGS[node.op_type]
    return layer_name(node.op_type, getattr(node.attributes.get(name), "value", default))


def weight_key(sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of a weight as in `Facts.weights`."""
    return tuple(sorted(sizes) if len(sizes) == 2 else sizes)


def _source(value: onnx_ir.Value) -> onnx_ir.Value:
    """The stored tensor of a value that is dequantized, converted or reshaped, other values as they are."""
    node, kinds = value.producer(), ("DequantizeLinear", "Cast", "Reshape")
    return node.inputs[0] or value if node is not None and node.op_type in kinds else value


def is_zero(value: onnx_ir.Value | None) -> bool:
    """Whether a value is a constant of zeros. As a factor it means that something was masked instead of removed."""
    constant = None if value is None else value.const_value
    return constant is not None and constant.size > 0 and not constant.numpy().any()
