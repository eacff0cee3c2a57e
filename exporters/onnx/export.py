"""Export to ONNX with torch's exporter: dynamic batch, checked, with all metadata that users of the file need.

The default opset is 20 with decomposed attention: every runtime supports it, at any widths of q/k and v, in patterns
that runtimes fuse. Opset 23 exports attention as one `Attention` node.
"""

import json
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import onnx
import onnx_ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, RemoveUnusedNodesPass
from onnxscript import opset20
from torch import Tensor, nn

import vitcompress
from vitcompress.errors import CheckFailedError, InputError, VitcompressError, first_line
from vitcompress.exporters.base import Exported, Exporter, ModelInfo, record_export
from vitcompress.exporters.onnx.file import read_contents
from vitcompress.exporters.onnx.gemm import join_linear_layers
from vitcompress.exporters.onnx.runner import OnnxRunner
from vitcompress.exporters.onnx.tokens import drop_unread_tokens
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.precision import HALF, expand_layers
from vitcompress.exporters.sidecar import sidecar_path
from vitcompress.exporters.uint8 import build_deployed, can_fold_normalization
from vitcompress.io.files import write_file
from vitcompress.io.progress import Progress
from vitcompress.models.cost import without_gradients
from vitcompress.models.create import InputConfig

INPUT, OUTPUT = "images", "logits"
DEFAULT_OPSET = 20
OPSETS = {  # supported opset -> reason in the metadata
    20: "decomposed attention: runs everywhere at any widths of q/k and v, and ONNX Runtime folds its scale into a "
    "product on the CPU; on CUDA its flash attention is documented for the Attention node of opset 23 alone",
    21: "requested",
    22: "requested",
    23: "requested: attention stays one Attention node, which fewer runtimes know",
}
PRECISIONS = ("fp32", "fp16", "bf16")
BF16_FROM = 22
ATTENTION_NODE_FROM = 23
TRACED_BATCH = 2  # torch would treat a traced size of 1 as a constant


def export(
    model: nn.Module,
    path: Path,
    *,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
    external_data: bool | None = None,
    lean: bool = True,
    reason: str | None = None,
    **about: Unpack[ModelInfo],
) -> Exported:
    """Write `model` to `path` and its sidecar to `<path>.json`. On failure nothing is left behind.

    The file maps `images` (batch, channels, height, width), float32, normalised, to `logits` (batch, classes), float32,
    for any batch. With `uint8` it takes bytes, (batch, height, width, channels), and normalises them. Metadata, each
    value as JSON text: classes, mean, std, size, interpolation, crop, precision, islands, input, plan hash, versions.

    Args:
        about: fields of `ModelInfo`.
        options: precision (`fp16` and `bf16` store and compute in half precision; logits stay float32), islands, uint8
            and opset (20 to 23; None: 20, or 22 for bf16). Other options do not apply.
        lean: remove unread tokens and join linear layers; False keeps the patterns that TensorRT documents.
        reason: reason for the default opset in the metadata; None: a general one.
        external_data: store the weights in `<path>.data`; None: only above the 2 GB that one file can hold.

    Raises:
        InputError: an unsupported precision or opset.
        PrecisionError: a weight that half precision cannot represent.
        CheckFailedError: onnx.checker rejects the graph.
        OutputError: the folder cannot be written.
    """
    options, path = options or ExportOptions(), Path(path)
    check_options(options)
    opset, why = _choose_opset(options, reason)
    input = about["input"]
    module = build_deployed(model, input, options.precision, options.islands, uint8=options.uint8)
    program = _trace(module, _example(input, uint8=options.uint8), opset)
    labels = {**_model_labels(about, program), **_option_labels(model, options), "opset_reason": why}
    metadata = {key: json.dumps(value) for key, value in labels.items()}
    _remove_empty_pads(program.model.graph)
    if lean:  # less work for the same outputs
        drop_unread_tokens(program.model.graph)
        join_linear_layers(program.model.graph)
        RemoveUnusedNodesPass()(program.model)
    _label(program.model, metadata)
    files = _save(program, path, external_data)
    fields = {"precision": options.precision, "opset": opset, "opset_reason": why, "metadata": metadata}
    return record_export(path, files, format="onnx", **fields)


def check_options(options: ExportOptions) -> None:
    """Raise InputError for an unsupported precision or opset."""
    if options.precision not in PRECISIONS:
        raise InputError(
            f"ONNX precision {options.precision!r} is not supported", hint=f"use one of {', '.join(PRECISIONS)}"
        )
    if options.opset is not None and options.opset not in OPSETS:
        raise InputError(
            f"ONNX opset {options.opset} is not supported", hint=f"use one of {', '.join(map(str, OPSETS))}"
        )
    if options.precision == "bf16" and (options.opset or BF16_FROM) < BF16_FROM:
        raise InputError(
            f"opset {options.opset} has no convolution in bf16", hint=f"use --opset {BF16_FROM} or omit it"
        )
    if options.islands and options.precision not in HALF:
        raise InputError(
            f"islands name fp32 layers, but the whole model is {options.precision}",
            hint="omit them, or use --precision fp16 or bf16",
        )


def _choose_opset(options: ExportOptions, reason: str | None) -> tuple[int, str]:
    """The opset and the reason for it. reason: the caller's reason for the default opset."""
    if options.opset is not None:
        return options.opset, OPSETS[options.opset]
    reason = reason or OPSETS[DEFAULT_OPSET]
    if options.precision == "bf16":
        return BF16_FROM, f"the first with a convolution in bf16; {reason}"
    return DEFAULT_OPSET, reason


def _option_labels(model: nn.Module, options: ExportOptions) -> dict[str, Any]:
    """The options as metadata, with the name of every fp32 layer."""
    place = (
        ("in the first convolution" if can_fold_normalization(model) else "in front")
        if options.uint8
        else "by the caller"
    )
    return {
        "precision": options.precision,
        "islands": list(expand_layers(model, options.islands)) if options.islands else [],
        "input": "uint8" if options.uint8 else "float32",
        "layout": "NHWC" if options.uint8 else "NCHW",
        "normalisation": place,
    }


def _model_labels(about: ModelInfo, program: Any) -> dict[str, Any]:
    """Metadata of the model. Without class names, the classes are numbered."""
    names = list(about.get("classes", ())) or [str(i) for i in range(program.model.graph.outputs[0].shape[-1])]
    libraries = {name: version(name) for name in ("torch", "timm", "onnx", "onnxscript")}
    versions = {"vitcompress": vitcompress.__version__, **libraries}
    plan_digest = about.get("plan_digest", "")
    return {"classes": names, **about["input"].to_dict(), "versions": versions, "plan_sha256": plan_digest}


def _example(input: InputConfig, *, uint8: bool) -> Tensor:
    """The input for tracing."""
    channels, height, width = input.size
    if uint8:
        return torch.zeros(TRACED_BATCH, height, width, channels, dtype=torch.uint8)
    return torch.zeros(TRACED_BATCH, *input.size)


def _trace(model: nn.Module, example: Tensor, opset: int) -> Any:
    """torch's ONNX program of `model`, with a dynamic batch."""
    attention: Any = torch.ops.aten.scaled_dot_product_attention.default
    table = {} if opset >= ATTENTION_NODE_FROM else {attention: _attention}
    try:
        with without_gradients(model):  # else a mask that is computed from parameters changes the layout of the outputs
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
        why = first_line(error.__cause__ or error)
        raise VitcompressError(
            f"torch could not export the model to ONNX: {why}", hint="--debug shows the full error"
        ) from error


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
    boolean = attn_mask is not None and attn_mask.dtype == onnx_ir.DataType.BOOL
    if boolean or is_causal or enable_gqa or dropout_p:
        raise NotImplementedError("attention with a boolean mask, dropout or grouped queries has no translation")
    factor = opset20.CastLike(
        opset20.Constant(value_float=float(query.shape[-1] ** -0.5 if scale is None else scale)), query
    )
    scores = opset20.MatMul(opset20.Mul(query, factor), opset20.Transpose(key, perm=[0, 1, 3, 2]))
    if attn_mask is not None:
        scores = opset20.Add(scores, attn_mask)
    return opset20.MatMul(opset20.Softmax(scores, axis=-1), value)


def _remove_empty_pads(graph: Any) -> None:
    """Remove each Pad that adds nothing: timm's Swin pads to whole windows even if they are whole already."""
    for node in list(graph):
        if node.op_type == "Pad" and (amounts := node.inputs[1].const_value) is not None and not amounts.numpy().any():
            onnx_ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
            graph.remove(node, safe=True)


def _label(model: Any, metadata: dict[str, str]) -> None:
    """Replace torch's metadata by ours."""
    ClearMetadataAndDocStringPass()(model)  # stack traces: paths of this machine, and bytes that change
    model.metadata_props.update(metadata)
    model.producer_name, model.producer_version = "vitcompress", vitcompress.__version__


def _save(program: Any, path: Path, external_data: bool | None) -> tuple[str, ...]:
    """Write and check the file in a folder beside `path`, then move its data and the file into place."""
    files: list[str] = []

    def fill(beside: Path) -> None:
        with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", suffix=".part") as name:
            target = Path(name) / path.name  # the graph refers to its data by this name
            program.save(str(target), external_data=external_data)
            try:
                onnx.checker.check_model(str(target), full_check=True)
            except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
                raise CheckFailedError(f"onnx.checker rejects the exported graph: {first_line(error)}") from None
            data = [file for file in sorted(target.parent.iterdir()) if file != target]
            sidecar_path(path).unlink(missing_ok=True)  # it describes the file that is replaced now
            for file in data:
                write_file(path.parent / file.name, file.replace)
            target.replace(beside)
            files.extend([path.name, *(file.name for file in data)])

    write_file(path, fill)
    return tuple(files)


ONNX = Exporter(
    "onnx",
    ".onnx",
    export,
    OnnxRunner,
    uses=frozenset({"precision", "opset", "islands", "uint8"}),
    check_options=check_options,
    unavailable=lambda: None,
    cannot_run=lambda: None,
    contents=read_contents,
)
