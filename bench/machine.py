"""The machine that a measurement is taken on: hardware, versions and load. Read, never changed."""

import contextlib
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from vitcompress.io import hardware
from vitcompress.io.hardware import versions

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
CGROUP = Path("/sys/fs/cgroup")  # of this process, as containers see it: cgroup v2, or v1 below `cpu`
PROC = Path("/proc")
DISTURBED = 0.25  # cores that other processes use, from which a measurement is called disturbed
SHORTEST = 0.5  # seconds: in shorter times the kernel's counters, in hundredths, show too little of other processes


def facts() -> dict[str, Any]:
    """Hardware and versions."""
    return {
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "cpu": _cpu_name(),
        "cpu_flags": cpu_flags(),
        "cpu_cores": os.cpu_count(),
        "cpu_cores_usable": usable_cores(),
        "cpu_quota_cores": quota_cores(),
        "memory_gib": _memory_gib(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(hardware.count())],
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
    """Wall-clock time, and processor time used so far on the cores that this process may use: by everyone, and by this
    process and those that it has started. None where the system does not tell.
    """
    stat = PROC / "stat"
    if not stat.is_file():
        return None
    usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    cores = [line.split() for line in stat.read_text().splitlines() if line.partition(" ")[0] in usable]
    # user, nice, system, irq, softirq: all but idle and waiting; what guests use is part of user.
    ticks = sum(int(core[field]) for core in cores for field in (1, 2, 3, 6, 7))
    return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), _family_seconds()


def _family_seconds() -> float:
    """Processor time of this process and of all that it has started: an engine runs in a process of its own."""
    own = os.times()
    below: dict[int, list[tuple[int, int]]] = {}
    for entry in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may end meanwhile
            fields = entry.read_text().rpartition(")")[2].split()
            parent, ticks = int(fields[1]), sum(map(int, fields[11:15]))  # its own, and of its children that ended
            below.setdefault(parent, []).append((int(entry.parent.name), ticks))
    total, open_ = 0, [os.getpid()]
    while open_:
        for pid, ticks in below.get(open_.pop(), []):
            total += ticks
            open_.append(pid)
    return sum((own.user, own.system, own.children_user, own.children_system)) + total / os.sysconf("SC_CLK_TCK")


def others_cores(before: tuple[float, float, float] | None, after: tuple[float, float, float] | None) -> float | None:
    """Cores that other processes kept busy between two `cpu_seconds`; None for a time too short to tell."""
    if before is None or after is None or after[0] - before[0] < SHORTEST:
        return None
    wall, everyone, own = (b - a for a, b in zip(before, after, strict=True))
    return min(max(0.0, (everyone - own) / wall), float(usable_cores()))


def quota_cores(folder: Path = CGROUP) -> float | None:
    """Cores' worth of time that a container may use, which is not how many cores it sees; None without a limit."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = (
                (folder / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
        return int(quota) / int(period) if quota.isdecimal() else None
    except (OSError, ValueError):
        return None


def held_back(folder: Path = CGROUP) -> int | None:
    """How many times so far the container was stopped because its quota was used up; None where that is unknown."""
    for stat in (folder / "cpu.stat", folder / "cpu" / "cpu.stat"):
        if stat.is_file():
            known = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines() if " " in line)
            return int(known["nr_throttled"]) if "nr_throttled" in known else None
    return None


def peak_bytes(pid: int | None = None) -> int | None:
    """Most memory that a process has held, this one by default; None where the system does not tell.

    By the kernel's own account where there is one: what getrusage tells on Linux starts with the parent's peak.
    """
    status = Path(f"/proc/{pid or 'self'}/status")
    if status.is_file():
        return next((1024 * int(s.split()[1]) for s in status.read_text().splitlines() if s.startswith("VmHWM")), None)
    if pid is not None:
        return None
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


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
