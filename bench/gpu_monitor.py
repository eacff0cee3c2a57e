"""Clocks, power, temperature and other users of a processor during a measurement. Read, never set."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

NVML_MISSING = "nvidia-ml-py is not installed: pip install 'vitcompress[cuda]'"
POWERCAP = Path("/sys/class/powercap")
SECONDS_BETWEEN = 0.5
# Bits of NVML's clocks event reasons that make a GPU slower than it was set to be (nvml.h).
THROTTLING = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


class Gpu:
    """One GPU through NVML. Raises LookupError, with the reason, where it cannot be asked.

    index: torch's number, which CUDA_VISIBLE_DEVICES may have moved; the GPU, or the MIG slice of one, is found by its
    uuid, as torch gives it.
    """

    def __init__(self, index: int = 0, uuid: str | None = None) -> None:
        try:
            import pynvml  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise LookupError(NVML_MISSING) from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = self._found(uuid) if uuid else pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            raise LookupError(f"NVML cannot be asked: {error}") from None

    def _found(self, uuid: str) -> Any:
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except self._nvml.NVMLError_NotFound:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")

    def _ask(self, name: str, *arguments: Any) -> Any:
        """One NVML value; None where this GPU does not tell it."""
        try:
            return getattr(self._nvml, name)(self._handle, *arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def settings(self) -> dict[str, Any]:
        """What does not change during a measurement."""
        mig, limit = self._ask("nvmlDeviceGetMigMode"), self._ask("nvmlDeviceGetEnforcedPowerLimit")
        return {
            "driver": self._nvml.nvmlSystemGetDriverVersion(),
            "vbios": self._ask("nvmlDeviceGetVbiosVersion"),
            "power_limit_w": None if limit is None else limit / 1000,
            "persistence": self._ask("nvmlDeviceGetPersistenceMode"),
            "mig": None if mig is None else mig[0],
            "max_sm_clock_mhz": self._ask("nvmlDeviceGetMaxClockInfo", self._nvml.NVML_CLOCK_SM),
        }

    def state(self) -> dict[str, Any]:
        """Clocks, temperature, power, what holds it back, and processes other than this one and its children."""
        power, reasons = self._ask("nvmlDeviceGetPowerUsage"), self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # what drivers before 535 call them
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        running = self._ask("nvmlDeviceGetComputeRunningProcesses")
        use = self._ask("nvmlDeviceGetUtilizationRates")
        return {
            "sm_clock_mhz": self._ask("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": self._ask("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_MEM),
            "temperature_c": self._ask("nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU),
            "power_w": None if power is None else power / 1000,
            "throttled_by": None if reasons is None else [name for bit, name in THROTTLING.items() if reasons & bit],
            "busy_percent": None if use is None else use.gpu,
            "foreign_processes": None if running is None else foreign([process.pid for process in running]),
        }

    def joules(self) -> float | None:
        """Energy used since the driver was loaded."""
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000


def foreign(pids: list[int]) -> list[int] | None:
    """Those that are neither this process nor started by it.

    This process or one that it has started does use the GPU. Where none of them is in the list, it holds numbers of
    another name space (in a container, those of its host), which say nothing of whose processes they are: None.
    """
    others = [pid for pid in pids if pid != os.getpid() and _parent(pid) != os.getpid()]
    return None if pids and len(others) == len(pids) else others


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


class Watch:
    """Looks at a GPU twice a second for as long as it is open; `summary()` is what it saw."""

    def __init__(self, gpu: Gpu | None) -> None:
        self._gpu, self._over, self.seen = gpu, threading.Event(), list[dict[str, Any]]()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while self._gpu is not None and not self._over.wait(SECONDS_BETWEEN):
            self.seen.append(self._gpu.state())

    def __enter__(self) -> "Watch":
        if self._gpu is not None:
            self.seen.append(self._gpu.state())
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._gpu is not None:
            self._thread.join()
            self.seen.append(self._gpu.state())

    def summary(self) -> dict[str, Any] | None:
        return summary(self.seen) if self.seen else None


def summary(seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Least and largest of each figure, and all that ever held the GPU back or used it too."""
    figures = ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w", "busy_percent")
    known = {name: [state[name] for state in seen if state[name] is not None] for name in figures}
    ranges = {name: [min(values), max(values)] if values else None for name, values in known.items()}
    return {**ranges, **{name: _all(seen, name) for name in ("throttled_by", "foreign_processes")}, "looks": len(seen)}


def _all(seen: list[dict[str, Any]], name: str) -> list[Any] | None:
    """Everything that a list ever held; None where it was never told."""
    told = [state[name] for state in seen if state[name] is not None]
    return sorted({item for items in told for item in items}) if told else None


# --------------------------------------------------------------------------------------------------------------- energy


def rapl(folder: Path = POWERCAP) -> Callable[[], float] | None:
    """Joules that the CPU packages have used, from the kernel's powercap counters; None where they cannot be read.

    Counters start over at their maximum, which a reader sees as one large step.
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
