"""How long a model takes on a runtime, for steps that aim at a latency: while they plan, and to check it before."""

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
from vitcompress.errors import DeviceError, InputError
from vitcompress.exporters.onnx.export import ONNX
from vitcompress.exporters.precision import HALF, present_layers
from vitcompress.exporters.runtimes import Runner, RunnerOptions, TorchRunner, open_runner
from vitcompress.methods import find_method
from vitcompress.methods.base import Clock
from vitcompress.models.checkpoint import PLAN
from vitcompress.models.create import create_model
from vitcompress.pipeline.job import Job
from vitcompress.training import distributed

# Short: dozens of candidates are measured, and the benchmark at the end measures for longer.
QUICK = suite.BenchOptions("paper", warmup=10, runs=40)
LONG = suite.BenchOptions("robust")


def check_latency(job: Job, *, fresh: bool) -> None:
    """Raise PlanError for a latency that no structure of a step can have, by measuring with random weights, and
    DeviceError for one that cannot be measured on the run's device.

    Nothing is measured where all such steps were taken already.
    """
    steps = job.recipe.steps
    targets = [find_method(step.method).describe(step.options).latency for step in steps]
    timed = [number for number, target in enumerate(targets) if target is not None]
    taken = not fresh and all((job.step_folder(number) / PLAN).is_file() for number in timed)
    if not timed or job.runtime.broadcast(taken):
        return
    check_clock(job)
    model, plan = create_model(job.recipe.model.name, job.arch_args), job.base
    with distributed.cpu_threads(job.recipe.run.threads):
        for number, step in enumerate(steps[: timed[-1] + 1]):
            if (target := targets[number]) is not None:
                job.progress.stage(f"Measure the range of latencies of step {number + 1}")
                target.check(model, job.family, plan, clock(job))
            delta = find_method(step.method).structure(model, job.family, plan, step.options)
            model, plan = surgery.apply_to_copy(model, delta), plan.then(delta)


def check_clock(job: Job) -> None:
    """Raise DeviceError where ONNX Runtime would measure on another device than the run's, which the latency is for."""
    targets = (find_method(step.method).describe(step.options).latency for step in job.recipe.steps)
    if any(target.runtime == "onnxruntime" for target in targets if target) and job.onnx_problem:
        raise DeviceError(
            f"a latency on {job.runtime.device} is aimed at, and ONNX Runtime does not work there: {job.onnx_problem}",
            hint="measure with torch (--set step.0.latency_on=torch), or run with --device cpu",
        )


def clock(job: Job) -> Clock:
    """Measures the latencies of a run's candidates, in one process for all."""
    return Clock(partial(latency_ms, job), partial(undisturbed_ms, job))


def latency_ms(job: Job, model: nn.Module, runtime: str) -> float:
    """Median milliseconds of one call on `runtime` (`onnxruntime` or `torch`), at the batch size of the recipe's
    [bench], on the run's device and in the precision of [export]; 1 where the recipe gives no batch size. The first
    process measures while the others wait, and all get the same.

    Raises:
        InputError: a runtime that is not one of these.
    """
    found = _measured(job, model, runtime, QUICK)["latency_ms"]["p50"] if job.runtime.is_main else None
    return float(job.runtime.broadcast(found))


def undisturbed_ms(job: Job, model: nn.Module, runtime: str) -> float:
    """As `latency_ms`, but the median of the fastest round of many, over ten seconds or more: what else runs makes
    times longer, never shorter.
    """
    job.progress.note(f"measured again for longer on {runtime}: other load on the machine must not decide")
    rounds = _measured(job, model, runtime, LONG)["samples_ms"] if job.runtime.is_main else None
    return float(job.runtime.broadcast(None if rounds is None else min(map(np.median, rounds))))


def measured_on(job: Job) -> dict[str, Any]:
    """What a latency belongs to beside the model and the recipe: hardware, versions, device, threads."""
    return {**machine.facts(), "device": str(job.runtime.device), "threads": job.recipe.run.threads}


def _measured(job: Job, model: nn.Module, runtime: str, how: suite.BenchOptions) -> dict[str, Any]:
    """A row of the benchmark."""
    options = replace(how, batch=job.recipe.bench.batch or 1, seed=job.recipe.run.seed)
    with tempfile.TemporaryDirectory() as folder, closing(_runner(job, model, runtime, Path(folder))) as runner:
        return suite.compare([runner], options).rows[0]


def _runner(job: Job, model: nn.Module, runtime: str, folder: Path) -> Runner:
    wanted = job.recipe.export
    if runtime == "torch":
        options = RunnerOptions(str(job.runtime.device), precision=wanted.precision)
        return TorchRunner(deepcopy(model), options, name="candidate")
    if runtime == "onnxruntime":
        path = folder / "candidate.onnx"
        # Islands are searched for at the end of the run; here only those apply that are named and still in the model.
        named = replace(wanted.only(ONNX.uses), islands=present_layers(model, wanted.islands))
        ONNX.export(_holdable(model, wanted.precision), path, input=job.input, options=named)
        return open_runner(path, device=job.onnx_device)
    raise InputError(f"no runtime {runtime!r} to measure on", hint="use onnxruntime or torch")


def _holdable(model: nn.Module, precision: str) -> nn.Module:
    """A copy on the CPU with all weights clipped to what half precision holds: their values do not change the time. The
    final export refuses a model that half precision cannot hold.
    """
    copy = deepcopy(model).cpu()
    if precision in HALF:
        for tensor in (*copy.parameters(), *copy.buffers()):
            if tensor.is_floating_point():
                tensor.data.clamp_(-torch.finfo(HALF[precision]).max, torch.finfo(HALF[precision]).max)
    return copy
