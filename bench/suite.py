"""Artifacts side by side: opened as asked, measured in turns, reported with everything that changes the number."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitcompress.bench import machine, timing
from vitcompress.errors import InputError
from vitcompress.exporters.runner import TimedCall
from vitcompress.exporters.runtimes import Runner, RunnerOptions, open_runner
from vitcompress.progress import Progress

FORMAT = 1


@dataclass(frozen=True)
class BenchOptions:
    """What to measure. `batch`, `warmup`, `runs`: None leaves what the protocol says.

    fail_under: every other artifact must be at least this many times as fast as the first one; what counts is the lower
    end of the 95 % interval.
    """

    protocol: str = "robust"
    batch: int | None = None
    warmup: int | None = None
    runs: int | None = None
    runner: RunnerOptions = field(default_factory=RunnerOptions)
    fail_under: float | None = None
    seed: int = 0

    def resolved(self) -> timing.Protocol:
        return timing.protocol(self.protocol, batch=self.batch, warmup=self.warmup, runs=self.runs)


@dataclass(frozen=True)
class Bench:
    """`rows`: one per artifact. `ratios`: each later artifact against the first. All plain data.

    `as_data` repeats the ratio of two artifacts as `ratio`.
    """

    rows: tuple[dict[str, Any], ...]
    ratios: tuple[dict[str, Any], ...]
    machine: dict[str, Any]
    warnings: tuple[str, ...]
    fail_under: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the lower end of every interval reaches `fail_under`; True without one."""
        return self.fail_under is None or all(r["ci95"][0] >= self.fail_under for r in self.ratios)

    def as_data(self) -> dict[str, Any]:
        known: dict[str, Any] = {"rows": list(self.rows), "ratios": list(self.ratios), "machine": self.machine}
        gate = {"fail_under": self.fail_under, "passed": self.passed}
        if len(self.ratios) == 1:
            known["ratio"] = self.ratios[0]
        return {"bench_format": FORMAT, **known, "warnings": list(self.warnings), **gate}


def run(
    artifacts: Sequence[str | Path],
    options: BenchOptions | None = None,
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> Bench:
    """Measure .onnx files, run folders and `timm:NAME`s in turns, the first one being the base of all ratios.

    `settings` are fields of BenchOptions, for callers that have no options at hand.

    Raises:
        ArtifactError, DeviceError: one of them cannot be run as asked. Nothing is measured then.
        InputError: settings that cannot be measured.
    """
    options = replace(options or BenchOptions(), **settings)
    if not artifacts:
        raise InputError("nothing to measure", hint="give .onnx files, run folders or timm:NAME")
    if options.fail_under is not None and len(artifacts) < 2:
        raise InputError("--fail-under compares with the first artifact, only one was given", hint="give two or more")
    options.resolved()
    with ExitStack() as stack:
        runners = []
        for artifact in artifacts:
            runner = open_runner(artifact, options.runner)
            stack.callback(runner.close)
            runners.append(runner)
        return compare(runners, options, progress)


def compare(runners: Sequence[Runner], options: BenchOptions, progress: Progress | None = None) -> Bench:
    """`run` for runners that are open already; they stay open."""
    protocol = options.resolved()
    targets = [_target(runner, protocol.batch, options.seed) for runner in runners]
    before, used = _state(runners), machine.cpu_seconds()
    samples = timing.measure(targets, protocol, progress)
    others = machine.others_cores(used, machine.cpu_seconds())
    after = _state(runners)
    rows = tuple(_row(r, s, protocol) for r, s in zip(runners, samples, strict=True))
    ratios = tuple(asdict(timing.ratio(samples[0], later)) for later in samples[1:])
    about = {**machine.facts(), "before": before, "after": after, "other_processes_cores": others}
    return Bench(rows, _plain(ratios), about, tuple(_warnings(samples, about)), options.fail_under)


def gated(found: Bench) -> str | None:
    """The sentence that says which artifact fell short of `fail_under`, None when none did."""
    short = [r for r in found.ratios if found.fail_under is not None and r["ci95"][0] < found.fail_under]
    if not short:
        return None
    worst = min(short, key=lambda r: float(r["ci95"][0]))
    low, high = worst["ci95"]
    upper = "open" if high is None else f"{high:.3f}"
    return (
        f"{worst['b']} is {worst['median']:.3f} times as fast as {worst['a']} (95 % interval {low:.3f} to {upper}); "
        f"at least {found.fail_under:g} was asked for"
    )


def synthetic_images(size: tuple[int, int, int], batch: int, seed: int) -> Tensor:
    """(batch, channels, height, width), standard normal: what normalised images look like to the arithmetic."""
    return torch.randn(batch, *size, generator=torch.Generator().manual_seed(seed))


def _target(runner: Runner, batch: int, seed: int) -> timing.Target:
    step: Callable[[], None] = runner.bind(synthetic_images(runner.input_size, batch, seed))
    timed = step.timed if isinstance(step, TimedCall) else None
    return timing.Target(runner.name, step, runner.synchronize, runner.uses_events, timed)


def _state(runners: Sequence[Runner]) -> dict[str, Any]:
    on_gpu = any(str(runner.describe()["device"]).startswith("cuda") for runner in runners)
    return {"load_average": machine.load_average(), "gpu": machine.gpu_state() if on_gpu else None}


def _row(runner: Runner, samples: timing.Samples, protocol: timing.Protocol) -> dict[str, Any]:
    """One bench row: what was measured, how, and every sample."""
    return {
        **runner.describe(),
        "protocol": protocol.id,
        "batch": samples.batch,
        "input_size": list(runner.input_size),
        "input": "standard normal, resident on the device; transfers are not timed",
        "warmup": samples.warmup_runs,
        "warmup_seconds": samples.warmup_seconds,
        "settled": samples.settled,
        "runs": len(samples.runs_ms),
        "clock": samples.clock,
        "images_per_second": samples.images_per_second,
        "latency_ms": samples.latency_ms(),
        "drift": samples.drift,
        "samples_ms": [list(map(float, block)) for block in samples.blocks_ms],
        "block_wall_ms": samples.wall_ms,
    }


def _plain(ratios: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """JSON knows no infinity: an interval without an upper end has None there."""
    return tuple({**r, "ci95": [end if end < float("inf") else None for end in r["ci95"]]} for r in ratios)


def _warnings(samples: Sequence[timing.Samples], about: Mapping[str, Any]) -> list[str]:
    """What a reader should know before believing the figures."""
    found = [
        f"{s.name}: times drifted by {s.drift:+.1%} from the first to the last third" for s in samples if s.drifted
    ]
    found += [f"{s.name}: times had not settled after {s.warmup_seconds:.0f} s" for s in samples if s.settled is False]
    if (others := about["other_processes_cores"] or 0.0) > machine.DISTURBED:
        found.append(f"other processes kept {others:.1f} of {machine.usable_cores()} cores busy meanwhile")
    if (processes := (about["before"]["gpu"] or {}).get("processes", 0)) > 1:
        found.append(f"the GPU had {processes} processes")
    return found
