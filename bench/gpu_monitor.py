"""Clocks, power, temperature and foreign processes of a GPU during a measurement, and energy counters. Read-only."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, cast

import psutil

from vitcompress.bench.report.records import GpuSettings, GpuSummary

NVML_MISSING = "nvidia-ml-py is not installed: pip install 'vitcompress[cuda]'"
POWERCAP = Path("/sys/class/powercap")
SECONDS_BETWEEN = 0.5
# Bits of NVML's clock event reasons that make a GPU slower than its settings (nvml.h).
THROTTLING = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


class GpuState(TypedDict):
    """One reading; None if the GPU does not report a value."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    busy_percent: int | None
    throttled_by: list[str] | None
    foreign_processes: list[int] | None


class Gpu:
    """One GPU through NVML. Raises LookupError, with the reason, if NVML is not available.

    index: the number in torch, which CUDA_VISIBLE_DEVICES may have changed. uuid: as torch reports it, of the GPU or of
    its MIG slice; preferred over `index`.
    """

    def __init__(self, index: int = 0, uuid: str | None = None) -> None:
        try:
            import pynvml  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise LookupError(NVML_MISSING) from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = self._handle_of(uuid) if uuid else pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            raise LookupError(f"NVML is not available: {error}") from None

    def _handle_of(self, uuid: str) -> Any:
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except self._nvml.NVMLError_NotFound:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")

    def _get(self, name: str, *arguments: Any) -> Any:
        """The value of `nvmlDeviceGet<name>`; None if this GPU does not report it."""
        try:
            return getattr(self._nvml, f"nvmlDeviceGet{name}")(self._handle, *arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def settings(self) -> GpuSettings:
        """Properties that do not change during a measurement."""
        mig, limit = self._get("MigMode"), self._get("EnforcedPowerLimit")
        return {
            "driver": self._nvml.nvmlSystemGetDriverVersion(),
            "vbios": self._get("VbiosVersion"),
            "power_limit_w": None if limit is None else limit / 1000,
            "persistence": self._get("PersistenceMode"),
            "mig": None if mig is None else mig[0],
            "max_sm_clock_mhz": self._get("MaxClockInfo", self._nvml.NVML_CLOCK_SM),
        }

    def state(self) -> GpuState:
        """Clocks, temperature, power, reasons for throttling, and processes not started here."""
        power, reasons = self._get("PowerUsage"), self._get("CurrentClocksEventReasons")
        if reasons is None:  # the name before driver 535
            reasons = self._get("CurrentClocksThrottleReasons")
        running, use = self._get("ComputeRunningProcesses"), self._get("UtilizationRates")
        return {
            "sm_clock_mhz": self._get("ClockInfo", self._nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": self._get("ClockInfo", self._nvml.NVML_CLOCK_MEM),
            "temperature_c": self._get("Temperature", self._nvml.NVML_TEMPERATURE_GPU),
            "power_w": None if power is None else power / 1000,
            "throttled_by": None if reasons is None else [name for bit, name in THROTTLING.items() if reasons & bit],
            "busy_percent": None if use is None else use.gpu,
            "foreign_processes": None if running is None else foreign_processes([process.pid for process in running]),
        }

    def joules(self) -> float | None:
        """Energy used since the driver was loaded."""
        millijoules = self._get("TotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000


def foreign_processes(pids: list[int]) -> list[int] | None:
    """The processes that are neither this one nor its children.

    One of the processes that use the GPU must be this one or its child. If none is, the numbers are those of another
    PID namespace (NVML in a container reports those of the host) and the result is None.
    """
    own = {os.getpid(), *(child.pid for child in psutil.Process().children())}
    others = [pid for pid in pids if pid not in own]
    return None if pids and len(others) == len(pids) else others


class Watch:
    """Reads the state of a GPU twice a second while it is open; `readings` are in order."""

    def __init__(self, gpu: Gpu | None) -> None:
        self._gpu, self._stop, self.readings = gpu, threading.Event(), list[GpuState]()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        while self._gpu is not None and not self._stop.wait(SECONDS_BETWEEN):
            self.readings.append(self._gpu.state())

    def __enter__(self) -> "Watch":
        if self._gpu is not None:
            self.readings.append(self._gpu.state())
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._gpu is not None:
            self._thread.join()
            self.readings.append(self._gpu.state())


def summary(readings: list[GpuState]) -> GpuSummary | None:
    """Minimum and maximum of each value, and everything that throttled or shared the GPU; None without readings."""
    if not readings:
        return None
    result: dict[str, object] = {"looks": len(readings)}
    for name in GpuState.__annotations__:
        known = [value for state in readings if (value := state[name]) is not None]  # type: ignore[literal-required]
        if known and isinstance(known[0], list):
            result[name] = sorted({item for items in known for item in items})
        else:
            result[name] = [min(known), max(known)] if known else None
    return cast(GpuSummary, result)


# --------------------------------------------------------------------------------------------------------------- energy


def rapl(folder: Path = POWERCAP) -> Callable[[], float] | None:
    """A counter of the joules used by the CPU packages (Linux powercap); None if it cannot be read.

    The counters restart at zero after their maximum.
    """
    zones = [zone for zone in sorted(folder.glob("*rapl:*")) if zone.name.count(":") == 1]  # packages, not their parts
    readable = [zone for zone in zones if os.access(zone / "energy_uj", os.R_OK)]
    if not readable:
        return None
    last = {zone: (_number(zone / "energy_uj"), 0) for zone in readable}

    def joules() -> float:
        for zone, (before, total) in last.items():
            now = _number(zone / "energy_uj")
            over = _number(zone / "max_energy_range_uj") if now < before else 0
            last[zone] = now, total + now - before + over
        return sum(total for _, total in last.values()) / 1e6

    return joules


def _number(file: Path) -> int:
    return int(file.read_text())
