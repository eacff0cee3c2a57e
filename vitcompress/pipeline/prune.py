"""Run the pruning steps of a recipe."""

from copy import deepcopy
from dataclasses import dataclass

from torch import nn

from vitcompress import surgery
from vitcompress.io.files import write_text
from vitcompress.methods.base import PUBLISHED, Context, check_sealed, load_handed_over, seal
from vitcompress.methods.latency import goal_of, plan_step
from vitcompress.pipeline.dense import load_dense, teacher_for
from vitcompress.pipeline.job import Job, JobStep
from vitcompress.pipeline.latency import create_clock, measured_on
from vitcompress.plan import Plan
from vitcompress.training.data import Splits
from vitcompress.verify.slice import keep_step_input


@dataclass(frozen=True)
class Steps:
    """The result of all steps.

    model: the input of the last step, with the weights that this step trained, if it trains. base: the plan that leads
    from the dense model to it. last: the plan of the last step. plan: of all steps.
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


def run_steps(job: Job, dense: nn.Module | None = None) -> Steps:
    """Plan each step on the model and the weights that the steps before it produced. Finished steps are read back.

    dense: None loads it.
    """
    dense = load_dense(job) if dense is None else dense
    # With structure only nothing is trained, so the dense model itself can be used.
    result = Steps(dense if job.options.structure_only else deepcopy(dense), job.base, job.base)
    for step in job.steps:
        model, base = (result.pruned(), result.plan) if step.number else (result.model, result.base)
        delta = _plan_step(job, dense, step, model, base)
        load_handed_over(model, step.files.path, base, job.runtime)
        if (delta.kept or delta.folded) and job.runtime.is_main:
            keep_step_input(step.files.path, model, base)
        result = Steps(model, base, delta)
    return result


def _plan_step(job: Job, dense: nn.Module, step: JobStep, model: nn.Module, plan: Plan) -> Plan:
    info, files = step.info, step.files
    text = job.runtime.broadcast(files.plan.read_text() if job.runtime.is_main and files.plan.is_file() else None)
    if text is not None:
        if job.runtime.is_main:
            check_sealed(files.path)
        return Plan.from_json(text)
    scored = not job.options.structure_only
    if scored or goal_of(step.options):
        work = "the published layers" if info.choice == PUBLISHED else step.method.summary
        job.progress.stage(f"Step {step.number + 1} of {len(job.steps)}: {work}")
    context = Context(
        plan=plan,
        family=job.family,
        data=job.data or Splits(),
        input=job.input,
        runtime=job.runtime,
        folder=files.path,
        seed=job.recipe.run.seed,
        progress=job.progress,
        train=job.recipe.finetune,
        teacher=lambda: teacher_for(job, dense),
        latency=create_clock(job),
        measured_on=measured_on(job.runtime.device, job.recipe.run.threads),
    )
    # Not `step.delta`: a latency target before this step may have led to other widths.
    delta = plan_step(step.method, model, context, step.options, scored=scored)
    if job.runtime.is_main:
        seal(files.path)
        write_text(files.plan, delta.to_json())
    return delta
