"""Measure latencies for steps that prune to one: while they plan, and before the run, to check that it is possible."""

import tempfile
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vitcompress import surgery
from vitcompress.bench import machine, suite
from vitcompress.bench.report.records import BenchRow
from vitcompress.errors import DeviceError, InputError
from vitcompress.exporters.onnx.export import ONNX
from vitcompress.exporters.precision import HALF, present_layers
from vitcompress.exporters.runtimes import Runner, RunnerOptions, TorchRunner, open_runner
from vitcompress.methods.base import Clock
from vitcompress.models.create import create_model
from vitcompress.pipeline.job import Job
from vitcompress.training import distributed

QUICK = suite.BenchOptions("paper", warmup=10, runs=40)  # for dozens of candidates
LONG = suite.BenchOptions("robust")


def check_latency(job: Job) -> None:
    """Check that each latency target can be measured and reached, by measuring models with random weights.

    Measures nothing if all steps with a latency target are done.

    Raises:
        PlanError: no structure of a step reaches its latency.
        DeviceError: a latency cannot be measured on the run's device.
    """
    timed = [step for step in job.steps if step.info.latency is not None]
    done = not job.options.fresh and all(step.files.plan.is_file() for step in timed)
    if not timed or job.runtime.broadcast(done):
        return
    check_clock(job)
    model, plan = create_model(job.base.arch, job.base.arch_args), job.base
    with distributed.cpu_threads(job.recipe.run.threads):
        for step in job.steps[: timed[-1].number + 1]:
            if step.info.latency is not None:
                job.progress.stage(f"Measure the range of latencies of step {step.number + 1}")
                step.info.latency.check(model, job.family, plan, clock(job))
            model, plan = surgery.apply_to_copy(model, step.delta), plan.then(step.delta)


def check_clock(job: Job) -> None:
    """Raise DeviceError if a latency target is for the run's device and ONNX Runtime would measure on another one."""
    if job.onnx_problem and any(s.info.latency and s.info.latency.runtime == "onnxruntime" for s in job.steps):
        raise DeviceError(
            f"the latency target is for {job.runtime.device}, and ONNX Runtime does not work there: {job.onnx_problem}",
            hint="measure with torch (--set step.0.latency_on=torch), or run with --device cpu",
        )


def clock(job: Job) -> Clock:
    """Measures candidates in the first process, while the others wait, and returns the same in all of them.

    At the batch size of the recipe's [bench] (1 if it sets none), on the run's device and in the precision of [export].
    `undisturbed` is the median of the fastest of many rounds, over ten seconds or more: other load on the machine only
    makes calls slower, so the fastest round is the least disturbed one.
    """

    def median(model: nn.Module, runtime: str) -> float:
        ms = measure(job, model, runtime, QUICK)["latency_ms"]["p50"] if job.runtime.is_main else None
        return float(job.runtime.broadcast(ms))

    def undisturbed(model: nn.Module, runtime: str) -> float:
        job.progress.note(f"measured again for longer on {runtime}, to exclude other load on the machine")
        rounds = measure(job, model, runtime, LONG)["samples_ms"] if job.runtime.is_main else None
        return float(job.runtime.broadcast(rounds and min(map(np.median, rounds))))

    return Clock(median, undisturbed)


def measured_on(job: Job) -> dict[str, object]:
    """What latencies depend on besides the model and the recipe: hardware, versions, device, threads."""
    return {**machine.facts(), "device": str(job.runtime.device), "threads": job.recipe.run.threads}


def measure(job: Job, model: nn.Module, runtime: str, protocol: suite.BenchOptions) -> BenchRow:
    """A row of the benchmark of `model` on `runtime`, `onnxruntime` or `torch`; raises InputError for others."""
    options = replace(protocol, batch=job.recipe.bench.batch or 1, seed=job.recipe.run.seed)
    with tempfile.TemporaryDirectory() as folder, closing(_runner(job, model, runtime, Path(folder))) as runner:
        return suite.compare([runner], options).rows[0]


def _runner(job: Job, model: nn.Module, runtime: str, folder: Path) -> Runner:
    table = job.recipe.export
    if runtime == "torch":
        options = RunnerOptions(str(job.runtime.device), precision=table.precision)
        return TorchRunner(deepcopy(model), options, name="candidate")
    if runtime == "onnxruntime":
        path = folder / "candidate.onnx"
        # The search for islands runs after training; here only islands that are named and still in the model count.
        export = replace(table.only(ONNX.uses), islands=present_layers(model, table.islands))
        ONNX.export(_clip_weights(model, table.precision), path, input=job.input, options=export)
        return open_runner(path, device=job.onnx_device)
    raise InputError(f"no runtime {runtime!r} to measure on", hint="use onnxruntime or torch")


def _clip_weights(model: nn.Module, precision: str) -> nn.Module:
    """A copy on the CPU with all weights clipped to the range of half precision; their values do not affect the time.

    The final export rejects a model that half precision cannot represent.
    """
    copy = deepcopy(model).cpu()
    limits = torch.finfo(HALF[precision]) if precision in HALF else None
    for tensor in (*copy.parameters(), *copy.buffers()):
        if limits and tensor.is_floating_point():
            tensor.data.clamp_(limits.min, limits.max)
    return copy
