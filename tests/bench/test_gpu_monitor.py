"""Counters, missing counters, and the monitoring of CPU and GPU during a measurement."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vitcompress.bench import environment, gpu_monitor, machine
from vitcompress.bench.timing import Protocol, Samples, measure
from vitcompress.exporters.calls import BoundCall


class CountingGpu(gpu_monitor.Gpu):
    """Reports how often its state was read; has a state for the first `limit` readings only."""

    def __init__(self, limit: int = 1000) -> None:
        self.count, self.limit = 0, limit

    def state(self) -> gpu_monitor.GpuState:
        self.count += 1
        if self.count > self.limit:
            raise RuntimeError("the GPU is lost")
        return {"busy_percent": self.count}


def test_a_gpu_is_read_before_and_after_the_measurement() -> None:
    with gpu_monitor.watch(CountingGpu()) as readings:
        assert [reading["busy_percent"] for reading in readings] == [1]
    assert [reading["busy_percent"] for reading in readings] == [1, 2]


@pytest.mark.parametrize("limit", [0, 1])
def test_a_gpu_that_cannot_be_read_is_no_measurement_without_readings(limit: int) -> None:
    with pytest.raises(RuntimeError, match="the GPU is lost"), gpu_monitor.watch(CountingGpu(limit)):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_reported() -> None:
    with pytest.raises(LookupError, match=r"NVML is not available|nvidia-ml-py is not installed"):
        gpu_monitor.Gpu("1-2")


def test_a_mig_slice_is_opened_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML has another prefix for the UUID of a MIG slice; torch reports it without a prefix."""
    pynvml = pytest.importorskip("pynvml")

    def handle(uuid: str) -> str:
        if uuid not in ("GPU-1-2", "MIG-3-4"):
            raise pynvml.NVMLError_NotFound
        return uuid

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", handle)
    assert [gpu_monitor.Gpu(uuid)._handle for uuid in ("1-2", "3-4")] == ["GPU-1-2", "MIG-3-4"]
    with pytest.raises(LookupError, match="Not Found"):
        gpu_monitor.Gpu("5-6")


def test_a_summary_keeps_extremes_and_every_name() -> None:
    state = {"sm_clock_mhz": 1000, "memory_clock_mhz": None, "temperature_c": 40, "power_w": 100.0, "busy_percent": 5}
    readings = [
        {**state, "throttled_by": [], "foreign_processes": None},
        {**state, "sm_clock_mhz": 1500, "throttled_by": ["hardware slowdown"], "foreign_processes": [3]},
    ]
    summary = gpu_monitor.summary(readings)
    assert summary is not None and summary["sm_clock_mhz"] == [1000, 1500]
    assert summary["memory_clock_mhz"] is None
    assert (summary["throttled_by"], summary["foreign_processes"], summary["looks"]) == (["hardware slowdown"], [3], 2)
    assert gpu_monitor.summary([]) is None


def test_this_process_and_its_children_are_not_foreign() -> None:
    assert gpu_monitor.foreign_processes([os.getpid()]) == []
    assert gpu_monitor.foreign_processes([os.getpid(), 1]) == [1]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert gpu_monitor.foreign_processes([child.pid]) == []


def test_process_numbers_of_another_namespace_are_ignored() -> None:
    """In a container NVML may report the numbers of its host; this process, which uses the GPU, is not among them."""
    assert gpu_monitor.foreign_processes([1]) is None
    assert gpu_monitor.foreign_processes([]) == []


def test_energy_counts_every_image_of_a_block() -> None:
    counter = iter(float(i) for i in range(1000))
    (samples,) = measure(
        [("a", BoundCall(lambda: None))], Protocol("p", batch=4, warmup=0, runs=20), joules=lambda: next(counter)
    )
    assert samples.joules == len(samples.blocks_ms) == 20  # one joule between two readings
    assert samples.images_per_joule is None  # blocks far below what a counter resolves
    long = Samples("a", 4, "wall", blocks_ms=[[200.0] * 3], wall_ms=[600.0], joules=8.0)
    assert long.images_per_joule == 4 * (3 + 1) / 8


def test_the_variation_of_the_runs() -> None:
    values = [1.0, 2.0, 4.0]
    samples = Samples("a", 1, "wall", blocks_ms=[values])
    assert samples.variation == pytest.approx(np.std(values, ddof=1) / np.mean(values))
    assert Samples("a", 1, "wall", blocks_ms=[[1.0]]).variation is None


def test_a_target_that_times_itself_is_called_with_the_number_of_runs() -> None:
    calls: list[int] = []

    def timed(runs: int) -> tuple[list[float], float]:
        calls.append(runs)
        return [1.0] * runs, 1.5 * runs

    call = BoundCall(lambda: None)
    call.timed = timed
    (samples,) = measure([("a", call)], Protocol("p", batch=2, warmup=1, runs=30))
    assert sum(calls) == len(samples.runs_ms) == 30
    assert (samples.clock, samples.images_per_second) == ("cuda events", 1000 * 2 * 30 / 45)


def test_other_processes_are_counted() -> None:
    assert machine.others_cores((0.0, 10.0, 4.0), (2.0, 11.5, 5.0)) == 0.25
    assert machine.others_cores((0.0, 0.0, 0.0), (2.0, 900.0, 0.0)) == machine.usable_cores()
    assert machine.others_cores((0.0, 0.0, 0.0), (0.01, 0.2, 0.0)) is None  # two ticks are too few


def test_the_time_that_the_usable_cores_were_busy_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [SimpleNamespace(user=user, system=2.0, idle=40.0) for user in (1.0, 100.0, 0.5)]
    monkeypatch.setattr("psutil.cpu_times", lambda percpu=False: cores if percpu else cores[0])
    monkeypatch.setattr(machine, "_usable", lambda: [0, 2, 7])
    assert machine.cpu_seconds()[1] == 1.0 + 2.0 + 0.5 + 2.0


def test_descendants_are_not_other_processes() -> None:
    before = machine.cpu_seconds()
    work = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        alive = machine.cpu_seconds()
    after = machine.cpu_seconds()
    assert alive[2] - before[2] >= 0.3
    assert after[2] >= alive[2] - 0.02  # it still counts after its end; a tick is 0.01 s


def test_the_cpu_quota_of_a_container_is_read(tmp_path: Path) -> None:
    assert machine.quota_cores(tmp_path) is None and machine.throttle_count(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 5\nnr_periods 9\nnr_throttled 4\n")
    assert (machine.quota_cores(tmp_path), machine.throttle_count(tmp_path)) == (1.5, 4)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.quota_cores(tmp_path) is None


@pytest.mark.parametrize(("counts", "pauses"), [((3, 5), 2), ((5, 5), 0), ((None, None), None)])
def test_pauses_of_the_container_are_those_during_the_measurement(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int | None, int | None], pauses: int | None
) -> None:
    readings = iter(counts)
    monkeypatch.setattr(machine, "throttle_count", lambda: next(readings))
    with environment.monitor([]) as monitor:
        pass
    assert monitor.conditions["held_back_by_quota"] == pauses
    assert [text for text in environment.disturbances(monitor.conditions) if "paused" in text] == [
        f"the container was paused {count} times because its CPU quota was used up"
        for count in ([pauses] if pauses else [])
    ]
