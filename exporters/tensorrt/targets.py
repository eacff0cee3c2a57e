"""What TensorRT engines can be asked for: on which machines they are built and run, and for which GPUs."""

from collections.abc import Sequence
from typing import get_args

from vitcompress.errors import DeviceError, InputError
from vitcompress.exporters.onnx.export import ATTENTION_NODE_FROM, ONNX
from vitcompress.exporters.options import ExportOptions, Precision
from vitcompress.exporters.precision import HALF
from vitcompress.exporters.tensorrt.flavours import DATA_CENTRE, RTX, RTX_DEFAULT, TRT, Flavour, buildable, capability
from vitcompress.io import hardware

TURING = 75  # compute capability


def unavailable(flavour: Flavour) -> str | None:
    """Why this machine cannot build such engines, None when it can."""
    if flavour is TRT and capability() is None:
        return f"{_no_gpu()}; build on the target ({flavour.install}), or use trt-rtx for GeForce and RTX"
    return flavour.missing() or (flavour.refused("Builder") if flavour is TRT else None)


def _no_gpu() -> str:
    return f"TensorRT builds on a GPU, and there is none here{hardware.because()}"


def cannot_run(flavour: Flavour) -> str | None:
    """Why this machine cannot run such engines, None when it can."""
    if reason := flavour.missing():
        return reason
    here = capability()
    if here is None:
        return f"there is no CUDA GPU here{hardware.because() or ': run it on the target'}"
    if flavour is RTX and here not in buildable(flavour.load()):
        return f"TensorRT for RTX does not run on this GPU (compute capability {here})"
    return flavour.refused("Runtime")


def refuse(flavour: Flavour, options: ExportOptions) -> None:
    """Raise InputError for options that the flavour does not offer; those of ONNX are part of them."""
    if options.precision not in get_args(Precision):
        raise InputError(
            f"{flavour.title} has no precision {options.precision!r}",
            hint=f"use one of {', '.join(get_args(Precision))}",
        )
    ONNX.check(options_of_onnx(options))
    if flavour is RTX:
        _refuse_targets(options.sm, buildable(flavour.load()))
        if (options.opset or 0) >= ATTENTION_NODE_FROM and options.precision not in HALF:
            raise InputError(
                f"as one Attention node, which opset {options.opset} makes of it, TensorRT for RTX takes attention in "
                f"half precision only, {options.precision} was asked for",
                hint="give --precision fp16, or leave the opset out",
            )
        if TURING in options.sm and options.precision != "fp16":
            raise InputError(
                f"on Turing (compute capability {TURING}) TensorRT for RTX computes in fp16 only, "
                f"{options.precision} was asked for",
                hint=f"give --precision fp16, or leave {TURING} out of --sm",
            )


def _refuse_targets(wanted: Sequence[int], known: Sequence[int]) -> None:
    listed = ", ".join(map(str, known))
    for target in wanted:
        if target in DATA_CENTRE:
            raise InputError(
                f"TensorRT for RTX is not for data centres, as compute capability {target} is; it knows {listed}",
                hint="on that machine use --format trt, or the ONNX file in ONNX Runtime with CUDA",
            )
        if target not in known:
            raise InputError(
                f"TensorRT for RTX does not know compute capability {target}", hint=f"give some of --sm {listed}"
            )


def targets_of(flavour: Flavour, options: ExportOptions) -> tuple[int, ...]:
    """What the engine is built for: the capabilities that were named, or the GPU that TensorRT builds on."""
    if flavour is RTX:
        return tuple(dict.fromkeys(options.sm)) or RTX_DEFAULT
    here = capability()
    if here is None:
        raise DeviceError(_no_gpu(), hint="run the same command on the target")
    if wrong := [target for target in options.sm if target != here]:
        raise InputError(
            f"TensorRT builds for the GPU that it builds on, which has compute capability {here}; "
            f"{', '.join(map(str, wrong))} was asked for",
            hint="run the same command on such a GPU, or use --format trt-rtx for GeForce and RTX",
        )
    return (here,)


def options_of_onnx(options: ExportOptions) -> ExportOptions:
    """The options of the ONNX file: TF32 is a way to multiply, not a way to store."""
    found = options.only(ONNX.uses)
    return found if found.precision != "tf32" else found.only(ONNX.uses - {"precision"})
