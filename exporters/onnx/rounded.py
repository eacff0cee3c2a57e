"""Emulate other arithmetic: the outputs of an ONNX file in half precision or int8 as other processors compute them.

On most CPUs ONNX Runtime computes fp16 in fp32 without rounding in between, so that overflows do not show, and bf16 not
at all. Here every operator computes in fp32, like tensor cores, and its result is rounded to the type in the file.
Or no result is rounded, so that errors show which roundings to half precision would hide. Without VNNI a CPU adds two
products of int8 in 16 bits, which saturate; with `unsigned_integers` it does not.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from vitcompress.exporters.onnx import file
from vitcompress.exporters.onnx.libraries import load_onnxruntime, run_errors
from vitcompress.exporters.runner import prepare_input
from vitcompress.exporters.sidecar import read_input
from vitcompress.io.files import decode_json_values

HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
ROUNDED_ALREADY = ("Cast", "Constant", "ConstantOfShape")  # their outputs have the stated type
MOVES = ("Reshape", "Transpose", "Slice", "Squeeze", "Unsqueeze", "Concat", "Split", "Gather", "Expand", "Identity")
CHUNK = 16  # images at a time


def rounded_logits(path: Path, images: Tensor, scalars: Collection[float] | None = None) -> Tensor:
    """Logits of the file `path` for normalized `images`, (count, channels, height, width), rounded at every step.

    scalars: as in `spell_out_casts`. Raises ArtifactError if ONNX Runtime cannot run the file.
    """
    model = file.read_onnx(path)
    with run_errors(str(path)):  # of shape inference
        content = spell_out_casts(model, scalars).SerializeToString()
    call = open_changed(path, content)
    return torch.cat([call(chunk)[0] for chunk in torch.split(images, CHUNK)])


def open_changed(path: Path, content: bytes, *, optimize: bool = False) -> Callable[[Tensor], list[Tensor]]:
    """`content`, the file `path` with changes, as a function from normalized images to all its outputs.

    Its weights may be in files beside `path`. optimize: with all optimizations.
    """
    ort = load_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.resolve().parent))
    with run_errors(str(path)):
        session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    config = read_input(str(path), decode_json_values(session.get_modelmeta().custom_metadata_map))
    name, uint8 = session.get_inputs()[0].name, session.get_inputs()[0].type == "tensor(uint8)"

    def call(images: Tensor) -> list[Tensor]:
        data = {name: prepare_input(images, config, uint8=uint8)}
        with run_errors(str(path)):
            return [*map(torch.from_numpy, session.run(None, data))]

    return call


def spell_out_casts(model: Any, scalars: Collection[float] | None = None) -> Any:
    """`model`, an ONNX protobuf, in fp32, with two casts after each result that was rounded to half precision.

    scalars: round no result, and take these numbers instead of the scalars of the file that are equal after rounding.
    """
    model = onnx.shape_inference.infer_shapes(model)
    graph = model.graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info, *graph.output)}
    nodes = []
    for tensor in graph.initializer:
        if tensor.data_type in HALF:
            name, tensor.name = tensor.name, f"{tensor.name}.low"
            if scalars and not tensor.dims:
                stored = numpy_helper.to_array(tensor)
                if equal := [exact for exact in scalars if stored == np.array(exact, stored.dtype)]:
                    tensor.CopyFrom(numpy_helper.from_array(np.array(equal[0], np.float32), tensor.name))
            nodes.append(_cast(tensor.name, name, TensorProto.FLOAT))
    for node in graph.node:
        nodes.append(node)
        for own in node.attribute:
            if scalars is not None and node.op_type == "Cast" and own.name == "to" and own.i in HALF:
                own.i = TensorProto.FLOAT
        for index, name in enumerate(node.output):
            if (kind := types.get(name)) not in HALF or node.op_type in MOVES:
                continue
            source = node.output[index] = f"{name}.wide"
            if scalars is None and node.op_type not in ROUNDED_ALREADY:
                nodes.append(_cast(source, f"{name}.low", kind))
                source = f"{name}.low"
            nodes.append(_cast(source, name, TensorProto.FLOAT))
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    return model


def unsigned_integers(model: Any) -> Any:
    """`model`, an ONNX protobuf, with 128 added to every tensor in int8, weights and all zero points: the same values.

    ONNX Runtime multiplies unsigned integers exactly on every processor. All else is computed by the same kernels.
    """
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.INT8:
            values = numpy_helper.to_array(tensor) ^ np.int8(-128)
            tensor.CopyFrom(numpy_helper.from_array(values.view(np.uint8), tensor.name))
    del model.graph.value_info[:]
    return model


def _cast(source: str, name: str, kind: int) -> Any:
    return helper.make_node("Cast", [source], [name], name=f"{name}.cast", to=kind)
