"""Execution providers of ONNX Runtime: what each needs, its options, and why it cannot be used here.

A provider is chosen by name or by device and loaded with what it needs. It computes, or the session is refused: no
other provider takes its place. Precision lies in the ONNX file, so that providers are told of none but TF32, which
concerns how fp32 products are computed and which only CUDA's provider leaves to its user.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import onnxruntime as ort

from vitcompress.errors import DeviceError, InputError, did_you_mean
from vitcompress.exporters.onnx import libraries
from vitcompress.exporters.onnx.libraries import RTX
from vitcompress.exporters.options import Precision
from vitcompress.exporters.runner import RunnerOptions
from vitcompress.io import hardware

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
TENSORRT, COREML = "TensorrtExecutionProvider", "CoreMLExecutionProvider"
# A graph with a dynamic batch rightly keeps its shape arithmetic on the CPU; these must be where they were asked for.
HEAVY = frozenset(
    {"MatMul", "Gemm", "Conv", "Attention", "LayerNormalization", "Softmax", "Gelu", "FusedMatMul", "FusedGemm"}
    | {"FusedConv", "MultiHeadAttention", "SkipLayerNormalization", "BiasGelu", "FastGelu"}
)


@dataclass(frozen=True)
class ProviderSettings:
    """What a session asks of its provider. index: number of the GPU. stream: address of the CUDA stream to compute on.

    profile: (least, best, largest) shape of the input as `images:1x3x224x224`, empty where it is fixed in the file.
    cache: folder for what the provider builds, None keeps nothing.
    """

    index: int = 0
    tf32: bool = False
    cuda_graph: bool = False
    stream: int = 0
    profile: tuple[str, ...] = ()
    cache: Path | None = None


@dataclass(frozen=True)
class Provider:
    """One execution provider.

    device: kind of the device that it computes on. remedy: what brings it. packages: distributions that it consists of.
    tf32: whether fp32 products are computed in TF32: `never`, as `asked`, or `always` (TensorRT's default, which its
    providers do not hand on). graph_number: run option that numbers the CUDA graphs of a session, one for each bound
    input; empty where it keeps a single one for all of them. builds: it compiles the file for a range of batches first,
    and can keep that. load(): makes what it needs known to the process. options(settings): as ONNX Runtime names them.
    """

    name: str
    device: str
    remedy: str
    packages: tuple[str, ...] = ("onnxruntime", "onnxruntime-gpu")
    tf32: Literal["never", "asked", "always"] = "never"
    graph_number: str = ""
    builds: bool = False
    load: Callable[[], None] = lambda: None
    options: Callable[[ProviderSettings], dict[str, str]] = lambda settings: {}

    @property
    def present(self) -> bool:
        """Whether it is installed, which says nothing of whether it works here."""
        return self.name in ort.get_available_providers() or (self.name == RTX and libraries.rtx_installed())


def _cuda_options(settings: ProviderSettings) -> dict[str, str]:
    return {
        "device_id": str(settings.index),
        "use_tf32": str(int(settings.tf32)),
        "user_compute_stream": str(settings.stream),
        "enable_cuda_graph": str(int(settings.cuda_graph)),
    }


def _tensorrt_options(settings: ProviderSettings) -> dict[str, str]:
    """Without one of the precision flags the network is strongly typed: it computes as the file says."""
    found = {
        "device_id": str(settings.index),
        "user_compute_stream": str(settings.stream),
        "trt_fp16_enable": "0",
        "trt_bf16_enable": "0",
        "trt_int8_enable": "0",
        **_profile("trt", settings),
    }
    if settings.cache is not None:
        found |= {"trt_engine_cache_enable": "1", "trt_engine_cache_path": str(settings.cache)}
        found |= {"trt_timing_cache_enable": "1", "trt_timing_cache_path": str(settings.cache)}
    return found


def _rtx_options(settings: ProviderSettings) -> dict[str, str]:
    found = {
        "has_user_compute_stream": "1",
        "user_compute_stream": str(settings.stream),
        "enable_cuda_graph": str(int(settings.cuda_graph)),
        **_profile("nv", settings),
    }
    return found | ({} if settings.cache is None else {"nv_runtime_cache_path": str(settings.cache)})


def _profile(prefix: str, settings: ProviderSettings) -> dict[str, str]:
    kinds = ("min", "opt", "max")
    return {f"{prefix}_profile_{kind}_shapes": shape for kind, shape in zip(kinds, settings.profile, strict=False)}


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider(CPU, "cpu", "pip install onnxruntime"),
        Provider(
            CUDA,
            "cuda",
            "pip install 'vitcompress[cuda]'",
            ("onnxruntime-gpu", "nvidia-cuda-runtime", "nvidia-cublas", "nvidia-curand", "nvidia-cudnn-cu13"),
            tf32="asked",
            graph_number="gpu_graph_id",
            load=libraries.load_cuda,
            options=_cuda_options,
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
        Provider(
            RTX,
            "cuda",
            "pip install onnxruntime-ep-nv-tensorrt-rtx",
            ("onnxruntime-gpu", "onnxruntime", "onnxruntime-ep-nv-tensorrt-rtx", "onnxruntime-ep-nv-tensorrt-rtx-cu13"),
            tf32="always",
            graph_number="cuda_graph_annotation_id",
            builds=True,
            load=libraries.load_rtx,
            options=_rtx_options,
        ),
        Provider(COREML, "mps", "pip install onnxruntime, on macOS"),
    )
}
OF_DEVICE = {"cpu": CPU, "cuda": CUDA, "mps": COREML}  # what a device computes with when no provider is named


def chosen(device: str | None, name: str | None) -> tuple[Provider, str]:
    """The provider and the device of a session; where one of them is not given, the other says which.

    Raises:
        DeviceError: one that is not known, two that do not go together, or a provider that is not installed here, or
            has no GPU here to compute on.
    """
    if name is not None and name not in PROVIDERS:
        raise DeviceError(
            f"there is no execution provider {name!r}{_meant(name)}",
            hint=f"the providers are {', '.join(PROVIDERS)}",
        )
    wanted = device or (PROVIDERS[name].device if name else "cpu")
    kind, _, index = wanted.partition(":")
    if kind not in OF_DEVICE or not (index or "0").isdecimal():
        raise DeviceError(f"device {wanted!r} is not known", hint="use cpu, cuda, cuda:N or mps")
    found = PROVIDERS[name or OF_DEVICE[kind]]
    if found.device != kind:
        raise DeviceError(
            f"{found.name} does not compute on {wanted}", hint=f"use --device {found.device}, or leave --device out"
        )
    if problem := absent(found, wanted):
        raise DeviceError(f"{found.name} was asked for: {problem}", hint=_way_out(found))
    return found, f"cuda:{index_of(wanted)}" if kind == "cuda" else wanted


def _meant(name: str) -> str:
    """The provider that `cuda` or a misspelled name was probably meant to be."""
    begun = [full for full in PROVIDERS if full.lower().startswith(name.lower())] if name else []
    return f", did you mean {begun[0]}?" if begun else did_you_mean(name, PROVIDERS)


def absent(provider: Provider, device: str) -> str | None:
    """Why a provider cannot be there: no such GPU, or it is not installed. None when there is no reason."""
    if provider.device == "cuda" and index_of(device) >= hardware.count():
        return f"it computes on an NVIDIA GPU, and torch finds no {device} here{hardware.because()}"
    if not provider.present:
        return f"this ONNX Runtime has {', '.join(ort.get_available_providers())} only"
    return None


def _way_out(provider: Provider) -> str:
    if provider.device == "cuda" and not hardware.count():
        return f"run it where there is one ({provider.remedy}); --device cpu without --provider runs the file here"
    return f"{provider.remedy}; `vitcompress doctor` shows what this machine has"


def index_of(device: str) -> int:
    """`cuda:1` -> 1"""
    return int(device.partition(":")[2] or 0)


def attach(provider: Provider, options: Any, settings: ProviderSettings) -> list[tuple[str, dict[str, str]]] | None:
    """Load a provider and have a session's options use it. Returns what the session is to be given as `providers`.

    Raises:
        DeviceError: it cannot be loaded, or does not support the GPU.
    """
    provider.load()
    named = provider.options(settings)
    if provider.name != RTX:
        return [(provider.name, named)]
    devices = [device for device in ort.get_ep_devices() if device.ep_name == RTX]
    numbered = ((int(device.ep_options.get("device_id", n)), device) for n, device in enumerate(devices))
    found = [device for number, device in numbered if number == settings.index]
    if not found:
        raise DeviceError(
            f"{RTX} does not support cuda:{settings.index}: it finds {len(devices)} GPUs that it supports",
            hint="it is for GeForce and RTX (compute capability 8.6, 8.9, 12.0 and later); use CUDAExecutionProvider",
        )
    options.add_provider_for_devices(found, named)
    return None


def check_settings(provider: Provider, options: RunnerOptions) -> None:
    if options.cuda_graph and provider.device != "cuda":
        raise DeviceError(
            f"a CUDA graph was asked for, and {provider.name} has no CUDA kernels to record",
            hint="leave --cuda-graph out, or use --device cuda",
        )
    if options.cuda_graph and options.transfers:
        raise InputError(
            "ONNX Runtime replays a CUDA graph on images that stay where they are: no transfers are timed with it",
            hint="leave --cuda-graph or --transfers out",
        )
    if options.cuda_graph and not provider.graph_number:
        raise InputError(
            f"{provider.name} keeps one CUDA graph for all that a session is given, so that none is used here",
            hint="leave --cuda-graph out, or measure an engine with it: vitcompress export DIR --format trt",
        )
    if options.engine_cache is not None and not provider.builds:
        raise InputError(f"{provider.name} builds nothing that a cache could keep", hint="leave --engine-cache out")


def precision_of(path: Path, stored: Any, wanted: str | None, provider: Provider) -> str:
    """The precision that the file computes in; it cannot be chosen, but TF32 products on CUDA can."""
    own = str(stored or "as stored")
    if own == "bf16" and provider.name == CPU:
        raise DeviceError(
            f"{path} computes in bf16, for which {CPU} has no convolution and no matrix product",
            hint="run it on a GPU with --device cuda, or use OpenVINO with --precision bf16 on the CPU",
        )
    wide = own in ("fp32", "as stored")
    if wide and wanted == "fp32" and provider.tf32 == "always":
        raise DeviceError(
            f"{provider.name} computes fp32 products in TF32 and cannot be told not to",
            hint="give --precision tf32, or use an engine: vitcompress export DIR --format trt",
        )
    if wide and wanted == "tf32" and provider.tf32 != "never":
        return "tf32"
    if own == "fp32" and provider.tf32 == "always":
        own = "tf32"
    if wanted in (None, own) or (wanted == "fp32" and stored is None):
        return own if wanted is None else str(wanted)
    offered = get_args(Precision)
    way = f"export it with --precision {wanted}" if wanted in offered else f"use one of {', '.join(offered)}"
    shown = own if stored else "what it is stored in"
    raise DeviceError(f"{path} computes in {shown}, {wanted} was asked for", hint=way)


def assignment(session: Any) -> dict[str, set[str]]:
    """Provider -> kinds of the nodes that it computes; needs recorded assignment info."""
    parts: Iterable[Any] = session.get_provider_graph_assignment_info()
    found: dict[str, set[str]] = {}
    for part in parts:
        found.setdefault(part.ep_name, set()).update(node.op_type for node in part.get_nodes())
    return found


def heavy_elsewhere(places: dict[str, set[str]], provider: str) -> list[str]:
    """Kinds of heavy nodes that another provider than `provider` computes."""
    return sorted({kind for name, kinds in places.items() if name != provider for kind in kinds} & HEAVY)
