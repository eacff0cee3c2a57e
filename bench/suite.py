"""Artifacts side by side: opened as asked, measured in turns, reported with everything that changes the number."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vitcompress.bench import environment, timing
from vitcompress.bench.artifacts import named, open_all, synthetic_images
from vitcompress.bench.memory import memory_of
from vitcompress.errors import InputError
from vitcompress.exporters.runner import TimedCall
from vitcompress.exporters.runtimes import Runner, RunnerOptions
from vitcompress.io.progress import Progress
from vitcompress.io.text import compared

FORMAT = 1


@dataclass(frozen=True)
class BenchOptions:
    """What to measure. `batch`, `warmup`, `runs`: None leaves what the protocol says; several batches are a sweep.

    memory: tell the peak memory of each artifact on the CPU, too, in a process of its own.
    variants: settings in which torch models are measured side by side, as in `fp32,fp16+compile` or `all`. fail_under:
    every other artifact must be at least this many times as fast as the first one; what counts is the lower end of the
    95 % interval.
    """

    protocol: str = "robust"
    batch: int | tuple[int, ...] | None = None
    warmup: int | None = None
    runs: int | None = None
    runner: RunnerOptions = field(default_factory=RunnerOptions)
    fail_under: float | None = None
    seed: int = 0
    variants: str | None = None
    memory: bool = False

    def resolved(self) -> list[timing.Protocol]:
        """One protocol per batch. Raises InputError for what cannot be measured."""
        batches = self.batch if isinstance(self.batch, tuple) and self.batch else (self.batch,)
        same = {"warmup": self.warmup, "runs": self.runs}
        return [timing.protocol(self.protocol, batch=batch, **same) for batch in batches]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Bench:
    """`rows`: one per artifact and batch. `ratios`: each later artifact against the first. All plain data.

    notes: what the protocol leaves out. disturbed: why the figures may be wrong: others used the machine, or it slowed
    down. `as_data` repeats the ratio of two artifacts as `ratio`.
    """

    rows: tuple[dict[str, Any], ...]
    ratios: tuple[dict[str, Any], ...]
    machine: dict[str, Any]
    warnings: tuple[str, ...]
    fail_under: float | None = None
    notes: tuple[str, ...] = ()
    disturbed: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the lower end of every interval reaches `fail_under`; True without one."""
        return self.fail_under is None or all(r["ci95"][0] >= self.fail_under for r in self.ratios)

    def as_data(self) -> dict[str, Any]:
        known: dict[str, Any] = {"rows": list(self.rows), "ratios": list(self.ratios), "machine": self.machine}
        gate = {"fail_under": self.fail_under, "passed": self.passed}
        if len(self.ratios) == 1:
            known["ratio"] = self.ratios[0]
        said = {"warnings": list(self.warnings), "notes": list(self.notes), "disturbed": list(self.disturbed)}
        return {"bench_format": FORMAT, **known, **said, **gate}


def run(
    artifacts: Sequence[str | Path],
    options: BenchOptions | None = None,
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> Bench:
    """Measure files, run folders, `timm:NAME`s and `timm-onnx:NAME`s in turns, the first one being the base of all
    ratios.

    `settings` are fields of BenchOptions, for callers that have no options at hand.

    Raises:
        ArtifactError, DeviceError: one of them cannot be run as asked. Nothing is measured then.
        InputError: settings that cannot be measured.
    """
    options = replace(options or BenchOptions(), **settings)
    if not artifacts:
        raise InputError("nothing to measure", hint="give files, run folders or timm:NAME")
    protocols = options.resolved()
    if options.fail_under is not None and not options.fail_under > 0:
        raise InputError(f"--fail-under must be above 0, got {options.fail_under:g}", hint="as in --fail-under 1.4")
    with ExitStack() as stack:
        runners = open_all(artifacts, _ranged(options, protocols), options.variants, stack)
        if options.fail_under is not None and len(runners) < 2:
            raise InputError(
                "--fail-under compares with the first artifact, only one was given", hint="give two or more"
            )
        found = compare(runners, options, progress)
    if not options.memory:
        return found
    (progress or Progress()).stage("Measure the memory of each artifact")
    of = named(artifacts, options.variants, options.runner.device)
    rows = zip(found.rows, of * len(protocols), strict=True)
    return replace(found, rows=tuple(_with_memory(row, *name, options.runner) for row, name in rows))


def _with_memory(row: dict[str, Any], artifact: str, variant: str | None, options: RunnerOptions) -> dict[str, Any]:
    """The row of an artifact on the CPU, with what it takes there; any other row as it is."""
    if not str(row["device"]).startswith("cpu"):
        return row
    return {**row, "memory": {**row["memory"], **memory_of(artifact, variant, options, row["batch"])}}


def _ranged(options: BenchOptions, protocols: Sequence[timing.Protocol]) -> RunnerOptions:
    """The options to open artifacts with: providers that build for a range of batches build for those measured."""
    batches = sorted(protocol.batch for protocol in protocols)
    return (
        options.runner
        if options.runner.batch
        else replace(options.runner, batch=(batches[0], batches[-1], batches[-1]))
    )


def compare(runners: Sequence[Runner], options: BenchOptions, progress: Progress | None = None) -> Bench:
    """`run` for runners that are open already; they stay open."""
    parts = [_at_batch(runners, options, protocol, progress) for protocol in options.resolved()]
    together: dict[str, Any] = {
        name: tuple(item for part in parts for item in getattr(part, name)) for name in ("rows", "ratios")
    }
    said = {  # what holds for several batches is said once
        name: tuple(dict.fromkeys(words for part in parts for words in getattr(part, name)))
        for name in ("warnings", "notes", "disturbed")
    }
    about = {**parts[0].machine, "conditions": [part.machine["conditions"] for part in parts]}
    return Bench(**together, **said, machine=about, fail_under=options.fail_under)


def _at_batch(
    runners: Sequence[Runner], options: BenchOptions, protocol: timing.Protocol, progress: Progress | None
) -> Bench:
    targets = [_target(runner, protocol.batch, options.seed) for runner in runners]
    with environment.watched([runner.describe() for runner in runners]) as watch:
        samples = timing.measure(targets, protocol, progress, watch.joules)
    rows = tuple(_row(*one, protocol, options, watch) for one in zip(runners, samples, targets, strict=True))
    ratios = [asdict(timing.ratio(samples[0], later)) for later in samples[1:]]
    about = {**environment.facts(), "conditions": watch.found}
    disturbed = tuple(environment.disturbances(watch.found))
    warned = (*environment.unlike(rows), *environment.crowded(rows), *environment.warnings(samples, rows))
    said = tuple(environment.left_out(protocol, rows))
    return Bench(rows, _plain(ratios, protocol.batch), about, (*warned, *disturbed), None, said, disturbed)


def gated(found: Bench) -> str | None:
    """The sentence that says which artifact fell short of `fail_under`, None when none did."""
    short = [r for r in found.ratios if found.fail_under is not None and r["ci95"][0] < found.fail_under]
    if not short:
        return None
    worst = min(short, key=lambda r: float(r["ci95"][0]))
    return f"{compared(worst)}; at least {found.fail_under:g} was asked for"


def _target(runner: Runner, batch: int, seed: int) -> timing.Target:
    step = runner.bind(synthetic_images(runner.input_size, batch, seed))
    timed = step.timed if isinstance(step, TimedCall) else None
    return timing.Target(runner.name, step, runner.synchronize, timed)


def _row(
    runner: Runner,
    samples: timing.Samples,
    target: timing.Target,
    protocol: timing.Protocol,
    options: BenchOptions,
    watch: environment.Watched,
) -> dict[str, Any]:
    """One bench row: what was measured, how, and every sample."""
    known = runner.describe()
    return {
        **known,
        "protocol": protocol.id,
        "batch": samples.batch,
        "input_size": list(runner.input_size),
        "input": environment.input_in_words(known),
        "caches": "warm: input and weights are used again by every run",
        "warmup": samples.warmup_runs,
        "warmup_seconds": samples.warmup_seconds,
        "settled": samples.settled,
        "runs": len(samples.runs_ms),
        "clock": samples.clock,
        "images_per_second": samples.images_per_second,
        "latency_ms": samples.latency_ms(),
        "variation": samples.variation,
        "drift": samples.drift,
        "images_per_joule": samples.images_per_joule,
        "joules": samples.joules,
        "energy_of": watch.energy_of,
        "memory": environment.memory(known, target),
        "samples_ms": [list(map(float, block)) for block in samples.blocks_ms],
        "block_wall_ms": samples.wall_ms,
    }


def _plain(ratios: Sequence[Mapping[str, Any]], batch: int) -> tuple[dict[str, Any], ...]:
    """JSON knows no infinity: an interval without an upper end has None there."""
    open_ended = [{**r, "ci95": [end if end < float("inf") else None for end in r["ci95"]]} for r in ratios]
    return tuple({**r, "batch": batch} for r in open_ended)
