"""Measure latencies for steps that prune to one: while they plan, and before the run, to check that it is possible."""

import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vitcompress import surgery
from vitcompress.bench import machine, suite, timing
from vitcompress.errors import DeviceError
from vitcompress.exporters import available_exporter, find_exporter
from vitcompress.exporters.precision import HALF, present_layers
from vitcompress.exporters.runtimes import Runner, RunnerOptions, TorchRunner, open_runner
from vitcompress.methods import budget
from vitcompress.methods.base import Clock, Goal, Measured, context_for
from vitcompress.methods.latency import CLOSE, Search, goal_of, list_sizes, most_candidates
from vitcompress.models.create import create_model
from vitcompress.pipeline.job import Job
from vitcompress.training import distributed

QUICK = suite.BenchOptions("paper", warmup=10, runs=40)  # one of up to REPEATS measurements of a candidate
REPEATS = 5
SECONDS = 20.0  # after which a candidate is not measured again
PATIENCE = 60.0  # seconds that a step waits for a quiet machine, in total
POLL = 1.0  # seconds over which the load is measured
FORMATS = {"onnxruntime": "onnx", "openvino": "openvino"}  # runtime -> format of the file that it measures


def describe_searches(job: Job) -> Iterator[str]:
    """What each search by a latency does, and how long at most."""
    for step in job.steps:
        if goal := goal_of(step.options):
            count = most_candidates(step.method, step.options)
            yield (
                f"Step {step.number + 1} prunes to {goal}, which a dry run does not check, as it measures nothing; the "
                "cost above is that of the recipe's sizes. A run first measures the largest and the smallest structure "
                "and is rejected if the latency is not in between. The search exports and measures at most "
                f"{count} candidates: each up to {REPEATS} times, until it is clear whether it is above or below, and "
                f"for about {SECONDS:g} s at most. Both parts wait up to {PATIENCE:g} s for a quiet machine. At most "
                f"{math.ceil(((count + 2) * SECONDS + 2 * PATIENCE) / 60)} min, and the exports."
            )


def check_latency(job: Job) -> None:
    """Check that each latency target can be measured and reached, by measuring models with random weights.

    Measures nothing if all steps with a latency target are done.

    Raises:
        PlanError: no structure of a step reaches its latency.
        DeviceError: a latency cannot be measured on the run's device.
    """
    timed = [step for step in job.steps if goal_of(step.options)]
    done = not job.options.fresh and all(step.files.plan.is_file() for step in timed)
    if not timed or job.runtime.broadcast(done):
        return
    check_clock(job)
    model, plan = create_model(job.base.arch, job.base.arch_args), job.base
    with distributed.cpu_threads(job.recipe.run.threads):
        for step in job.steps[: timed[-1].number + 1]:
            if goal := goal_of(step.options):
                job.progress.stage(f"Measure the range of latencies of step {step.number + 1}")
                context = replace(context_for(model, plan=plan, latency=clock(job)), progress=job.progress)
                smallest = list_sizes(step.method, model, job.family, plan, step.options)[-1][1]
                target = Search(context, goal, model, 2).target(lambda delta: delta)
                budget.check_reach(plan.delta(), smallest, target)
            model, plan = surgery.apply_to_copy(model, step.delta), plan.then(step.delta)


def check_clock(job: Job) -> None:
    """Check that the runtimes of latency targets measure on the run's device.

    Raises:
        DeviceError: they measure on another one.
        InputError: they are not installed.
    """
    cpu = job.runtime.device.type == "cpu"
    problems = {"onnxruntime": job.onnx_problem, "openvino": None if cpu else "it runs on the CPU"}
    for goal in filter(None, (goal_of(step.options) for step in job.steps)):
        if problem := problems.get(goal.runtime):
            where = f"{job.runtime.device}, and {goal.runtime} does not work there"
            raise DeviceError(
                f"the latency target is for {where}: {problem}",
                hint="measure with torch (--set step.0.latency_on=torch), or run with --device cpu",
            )
        if goal.runtime in FORMATS:
            available_exporter(FORMATS[goal.runtime], hint="or set latency_on to another runtime")


def clock(job: Job) -> Clock:
    """Measures candidates in the first process, while the others wait, and returns the same in all of them.

    At the batch size of the goal (default: of the recipe's [bench], or 1), on the run's device and in the precision of
    [export].
    """
    waited = [0.0]

    def measure(model: nn.Module, goal: Goal) -> Measured:
        with distributed.cpu_threads(goal.threads or job.recipe.run.threads):
            result = _measure(job, model, goal, waited) if job.runtime.is_main else None
        measured: Measured = job.runtime.broadcast(result)
        return measured

    return measure


def measured_on(job: Job) -> dict[str, object]:
    """What latencies depend on besides the model and the recipe: hardware, versions, device, threads."""
    return {**machine.facts(), "device": str(job.runtime.device), "threads": job.recipe.run.threads}


def _measure(job: Job, model: nn.Module, goal: Goal, waited: list[float]) -> Measured:
    """The median over the blocks of all repeats, with the interval of the benchmark."""
    medians, causes, start = list[float](), list[str](), time.monotonic()
    options = replace(QUICK, batch=goal.batch or job.recipe.bench.batch or 1, seed=job.recipe.run.seed)
    with _runner(job, model, goal) as runner:
        while True:
            causes += wait_until_quiet(job, waited)
            bench = suite.compare([runner], options)
            causes += bench.disturbed
            medians += [float(np.median(block)) for block in bench.rows[0]["samples_ms"]]
            ms, low, end = timing.median_interval(medians)
            high, repeats = end or math.inf, len(medians) // len(bench.rows[0]["samples_ms"])
            near = high <= goal.ms * (1 + CLOSE) and low >= goal.ms * (1 - CLOSE)
            late = repeats == REPEATS or time.monotonic() - start > SECONDS
            if near or high < goal.ms or low > goal.ms or late:
                return Measured(ms, low, high, min(medians), repeats, causes[-1] if causes else "")


def wait_until_quiet(job: Job, waited: list[float]) -> list[str]:
    """Wait until other processes use as few cores as the benchmark allows, at most PATIENCE seconds; else the load.

    waited: seconds of this step so far, in place.
    """
    while True:
        before = machine.cpu_seconds()
        time.sleep(POLL)
        others = machine.others_cores(before, machine.cpu_seconds()) or 0.0
        load = f"other processes used {others:.1f} of {machine.usable_cores()} cores"
        if others <= machine.DISTURBED or waited[0] >= PATIENCE:
            return [load] if others > machine.DISTURBED else []
        if waited[0] == 0:
            job.progress.note(f"{load}: waiting up to {PATIENCE:g} s until they use {machine.DISTURBED:g} at most")
        waited[0] += POLL
        job.progress.update("wait for a quiet machine", round(waited[0]), round(PATIENCE), load)


@contextmanager
def _runner(job: Job, model: nn.Module, goal: Goal) -> Iterator[Runner]:
    """`model` in the runtime of `goal`."""
    table, options = job.recipe.export, RunnerOptions(str(job.runtime.device), threads=goal.threads)
    with tempfile.TemporaryDirectory() as folder:
        if goal.runtime == "torch":
            runner: Runner = TorchRunner(deepcopy(model), replace(options, precision=table.precision), name="candidate")
        else:
            exporter = find_exporter(FORMATS[goal.runtime])
            path, used = Path(folder) / f"candidate{exporter.file_suffix}", table.only(exporter.uses)
            # The search for islands runs after training; here only islands that are named and still in the model count.
            export = replace(used, islands=present_layers(model, used.islands))
            exporter.export(_clip_weights(model, table.precision), path, input=job.input, options=export)
            runner = open_runner(path, options)
        with closing(runner):
            yield runner


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
