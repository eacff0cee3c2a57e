"""What a measurement was taken on, read and never changed."""

import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

LIBRARIES = ("vitcompress", "torch", "timm", "onnx", "onnxruntime", "onnxruntime-gpu", "numpy")
DISTURBED = 0.25  # cores that other processes use, from which a measurement is called disturbed


def facts() -> dict[str, Any]:
    """Hardware and versions."""
    return {
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "cpu_cores_usable": usable_cores(),
        "memory_gb": _memory_gb(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "environment": {k: v for k, v in os.environ.items() if k.endswith("_NUM_THREADS")},
        "versions": {name: found for name in LIBRARIES if (found := _version(name))},
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


def gpu_state(index: int = 0) -> dict[str, Any] | None:
    """Clocks, temperature, power, throttling and the number of other processes; None without CUDA or nvidia-ml-py."""
    try:
        import pynvml  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return {
            "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "memory_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "throttle_reasons": pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
            "processes": len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)),
            "driver": pynvml.nvmlSystemGetDriverVersion(),
        }
    except pynvml.NVMLError:
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """The processor's name; the architecture where the system does not tell."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
