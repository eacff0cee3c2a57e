"""Execution providers of ONNX Runtime: what each needs, its options, and why it cannot be used here.

A provider is chosen by name or by device. It runs the model, or the session is rejected: no other provider replaces it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from vitcompress.errors import DeviceError, InputError, did_you_mean
from vitcompress.exporters.onnx import libraries
from vitcompress.exporters.options import Precision
from vitcompress.exporters.runner import RunnerOptions
from vitcompress.io import hardware

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
TENSORRT, COREML = "TensorrtExecutionProvider", "CoreMLExecutionProvider"
# The CPU may run the shape arithmetic of a dynamic batch, but none of these operators.
HEAVY = frozenset(
    {"MatMul", "Gemm", "Conv", "Attention", "LayerNormalization", "Softmax", "Gelu", "FusedMatMul", "FusedGemm"}
    | {"FusedConv", "MultiHeadAttention", "SkipLayerNormalization", "BiasGelu", "FastGelu"}
)


@dataclass(frozen=True)
class Provider:
    """One execution provider.

    device: kind of device. remedy: how to install it. packages: its distributions.
    tf32: whether fp32 products use TF32: `never`, on `request`, or `always` (TensorRT's default, for which its provider
        has no option).
    graphs: whether a session can record CUDA graphs, one for each bound input.
    builds: whether it compiles the file for a range of batches first, and can cache the result.
    load(): loads its libraries. options(options, profile): its options under ONNX Runtime's names, besides the GPU and
        its stream. profile: (minimum, optimal, maximum) shape of the input as `images:1x3x224x224`; empty if the file
        has fixed shapes.
    """

    name: str
    device: str
    remedy: str
    packages: tuple[str, ...] = ("onnxruntime", "onnxruntime-gpu")
    tf32: Literal["never", "request", "always"] = "never"
    graphs: bool = False
    builds: bool = False
    load: Callable[[], None] = lambda: None
    options: Callable[[RunnerOptions, Sequence[str]], dict[str, str]] = lambda options, profile: {}

    @property
    def present(self) -> bool:
        """Whether it is installed; it may still not work here."""
        return not libraries.unavailable() and self.name in libraries.load_onnxruntime().get_available_providers()


def _tensorrt_options(options: RunnerOptions, profile: Sequence[str]) -> dict[str, str]:
    """Without precision flags the network is strongly typed: the file determines the precision."""
    flags = dict.fromkeys(("trt_fp16_enable", "trt_bf16_enable", "trt_int8_enable"), "0")
    for kind in ("engine", "timing") if options.engine_cache is not None else ():
        flags |= {f"trt_{kind}_cache_enable": "1", f"trt_{kind}_cache_path": str(options.engine_cache)}
    for kind, shape in zip(("min", "opt", "max"), profile, strict=False):
        flags[f"trt_profile_{kind}_shapes"] = shape
    return flags


_ALL = (
    Provider(CPU, "cpu", "pip install onnxruntime"),
    Provider(
        CUDA,
        "cuda",
        "pip install 'vitcompress[cuda]'",
        ("onnxruntime-gpu", "nvidia-cuda-runtime", "nvidia-cublas", "nvidia-curand", "nvidia-cudnn-cu13"),
        tf32="request",
        graphs=True,
        load=libraries.load_cuda,
        options=lambda own, _: {"use_tf32": f"{own.precision == 'tf32':d}", "enable_cuda_graph": f"{own.cuda_graph:d}"},
    ),
    Provider(
        TENSORRT,
        "cuda",
        "pip install 'vitcompress[cuda]' 'tensorrt<11'",  # for libnvinfer.so.10; `tensorrt` pins tensorrt-cu13
        ("onnxruntime-gpu", "tensorrt-cu13", "tensorrt"),
        tf32="always",
        builds=True,
        load=libraries.load_tensorrt,
        options=_tensorrt_options,
    ),
    Provider(COREML, "mps", "pip install onnxruntime, on macOS"),
)
PROVIDERS = {provider.name: provider for provider in _ALL}
DEFAULTS = {"cpu": CPU, "cuda": CUDA, "mps": COREML}  # device -> its provider if none is named


def choose_provider(device: str | None, name: str | None) -> tuple[Provider, str]:
    """The provider and the device of a session; either one determines the other if that is None.

    Raises DeviceError for unknown ones, a provider for another device, or one that this machine lacks.
    """
    if name is not None and name not in PROVIDERS:
        message = f"there is no execution provider {name!r}{did_you_mean(name, PROVIDERS)}"
        raise DeviceError(message, hint=f"the providers are {', '.join(PROVIDERS)}")
    device = device or (PROVIDERS[name].device if name else "cpu")
    kind, index = hardware.parse_device(device)
    provider = PROVIDERS[name or DEFAULTS[kind]]
    if provider.device != kind:
        message = f"{provider.name} does not run on {device}"
        raise DeviceError(message, hint=f"use --device {provider.device}, or omit --device")
    on_cuda, hint = kind == "cuda", f"{provider.remedy}; `vitcompress doctor` shows what this machine has"
    if on_cuda and index >= hardware.count_gpus():
        if not hardware.count_gpus():
            hint = f"run it on a machine with a GPU ({provider.remedy}), or use --device cpu without --provider here"
        reason = f"it needs an NVIDIA GPU, and torch finds no {device} here{hardware.cuda_reason()}"
        raise DeviceError(f"{provider.name} is not available: {reason}", hint=hint)
    if not provider.present:
        others = ", ".join(libraries.load_onnxruntime().get_available_providers())
        hint = libraries.find_conflict() or hint
        raise DeviceError(f"{provider.name} is not available: this ONNX Runtime has only {others}", hint=hint)
    return provider, f"cuda:{index}" if on_cuda else device


def check_settings(provider: Provider, options: RunnerOptions) -> None:
    """Raise DeviceError or InputError for settings that the provider does not support."""
    if options.cuda_graph and not provider.graphs:
        reason = "supports only one CUDA graph per session" if provider.device == "cuda" else "has no CUDA kernels"
        hint = "omit --cuda-graph, or use --provider cuda, or an engine: vitcompress export DIR --format trt"
        raise DeviceError(f"{provider.name} {reason}, so CUDA graphs are not supported with it", hint=hint)
    if options.cuda_graph and options.transfers:
        message = "ONNX Runtime replays a CUDA graph on images that stay on the GPU: it cannot be timed with transfers"
        raise InputError(message, hint="omit --cuda-graph or --transfers")
    if options.engine_cache is not None and not provider.builds:
        raise InputError(f"{provider.name} builds nothing that could be cached", hint="omit --engine-cache")


def resolve_precision(path: Path | str, stored: Any, requested: str | None, provider: Provider) -> str:
    """The precision that the file is run in. Only TF32 products on CUDA can be chosen. stored: by its metadata.

    Raises DeviceError if the file or the provider does not have the requested precision.
    """
    own = str(stored or "as stored")
    if own == "bf16" and provider.name == CPU:
        message = f"{path} is in bf16, for which {CPU} has no convolution and no matrix product"
        hint = "run it on a GPU with --device cuda, or use OpenVINO with --precision bf16 on the CPU"
        raise DeviceError(message, hint=hint)
    if own == "fp8" and provider.name == CPU:
        raise DeviceError(f"{path} is in fp8, in which {CPU} cannot multiply", hint="build an engine: --format trt-rtx")
    possible = [own]
    if own in ("fp32", "as stored"):
        possible = {"never": ["fp32"], "request": ["fp32", "tf32"], "always": ["tf32"]}[provider.tf32]
        if requested == "fp32" and provider.tf32 == "always":
            message = f"{provider.name} always computes fp32 products in TF32"
            raise DeviceError(message, hint="use --precision tf32, or an engine: vitcompress export DIR --format trt")
    default = possible[0] if stored else own
    if requested in (None, default, *possible):
        return requested or default
    choices = get_args(Precision)
    remedy = f"export it with --precision {requested}" if requested in choices else f"use one of {', '.join(choices)}"
    remedy = {"tf32": "use --device cuda", "int8+bf16": f"{remedy} --format openvino"}.get(str(requested), remedy)
    shown = default if stored else "its stored precision"
    raise DeviceError(f"{path} runs in {shown}, but the precision is {requested}", hint=remedy)


def assigned_operators(session: Any, provider: str) -> tuple[set[str], set[str]]:
    """The operators that `provider` runs, and those that others run. The session must record its assignment."""
    own, others = set[str](), set[str]()
    for part in session.get_provider_graph_assignment_info():
        (own if part.ep_name == provider else others).update(node.op_type for node in part.get_nodes())
    return own, others
