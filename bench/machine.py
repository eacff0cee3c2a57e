"""What a measurement was taken on, read and never changed."""

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from vitcompress.installed import versions

LIBRARIES = (
    "vitcompress",
    "torch",
    "timm",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "openvino",
    "tensorrt",
    "tensorrt-rtx",
    "numpy",
)
CPU_FLAGS = ("avx2", "avx_vnni", "f16c", "bf16", "i8mm")
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
DISTURBED = 0.25  # cores that other processes use, from which a measurement is called disturbed


def facts() -> dict[str, Any]:
    """Hardware and versions."""
    return {
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "cpu": _cpu_name(),
        "cpu_flags": cpu_flags(),
        "cpu_cores": os.cpu_count(),
        "cpu_cores_usable": usable_cores(),
        "memory_gb": _memory_gb(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "environment": {k: v for k, v in os.environ.items() if k.endswith("_NUM_THREADS")},
        "versions": versions(LIBRARIES),
    }


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> float | None:
    """Runnable processes over the last minute, ours included; None where the system does not count them."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def cpu_seconds() -> tuple[float, float, float] | None:
    """Wall-clock time, and processor time used so far by all processes and by this one; None where it is not told."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return None
    user, nice, system, _, _, irq, softirq = map(int, stat.read_text().split()[1:8])
    own = os.times()
    return time.monotonic(), (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK"), own.user + own.system


def others_cores(before: tuple[float, float, float] | None, after: tuple[float, float, float] | None) -> float | None:
    """Cores that other processes kept busy between two `cpu_seconds`."""
    if before is None or after is None or after[0] <= before[0]:
        return None
    wall, everyone, own = (b - a for a, b in zip(before, after, strict=True))
    return max(0.0, (everyone - own) / wall)


def peak_bytes() -> int | None:
    """Most memory that this process has held."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def cpu_state() -> dict[str, Any]:
    """Load, clock and governor of the processor now; None for what the system does not tell."""
    clocks = [float(value) for value in _cpuinfo("cpu MHz")]
    return {
        "load_average": load_average(),
        "clock_mhz": [min(clocks), max(clocks)] if clocks else None,
        "governor": GOVERNOR.read_text().strip() if GOVERNOR.is_file() else None,
    }


def cpu_flags() -> list[str]:
    """What the processor has for matrix products: avx2, avx512*, amx*, *vnni."""
    flags = set(" ".join(_cpuinfo("flags")[:1] or _cpuinfo("Features")[:1]).split())
    return sorted(flag for flag in flags if flag in CPU_FLAGS or flag.startswith(("avx512", "amx", "sve", "asimd")))


def _cpuinfo(key: str) -> list[str]:
    """What the kernel says of each core under `key`."""
    info = Path("/proc/cpuinfo")
    pairs = [line.partition(":") for line in info.read_text().splitlines()] if info.is_file() else []
    return [value.strip() for name, _, value in pairs if name.strip() == key]


def _cpu_name() -> str:
    """The processor's name; the architecture where the system does not tell."""
    return next(iter(_cpuinfo("model name")), "") or platform.processor() or platform.machine()


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
