"""Conditions of a measurement, and warnings about them."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from vitcompress.bench import gpu_monitor, machine, timing
from vitcompress.bench.report.records import BenchRow, Conditions, MachineRecord, MemoryRecord, RunnerRecord
from vitcompress.exporters.calls import BoundCall
from vitcompress.io import hardware
from vitcompress.io.text import format_shape, join_names

DRIFT = 0.05  # relative difference between last and first third above which drift is reported
NOISY = {"cuda": 0.025, "cpu": 0.10}  # variation of the runs that is reported as noise; on GPUs the limit of trtexec
PAPER = (
    "the paper protocol (10 warm-up and 100 timed runs at one batch size, synthetic images that are already on the "
    "device) leaves out: loading and preprocessing of images, transfers, a warm-up until times settle, other batch "
    "sizes, and the tail (100 runs are too few for a p99)",
    "here the device is synchronized between warm-up and measurement, and fp32 uses no TF32 in matrix products and "
    "convolutions; the published script does not synchronize, and leaves TF32 on in convolutions, the default of torch",
    f"here the timed runs are split into up to {timing.ROUNDS} blocks that alternate between the artifacts, and each "
    "block begins with one more run that is not timed; the published script times all runs of one model in a row",
)


@dataclass
class Monitor:
    """Observes a measurement. conditions: known when it has ended.

    joules: reads the energy counter of the GPU; None without one. energy_of: what it counts, or why not.
    """

    joules: Callable[[], float] | None
    energy_of: str
    conditions: Conditions = field(init=False)


def facts() -> MachineRecord:
    """Hardware, versions, and the settings of each GPU."""
    gpus = [gpu_monitor.find_gpu(index) for index in range(hardware.count_gpus())]
    return {**machine.facts(), "gpu_settings": [gpu.settings() if gpu else str(reason) for gpu, reason in gpus]}


@contextmanager
def monitor(runners: Sequence[RunnerRecord]) -> Iterator[Monitor]:
    """Record everything that can disturb a measurement of these runners."""
    indices = sorted({int(runner["device"].partition(":")[2] or 0) for runner in runners if _kind(runner) == "cuda"})
    gpu, reason = gpu_monitor.find_gpu(indices[0]) if indices else (None, None)
    result = Monitor(*_energy_counter(runners, gpu, reason))
    before, seconds, pauses = machine.cpu_state(), machine.cpu_seconds(), machine.throttle_count()
    with gpu_monitor.watch(gpu) as readings:
        yield result
    result.conditions = {
        "cpu_before": before,
        "cpu_after": machine.cpu_state(),
        "other_processes_cores": machine.others_cores(seconds, machine.cpu_seconds()),
        "held_back_by_quota": None if pauses is None else (machine.throttle_count() or 0) - pauses,
        "gpu": gpu_monitor.summary(readings),
        "gpu_unwatched": reason,
    }


def _kind(runner: RunnerRecord) -> str:
    """`cpu`, `cuda`, `mps`"""
    return runner["device"].partition(":")[0]


def _energy_counter(
    runners: Sequence[RunnerRecord], gpu: gpu_monitor.Gpu | None, reason: str | None
) -> tuple[Callable[[], float] | None, str]:
    """The energy counter of the GPU, if all runners use it, and its name or why there is none."""
    if gpu is None or {*map(_kind, runners)} != {"cuda"}:
        return None, f"none: {reason or 'not all artifacts run on a GPU'}"
    if gpu.joules() is None:
        return None, "none: this GPU has no energy counter"
    return lambda: gpu.joules() or 0.0, "the GPU (NVML), used by any process"


def peak_memory(runner: RunnerRecord, call: BoundCall) -> MemoryRecord:
    """Peak GPU memory in torch, and the peak of the process that an engine runs in.

    cuda_peak_bytes: the weights, plus what one more run allocates on top of everything that is allocated already; None
    with a CUDA graph, which allocated its memory when it was recorded. The memory of an artifact that shares this
    process on the CPU is measured by `suite.measure_memory`.
    """
    memory: MemoryRecord = {"cuda_peak_bytes": None, "process_start_bytes": None, "process_peak_bytes": None}
    if runner["runtime"] == "torch" and _kind(runner) == "cuda" and not runner["cuda_graph"]:
        torch.cuda.reset_peak_memory_stats(runner["device"])
        before = torch.cuda.memory_allocated(runner["device"])
        call()
        memory["cuda_peak_bytes"] = runner["weight_bytes"] + torch.cuda.max_memory_allocated(runner["device"]) - before
    if pid := runner.get("process"):
        memory["process_peak_bytes"] = machine.peak_bytes(pid)
    return memory


def describe_input(runner: RunnerRecord) -> str:
    """The input, where it is, and whether its transfer is timed."""
    images = "bytes of standard normal images" if runner.get("input_type") == "uint8" else "standard normal"
    if _kind(runner) == "cpu":
        return f"{images}, in host memory, where the model computes; there is nothing to transfer"
    if runner["transfers"]:
        kind = "pageable" if runner["runtime"] == "onnxruntime" else "page-locked"
        return f"{images}, from {kind} host memory; transfers of images and logits are timed"
    return f"{images}, resident on the device; transfers are not timed"


def protocol_notes(protocol: timing.Protocol, rows: Sequence[RunnerRecord]) -> Iterator[str]:
    """What the figures of a protocol do not cover."""
    if protocol.name == "paper":
        yield from PAPER
        if protocol != (published := timing.PROTOCOLS["paper"]):
            yield f"this is not the published protocol {published.id}, but {protocol.id}"
    if {row["device"] for row in rows} == {"cpu"}:
        yield "device: cpu. These figures say nothing about a GPU"


def disturbances(conditions: Conditions) -> Iterator[str]:
    """Why the figures may be wrong: other processes, or throttling."""
    if (others := conditions["other_processes_cores"] or 0.0) > machine.DISTURBED:
        yield f"other processes used {others:.1f} of {machine.usable_cores()} cores during the measurement"
    if pauses := conditions["held_back_by_quota"]:
        yield f"the container was paused {pauses} time{'s' * (pauses != 1)} because its CPU quota was used up"
    if gpu := conditions["gpu"]:
        if gpu["foreign_processes"]:
            yield f"other processes used the GPU: {', '.join(map(str, gpu['foreign_processes']))}"
        if gpu["throttled_by"]:
            yield f"the GPU was throttled by: {', '.join(gpu['throttled_by'])}"


def sample_warnings(samples: Sequence[timing.Samples], rows: Sequence[RunnerRecord]) -> Iterator[str]:
    """A warm-up that did not settle, drift, and noise."""
    for one, row in zip(samples, rows, strict=True):
        name, drift, variation = f"{one.name}, batch {one.batch}", one.drift or 0.0, one.variation or 0.0
        if one.settled is False:
            yield f"{name}: times had not settled after {one.warmup_seconds:.0f} s"
        if abs(drift) > DRIFT:
            yield f"{name}: times drifted by {100 * drift:+.1f} % from the first to the last third"
        if variation > NOISY.get(_kind(row), NOISY["cpu"]):
            yield f"{name}: noisy, the runs vary by {100 * variation:.1f} % (standard deviation over mean)"


def comparison_warnings(rows: Sequence[BenchRow], *, transfers: bool = False) -> Iterator[str]:
    """Differences that make a ratio unfair: image sizes, classes, devices, types of the input, CPU threads.

    transfers: they were requested, which has no effect on the CPU.
    """
    properties: dict[str, Callable[[BenchRow], object]] = {
        "image sizes": lambda row: format_shape(row["input_size"]),
        "numbers of classes": lambda row: row.get("classes"),
        "devices": lambda row: row["device"],
        "input types": lambda row: row.get("input_type"),
        "numbers of threads": lambda row: row["threads"] if _kind(row) == "cpu" else None,
    }
    for what, get in properties.items():
        groups = join_names((str(value), row["artifact"]) for row in rows if (value := get(row)) is not None)
        if len(groups) > 1:
            listing = "; ".join(f"{value}: {names}" for value, names in groups.items())
            yield f"the ratios compare different {what} ({listing})"
    if transfers and (names := [row["artifact"] for row in rows if _kind(row) == "cpu"]):
        yield f"--transfers has no effect on the CPU, where nothing is copied ({', '.join(dict.fromkeys(names))})"


def thread_warnings(rows: Sequence[RunnerRecord]) -> Iterator[str]:
    """Rows that use more threads than there are cores, or than the container may use."""
    quota = machine.quota_cores()
    cores = min(machine.usable_cores(), quota or math.inf)
    for row in rows:
        if _kind(row) == "cpu" and isinstance(threads := row["threads"], int) and threads > cores:
            limit = "cores" if quota is None or quota > cores else "cores of CPU time that this container may use"
            yield f"{row['artifact']}: {threads} threads on {cores:g} {limit}; use --threads {max(1, int(cores))}"
