"""Hardware, versions and load of the machine that runs a measurement. Nothing is changed."""

import contextlib
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from vitcompress.bench.report.records import CpuState, MachineRecord
from vitcompress.io import hardware

RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt", "tensorrt-rtx")
LIBRARIES = ("vitcompress", "torch", "timm", "onnx", *RUNTIMES, "numpy")
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
CGROUP = Path("/sys/fs/cgroup")  # of this process, as seen in a container: cgroup v2
DISTURBED = 0.25  # cores used by other processes, above which a measurement counts as disturbed
SHORTEST = 0.5  # seconds: below, the counters of the kernel (steps of 0.01 s) are too coarse
BUSY = ("user", "nice", "system", "irq", "softirq")  # fields of psutil.cpu_times; `user` includes guests


def facts() -> MachineRecord:
    """Hardware and versions."""
    return {
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "cpu": hardware.cpu_name(),
        "cpu_flags": hardware.cpu_flags(),
        "cpu_cores": os.cpu_count(),
        "cpu_cores_usable": usable_cores(),
        "cpu_quota_cores": quota_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(hardware.count_gpus())],
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "environment": {k: v for k, v in os.environ.items() if k.endswith("_NUM_THREADS")},
        "versions": hardware.package_versions(LIBRARIES),
    }


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(_usable())


def _usable() -> Sequence[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def cpu_seconds() -> tuple[float, float, float]:
    """Wall-clock time, and CPU seconds used so far: by all processes on the cores that this process may use, and by
    this process with all its descendants (engines run in processes of their own).
    """
    cores = psutil.cpu_times(percpu=True)
    everyone = sum(getattr(cores[core], name, 0.0) for core in _usable() if core < len(cores) for name in BUSY)
    this, own = psutil.Process(), 0.0
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it may have ended
            own += sum(process.cpu_times()[:4])  # user, system, and those of ended children
    return time.monotonic(), everyone, own


def others_cores(before: tuple[float, float, float], after: tuple[float, float, float]) -> float | None:
    """Mean number of cores used by other processes between two `cpu_seconds`; None if the time is too short."""
    if after[0] - before[0] < SHORTEST:
        return None
    wall, everyone, own = (b - a for a, b in zip(before, after, strict=True))
    return min(max(0.0, (everyone - own) / wall), float(usable_cores()))


def quota_cores(folder: Path = CGROUP) -> float | None:
    """CPU time limit of the container, in cores; None without a limit. A container may see more cores than that."""
    with contextlib.suppress(OSError, ValueError):  # the quota may be `max`
        quota, period = map(int, (folder / "cpu.max").read_text().split())
        return quota / period
    return None


def throttle_count(folder: Path = CGROUP) -> int | None:
    """How often the container was paused so far because its CPU quota was used up; None if unknown."""
    stat = folder / "cpu.stat"
    match = re.search(r"^nr_throttled (\d+)", stat.read_text(), re.MULTILINE) if stat.is_file() else None
    return int(match[1]) if match else None


def peak_bytes(pid: int | None = None) -> int | None:
    """Peak resident memory of a process (default: this one); None if unknown. psutil reports it on Windows only.

    On Linux VmHWM: ru_maxrss of getrusage starts at the peak of the parent process.
    """
    status = Path(f"/proc/{pid or 'self'}/status")
    if status.is_file():
        return next((1024 * int(s.split()[1]) for s in status.read_text().splitlines() if s.startswith("VmHWM")), None)
    if sys.platform == "darwin" and pid is None:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(psutil.Error):
        return getattr(psutil.Process(pid).memory_info(), "peak_wset", None)
    return None


def cpu_state() -> CpuState:
    """Load, clock and governor of the processor now."""
    clocks = [core.current for core in psutil.cpu_freq(percpu=True)] if hasattr(psutil, "cpu_freq") else []
    return {
        "load_average": psutil.getloadavg()[0],  # mean number of runnable processes during the last minute
        "clock_mhz": [min(clocks), max(clocks)] if clocks else None,
        "governor": GOVERNOR.read_text().strip() if GOVERNOR.is_file() else None,
    }
