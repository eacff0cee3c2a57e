"""Export to TensorRT engines: the model as ONNX, an engine built from it, and a sidecar that describes it.

Beside an engine are `<engine>.json` (the sidecar), `<engine>.onnx` (the source of the build) and, if a GPU can run it
here, `<engine>.layers.json` (the output of the library's engine inspector).
"""

import json
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

import torch
from torch import nn

from vitcompress.errors import DeviceError, InputError, VitcompressError
from vitcompress.exporters.base import Exported, Exporter, ModelInfo, record_export, write_sidecar, write_with_data
from vitcompress.exporters.onnx import export as onnx_export
from vitcompress.exporters.onnx import file
from vitcompress.exporters.onnx.export import ATTENTION_NODE_FROM, ONNX
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.precision import HALF
from vitcompress.exporters.quantize.graph import CORE
from vitcompress.exporters.runner import RunnerOptions
from vitcompress.exporters.sidecar import sidecar_path
from vitcompress.exporters.tensorrt.build import Built, build
from vitcompress.exporters.tensorrt.flavours import RTX, TRT, Flavour, capability
from vitcompress.exporters.tensorrt.layers import layer_checks, parse_layers, unavailable_checks, unfused_warnings
from vitcompress.exporters.tensorrt.runner import EngineRunner
from vitcompress.io import hardware
from vitcompress.io.files import write_bytes, write_text
from vitcompress.io.progress import SILENT, Progress

RTX_DEFAULT = (80, 86, 89, 120)  # Ampere, Ada and Blackwell: the default targets of TensorRT for RTX itself
# Hopper and Blackwell for data centers and robots: not for TensorRT for RTX.
DATA_CENTER = (90, 100, 103, 107, 110)
TURING = 75  # compute capability
COMMON = ONNX.uses | {"batch", "sm", "workspace", "keep_onnx"}
PRECISIONS = ("tf32", *onnx_export.PRECISIONS)
FP8_FROM = 89  # compute capability: Ada
# They need a GPU, or parts that TensorRT for RTX lacks; its engines are the same bytes at each optimization level.
ONLY_TRT = {"timing_cache", "hardware_compatible", "version_compatible", "optimization_level"}
RECORDED = ("optimization_level", "workspace", "hardware_compatible", "version_compatible")  # as they are
NO_GPU = "TensorRT builds on a GPU, and there is none here"
DECOMPOSED = (
    "decomposed attention, which TensorRT fuses in half precision where q/k and v are equally wide, and builds at any "
    "widths and in fp32; its Attention operator (TensorRT 10.14 on) wants equal widths and a fused kernel"
)


def export(
    flavour: Flavour,
    model: nn.Module,
    path: Path,
    *,
    options: ExportOptions | None = None,
    progress: Progress = SILENT,
    **about: Unpack[ModelInfo],
) -> Exported:
    """Write `model` as an engine to `path`. A failed or interrupted export leaves the previous files unchanged.

    Raises InputError for unsupported options, or a missing library or GPU, VitcompressError if the library does not
    support the graph or cannot build it, and OutputError if the folder cannot be written.
    """
    options, path = options or ExportOptions(), Path(path)
    check_options(flavour, options)
    options = replace(options, sm=choose_targets(flavour, options))
    results: list[Exported] = []

    def write(staged: Path) -> None:
        source = onnx_export.export(
            model, source_path(staged), options=onnx_options(options), reason=DECOMPOSED, form="float_bias", **about
        )
        # The batches at which its outputs are compared with those of the model.
        source = write_sidecar(replace(source, build={"batch": list(options.batch)}))
        channels, height, width = about["input"].size
        size = (height, width, channels) if options.uint8 else (channels, height, width)
        built = build(flavour, source.path, size, options, progress)
        write_bytes(staged, built.data)
        built.warnings.extend(unfused_warnings(model, options.precision))
        exported = _record(flavour, staged, source, built, options)
        if cannot_run(flavour) is None and capability() in options.sm:
            exported = _inspect(exported, source, options)
        results.append(exported)
        for name in () if options.keep_onnx else (*source.files, sidecar_path(source.path).name):
            (staged.parent / name).unlink()

    beside = (sidecar_path(path), layers_path(path), source_path(path), sidecar_path(source_path(path)))
    write_with_data(path, write, beside)  # the sidecar first
    return replace(results[0], path=path)


def layers_path(engine: Path) -> Path:
    return engine.with_name(f"{engine.name}.layers.json")


def source_path(engine: Path) -> Path:
    return engine.with_name(f"{engine.name}.onnx")


def _record(flavour: Flavour, staged: Path, source: Exported, built: Built, options: ExportOptions) -> Exported:
    """Write the sidecar of an engine."""
    build = {
        "runtime": flavour.title,
        "runtime_version": str(flavour.load().__version__),
        "sm": list(options.sm),
        "batch": list(options.batch),
        "tf32": options.precision == "tf32",
        **{name: getattr(options, name) for name in RECORDED},
        "timing_cache": None if options.timing_cache is None else options.timing_cache.name,
        "gpu": torch.cuda.get_device_name(0) if flavour is TRT else None,
        "seconds": round(built.seconds, 3),
        "warnings": built.warnings,
    }
    return record_export(staged, [staged.name], source, format=flavour.name, precision=options.precision, build=build)


def _inspect(exported: Exported, source: Exported, options: ExportOptions) -> Exported:
    """Write the inspector output, which version-compatible engines may lack, and checks of it into the sidecar."""
    try:
        with closing(EngineRunner(exported.path, RunnerOptions(trust=options.version_compatible))) as runner:
            output = runner.layers()
        layers = parse_layers(output)
    except VitcompressError as error:
        checks = unavailable_checks(error.message)
    else:
        write_text(layers_path(exported.path), output)
        nodes = file.graph_facts(source.path).operators
        record = json.loads(source.metadata.get("quantization", '{"ranges": []}'))
        # Each of the two products of an attention has two ranges.
        products = len({key.rpartition(".")[0] if CORE in key else key for key in record["ranges"]})
        checks = layer_checks(layers, options.precision, nodes["Softmax"] + nodes["Attention"], products)
    return write_sidecar(replace(exported, build={**exported.build, "truth": [check.to_dict() for check in checks]}))


def unavailable(flavour: Flavour) -> str | None:
    """Why this machine cannot build such engines, or None."""
    if flavour is TRT and capability() is None:
        remedy = f"build on the target ({flavour.install}), or use trt-rtx for GeForce and RTX"
        return f"{NO_GPU}{hardware.cuda_reason()}; {remedy}"
    return flavour.problem("Builder" if flavour is TRT else None)


def cannot_run(flavour: Flavour) -> str | None:
    """Why this machine cannot run such engines, or None."""
    if reason := flavour.problem():
        return reason
    here = capability()
    if here is None:
        return f"there is no CUDA GPU here{hardware.cuda_reason()}; run it on the target"
    if flavour is RTX and here not in flavour.supported_targets():
        return f"TensorRT for RTX does not support this GPU (compute capability {here})"
    return flavour.problem("Runtime")


def check_options(flavour: Flavour, options: ExportOptions) -> None:
    """Raise InputError for unsupported options, including those of the ONNX file."""
    precision = options.precision
    if precision not in PRECISIONS:
        raise InputError(f"{flavour.title} has no precision {precision!r}", hint=f"use one of {', '.join(PRECISIONS)}")
    ONNX.check(onnx_options(options))
    here = capability()
    targets = options.sm or (RTX_DEFAULT if flavour is RTX else () if here is None else (here,))
    if precision == "fp8" and (others := [target for target in targets if target < FP8_FROM]):
        message = f"fp8 needs compute capability {FP8_FROM} (Ada) or later, got {', '.join(map(str, others))}"
        raise InputError(message, hint="use --precision int8, or --sm 89,120")
    if flavour is not RTX:
        return
    supported = flavour.supported_targets()
    listed = ", ".join(map(str, supported))
    for target in options.sm:
        if target in DATA_CENTER:
            message = f"TensorRT for RTX supports no data center GPUs (compute capability {target}), only {listed}"
            hint = "on that machine use --format trt, or the ONNX file in ONNX Runtime with CUDA"
            raise InputError(message, hint=hint)
        if target not in supported:
            message = f"TensorRT for RTX does not support compute capability {target}"
            raise InputError(message, hint=f"use some of --sm {listed}")
    if (options.opset or 0) >= ATTENTION_NODE_FROM and precision not in HALF:
        limit = f"which TensorRT for RTX supports in half precision only, but the precision is {precision}"
        message = f"opset {options.opset} exports attention as one Attention node, {limit}"
        raise InputError(message, hint="use --precision fp16, or omit the opset")
    if TURING in options.sm and precision != "fp16":
        message = f"on Turing (compute capability {TURING}) TensorRT for RTX supports fp16 only, not {precision}"
        raise InputError(message, hint=f"use --precision fp16, or omit {TURING} from --sm")


def choose_targets(flavour: Flavour, options: ExportOptions) -> tuple[int, ...]:
    """The compute capabilities to build for: those of the options, or that of the GPU that TensorRT builds on.

    Raises DeviceError without that GPU, InputError if the options have another one.
    """
    if flavour is RTX:
        return tuple(dict.fromkeys(options.sm)) or RTX_DEFAULT
    here = capability()
    if here is None:
        raise DeviceError(f"{NO_GPU}{hardware.cuda_reason()}", hint="run the same command on the target")
    if others := [target for target in options.sm if target != here]:
        message = f"TensorRT builds for the GPU that it builds on (compute capability {here})"
        hint = "run the same command on such a GPU, or use --format trt-rtx for GeForce and RTX"
        raise InputError(f"{message}, but --sm has {', '.join(map(str, others))}", hint=hint)
    return (here,)


def onnx_options(options: ExportOptions) -> ExportOptions:
    """The options of the ONNX file. TF32 is a way to multiply, not to store: its file is in fp32."""
    return options.only(ONNX.uses - ({"precision"} if options.precision == "tf32" else set()))


def _create_exporter(flavour: Flavour, uses: frozenset[str]) -> Exporter:
    return Exporter(
        flavour.name,
        flavour.suffix,
        partial(export, flavour),
        EngineRunner,
        uses,
        check_options=partial(check_options, flavour),
        unavailable=partial(unavailable, flavour),
        cannot_run=partial(cannot_run, flavour),
        equal_widths=lambda options: (options.opset or 0) >= ATTENTION_NODE_FROM,
        other_suffixes=(".trt", ".plan"),
    )


TENSORRT, TENSORRT_RTX = _create_exporter(TRT, COMMON | ONLY_TRT), _create_exporter(RTX, COMMON)
