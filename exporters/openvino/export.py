"""Export to OpenVINO IR: `model.xml` with its weights in `model.bin`, converted from our ONNX file.

Weights stay in fp32 and are not multiplied together, so that the file holds the model bit for bit. The precision is
that of the arithmetic: fp32, or bf16 and fp16 if the processor has them.
"""

import errno
import os
import shutil
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import numpy as np
from torch import nn

from vitcompress.errors import ArtifactError, InputError, first_line
from vitcompress.exporters.base import Contents, Exported, Exporter, ModelInfo, Stored, record_export, write_with_data
from vitcompress.exporters.onnx import export as onnx_export
from vitcompress.exporters.onnx.file import represented_values
from vitcompress.exporters.openvino import runner
from vitcompress.exporters.openvino.runner import HINTS, INFO, OpenVinoRunner, core, read_ir, read_metadata, unavailable
from vitcompress.exporters.options import ONLY_EIGHT_BITS, ExportOptions
from vitcompress.io import hardware
from vitcompress.io.progress import SILENT, Progress

REASON = "decomposed attention, which OpenVINO fuses when it loads the file, at any widths of q/k and v"
SCALED = [[end, "Add", "Multiply", "MVN"] for end in ("FakeQuantize", "Reshape")]  # a LayerNorm, from one of these
NESTED = ("If", "Loop", "TensorIterator")  # operations with graphs of their own


def export(
    model: nn.Module,
    path: Path,
    *,
    options: ExportOptions | None = None,
    progress: Progress = SILENT,
    **about: Unpack[ModelInfo],
) -> Exported:
    """Write `model` to `path` (.xml), its weights beside it (.bin) and its sidecar. On failure nothing is left behind.

    Inputs and outputs are those of the ONNX file; see `onnx.export`. The metadata are also in the IR's `rt_info`.
    Raises InputError for unsupported options, and OutputError if the folder cannot be written.
    """
    options, path = options or ExportOptions(), Path(path)
    check_options(options)
    with TemporaryDirectory(prefix="vitcompress-") as folder:
        stored = _stored_options(options)
        arguments: dict[str, Any] = {"options": stored, "reason": REASON, "form": "int32_bias"}
        source = onnx_export.export(model, Path(folder) / f"{path.stem}.onnx", **arguments, **about)
        labels = {**source.metadata, "precision": f'"{options.precision}"'}
        files = write_with_data(path, partial(_convert, source.path, labels))
    settings, version = {runner.HINT: HINTS[options.precision]}, metadata.version("openvino")
    build: dict[str, Any] = {"runtime": "openvino", "runtime_version": version, "weights": stored.precision}
    build |= {"settings": settings, "variable_batch": runner.needs_variable_batch(read_ir(path))}
    fields = {"format": "openvino", "precision": options.precision, "metadata": labels, "build": build}
    return record_export(path, files, source, **fields)


def check_options(options: ExportOptions) -> None:
    """Raise InputError for a precision that OpenVINO has no hint for, or an unsupported opset."""
    if options.precision not in HINTS:
        raise InputError(f"OpenVINO has no precision {options.precision!r}", hint=f"use one of {', '.join(HINTS)}")
    onnx_export.check_options(_stored_options(options))


def _stored_options(options: ExportOptions) -> ExportOptions:
    """Those of the ONNX file to convert. Eight bits of weights need a processor that adds their products exactly."""
    if not options.precision.startswith("int8"):
        return replace(options, precision="fp32")
    bits = options.weight_bits or (7 if hardware.slow_reason("int8") else 8)
    return replace(options, precision="int8", weight_bits=bits)


def _convert(source: Path, labels: dict[str, str], target: Path) -> None:
    """Raises OSError with a reason where OpenVINO only reports that a stream failed."""
    model: Any = core().read_model(str(source))  # convert_model would multiply LayerScales into biases
    _separate_heads(model)
    if "quantization" in labels:  # others keep their fused LayerNorms
        _separate_scales(model)
    for key, value in labels.items():
        model.set_rt_info(value, [INFO, key])
    try:
        runner.load().save_model(model, str(target), compress_to_fp16=False)
    except RuntimeError as error:
        full = shutil.disk_usage(target.parent).free < 2**16  # a disk with fewer free bytes is reported as full
        number = errno.ENOSPC if full else errno.EIO
        raise OSError(number, os.strerror(number) if full else first_line(error)) from None


def _separate_heads(model: Any) -> None:
    """Transpose tokens and heads of equal number with an axis of size 1 at the end.

    With a fixed batch, the CPU plugin of version 2026.4 joins the operations of such an attention to wrong outputs.
    """
    opset = runner.load().opset13
    end = opset.constant([4], dtype=np.int64)
    for node in [node for node in model.get_ops() if node.get_type_name() == "Transpose"]:
        shape = node.get_input_partial_shape(0)
        if len(shape) == 4 and shape[1] == shape[2]:
            order = opset.constant([*node.input_value(1).get_node().get_data(), 4], dtype=np.int64)
            apart = opset.transpose(opset.unsqueeze(node.input_value(0), end), order)
            for use in node.output(0).get_target_inputs():
                use.replace_source_output(opset.squeeze(apart, end).output(0))


def _separate_scales(model: Any) -> None:
    """Quantize and reshape the output of each LayerNorm with an axis of size 1 in front.

    The CPU plugin joins a scale and shift per column of a matrix with the quantization after it, in a slow kernel. It
    moves them behind a Reshape, too: with a variable batch along a wrong axis, which fails or changes the outputs.
    """
    opset = runner.load().opset13
    for node in sorted(model.get_ops(), key=lambda node: node.get_type_name()):  # FakeQuantize first
        chain = [node]
        while len(chain) < len(SCALED[0]) and chain[-1].get_input_size():
            chain.append(chain[-1].input_value(0).get_node())
        if [one.get_type_name() for one in chain] in SCALED and len(chain[-1].get_output_partial_shape(0)) == 2:
            uses, front = node.output(0).get_target_inputs(), opset.constant([0], dtype=np.int64)
            chain[-2].input(0).replace_source_output(opset.unsqueeze(chain[-1], front).output(0))
            for use in uses if node.get_type_name() == "FakeQuantize" else ():  # a Reshape removes the axis
                use.replace_source_output(opset.squeeze(node, front).output(0))
    model.validate_nodes_and_infer_types()


def read_contents(path: Path) -> Contents:
    """The constants of an IR, as OpenVINO reads them. Raises like `read_ir`, and ArtifactError for nested graphs."""
    model = read_ir(path)
    if nested := [node.get_type_name() for node in model.get_ops() if node.get_type_name() in NESTED]:
        message = f"{path} has the operation {nested[0]}, whose constants cannot be listed"
        raise ArtifactError(message, hint="export it with vitcompress")
    constants = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
    # The quantizer names a tensor X_quantized, its scale X_quantized_scale or X_scale, and its zero point likewise.
    named = {node.get_friendly_name(): node.data for node in constants}
    stems = {n: n if f"{n}_scale" in named else n.removesuffix("_quantized") for n in named if n.endswith("_quantized")}
    parameters = {f"{stem}_{kind}" for stem in stems.values() for kind in ("scale", "zero_point")}
    for node in (node for node in model.get_ops() if node.get_type_name() == "Reshape"):  # to the axis of a scale
        if (name := node.input_value(0).get_node().get_friendly_name()) in parameters & named.keys():
            named[name] = named[name].reshape(node.get_output_shape(0))
    stored = []
    for node in constants:
        values, name = node.data, node.get_friendly_name()
        index = node.get_element_type().get_type_name() in ("i64", "i32", "boolean") or name in parameters
        scale = np.array(1.0) if values.dtype == np.float16 else named.get(f"{stems.get(name)}_scale")
        zero = named.get(f"{stems.get(name)}_zero_point", np.array(0)).astype(np.float64)
        represented = None if scale is None else partial(represented_values, values, scale, zero)
        place = (values.ctypes.data, values.nbytes)
        stored.append(Stored(name, values.shape, values.nbytes, place, values.tobytes, index, represented))
    size = path.stat().st_size + path.with_suffix(".bin").stat().st_size
    uint8 = any(images.get_element_type().get_type_name() == "u8" for images in model.inputs)
    labels = read_metadata(model)
    labels["precision"] = '"int8"' if "quantization" in labels else '"fp32"'
    return Contents(tuple(stored), size, labels, uint8=uint8)


OPENVINO = Exporter(
    "openvino",
    ".xml",
    export,
    OpenVinoRunner,
    uses=frozenset({"precision", "opset", "islands", "uint8", *ONLY_EIGHT_BITS}),
    eight_bits_only=frozenset({"islands"}),
    check_options=check_options,
    unavailable=unavailable,
    cannot_run=unavailable,
    contents=read_contents,
)
