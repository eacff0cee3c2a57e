"""Measure latencies for steps that prune to one: while they plan, and before the run, to check that it is possible."""

import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vitcompress import surgery
from vitcompress.bench import machine, suite, timing
from vitcompress.errors import DeviceError, InputError
from vitcompress.exporters.onnx.providers import choose_provider, resolve_precision
from vitcompress.exporters.precision import HALF, present_layers
from vitcompress.exporters.quantize.calibrate import calibrate
from vitcompress.exporters.runtimes import RUNTIME_FORMATS, Runner, RunnerOptions, available_exporter, open_runner
from vitcompress.exporters.torch_runner import TorchRunner, check_options
from vitcompress.io.progress import Progress
from vitcompress.methods import budget
from vitcompress.methods.base import Goal, Measured, context_for
from vitcompress.methods.latency import CLOSE, LatencySearch, goal_of, list_sizes, most_candidates
from vitcompress.models.create import InputConfig, create_model
from vitcompress.pipeline.export import QUICK
from vitcompress.pipeline.job import Job
from vitcompress.recipe.schema import ExportTable
from vitcompress.training import distributed

REPEATS = 5  # measurements of a candidate at most
SECONDS = 20.0  # after which a candidate is not measured again
PATIENCE = 60.0  # seconds that a step waits for a quiet machine, in total
POLL = 1.0  # seconds over which the load is measured
OTHER_RUNTIME = "set latency_on to another runtime"


def describe_searches(job: Job) -> Iterator[str]:
    """What each search by a latency does, and how long at most."""
    for step in job.steps:
        if goal := goal_of(step.options):
            count = most_candidates(step.method, step.options)
            minutes = math.ceil(((count + 2) * SECONDS + 2 * PATIENCE) / 60)
            yield (
                f"Step {step.number + 1} prunes to {goal}, which a dry run does not check; the cost above is that of "
                "the recipe's sizes. A run ends if no structure reaches the latency. It measures at most "
                f"{count} candidates, in up to {minutes} min, and exports them."
            )


def check_latency(job: Job) -> None:
    """Check that latency targets can be measured, and the first one reached, with random weights, unless it is done.

    The sizes before later ones are those that the first one leads to. Raises PlanError if no structure reaches the
    first one, and as `check_clock`.
    """
    timed = [step.number for step in job.steps if goal_of(step.options)]
    left = [number for number in timed if job.options.fresh or not job.steps[number].files.plan.is_file()]
    if not (left := job.runtime.broadcast(left)):
        return
    check_clock(job)
    model, plan = create_model(job.base.arch, job.base.arch_args), job.base
    with distributed.cpu_threads(job.recipe.run.threads):
        for step in job.steps[: timed[0] + 1] if left == timed else ():
            if goal := goal_of(step.options):
                job.progress.stage(f"Measure the range of latencies of step {step.number + 1}")
                context = context_for(model, plan=plan, latency=create_clock(job), progress=job.progress)
                smallest = list_sizes(step.method, model, job.family, plan, step.options)[-1][1]
                target = LatencySearch(context, goal, model, 2).target(lambda delta: delta)
                budget.check_reach(plan.delta(), smallest, target)
            model, plan = surgery.apply_to_copy(model, step.delta), plan.then(step.delta)


def check_clock(job: Job) -> None:
    """Raise DeviceError or InputError if the runtime of a latency target is missing, or lacks device or precision."""
    table, cpu = job.recipe.export, job.runtime.device.type == "cpu"
    problems = {"onnxruntime": job.onnx_problem, "openvino": None if cpu else "it runs on the CPU"}
    for step, goal in [(step, goal) for step in job.steps if (goal := goal_of(step.options))]:
        if problem := problems.get(goal.runtime):
            message = f"the latency target is for {job.runtime.device}, where {goal.runtime} does not work: {problem}"
            torch_instead = f"measure with torch (--set step.{step.number}.latency_on=torch)"
            raise DeviceError(message, hint=f"{torch_instead}, or use --device cpu")
        try:
            if goal.runtime in RUNTIME_FORMATS:
                exporter = available_exporter(RUNTIME_FORMATS[goal.runtime], hint=OTHER_RUNTIME)
                exporter.check(table.only(exporter.supported(table)))
            if goal.runtime == "onnxruntime":
                resolve_precision("the file", table.precision, None, choose_provider(str(job.runtime.device), None)[0])
            if goal.runtime == "torch":
                check_options(RunnerOptions(), job.runtime.device, table.precision)
        except InputError as error:
            raise InputError(f"no latency on {goal.runtime} here: {error.message}", hint=OTHER_RUNTIME) from None


def create_clock(job: Job) -> "LatencyClock":
    """The clock of a run: batch and precision of the recipe."""
    recipe, at = job.recipe, (job.input, job.runtime, job.progress)
    return LatencyClock(*at, export=recipe.export, batch=recipe.bench.batch or 1, threads=recipe.run.threads)


def measured_on(device: torch.device, threads: int | None) -> dict[str, object]:
    """What latencies depend on besides the model and the recipe: hardware, versions, device, threads."""
    return {**machine.facts(), "device": str(device), "threads": threads}


@dataclass
class LatencyClock:
    """Measures candidates in the first process, while the others wait, and returns the same in all of them.

    On the device of `runtime` and in the precision of `export`. batch, threads: defaults of a goal. waited: seconds for
    a quiet machine so far.
    """

    input: InputConfig
    runtime: distributed.Runtime
    progress: Progress
    _: KW_ONLY
    export: ExportTable = ExportTable()  # noqa: RUF009 (frozen)
    batch: int = 1
    threads: int | None = None
    waited: float = field(default=0.0, init=False)

    def __call__(self, model: nn.Module, goal: Goal) -> Measured:
        with distributed.cpu_threads(goal.threads or self.threads):
            result: Measured = self.runtime.broadcast(self.measure(model, goal) if self.runtime.is_main else None)
        return result

    def measure(self, model: nn.Module, goal: Goal) -> Measured:
        """The median over the blocks of all repeats, with the interval of the benchmark."""
        medians, causes, start = list[float](), list[str](), time.monotonic()
        options = replace(QUICK, batch=goal.batch or self.batch)
        with self._open(model, goal) as runner:
            for repeats in range(1, REPEATS + 1):
                busy = self.wait_until_quiet()
                bench = suite.compare([runner], options)
                causes += filter(None, [busy, *bench.disturbed])
                medians += [float(np.median(block)) for block in bench.rows[0]["samples_ms"]]
                ms, low, end = timing.median_interval(medians)
                result = Measured(ms, low, end or math.inf, min(medians), repeats, causes[-1] if causes else "")
                near = result.high <= goal.ms * (1 + CLOSE) and low >= goal.ms * (1 - CLOSE)
                if near or not low <= goal.ms <= result.high or time.monotonic() - start > SECONDS:
                    break
        return result

    def wait_until_quiet(self) -> str:
        """Wait until other processes use as few cores as the benchmark allows, at most PATIENCE seconds in total.

        Returns a description of their load if they still use more; empty otherwise.
        """
        while True:
            before = machine.cpu_seconds()
            time.sleep(POLL)
            others = machine.others_cores(before, machine.cpu_seconds()) or 0.0
            load = f"other processes used {others:.1f} of {machine.usable_cores()} cores"
            if others <= machine.DISTURBED or self.waited >= PATIENCE:
                return load if others > machine.DISTURBED else ""
            if not self.waited:
                self.progress.note(f"{load}: waiting up to {PATIENCE:g} s until they use {machine.DISTURBED:g} at most")
            self.waited += POLL
            self.progress.update("wait for a quiet machine", round(self.waited), round(PATIENCE), load)

    @contextmanager
    def _open(self, model: nn.Module, goal: Goal) -> Iterator[Runner]:
        """A copy of `model` in the runtime of `goal`."""
        copy, precision = deepcopy(model).cpu(), self.export.precision
        options = RunnerOptions(str(self.runtime.device), threads=goal.threads)
        for tensor in copy.state_dict().values():  # weights do not affect the time; the final export checks their range
            if precision in HALF and tensor.is_floating_point():
                tensor.clamp_(torch.finfo(HALF[precision]).min, torch.finfo(HALF[precision]).max)
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            if goal.runtime == "torch":
                runner: Runner = TorchRunner(copy, replace(options, precision=precision), name="candidate")
            else:
                exporter = available_exporter(RUNTIME_FORMATS[goal.runtime], hint=OTHER_RUNTIME)
                path = Path(folder) / f"candidate{exporter.file_suffix}"
                used = self.export.only(exporter.supported(self.export))
                # The search for islands runs after training; only islands that are named and still there count.
                used = replace(used, islands=present_layers(copy, used.islands))
                # Ranges do not affect the time either.
                noise = torch.randn(2, *self.input.size, generator=torch.Generator().manual_seed(0))
                ranges = partial(calibrate, images=noise, precision=used.eight_bits or "int8")
                exporter.export(copy, path, input=self.input, options=used, calibrate=ranges)
                runner = open_runner(path, options)
            yield stack.enter_context(closing(runner))
