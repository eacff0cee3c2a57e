"""ONNX files from torch's exporter: dynamic batch, checked, and with all that a user of the file must know inside it.

The default opset is 20 with attention decomposed: it runs in every runtime, at any widths of q/k and v, and in the
patterns that runtimes fuse. Opset 23 keeps attention as one `Attention` node.
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
from vitcompress.exporters.base import About, Exported, Exporter, recorded
from vitcompress.exporters.onnx.gemm import join_linear_layers
from vitcompress.exporters.onnx.tokens import drop_unread_tokens
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.precision import HALF, expanded
from vitcompress.exporters.sidecar import sidecar_path
from vitcompress.exporters.uint8 import deployed, folds
from vitcompress.io.files import write
from vitcompress.io.progress import Progress
from vitcompress.models.create import InputConfig

INPUT, OUTPUT = "images", "logits"
DEFAULT_OPSET = 20
OPSETS = {
    20: "decomposed attention: runs everywhere at any widths of q/k and v, and ONNX Runtime folds its scale into a "
    "product on the CPU; on CUDA its flash attention is documented for the Attention node of opset 23 alone",
    21: "asked for",
    22: "asked for",
    23: "asked for: attention stays one Attention node, which fewer runtimes know",
}
PRECISIONS = ("fp32", "fp16", "bf16")
BF16_FROM = 22
ATTENTION_NODE_FROM = 23
TRACED_BATCH = 2  # a traced size of 1 would be taken for a constant


def export(
    model: nn.Module,
    path: Path,
    *,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
    external_data: bool | None = None,
    lean: bool = True,
    reason: str | None = None,
    **about: Unpack[About],
) -> Exported:
    """Write `model` to `path` and its sidecar to `<path>.json`. On failure nothing is left behind.

    The file maps `images` (batch, channels, height, width), float32, normalised, to `logits` (batch, classes), float32,
    for any batch; with `uint8` it takes bytes, (batch, height, width, channels), and normalises them itself. Metadata,
    each value JSON text: classes, mean, std, size, interpolation, crop, precision, islands, input, plan hash, versions.

    Args:
        about: see `artifact.About`.
        options: precision (`fp16` and `bf16` store and compute in half precision; logits stay float32), islands,
            uint8 and opset (20 to 23; None takes 20, for bf16 22); the rest concerns other formats.
        lean: drop tokens that nobody reads, join linear layers; False leaves the patterns that TensorRT documents.
        reason: why the default opset is right for what the file is for; None is what holds everywhere.
        external_data: keep the weights in `<path>.data`; None does so only above the 2 GB that one file can hold.

    Raises:
        InputError: a precision or opset that is not offered.
        PrecisionError: a weight that half precision cannot hold.
        CheckFailedError: a graph that onnx.checker refuses.
        OutputError: the folder cannot be written.
    """
    options, path = options or ExportOptions(), Path(path)
    check(options)
    opset, why = _opset(options, reason)
    input = about["input"]
    module = deployed(model, input, options.precision, options.islands, uint8=options.uint8)
    program = _program(module, _example(input, uint8=options.uint8), opset)
    known = {**_metadata(about, program), **_choices(model, options), "opset_reason": why}
    metadata = {key: json.dumps(value) for key, value in known.items()}
    _drop_empty_pads(program.model.graph)
    if lean:
        _make_lean(program.model)
    _label(program.model, metadata)
    files = _save(program, path, external_data)
    kept = {"precision": options.precision, "opset": opset, "opset_reason": why, "metadata": metadata}
    return recorded(path, files, format="onnx", **kept)


def check(options: ExportOptions) -> None:
    """Raise InputError for a precision or opset that is not offered."""
    if options.precision not in PRECISIONS:
        raise InputError(
            f"ONNX precision {options.precision!r} is not offered", hint=f"use one of {', '.join(PRECISIONS)}"
        )
    if options.opset is not None and options.opset not in OPSETS:
        raise InputError(f"ONNX opset {options.opset} is not offered", hint=f"use one of {', '.join(map(str, OPSETS))}")
    if options.precision == "bf16" and (options.opset or BF16_FROM) < BF16_FROM:
        raise InputError(
            f"opset {options.opset} has no convolution in bf16", hint=f"use --opset {BF16_FROM} or leave it out"
        )
    if options.islands and options.precision not in HALF:
        raise InputError(
            f"islands of fp32 were given, but all is {options.precision}",
            hint="leave them out, or use --precision fp16 or bf16",
        )


def _opset(options: ExportOptions, reason: str | None) -> tuple[int, str]:
    """The operator set and the reason for it; `reason` is the caller's for the default one."""
    if options.opset is None and options.precision == "bf16":
        return BF16_FROM, f"the first with a convolution in bf16; {reason or OPSETS[DEFAULT_OPSET]}"
    if options.opset is None:
        return DEFAULT_OPSET, reason or OPSETS[DEFAULT_OPSET]
    return options.opset, OPSETS[options.opset]


def _choices(model: nn.Module, options: ExportOptions) -> dict[str, Any]:
    """The chosen options, as metadata; each island by a name of its own."""
    islands = expanded(model, options.islands) if options.islands else ()
    normalisation = ("in the first convolution" if folds(model) else "in front") if options.uint8 else "by the caller"
    return {
        "precision": options.precision,
        "islands": list(islands),
        "input": "uint8" if options.uint8 else "float32",
        "layout": "NHWC" if options.uint8 else "NCHW",
        "normalisation": normalisation,
    }


def _example(input: InputConfig, *, uint8: bool) -> Tensor:
    """What the module is traced with."""
    channels, height, width = input.size
    if uint8:
        return torch.zeros(TRACED_BATCH, height, width, channels, dtype=torch.uint8)
    return torch.zeros(TRACED_BATCH, *input.size)


def _program(model: nn.Module, example: Tensor, opset: int) -> Any:
    """torch's ONNX program of `model`, with the batch dynamic."""
    attention: Any = torch.ops.aten.scaled_dot_product_attention.default
    table = {} if opset >= ATTENTION_NODE_FROM else {attention: _attention}
    try:
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
        raise VitcompressError(f"torch could not export the model to ONNX: {why}", hint="--debug shows all") from error


def _make_lean(model: Any) -> None:
    """Change the graph to do less work for the same answers; see `onnx_tokens` and `onnx_linear`."""
    drop_unread_tokens(model.graph)
    join_linear_layers(model.graph)
    RemoveUnusedNodesPass()(model)


def _drop_empty_pads(graph: Any) -> None:
    """Take out each Pad that adds nothing: timm's Swin pads to whole windows even where they are whole already."""
    for node in list(graph):
        if node.op_type == "Pad" and (amounts := node.inputs[1].const_value) is not None and not amounts.numpy().any():
            onnx_ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
            graph.remove(node, safe=True)


def _label(model: Any, metadata: dict[str, str]) -> None:
    """Replace what torch wrote about the graph by `metadata` and our name."""
    ClearMetadataAndDocStringPass()(model)  # stack traces: paths of this machine, and bytes that change
    model.metadata_props.update(metadata)
    model.producer_name, model.producer_version = "vitcompress", vitcompress.__version__


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
    """Attention without a mask as MatMul, Softmax, MatMul; q, k and v are (batch, heads, tokens, channels).

    torch's own decomposition computes k's transposed shape at run time, seven more nodes per attention, and scales q
    and k each by the root. Here q alone is scaled, in front of the product as TensorRT documents for its fusion (that,
    or both by the root): ONNX Runtime folds one scale into the product as well as two, and OpenVINO leaves none over.
    """
    if attn_mask is not None or is_causal or enable_gqa or dropout_p:
        raise NotImplementedError("attention with a mask, dropout or grouped queries has no translation")
    factor = opset20.CastLike(
        opset20.Constant(value_float=float(query.shape[-1] ** -0.5 if scale is None else scale)), query
    )
    scores = opset20.MatMul(opset20.Mul(query, factor), opset20.Transpose(key, perm=[0, 1, 3, 2]))
    return opset20.MatMul(opset20.Softmax(scores, axis=-1), value)


def _metadata(about: About, program: Any) -> dict[str, Any]:
    """What a user of the file must know; without class names the numbers of the outputs stand for them."""
    names = list(about.get("classes", ())) or [str(i) for i in range(program.model.graph.outputs[0].shape[-1])]
    libraries = {name: version(name) for name in ("torch", "timm", "onnx", "onnxscript")}
    versions = {"vitcompress": vitcompress.__version__, **libraries}
    told = {"classes": names, **about["input"].to_dict(), "versions": versions}
    return {**told, "plan_sha256": about.get("plan_digest", "")}


def _save(program: Any, path: Path, external_data: bool | None) -> tuple[str, ...]:
    """Write and check the file in a folder beside `path`, then move it (its data first) into place."""
    files: list[str] = []

    def fill(beside: Path) -> None:
        with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", suffix=".part") as name:
            made = Path(name) / path.name  # the name under which the graph looks for its data
            program.save(str(made), external_data=external_data)
            _check(made)
            data = [file for file in sorted(made.parent.iterdir()) if file != made]
            sidecar_path(path).unlink(missing_ok=True)  # it describes the file that is about to go
            for file in data:
                write(path.parent / file.name, file.replace)
            made.replace(beside)
            files.extend([path.name, *(file.name for file in data)])

    write(path, fill)
    return tuple(files)


def _check(path: Path) -> None:
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise CheckFailedError(f"onnx.checker refuses the exported graph: {first_line(error)}") from None


ONNX = Exporter(
    "onnx",
    ".onnx",
    export,
    uses=frozenset({"precision", "opset", "islands", "uint8"}),
    refuse=check,
    unavailable=lambda: None,
    cannot_run=lambda: None,
)
