"""Benchmark artifacts against each other: open, measure interleaved, and report everything that affects the numbers."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Annotated, cast

from annotated_types import Gt, MinLen
from torch import nn

from vitcompress.bench import environment, machine, timing
from vitcompress.bench.artifacts import Artifact, as_file, open_artifacts, synthetic_images
from vitcompress.bench.environment import Monitor
from vitcompress.bench.report import records
from vitcompress.bench.report.measurements import bench_table, too_slow
from vitcompress.errors import InputError, VitcompressError, first_line
from vitcompress.exporters.calls import BoundCall
from vitcompress.exporters.options import Positive
from vitcompress.exporters.runtimes import Runner, RunnerOptions
from vitcompress.io.progress import SILENT, Progress
from vitcompress.io.text import format_interval, format_ratio, shorten_names
from vitcompress.recipe.schema import ProtocolTable

FORMAT = 1
MEMORY_RUNS = 2  # the first run may reserve more than is kept
NO_INTERVAL = "the speed-up has no interval: at least 6 rounds are needed, as with --runs 6"


@dataclass(frozen=True)
class BenchOptions(ProtocolTable):
    """What to measure. batch, warmup, runs: None takes the value of the protocol; several batches are a sweep.

    fail_under: every other artifact must be at least this many times as fast as the first one, by the lower end of the
    95 % interval. variants: settings in which torch models are measured, as in `fp32,fp16+compile` or `all`. memory:
    also measure the peak memory of each artifact on the CPU, in a process of its own.
    """

    batch: Positive | Annotated[tuple[Positive, ...], MinLen(1)] | None = None  # type: ignore[assignment]
    runner: RunnerOptions = field(default_factory=RunnerOptions)
    fail_under: Annotated[float, Gt(0)] | None = None
    variants: str | None = None
    memory: bool = False

    def protocols(self) -> list[timing.Protocol]:
        """One protocol per batch size."""
        batches = self.batch if isinstance(self.batch, tuple) else (self.batch,)
        stated = [{"batch": size, "warmup": self.warmup, "runs": self.runs} for size in batches]
        changes = [{name: value for name, value in own.items() if value is not None} for own in stated]
        return [replace(timing.PROTOCOLS[self.protocol], **own) for own in changes]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Bench:
    """Result of a measurement. rows: one per artifact and batch. ratios: each later artifact over the first.

    warnings: the most important first. notes: what the protocol does not cover. disturbed: why the figures may be
    wrong; the first warnings.
    """

    rows: tuple[records.BenchRow, ...]
    ratios: tuple[records.RatioRecord, ...]
    machine: records.MachineRecord
    warnings: tuple[str, ...]
    fail_under: float | None = None
    notes: tuple[str, ...] = ()
    disturbed: tuple[str, ...] = ()

    def __str__(self) -> str:
        """A table of the rows with the ratios, then the warnings."""
        return "\n".join([bench_table([self.to_dict()]).markdown(), *self.warnings])

    def to_dict(self) -> records.BenchRecord:
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return cast(records.BenchRecord, {"bench_format": FORMAT, **fields, "passed": self.failure() is None})

    def failure(self) -> str | None:
        """A line for each ratio below `fail_under`; None if none is."""
        lines = [
            f"batch {r['batch']}: {r['b']} is {format_ratio(r['median'], 3)} times as fast as {r['a']} "
            f"({format_interval(r['ci95'], 3)})"
            for r in too_slow(self.ratios, self.fail_under)
        ]
        text = "\n".join([*lines, f"the limit of --fail-under is {self.fail_under or 0:g}"])
        return shorten_names(text, [row["artifact"] for row in self.rows]) if lines else None


def run(artifacts: Sequence[Artifact], options: BenchOptions, progress: Progress = SILENT) -> Bench:
    """Measure models in memory, files, run folders, `timm:NAME` and `timm-onnx:NAME` interleaved, against the first.

    Raises InputError for invalid options, ArtifactError or DeviceError if an artifact cannot run (nothing is measured).
    """
    protocols = options.protocols()
    if options.memory and any(isinstance(artifact, nn.Module) for artifact in artifacts):
        message = "memory is measured in a process of its own, which cannot open a model of this one"
        raise InputError(message, hint="save the model with vc.save_model, and pass its folder")
    runner_options = options.runner
    if not runner_options.batch:  # providers that build for a range of batch sizes
        batches = sorted(protocol.batch for protocol in protocols)
        runner_options = replace(runner_options, batch=(batches[0], batches[-1], batches[-1]))
    with ExitStack() as stack:
        runners = open_artifacts(artifacts, runner_options, options.variants, stack)
        if options.fail_under is not None and len(runners) < 2:
            raise InputError("--fail-under compares with the first artifact, got only one", hint="give two or more")
        bench = compare([*runners], options, progress)
    if not options.memory:
        return bench
    progress.stage("Measure the memory of each artifact")
    rows, opened = list(bench.rows), [*runners.values()] * len(protocols)
    for number, (row, (artifact, variant)) in enumerate(zip(bench.rows, opened, strict=True)):
        if row["device"].startswith("cpu"):
            peaks = measure_memory(str(artifact), variant, options.runner, row["batch"])
            rows[number] = {**row, "memory": cast(records.MemoryRecord, {**row["memory"], **peaks})}
    return replace(bench, rows=tuple(rows))


def compare(runners: Sequence[Runner], options: BenchOptions, progress: Progress = SILENT) -> Bench:
    """`run` for runners that are already open; they stay open."""
    rows, ratios, conditions = list[records.BenchRow](), list[records.RatioRecord](), list[records.Conditions]()
    disturbed, unfair, noisy, notes = list[str](), list[str](), list[str](), list[str]()
    for protocol in options.protocols():
        calls = [runner.bind(synthetic_images(runner.input_size, protocol.batch)) for runner in runners]
        targets = [(runner.name, call) for runner, call in zip(runners, calls, strict=True)]
        with environment.monitor([cast(records.RunnerRecord, runner.describe()) for runner in runners]) as monitor:
            samples = timing.measure(targets, protocol, progress, monitor.joules)
        new = [_row(*one, protocol, monitor) for one in zip(runners, samples, calls, strict=True)]
        disturbed += environment.disturbances(monitor.conditions)
        unfair += environment.comparison_warnings(new, transfers=options.runner.transfers)
        unfair += environment.thread_warnings(new)
        ratios += (compared := [timing.ratio(samples[0], later) for later in samples[1:]])
        unfair += [NO_INTERVAL] if any(ratio["ci95"][1] is None for ratio in compared) else []
        noisy += environment.sample_warnings(samples, new)
        notes += environment.protocol_notes(protocol, new)
        rows += new
        conditions.append(monitor.conditions)
    # Each sentence once, although several batches may have it.
    sentences = {"warnings": [*disturbed, *unfair, *noisy], "notes": notes, "disturbed": disturbed}
    distinct = {name: tuple(dict.fromkeys(texts)) for name, texts in sentences.items()}
    machine: records.MachineRecord = {**environment.facts(), "conditions": conditions}
    return Bench(tuple(rows), tuple(ratios), machine, fail_under=options.fail_under, **distinct)


def _row(
    runner: Runner, samples: timing.Samples, call: BoundCall, protocol: timing.Protocol, monitor: Monitor
) -> records.BenchRow:
    description = cast(records.RunnerRecord, runner.describe())
    rates = ("clock", "images_per_second", "variation", "drift", "images_per_joule", "joules")
    row = {
        **description,
        "protocol": protocol.id,
        "input_size": list(runner.input_size),
        "input": environment.describe_input(description),
        "warmup": samples.warmup_runs,
        "runs": len(samples.runs_ms),
        "latency_ms": samples.latency_ms(),
        **{name: getattr(samples, name) for name in ("batch", "warmup_seconds", "settled", *rates)},
        "energy_of": monitor.energy_of,
        "memory": environment.peak_memory(description, call),
        "samples_ms": [list(map(float, block)) for block in samples.blocks_ms],
        "block_wall_ms": samples.wall_ms,
    }
    return cast(records.BenchRow, row)


def measure_memory(artifact: str, variant: str | None, options: RunnerOptions, batch: int) -> dict[str, int | None]:
    """Peak memory of a process that runs `batch` images through one artifact, in bytes.

    process_start_bytes: peak before the artifact was opened (Python and its libraries). process_peak_bytes: peak over
    the whole life of the process, with weights, images, and libraries such as OpenVINO that opening loads. Raises
    VitcompressError if the process failed, for example because there is not enough memory.
    """
    # A fork would start with this process's memory; an exporter would need more than the file.
    with as_file(artifact, options) as file, ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(_run_images, file, variant, options, batch).result()
        except Exception as error:  # whatever the process raised, or its end
            message = f"the memory of {artifact} cannot be measured: {first_line(error)}"
            hint = 'leave --memory out; a script must measure it under `if __name__ == "__main__":`'
            raise VitcompressError(message, hint=hint) from error


def _run_images(artifact: Artifact, variant: str | None, options: RunnerOptions, batch: int) -> dict[str, int | None]:
    start = machine.peak_bytes()
    with ExitStack() as stack:
        (runner,) = open_artifacts([artifact], options, variant, stack)
        step = runner.bind(synthetic_images(runner.input_size, batch))
        for _ in range(MEMORY_RUNS):
            step()
        return {"process_start_bytes": start, "process_peak_bytes": machine.peak_bytes()}
