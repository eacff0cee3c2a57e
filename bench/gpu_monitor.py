"""Clocks, power, temperature and foreign processes of a GPU during a measurement, and its energy counter. Read-only."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import psutil
import torch

from vitcompress.bench.report.records import GpuSettings, GpuSummary

SECONDS_BETWEEN = 0.5
GpuState = dict[str, float | list[str] | list[int] | None]  # one reading; None if the GPU does not report a value
# Bits of NVML's clock event reasons that make a GPU slower than its settings (nvml.h).
THROTTLING = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


class Gpu:
    """One GPU, or MIG slice of one, through NVML. Raises LookupError, with the reason, if NVML is not available.

    uuid: as torch reports it; numbers of GPUs differ from those in torch, which depend on CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, uuid: str) -> None:
        try:
            import pynvml  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise LookupError("nvidia-ml-py is not installed: pip install 'vitcompress[cuda]'") from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            try:
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            except pynvml.NVMLError_NotFound:
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        except pynvml.NVMLError as error:
            raise LookupError(f"NVML is not available: {error}") from None

    def _get(self, name: str, *arguments: Any) -> Any:
        """The value of `nvmlDeviceGet<name>`; None if this GPU does not report it."""
        try:
            return getattr(self._nvml, f"nvmlDeviceGet{name}")(self._handle, *arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def _get_thousandth(self, name: str) -> float | None:
        return None if (value := self._get(name)) is None else value / 1000

    def settings(self) -> GpuSettings:
        """Properties that do not change during a measurement."""
        mig = self._get("MigMode")
        return {
            "driver": self._nvml.nvmlSystemGetDriverVersion(),
            "vbios": self._get("VbiosVersion"),
            "power_limit_w": self._get_thousandth("EnforcedPowerLimit"),
            "persistence": self._get("PersistenceMode"),
            "mig": None if mig is None else mig[0],
            "max_sm_clock_mhz": self._get("MaxClockInfo", self._nvml.NVML_CLOCK_SM),
        }

    def state(self) -> GpuState:
        """Clocks, temperature, power, reasons for throttling, and processes not started here."""
        reasons = self._get("CurrentClocksEventReasons")
        running, use = self._get("ComputeRunningProcesses"), self._get("UtilizationRates")
        return {
            "sm_clock_mhz": self._get("ClockInfo", self._nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": self._get("ClockInfo", self._nvml.NVML_CLOCK_MEM),
            "temperature_c": self._get("Temperature", self._nvml.NVML_TEMPERATURE_GPU),
            "power_w": self._get_thousandth("PowerUsage"),
            "throttled_by": None if reasons is None else [name for bit, name in THROTTLING.items() if reasons & bit],
            "busy_percent": None if use is None else use.gpu,
            "foreign_processes": None if running is None else foreign_processes([process.pid for process in running]),
        }

    def joules(self) -> float | None:
        """Energy used since the driver was loaded."""
        return self._get_thousandth("TotalEnergyConsumption")


def find_gpu(index: int) -> tuple[Gpu | None, str | None]:
    """GPU `index` of torch, or the reason why it cannot be monitored."""
    try:
        return Gpu(str(torch.cuda.get_device_properties(index).uuid)), None
    except LookupError as reason:
        return None, str(reason)


def foreign_processes(pids: list[int]) -> list[int] | None:
    """The processes that are neither this one nor its children.

    One of the processes that use the GPU must be this one or its child. If none is, the numbers are those of another
    PID namespace (NVML in a container reports those of the host) and the result is None.
    """
    own = {os.getpid(), *(child.pid for child in psutil.Process().children())}
    others = [pid for pid in pids if pid not in own]
    return None if pids and len(others) == len(pids) else others


@contextmanager
def watch(gpu: Gpu | None) -> Iterator[list[GpuState]]:
    """Read the state of a GPU when this opens, twice a second, and when it closes; yields the readings in order."""
    if gpu is None:
        yield []
        return
    readings, stop = [gpu.state()], threading.Event()

    def read() -> None:
        while not stop.wait(SECONDS_BETWEEN):
            readings.append(gpu.state())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        stop.set()
        thread.join()
        readings.append(gpu.state())


def summary(readings: Sequence[GpuState]) -> GpuSummary | None:
    """Minimum and maximum of each value, and everything that throttled or shared the GPU; None without readings."""
    if not readings:
        return None
    result: dict[str, object] = {"looks": len(readings)}
    for name in readings[0]:
        known: list[Any] = [state[name] for state in readings if state[name] is not None]
        if known and isinstance(known[0], list):
            result[name] = sorted({item for items in known for item in items})
        else:
            result[name] = [min(known), max(known)] if known else None
    return cast(GpuSummary, result)
