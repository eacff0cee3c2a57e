"""The processor, CUDA devices that torch can use, and versions of installed packages."""

import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

from vitcompress.errors import DeviceError, first_line

CPUINFO = Path("/proc/cpuinfo")
CPU_FLAGS = ("avx2", "avx_vnni", "f16c", "bf16", "i8mm")
# Instruction sets that decide how fast matrix products are -> the flags of Linux, any of which means that it is there.
X86: dict[str, tuple[str, ...]] = {
    "AVX2": ("avx2",),
    "AVX-512": ("avx512f",),
    "VNNI": ("avx512_vnni", "avx_vnni"),
    "BF16": ("avx512_bf16",),
    "AMX": ("amx_tile",),
}
ARM: dict[str, tuple[str, ...]] = {"dotprod": ("asimddp",), "i8mm": ("i8mm",), "bf16": ("bf16",)}

# Precision -> instruction sets of which any makes it fast, and the reason and the remedy without them.
PRECISIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "fp32": ((), ""),
    "bf16": (("BF16",), "no BF16, which OpenVINO needs; use int8 or fp32"),
    "int8": (("VNNI", "dotprod"), "no VNNI (dotprod on Arm), so only ONNX Runtime gains from it; use --format onnx"),
    "int8+bf16": (("BF16",), "no BF16, which OpenVINO needs; use int8"),
}


def cpu_name() -> str:
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> list[str]:
    """Instruction sets for matrix products: avx2, avx512*, amx*, *vnni and the like; empty if unknown."""
    facts = _cpuinfo()
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    return sorted(flag for flag in flags if flag in CPU_FLAGS or flag.startswith(("avx512", "amx", "sve", "asimd")))


def instruction_sets() -> dict[str, bool] | None:
    """Whether the processor has each of `X86` or `ARM`; None if unknown, without /proc/cpuinfo."""
    facts, present = _cpuinfo(), cpu_flags()
    known = ARM if "Features" in facts else X86 if "flags" in facts else None
    return {name: any(flag in present for flag in flags) for name, flags in known.items()} if known else None


def slow_reason(precision: str) -> str | None:
    """Why one of `PRECISIONS` is not fast, or may not be, on this processor, and the remedy; None if it is fast."""
    sets, problem = PRECISIONS[precision]
    if not problem:
        return None
    if (present := instruction_sets()) is None:
        return "the instruction sets of the processor are unknown here; --precision fastest measures"
    return None if any(map(present.get, sets)) else problem


def _cpuinfo() -> dict[str, str]:
    """/proc/cpuinfo, of the first core; psutil has neither the name of the processor nor its flags."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    pairs = (line.partition(":") for line in reversed(lines))  # the first core replaces the others
    return {name.strip(): value.strip() for name, _, value in pairs}


def parse_device(device: str) -> tuple[str, int]:
    """`cuda:1` -> ("cuda", 1); `cuda` is the GPU of this process under torchrun, else 0. Raises DeviceError."""
    kind, colon, index = device.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (colon and not (kind == "cuda" and index.isdecimal())):
        raise DeviceError(f"device {device!r} is unknown", hint="use cpu, cuda, cuda:N or mps; in a recipe also auto")
    return kind, int(index or os.environ.get("LOCAL_RANK", "0"))


def check_device(name: str | torch.device, amp: str = "none") -> torch.device:
    """The device `name`; `auto` is CUDA, else MPS, else CPU. amp: a precision that it must support.

    Raises DeviceError if this machine lacks it.
    """
    name = str(name).removesuffix(":0") if isinstance(name, torch.device) and name.type != "cuda" else str(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind, number = parse_device(name)
    if kind == "mps" and not torch.backends.mps.is_available():
        raise DeviceError("device 'mps' is requested, but this machine has no Apple GPU", hint="use --device cpu")
    if kind != "cuda":
        return torch.device(kind)
    if number >= (count := count_gpus()):
        devices = f"{count} CUDA device{'s' if count != 1 else ''}"
        message = f"device 'cuda:{number}' is requested, but torch sees {devices}{cuda_reason()}"
        raise DeviceError(message, hint="use --device cpu, or auto")
    if amp == "bf16" and not is_ampere(number):
        message = f"amp bf16 is requested, but {torch.cuda.get_device_name(number)} does not support it"
        raise DeviceError(message, hint="use fp16")
    return torch.device("cuda", number)


def count_gpus() -> int:
    """Number of CUDA devices; 0 if CUDA does not start."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cuda_reason() -> str:
    """`: REASON` to complete a message about a missing GPU; empty if CUDA starts, or if there is no GPU."""
    if torch.cuda.is_available() or not torch.cuda.device_count():
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        return f": {first_line(error)}"
    return ""


def is_ampere(index: int) -> bool:
    """Whether GPU `index` supports bf16 and TF32. On others torch emulates bf16 and silently ignores TF32."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(index) >= (8, 0)


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Version of each installed distribution of `packages`."""
    installed = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed
