"""The conditions of a measurement, and what a reader should know before believing it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from vitcompress.bench import gpu_monitor, machine, timing
from vitcompress.io import hardware

NOISY = {"cuda": 0.025, "cpu": 0.10}  # variation of the runs from which they are called noisy; trtexec's limit on GPUs
PAPER = (
    "the paper protocol (10 warm-up and 100 timed runs at one batch size, synthetic images that lie on the device) "
    "leaves out: loading and pre-processing of images, transfers, a warm-up until times settle, other batch sizes, and "
    "the tail (100 runs carry no p99)",
    "here the device is waited for between warm-up and measurement, and fp32 is without TF32 in products and in "
    "convolutions; the published script did not wait, and left TF32 on in convolutions, torch's default",
    f"here the timed runs come in up to {timing.ROUNDS} blocks, in which artifacts take turns; each block begins with "
    "one more run that is not timed. The published script times all runs of one model in a row",
)


@dataclass
class Watched:
    """joules: reads a counter of all processors that were used, None where there is none; energy_of says which, or why
    there is none. found: what was seen, once the measurement is over.
    """

    joules: Callable[[], float] | None
    energy_of: str
    found: dict[str, Any] = field(default_factory=dict)


def facts() -> dict[str, Any]:
    """Hardware, versions, and the GPUs' settings."""
    settings: list[Any] = []
    for index in range(hardware.count()):
        try:
            settings.append(_gpu(index).settings())
        except LookupError as reason:
            settings.append(str(reason))
    return {**machine.facts(), "gpu_settings": settings}


@contextmanager
def watched(runners: Sequence[Mapping[str, Any]]) -> Iterator[Watched]:
    """Watch all that can disturb a measurement of these runners (as described) while it is made."""
    indices = sorted({_index(str(known["device"])) for known in runners if str(known["device"]).startswith("cuda")})
    gpu, reason = None, None
    if indices:
        try:
            gpu = _gpu(indices[0])
        except LookupError as error:
            reason = str(error)
    watch = Watched(*_counter(runners, gpu, reason))
    before, used, stopped = machine.cpu_state(), machine.cpu_seconds(), machine.held_back()
    with gpu_monitor.Watch(gpu) as look:
        yield watch
    watch.found = {
        "cpu_before": before,
        "cpu_after": machine.cpu_state(),
        "other_processes_cores": machine.others_cores(used, machine.cpu_seconds()),
        "held_back_by_quota": None if stopped is None else (machine.held_back() or 0) - stopped,
        "host_peak_bytes": machine.peak_bytes(),
        "gpu": look.summary(),
        "gpu_unwatched": reason,
    }


def _gpu(index: int) -> gpu_monitor.Gpu:
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None) if torch.cuda.is_available() else None
    return gpu_monitor.Gpu(index, None if uuid is None else str(uuid))


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _counter(
    runners: Sequence[Mapping[str, Any]], gpu: gpu_monitor.Gpu | None, reason: str | None
) -> tuple[Callable[[], float] | None, str]:
    """The energy counter of the one kind of processor that all runners use, and its name or why there is none."""
    kinds = {str(known["device"]).partition(":")[0] for known in runners}
    if kinds == {"cuda"} and gpu is not None:
        joules = gpu.joules
        if joules() is None:
            return None, "none: this GPU does not count its energy"
        return lambda: joules() or 0.0, "the GPU (NVML), whoever used it"
    if kinds == {"cpu"}:
        counter = gpu_monitor.rapl()
        return counter, "the CPU packages (RAPL), whoever used them" if counter else "none: RAPL cannot be read here"
    return None, f"none: {reason or 'artifacts on several kinds of devices'}"


def memory(known: Mapping[str, Any], target: timing.Target) -> dict[str, int | None]:
    """Peak of the GPU's memory in torch, and of the process of its own that an engine runs in.

    The first is the weights, and what one more run takes of torch's allocator on top of all that is there already: the
    other artifacts, and the images. A CUDA graph has taken its memory when it was recorded, so that there it is None.
    What an artifact takes on the CPU, where it shares this process with the others, is told by `peak_memory.memory_of`.
    """
    found: dict[str, int | None] = {"cuda_peak_bytes": None, "process_start_bytes": None, "process_peak_bytes": None}
    if known["runtime"] == "torch" and str(known["device"]).startswith("cuda") and not known["cuda_graph"]:
        torch.cuda.reset_peak_memory_stats(known["device"])
        before = torch.cuda.memory_allocated(known["device"])
        target.step()
        target.synchronize()
        taken = torch.cuda.max_memory_allocated(known["device"]) - before
        found["cuda_peak_bytes"] = known["weight_bytes"] + taken
    if pid := known.get("process"):
        found["process_peak_bytes"] = machine.peak_bytes(int(pid))
    return found


def input_in_words(known: Mapping[str, Any]) -> str:
    """What the input is, and whether copying it to the device is timed."""
    what = "bytes of standard normal images" if known.get("input_type") == "uint8" else "standard normal"
    if str(known["device"]).startswith("cpu"):
        return f"{what}, in the host's memory, where the model computes; there is nothing to transfer"
    if known["transfers"]:
        kind = "ordinary" if known["runtime"] == "onnxruntime" else "page-locked"
        return f"{what}, from the host's {kind} memory; transfers of images and logits are timed"
    return f"{what}, resident on the device; transfers are not timed"


def left_out(protocol: timing.Protocol, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What the protocol does not tell."""
    if protocol.name == "paper":
        yield from PAPER
        if (protocol.warmup, protocol.runs, protocol.batch) != (10, 100, 256):
            yield f"this is not the published protocol, which is paper-10/100/256, but {protocol.id}"
    if {row["device"] for row in rows} == {"cpu"}:
        yield "device: cpu. No figure here says anything about a GPU"


def disturbances(found: Mapping[str, Any]) -> Iterator[str]:
    """Why the figures may be wrong: others used the processor, or it was slowed down."""
    if (others := found["other_processes_cores"] or 0.0) > machine.DISTURBED:
        yield f"other processes kept {others:.1f} of {machine.usable_cores()} cores busy meanwhile"
    if stops := found.get("held_back_by_quota"):
        yield f"the container was stopped {stops} times because its share of the processor was used up"
    gpu = found["gpu"] or {}
    if gpu.get("foreign_processes"):
        yield f"other processes used the GPU: {', '.join(map(str, gpu['foreign_processes']))}"
    if gpu.get("throttled_by"):
        yield f"the GPU was slowed down by: {', '.join(gpu['throttled_by'])}"


def warnings(samples: Sequence[timing.Samples], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What the samples themselves say: drift, noise, a warm-up that did not settle."""
    for one, row in zip(samples, rows, strict=True):
        name = f"{one.name}, batch {one.batch}"
        if one.drifted:
            yield f"{name}: times drifted by {100 * (one.drift or 0.0):+.1f} % from the first to the last third"
        if (one.variation or 0.0) > NOISY.get(str(row["device"]).partition(":")[0], NOISY["cpu"]):
            yield f"{name}: noisy, the runs vary by {100 * (one.variation or 0.0):.1f} % (standard deviation over mean)"
        if one.settled is False:
            yield f"{name}: times had not settled after {one.warmup_seconds:.0f} s"


def unlike(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """In what compared artifacts differ that makes their ratio unfair: sizes, classes, devices, CPU threads."""
    on_cpu = [row for row in rows if str(row["device"]).startswith("cpu")]
    about = (("image sizes", "input_size", rows), ("numbers of classes", "classes", rows), ("devices", "device", rows))
    for words, key, those in (*about, ("numbers of threads", "threads", on_cpu)):
        values: dict[str, list[str]] = {}
        for row in those:
            if row.get(key) is not None:
                values.setdefault(_shown(row[key]), []).append(str(row["artifact"]))
        if len(values) > 1:
            told = "; ".join(f"{value}: {', '.join(dict.fromkeys(names))}" for value, names in values.items())
            yield f"the ratios compare different {words} ({told})"


def _shown(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list) else str(value)


def crowded(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Which rows use more threads than there are cores for them."""
    quota = machine.quota_cores()
    cores = min(machine.usable_cores(), quota or math.inf)
    for row in rows:
        threads = row.get("threads")
        if str(row["device"]).startswith("cpu") and isinstance(threads, int) and threads > cores:
            why = "cores" if quota is None or quota > cores else "cores' worth of time that this container may use"
            yield f"{row['artifact']}: {threads} threads on {cores:g} {why}; give --threads {max(1, int(cores))}"
