"""Reading ONNX files without trusting them: is it one, where does its data lie, what does its graph hold.

Both the runtimes and the verification read files through here. Nothing is executed.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]
from onnx import numpy_helper

from vitcompress.errors import ArtifactError

NO_WORK = ("Identity", "Dropout")


@dataclass(frozen=True)
class Facts:
    """What a graph holds. `weights`: sorted sizes of the constant operand of every matrix product and convolution.

    A linear layer counts as (smaller, larger) size, as exporters store weights either way round.
    """

    operators: dict[str, int]
    weights: tuple[tuple[int, ...], ...]
    no_work: tuple[str, ...]
    zero_products: tuple[str, ...]
    metadata: dict[str, str]
    opset: int


def read(path: Path) -> Any:
    """The model protobuf of `path`, its external data left on disk.

    Raises:
        ArtifactError: missing, not ONNX, or with external data outside its own folder.
    """
    if not path.is_file():
        raise ArtifactError(f"there is no file {path}", hint="`vitcompress export` writes one from a run folder")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, ValueError, OSError) as error:
        raise _not_onnx(path, str(error)) from None
    if not model.ir_version or not model.graph.node or not model.graph.output:
        raise _not_onnx(path, "it holds no graph")
    for tensor in tensors(model):
        _check_location(path, tensor)
    return model


def _not_onnx(path: Path, why: str) -> ArtifactError:
    return ArtifactError(f"{path} is not an ONNX file: {why}", hint="copy or export it again")


def _check_location(path: Path, tensor: Any) -> None:
    """External data may lie only in the model's own folder, else a file could read anything on this machine."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return
    place = location(tensor)
    folder = path.resolve().parent
    if not place or Path(place).is_absolute() or not (folder / place).resolve().is_relative_to(folder):
        raise ArtifactError(
            f"{path} keeps the tensor {tensor.name} at {place!r}, outside its own folder",
            hint="do not run it; export it again from a source that you trust",
        )
    if not (folder / place).is_file():
        raise ArtifactError(f"{path} needs the file {place} beside it, which is missing", hint="copy both files")


def tensors(model: Any) -> Iterator[Any]:
    """Every tensor of a model: of its graph, of the graphs and functions inside it."""
    for graph in _graphs(model):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for attribute in _attributes(model):
        yield from (attribute.t, *attribute.tensors)


def _graphs(model: Any) -> Iterator[Any]:
    yield model.graph
    for training in model.training_info:
        yield from (training.initialization, training.algorithm)
    for attribute in _attributes(model):
        yield from (attribute.g, *attribute.graphs)


def _attributes(model: Any) -> Iterator[Any]:
    """Every attribute of every node, inner graphs too."""
    waiting = [model.graph, *model.functions]
    waiting += [graph for training in model.training_info for graph in (training.initialization, training.algorithm)]
    while waiting:
        for node in waiting.pop().node:
            for attribute in node.attribute:
                yield attribute
                waiting += [attribute.g, *attribute.graphs]


def doc_bytes(model: Any) -> int:
    """Bytes of text that only people read."""
    nodes = [node for graph in (*_graphs(model), *model.functions) for node in graph.node]
    return sum(len(part.doc_string.encode()) for part in (model, model.graph, *model.functions, *nodes))


def long_lists(model: Any, longest: int) -> tuple[str, ...]:
    """Names of the attributes that are lists of more numbers than `longest`, which a tensor could hide in."""
    return tuple(a.name for a in _attributes(model) if max(len(a.floats), len(a.ints), len(a.s)) > longest)


def location(tensor: Any) -> str | None:
    """The file that holds a tensor's values, empty where that is not told; None for one whose values are inside."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return None
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def external_files(model: Any) -> tuple[str, ...]:
    """Names of the files that hold a model's large tensors."""
    return tuple(sorted({place for tensor in tensors(model) if (place := location(tensor))}))


def metadata(model: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def facts(path: Path) -> Facts:
    """What the graph of `path` computes with. Raises ArtifactError like `read`."""
    model = read(path)
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = model.graph.node
    return Facts(
        operators=dict(Counter(node.op_type for node in nodes)),
        weights=tuple(sorted(_weights(nodes, constants))),
        no_work=tuple(node.name or node.op_type for node in nodes if _is_idle(node, constants, path.parent)),
        zero_products=tuple(_zero_products(nodes, constants, path.parent)),
        metadata=metadata(model),
        opset=max(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")),
    )


def _weights(nodes: Iterable[Any], constants: dict[str, Any]) -> Iterator[tuple[int, ...]]:
    for node in nodes:
        if node.op_type in ("MatMul", "Gemm", "Conv") and node.input[1] in constants:
            sizes = tuple(constants[node.input[1]].dims)
            yield weight_key(sizes)


def weight_key(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of a weight in the form of `Facts.weights`."""
    return tuple(sorted(sizes)) if len(sizes) == 2 else sizes


def _is_idle(node: Any, constants: dict[str, Any], folder: Path) -> bool:
    """Whether a node passes its input on as it is."""
    if node.op_type != "Pad":
        return node.op_type in NO_WORK
    amounts = constants.get(node.input[1])
    return amounts is not None and not _values(amounts, folder).any()


def _zero_products(nodes: Iterable[Any], constants: dict[str, Any], folder: Path) -> Iterator[str]:
    """Products with a constant that is zero everywhere: something was masked instead of removed."""
    for node in nodes:
        if node.op_type in ("Mul", "MatMul", "Gemm", "Conv"):
            for name in node.input[:2]:  # the third one, of Gemm and Conv, is a bias
                tensor = constants.get(name)
                if tensor is not None and math.prod(tensor.dims) and not _values(tensor, folder).any():
                    yield node.name or name


def _values(tensor: Any, folder: Path) -> np.ndarray:
    values: np.ndarray = numpy_helper.to_array(tensor, base_dir=str(folder))
    return values
