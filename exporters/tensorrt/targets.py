"""Where TensorRT engines can be built and run, for which GPUs, and with which options."""

from collections.abc import Sequence
from typing import get_args

from vitcompress.errors import DeviceError, InputError
from vitcompress.exporters.onnx.export import ATTENTION_NODE_FROM, ONNX
from vitcompress.exporters.options import ExportOptions, Precision
from vitcompress.exporters.precision import HALF
from vitcompress.exporters.tensorrt.flavours import (
    DATA_CENTRE,
    RTX,
    RTX_DEFAULT,
    TRT,
    Flavour,
    capability,
    supported_targets,
)
from vitcompress.io import hardware

TURING = 75  # compute capability


def unavailable(flavour: Flavour) -> str | None:
    """Why this machine cannot build such engines, or None."""
    if flavour is TRT and capability() is None:
        return f"{_no_gpu()}; build on the target ({flavour.install}), or use trt-rtx for GeForce and RTX"
    return flavour.problem("Builder" if flavour is TRT else None)


def _no_gpu() -> str:
    return f"TensorRT builds on a GPU, and there is none here{hardware.cuda_reason()}"


def cannot_run(flavour: Flavour) -> str | None:
    """Why this machine cannot run such engines, or None."""
    if reason := flavour.problem():
        return reason
    here = capability()
    if here is None:
        return f"there is no CUDA GPU here{hardware.cuda_reason() or ': run it on the target'}"
    if flavour is RTX and here not in supported_targets(flavour.load()):
        return f"TensorRT for RTX does not support this GPU (compute capability {here})"
    return flavour.problem("Runtime")


def check_options(flavour: Flavour, options: ExportOptions) -> None:
    """Raise InputError for unsupported options, including those of the ONNX file."""
    precision, precisions = options.precision, get_args(Precision)
    if precision not in precisions:
        raise InputError(f"{flavour.title} has no precision {precision!r}", hint=f"use one of {', '.join(precisions)}")
    ONNX.check(onnx_options(options))
    if flavour is not RTX:
        return
    _check_targets(options.sm, supported_targets(flavour.load()))
    if (options.opset or 0) >= ATTENTION_NODE_FROM and precision not in HALF:
        raise InputError(
            f"opset {options.opset} exports attention as one Attention node, which TensorRT for RTX supports in half "
            f"precision only, but the precision is {precision}",
            hint="use --precision fp16, or omit the opset",
        )
    if TURING in options.sm and precision != "fp16":
        raise InputError(
            f"on Turing (compute capability {TURING}) TensorRT for RTX supports fp16 only, but the precision is "
            f"{precision}",
            hint=f"use --precision fp16, or omit {TURING} from --sm",
        )


def _check_targets(targets: Sequence[int], supported: Sequence[int]) -> None:
    listed = ", ".join(map(str, supported))
    for target in targets:
        if target in DATA_CENTRE:
            raise InputError(
                f"TensorRT for RTX does not support data centre GPUs such as compute capability {target}; it supports "
                f"{listed}",
                hint="on that machine use --format trt, or the ONNX file in ONNX Runtime with CUDA",
            )
        if target not in supported:
            raise InputError(
                f"TensorRT for RTX does not support compute capability {target}", hint=f"use some of --sm {listed}"
            )


def choose_targets(flavour: Flavour, options: ExportOptions) -> tuple[int, ...]:
    """The compute capabilities to build for: those of the options, or that of the GPU that TensorRT builds on."""
    if flavour is RTX:
        return tuple(dict.fromkeys(options.sm)) or RTX_DEFAULT
    here = capability()
    if here is None:
        raise DeviceError(_no_gpu(), hint="run the same command on the target")
    if others := [target for target in options.sm if target != here]:
        raise InputError(
            f"TensorRT builds for the GPU that it builds on (compute capability {here}), but --sm has "
            f"{', '.join(map(str, others))}",
            hint="run the same command on such a GPU, or use --format trt-rtx for GeForce and RTX",
        )
    return (here,)


def onnx_options(options: ExportOptions) -> ExportOptions:
    """The options of the ONNX file. TF32 is a way to multiply, not to store: its file is in fp32."""
    return options.only(ONNX.uses - ({"precision"} if options.precision == "tf32" else set()))
