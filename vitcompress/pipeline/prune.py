"""Run the pruning steps of a recipe, and recover the accuracy by fine-tuning with a distillation teacher."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from vitcompress import surgery
from vitcompress.families.gated_ffn import freeze_gates
from vitcompress.io.files import write_json, write_text
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import save_tensors
from vitcompress.methods.base import PUBLISHED, Context, check_sealed, load_handed_over, seal
from vitcompress.methods.depth import read_mean_gates
from vitcompress.methods.latency import goal_of, plan_step
from vitcompress.models.checkpoint import write_model
from vitcompress.pipeline.dense import load_dense
from vitcompress.pipeline.job import Job, JobStep
from vitcompress.pipeline.latency import create_clock, measured_on
from vitcompress.pipeline.training import measure_accuracy, teacher_for, train_model
from vitcompress.plan import Plan
from vitcompress.surgery.gates import GatedModel
from vitcompress.training.data import Splits
from vitcompress.training.trainer import TrainingControls
from vitcompress.verify.slice import keep_step_input


@dataclass(frozen=True)
class Steps:
    """The result of all steps.

    model: the input of the last step, with the weights that this step trained, if it trains. base: the plan that leads
    from the dense model to it. last: the plan of the last step. plan: of all steps. means: gates of fading layers.
    """

    model: nn.Module
    base: Plan
    last: Plan
    means: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        return self.base.then(self.last)

    def pruned(self) -> nn.Module:
        """A new copy of the model after all steps."""
        return surgery.apply_plan(freeze_gates(deepcopy(self.model), self.means), self.last)


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
        means = job.runtime.broadcast(read_mean_gates(step.files.path) if job.runtime.is_main else None)
        result = Steps(model, base, delta, means)
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
        fades=step is job.steps[-1] and step.method.dilute is not None,
    )
    # Not `step.delta`: a latency target before this step may have led to other widths.
    delta = plan_step(step.method, model, context, step.options, scored=scored)
    if job.runtime.is_main:
        seal(files.path)
        write_text(files.plan, delta.to_json())
    return delta


def recover(job: Job) -> None:
    """Read the finished steps, fine-tune the pruned model, and save it before folding.

    It starts from the dense weights (HetDPT, stage 2), or from those that the last step trained.
    """
    dense = load_dense(job)
    steps = run_steps(job, dense)
    model, plan = steps.pruned(), steps.plan
    if not job.options.structure_only:
        job.progress.stage("Fine-tune the pruned model")
        _measure_before(job, dense, model)
        model = _finetune(job, dense, steps, model)
    if job.runtime.is_main:
        save_tensors(job.files.unfolded, model.state_dict(), {"plan": plan.digest})
        write_text(job.files.unfolded_plan, plan.to_json())


def train_control(job: Job) -> None:
    """With `control`: train the dense model for as many epochs as the compressed one, as the fine-tuning does."""
    if not job.options.control:
        return
    job.progress.stage("Train the control, the dense model")
    dense, files = load_dense(job), RunFolder(job.files.control)
    options, controls = replace(job.recipe.finetune, epochs=job.extra_epochs), TrainingControls(teacher_for(job, dense))
    train_model(job, dense, options, files.state, "control", files.training, controls)
    if job.runtime.is_main:
        job.files.report.unlink(missing_ok=True)  # of a run without control, which ends here again
        write_model(files.path, dense, job.base)


def _measure_before(job: Job, dense: nn.Module, pruned: nn.Module) -> None:
    """Record the held-out accuracy just after pruning: the loss that fine-tuning has to recover."""
    assert job.data is not None
    if not (images := job.data.heldout) or job.runtime.broadcast(job.files.before_recovery.is_file()):
        return
    accuracies = {name: measure_accuracy(job, model, images) for name, model in (("dense", dense), ("pruned", pruned))}
    job.progress.note("held-out top-1: " + ", ".join(f"{name} {accuracy}" for name, accuracy in accuracies.items()))
    if job.runtime.is_main:
        write_json(job.files.before_recovery, {name: accuracy.to_dict() for name, accuracy in accuracies.items()})


def _finetune(job: Job, dense: nn.Module, steps: Steps, pruned: nn.Module) -> nn.Module:
    """The model after `steps`, of which `pruned` is a copy, with the weights of the fine-tuning."""
    step, options, files = job.steps[-1], job.recipe.finetune, job.files
    controls = TrainingControls(teacher_for(job, dense))
    if step.method.dilute is None:
        train_model(job, pruned, options, files.recovery_state, "recovery", files.recovery, controls)
        return pruned
    # The layers of the last step fade out; those of the steps before are removed from the start.
    gated = GatedModel(deepcopy(steps.model), job.family, steps.last, steps.means)
    gated.scores.requires_grad_(False)  # they would count in the norm of the gradient
    factor = step.method.dilute(step.options, options.epochs)

    def set_gates(epoch: int) -> None:
        """After an epoch, set all gates to the value of the next one."""
        for site in gated.sites:
            gated.set_gate(site.name, factor(epoch + 1))

    set_gates(-1)
    controls = replace(controls, after_epoch=set_gates)
    train_model(job, gated, options, files.recovery_state, "recovery", files.recovery, controls)
    steps.model.load_state_dict(gated.model.state_dict())  # it is without the hooks of the gates
    return steps.pruned()
