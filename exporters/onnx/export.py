"""Export to ONNX with torch's exporter: dynamic batch, checked, with all metadata that users of the file need.

Up to opset 22 attention is decomposed, in patterns that runtimes fuse; from 23 on it is one `Attention` node.
"""

import json
import logging
from ast import literal_eval
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import numpy as np
import onnx
import onnx_ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, RemoveUnusedNodesPass
from torch import Tensor, nn

import vitcompress
from vitcompress.errors import CheckFailedError, InputError, UnsupportedModelError, VitcompressError, first_line
from vitcompress.exporters.base import Exported, Exporter, ModelInfo, describe_file, record_export, write_with_data
from vitcompress.exporters.onnx import libraries
from vitcompress.exporters.onnx.file import is_zero, read_contents
from vitcompress.exporters.onnx.gemm import join_linear_layers, multiply_patches
from vitcompress.exporters.onnx.runner import OnnxRunner
from vitcompress.exporters.onnx.tokens import drop_unread_tokens
from vitcompress.exporters.options import AUTO, EIGHT_BITS, ONLY_EIGHT_BITS, ExportOptions
from vitcompress.exporters.precision import HALF, classifier_layers, expand_layers
from vitcompress.exporters.quantize.graph import CORE, WEIGHT, Form, Quantization, quantize
from vitcompress.exporters.quantize.smooth import rescale
from vitcompress.exporters.uint8 import build_deployed, tensors_of
from vitcompress.families import family_of
from vitcompress.io.progress import SILENT, Progress
from vitcompress.models.cost import TRACING
from vitcompress.plan import is_within

INPUT, OUTPUT = "images", "logits"
DEFAULT_OPSET = 20
OPSETS = {  # supported opset -> reason in the metadata
    20: "decomposed attention: runs everywhere at any widths of q/k and v, and ONNX Runtime folds its scale into a "
    "product on the CPU; on CUDA its flash attention is documented for the Attention node of opset 23 alone",
    21: "requested",
    22: "requested",
    23: "requested: attention stays one Attention node, which fewer runtimes know",
}
PRECISIONS = ("fp32", "fp16", "bf16", *EIGHT_BITS)
BF16_FROM = 22
ATTENTION_NODE_FROM = 23
TRACED_BATCH = 2  # torch would treat a traced size of 1 as a constant


def export(
    model: nn.Module,
    path: Path,
    *,
    options: ExportOptions | None = None,
    progress: Progress = SILENT,
    reason: str | None = None,
    form: Form = "unsigned_input",
    **about: Unpack[ModelInfo],
) -> Exported:
    """Write `model` to `path`, its sidecar to `<path>.json`, and large weights to `<path>.data`; nothing on failure.

    The file maps `images` (batch, channels, height, width), float32, normalized, to `logits` (batch, classes), float32,
    for any batch. With `uint8` it takes bytes, (batch, height, width, channels), and normalizes them.

    Args:
        options: only precision, islands, weight_bits, uint8 and opset (20 to 23; None: 20, or 22 for bf16) apply.
        form: of the graph in int8 or fp8, see `quantize.graph`. In all precisions "float_bias" keeps the patterns that
            TensorRT documents; for others unread tokens and shapes are removed, and linear layers joined.
        reason: reason for the default opset in the metadata; None: a general one.

    Raises:
        InputError: an unsupported precision or opset, attention of a form that has no translation, or no `calibrate`
            for a precision of eight bits.
        PrecisionError: a weight that the precision cannot represent.
        CheckFailedError: onnx.checker rejects the graph.
        OutputError: the folder cannot be written.
    """
    options, path = options or ExportOptions(), Path(path)
    check_options(options)
    if options.precision in EIGHT_BITS:
        with TemporaryDirectory(prefix="vitcompress-") as folder:
            source = Path(folder) / path.name
            plain, settings = prepare_quantized(model, source, options, form, reason=reason, **about)
            files = _write_checked(path, lambda target: quantize(source, target, settings, plain.metadata))
        opset, why, metadata = plain.opset, plain.opset_reason, plain.metadata
    else:
        opset, why = options.opset or DEFAULT_OPSET, reason or OPSETS[DEFAULT_OPSET]
        if options.opset is not None:
            why = OPSETS[opset]
        elif options.precision == "bf16":
            opset, why = BF16_FROM, f"the first with a convolution in bf16; {why}"
        program = _trace(model, options, opset, about)
        metadata = {**describe_file(model, options, about), "opset_reason": json.dumps(why)}
        if form != "float_bias":
            _simplify(program.model, options.precision)
        ClearMetadataAndDocStringPass()(program.model)  # stack traces: paths of this machine, and bytes that change
        program.model.metadata_props.update(metadata)
        program.model.producer_name, program.model.producer_version = "vitcompress", vitcompress.__version__
        files = _write_checked(path, program.save)
    fields: dict[str, Any] = {"precision": options.precision, "opset": opset, "opset_reason": why, "metadata": metadata}
    return record_export(path, files, format="onnx", **fields)


def prepare_quantized(
    model: nn.Module,
    path: Path,
    options: ExportOptions,
    form: Form,
    *,
    reason: str | None = None,
    **about: Unpack[ModelInfo],
) -> tuple[Exported, Quantization]:
    """Write the file in fp32. Returns its record, with the metadata of the one in eight bits, and what that computes.

    The classifier and the patch embedding stay in fp32, too; files that are not for TensorRT store them in fp16. Raises
    InputError without `calibrate`.
    """
    if "calibrate" not in about:
        message = f"{options.precision} needs images of the training data to calibrate on"
        raise InputError(message, hint="export a run folder whose recipe has data, or pass data in Python")
    islands = expand_layers(model, options.islands)
    classifier, stem = tuple(classifier_layers(model)), family_of(model).stem
    factors = {name: tuple(exponents) for name, exponents in about.get("factors", {}).items()}
    if factors:  # the traces are those of the model as it is
        about["traces"] = about.get("traces", {}).setdefault(tuple(factors.items()), {})
    write = partial(export, rescale(model, factors), options=options.only({"opset", "uint8"}), reason=reason, **about)
    plain = write(path, form=form)
    # Ranges are those of the tokens that are read, in every form.
    measured = about["calibrate"](write(path.with_name("lean.onnx")).path if form == "float_bias" else plain.path)
    for island in options.islands:
        if not any(is_within(key, expand_layers(model, (island,))) for key in (*measured, *classifier, stem)):
            hint = "omit it, or name linear layers"
            raise InputError(f"the island {island} has no effect in {options.precision}", hint=hint)
    fp32_layers = [*islands, *classifier, stem]
    half: tuple[str, ...] = ()
    if options.precision == "int8" and form != "float_bias":
        half = ("pos_embed", *(f"{layer}{WEIGHT}" for layer in (*classifier, stem) if layer not in islands))
        stored = {tensor.name for tensor in onnx.load(str(plain.path), load_external_data=False).graph.initializer}
        half = tuple(name for name in half if name in stored)  # not positions that `dynamic_img_size` makes constants
    ranges = {key: size for key, size in measured.items() if not is_within(key, fp32_layers)}
    bits = options.weight_bits or (8 if form == "float_bias" else 7)
    settings = Quantization(options.eight_bits or "int8", ranges, form, bits, factors, half)
    changes = {"precision": options.precision, "islands": fp32_layers, "quantization": asdict(settings)}
    metadata = {**plain.metadata, **{key: json.dumps(value) for key, value in changes.items()}}
    return replace(plain, metadata=metadata), settings


def measure_quantization(
    model: nn.Module, options: ExportOptions, form: Form, **about: Unpack[ModelInfo]
) -> Quantization:
    """What files with these options compute in eight bits; layers that `auto` would keep in fp32 are included."""
    named = replace(options, islands=tuple(name for name in options.islands if name != AUTO))
    with TemporaryDirectory(prefix="vitcompress-") as folder:
        return prepare_quantized(model, Path(folder) / "model.onnx", named, form, **about)[1]


def check_options(options: ExportOptions) -> None:
    """Raise InputError for an unsupported precision or opset."""
    for name, value, allowed in (("precision", options.precision, PRECISIONS), ("opset", options.opset, OPSETS)):
        if value is not None and value not in allowed:
            other = ", or --format openvino" if value == "int8+bf16" else ""
            hint = f"use one of {', '.join(map(str, allowed))}{other}"
            raise InputError(f"ONNX {name} {value!r} is not supported", hint=hint)
    if options.precision == "bf16" and (options.opset or BF16_FROM) < BF16_FROM:
        raise InputError(f"opset {options.opset} has no convolution in bf16", hint=f"use --opset {BF16_FROM} or none")
    useless = {"int8": (), "fp8": ("weight_bits",)}.get(options.precision, ONLY_EIGHT_BITS)
    if wrong := [name for name in options.changed() if name in useless]:
        raise InputError(f"{wrong[0]} has no effect in {options.precision}", hint="omit it, or use precision int8")
    if options.precision == "fp8" and (options.opset or DEFAULT_OPSET) >= ATTENTION_NODE_FROM:
        message = f"opset {options.opset} exports attention as one node, whose products have no inputs to quantize"
        raise InputError(message, hint=f"use --opset {DEFAULT_OPSET} or omit it")
    if options.islands and options.precision not in (*HALF, *EIGHT_BITS):
        message = f"islands name fp32 layers, but the whole model is {options.precision}"
        raise InputError(message, hint="omit them, or use --precision fp16, bf16, int8 or fp8")


def _trace(model: nn.Module, options: ExportOptions, opset: int, about: ModelInfo) -> Any:
    """torch's ONNX program of the deployed `model`, with a dynamic batch. In fp32 it is kept in `about["traces"]`."""
    traces = about.get("traces", {}) if options.precision == "fp32" else {}
    key = (opset, options.uint8)
    if key not in traces:
        channels, height, width = about["input"].size
        module = build_deployed(model, about["input"], options.precision, options.islands, uint8=options.uint8)
        module.requires_grad_(False)  # otherwise a mask computed from parameters changes the layout of the outputs
        example = torch.zeros(TRACED_BATCH, channels, height, width, dtype=torch.float32)
        if options.uint8:
            example = torch.zeros(TRACED_BATCH, height, width, channels, dtype=torch.uint8)
        program = traces[key] = _run_exporter(module, example, opset)
        _remove_empty_pads(program.model.graph)
        _name_products(program.model.graph, tensors_of(module))
    return torch.onnx.ONNXProgram(traces[key].model.clone(), traces[key].exported_program)


def _run_exporter(model: nn.Module, example: Tensor, opset: int) -> Any:
    attention: Any = torch.ops.aten.scaled_dot_product_attention.default
    table = {} if opset >= ATTENTION_NODE_FROM else {attention: _attention}
    try:
        with TRACING, ExitStack() as stack:
            for logger in map(logging.getLogger, ("onnxscript", "torch.onnx")):
                stack.callback(logger.setLevel, logger.level)
                logger.setLevel(logging.ERROR)  # they warn of nodes that stay as is, and of `_attention` (torch 2.8)
            return torch.onnx.export(
                model,
                (example,),
                dynamo=True,
                opset_version=opset,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                input_names=[INPUT],
                output_names=[OUTPUT],
                custom_translation_table=table,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, InputError):
            cause = cause.__cause__
        if cause is not None:
            raise cause from None
        message = f"torch could not export the model to ONNX: {first_line(error.__cause__ or error)}"
        raise VitcompressError(message, hint="--debug shows the full error") from error


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention as MatMul, Add (of an additive mask), Softmax, MatMul; q, k, v are (batch, heads, tokens, channels).

    torch's own decomposition computes the shape of the transposed k at run time, with seven more nodes per attention,
    and scales both q and k by the root of the scale. Here only q is scaled, before the product. TensorRT documents this
    form (and scaling both by the root) for its fusion, ONNX Runtime folds one scale into the product as well as two,
    and OpenVINO leaves no scale behind.
    """
    from onnxscript import opset20  # slow to import, and unused in a dry run

    boolean = attn_mask is not None and attn_mask.dtype == onnx_ir.DataType.BOOL
    forms = {"boolean mask": boolean, "causal mask": is_causal, "grouped queries": enable_gqa, "dropout": dropout_p}
    if unsupported := ", ".join(name for name, value in forms.items() if value):
        message = f"an attention of the model has {unsupported}; decomposed attention supports an additive mask or none"
        hint = "use --opset 23, which exports attention as one node, or write the mask as numbers that are added"
        raise UnsupportedModelError(message, hint=hint)
    number = float(query.shape[-1] ** -0.5 if scale is None else scale)
    factor = opset20.CastLike(opset20.Constant(value_float=number), query)
    scores = opset20.MatMul(opset20.Mul(query, factor), opset20.Transpose(key, perm=[0, 1, 3, 2]))
    if attn_mask is not None:
        scores = opset20.Add(scores, attn_mask)
    return opset20.MatMul(opset20.Softmax(scores, axis=-1), value)


def _simplify(model: Any, precision: str) -> None:
    """Remove work without effect."""
    if precision in HALF:
        multiply_patches(model.graph)
    drop_unread_tokens(model.graph)
    join_linear_layers(model.graph)
    RemoveUnusedNodesPass()(model)
    for value in (output for node in model.graph for output in node.outputs if not output.is_graph_output()):
        value.shape = None  # with stored shapes ONNX Runtime reuses less memory, and is slower


def _remove_empty_pads(graph: Any) -> None:
    """Swin in timm pads to whole windows even if they are whole already: such a Pad adds nothing."""
    for node in list(graph):
        if node.op_type == "Pad" and is_zero(node.inputs[1]):
            onnx_ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
            graph.remove(node, safe=True)


def _name_products(graph: Any, tensors: dict[str, Tensor]) -> None:
    """Name products of attentions `blocks.0.attn.softmax.0`, and tensors of linear layers as in torch.

    torch forgets the names of transposed weights, and stores small equal tensors once. In eight bits each layer has its
    own range, and so needs its own. tensors: of the module, by name.
    """
    counts = Counter[str]()
    for node in [node for node in graph if node.op_type in ("Gemm", "MatMul", "Add")]:
        path = literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "['', '']"))[-2]
        if node.op_type != "Add" and node.inputs[1].const_value is None:
            node.name = f"{path}{CORE}{counts[path]}"
            counts[path] += 1
        stored = [(n, v) for n, v in enumerate(node.inputs) if v is not None and v.const_value is not None]
        for index, value in stored:
            if not is_within(value.name, [path]):
                values = value.const_value.numpy().astype(np.float32)
                unused = (n for n in tensors if is_within(n, [path]) and n not in graph.initializers)
                own = ((n, tensors[n].detach().float().numpy()) for n in unused)
                name = next((n for n, t in own if any(np.array_equal(x, values) for x in (t, t.T))), value.name)
                if name != value.name and len(value.uses()) > 1:
                    value = onnx_ir.Value(name=name, shape=value.shape, type=value.type, const_value=value.const_value)
                    graph.register_initializer(value)
                    node.replace_input_with(index, value)
                value.name = name


def _write_checked(path: Path, write: Callable[[Path], object]) -> tuple[str, ...]:
    """`write_with_data`, which also checks the file. Its graph refers to its data by this name."""

    def write_and_check(target: Path) -> None:
        write(target)
        try:
            onnx.checker.check_model(str(target), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise CheckFailedError(f"onnx.checker rejects the exported graph: {first_line(error)}") from None

    return write_with_data(path, write_and_check)


ONNX = Exporter(
    "onnx",
    ".onnx",
    export,
    OnnxRunner,
    uses=frozenset({"precision", "opset", "islands", "uint8", *ONLY_EIGHT_BITS}),
    check_options=check_options,
    unavailable=lambda: None,
    cannot_run=libraries.unavailable,
    contents=read_contents,
)
