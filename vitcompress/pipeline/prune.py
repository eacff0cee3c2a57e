"""Carry out the pruning steps of a recipe."""

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from vitcompress import surgery
from vitcompress.io.files import write_text
from vitcompress.methods import METHODS
from vitcompress.methods.base import LEFT_WEIGHTS, PUBLISHED, Context, check_sealed, seal
from vitcompress.models.checkpoint import load_for, load_strictly
from vitcompress.pipeline.job import Job
from vitcompress.pipeline.latency import clock, measured_on
from vitcompress.pipeline.teacher import teacher_for
from vitcompress.plan import Plan
from vitcompress.training.data import no_data
from vitcompress.verify.slice import keep_given

# ----------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class Steps:
    """The result of all steps.

    model: the one that the last step was given, with the weights that this step left for it. base: the plan that makes
    it of the dense model. last: what the last step adds.
    """

    model: nn.Module
    base: Plan
    last: Plan

    @property
    def plan(self) -> Plan:
        return self.base.then(self.last)

    def pruned(self) -> nn.Module:
        """A new copy of the model after all steps."""
        return surgery.apply_to_copy(self.model, self.last)


def take_steps(job: Job, dense: nn.Module) -> Steps:
    """Plan each step on the model that the steps before left, with the weights that they left."""
    # Nothing is trained or taught with structure only, so the dense model itself will do.
    taken = Steps(dense if job.structure_only else deepcopy(dense), job.base, job.base)
    for number in range(len(job.recipe.steps)):
        model, base = (taken.pruned(), taken.plan) if number else (taken.model, taken.base)
        delta = _step_plan(job, dense, number, model, base)
        _take_over(job, number, model, base)
        if (delta.kept or delta.folded) and job.runtime.is_main:
            keep_given(job.step_folder(number), model, base)
        taken = Steps(model, base, delta)
    return taken


def _take_over(job: Job, number: int, model: nn.Module, plan: Plan) -> None:
    """Give `model` the weights that step `number`, which was given it, has left, if it has left any."""
    path = job.step_folder(number) / LEFT_WEIGHTS
    found = load_for(path, plan) if job.runtime.is_main and path.is_file() else None
    left: dict[str, Tensor] | None = job.runtime.broadcast(found)
    if left is not None:
        load_strictly(model, left, path)


def _step_plan(job: Job, dense: nn.Module, number: int, model: nn.Module, plan: Plan) -> Plan:
    step, folder = job.recipe.steps[number], job.step_folder(number)
    method, path = METHODS[step.method], folder / "plan.json"
    text = job.runtime.broadcast(path.read_text() if job.runtime.is_main and path.is_file() else None)
    if text is not None:
        if job.runtime.is_main:
            check_sealed(folder)
        return Plan.from_json(text)
    timed = method.timed(step.options) if job.structure_only else None
    if job.structure_only and timed is None:
        delta = method.structure(model, job.family, plan, step.options)
    else:
        what = "the published layers" if method.choice(step.options) == PUBLISHED else method.summary
        job.progress.stage(f"Step {number + 1} of {len(job.recipe.steps)}: {what}")
        delta = method.plan(model, _context(job, dense, plan, folder), timed or step.options)
    if job.runtime.is_main:
        seal(folder)
        write_text(path, delta.to_json())
    return delta


def _context(job: Job, dense: nn.Module, plan: Plan, folder: Path) -> Context:
    return Context(
        arch=job.recipe.model.name,
        arch_args=job.arch_args,
        plan=plan,
        family=job.family,
        data=job.data or no_data(),
        input=job.input,
        runtime=job.runtime,
        folder=folder,
        seed=job.recipe.run.seed,
        progress=job.progress,
        train=job.recipe.finetune,
        teacher=lambda: teacher_for(job, dense),
        latency=clock(job),
        measured_on=partial(measured_on, job),
    )
