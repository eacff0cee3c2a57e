"""What an ONNX file in half precision answers where every result is rounded to it: a stand-in for a GPU.

On most CPUs ONNX Runtime has no kernels for fp16. It then computes in fp32 from one operator to the next and rounds
nothing between them, so that neither an overflow nor a loss of digits shows there; bf16 it cannot compute at all. Here
the file is asked with its casts spelled out: every operator computes in fp32, as tensor cores add up, and its result is
rounded to what the file says.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper
from torch import Tensor

from vitcompress.errors import ArtifactError
from vitcompress.exporters.onnx import file
from vitcompress.exporters.onnx.libraries import said_by
from vitcompress.exporters.runner import as_given
from vitcompress.exporters.sidecar import input_of
from vitcompress.io.files import decoded, writing

HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
GIVEN_LOW = ("Cast", "Constant", "ConstantOfShape")  # what they give is in half precision as it stands
MOVES = ("Reshape", "Transpose", "Slice", "Squeeze", "Unsqueeze", "Concat", "Split", "Gather", "Expand", "Identity")
PART = 16  # images at a time


def rounded_answers(path: Path, images: Tensor) -> Tensor:
    """Logits of the file `path` to normalised `images`, (count, channels, height, width), rounded at every step.

    Raises:
        ArtifactError: not an ONNX file, or one that ONNX Runtime cannot run.
        OutputError: weights in a file of their own, in a folder that cannot be written.
    """
    model = file.read(path)
    known = decoded(file.metadata(model))
    takes_bytes = model.graph.input[0].type.tensor_type.elem_type == TensorProto.UINT8
    with _session(path, spelled_out(model)) as session:
        name = session.get_inputs()[0].name
        parts = (as_given(part, input_of(str(path), known), uint8=takes_bytes) for part in torch.split(images, PART))
        answers = [session.run(None, {name: part})[0] for part in parts]
    return torch.from_numpy(np.concatenate(answers))


@contextmanager
def _session(path: Path, model: Any) -> Iterator[Any]:
    """A session of `model`, whose weights may lie beside `path`, in which nothing is optimised away."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    source = model.SerializeToString()
    with ExitStack() as stack:
        if file.external_files(model):
            stack.enter_context(writing(path))
            beside = stack.enter_context(NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".part"))
            beside.write(source)
            beside.flush()
            source = beside.name
        yield _opened(source, options, path)


def _opened(source: Any, options: Any, path: Path) -> Any:
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - its own exception classes share no base but this one
        raise ArtifactError(f"ONNX Runtime cannot run {path}: {said_by(error)}") from None


def spelled_out(model: Any) -> Any:
    """`model`, an ONNX protobuf, with fp32 in the place of half precision, and two casts where a result was rounded."""
    model = onnx.shape_inference.infer_shapes(model)
    graph = model.graph
    values = (*graph.input, *graph.value_info, *graph.output)
    kinds = {value.name: value.type.tensor_type.elem_type for value in values}
    nodes = []
    for tensor in graph.initializer:
        if tensor.data_type in HALF:
            name, tensor.name = tensor.name, f"{tensor.name}.low"
            nodes.append(_cast(tensor.name, name, TensorProto.FLOAT))
    for node in graph.node:
        nodes += _rounding(node, kinds)
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    return model


def _rounding(node: Any, kinds: dict[str, int]) -> Iterator[Any]:
    """A node, and the casts behind those of its results that are in half precision."""
    casts = []
    for index, name in enumerate(node.output):
        kind = kinds.get(name)
        if kind is None or kind not in HALF or node.op_type in MOVES:
            continue
        made = node.output[index] = f"{name}.made"
        if node.op_type not in GIVEN_LOW:
            casts.append(_cast(made, f"{name}.low", kind))
            made = f"{name}.low"
        casts.append(_cast(made, name, TensorProto.FLOAT))
    yield node
    yield from casts


def _cast(source: str, name: str, kind: int) -> Any:
    return helper.make_node("Cast", [source], [name], name=f"{name}.cast", to=kind)
