"""Measure latencies for steps that prune to one: while they plan, and before the run, to check that it is possible."""

import tempfile
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

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


def check_latency(job: Job, *, fresh: bool) -> None:
    """Check that each latency target can be measured and reached, by measuring models with random weights.

    Measures nothing if all steps with a latency target are done.

    Raises:
        PlanError: no structure of a step reaches its latency.
        DeviceError: a latency cannot be measured on the run's device.
    """
    timed = [step for step in job.steps if step.info.latency is not None]
    done = not fresh and all(step.files.plan.is_file() for step in timed)
    if not timed or job.runtime.broadcast(done):
        return
    check_clock(job)
    model, plan = create_model(job.recipe.model.name, job.arch_args), job.base
    with distributed.cpu_threads(job.recipe.run.threads):
        for step, delta in zip(job.steps[: timed[-1].number + 1], job.deltas, strict=False):
            if step.info.latency is not None:
                job.progress.stage(f"Measure the range of latencies of step {step.number + 1}")
                step.info.latency.check(model, job.family, plan, clock(job))
            model, plan = surgery.apply_to_copy(model, delta), plan.then(delta)


def check_clock(job: Job) -> None:
    """Raise DeviceError if a latency target is for the run's device and ONNX Runtime would measure on another one."""
    targets = (step.info.latency for step in job.steps if step.info.latency)
    if any(target.runtime == "onnxruntime" for target in targets) and job.onnx_problem:
        raise DeviceError(
            f"the latency target is for {job.runtime.device}, and ONNX Runtime does not work there: {job.onnx_problem}",
            hint="measure with torch (--set step.0.latency_on=torch), or run with --device cpu",
        )


def clock(job: Job) -> Clock:
    """Measures candidates in the first process for all processes."""
    return Clock(partial(latency_ms, job), partial(undisturbed_ms, job))


def latency_ms(job: Job, model: nn.Module, runtime: str) -> float:
    """Median milliseconds of one call on `runtime` (`onnxruntime` or `torch`).

    At the batch size of the recipe's [bench] (1 if it sets none), on the run's device and in the precision of [export].
    The first process measures while the others wait, and all return the same.

    Raises:
        InputError: an unknown runtime.
    """
    median = _measure(job, model, runtime, QUICK)["latency_ms"]["p50"] if job.runtime.is_main else None
    return float(job.runtime.broadcast(median))


def undisturbed_ms(job: Job, model: nn.Module, runtime: str) -> float:
    """As `latency_ms`, but the median of the fastest of many rounds, over ten seconds or more.

    Other load on the machine only makes calls slower, so the fastest round is the least disturbed one.
    """
    job.progress.note(f"measured again for longer on {runtime}, to exclude other load on the machine")
    rounds = _measure(job, model, runtime, LONG)["samples_ms"] if job.runtime.is_main else None
    return float(job.runtime.broadcast(None if rounds is None else min(map(np.median, rounds))))


def measured_on(job: Job) -> dict[str, Any]:
    """What latencies depend on besides the model and the recipe: hardware, versions, device, threads."""
    return {**machine.facts(), "device": str(job.runtime.device), "threads": job.recipe.run.threads}


def _measure(job: Job, model: nn.Module, runtime: str, protocol: suite.BenchOptions) -> BenchRow:
    """A row of the benchmark."""
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
    if precision in HALF:
        for tensor in (*copy.parameters(), *copy.buffers()):
            if tensor.is_floating_point():
                tensor.data.clamp_(-torch.finfo(HALF[precision]).max, torch.finfo(HALF[precision]).max)
    return copy
