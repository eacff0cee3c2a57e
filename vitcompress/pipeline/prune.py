"""Run the pruning steps of a recipe, and recover the accuracy by fine-tuning with a distillation teacher."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from vitcompress import surgery
from vitcompress.io.files import write_json, write_text
from vitcompress.io.tensors import save_tensors
from vitcompress.methods.base import PUBLISHED, Context, check_sealed, load_handed_over, seal
from vitcompress.methods.depth import freeze_gates, read_mean_gates
from vitcompress.pipeline.dense import heldout_accuracy, load_dense, teacher_for, train_model
from vitcompress.pipeline.job import Job, JobStep, Work
from vitcompress.pipeline.latency import clock, measured_on
from vitcompress.plan import Plan
from vitcompress.surgery.gates import GATED_KINDS, GatedModel
from vitcompress.training.data import no_data
from vitcompress.training.trainer import TrainingControls
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


def estimate_steps(job: Job) -> Iterator[Work]:
    for step in job.steps if not job.options.structure_only else ():
        prefix = f"{step.number + 1}. " if len(job.steps) > 1 else ""
        for part in step.method.estimate(step.model, job.family, step.options):
            images = part.images or part.images_per_class * job.classes or job.train_images
            if images is not None and job.train_images is not None:
                images = min(images, job.train_images)
            yield Work(f"{prefix}{step.method.name}: {part.title}", part.rounds, part.epochs, images)


def _plan_step(job: Job, dense: nn.Module, step: JobStep, model: nn.Module, plan: Plan) -> Plan:
    info, files = step.info, step.files
    text = job.runtime.broadcast(files.plan.read_text() if job.runtime.is_main and files.plan.is_file() else None)
    if text is not None:
        if job.runtime.is_main:
            check_sealed(files.path)
        return Plan.from_json(text)
    if job.options.structure_only and info.latency is None:
        delta = step.delta
    else:
        work = "the published layers" if info.choice == PUBLISHED else step.method.summary
        job.progress.stage(f"Step {step.number + 1} of {len(job.steps)}: {work}")
        options = info.latency.unscored if info.latency and job.options.structure_only else step.options
        context = Context(
            plan=plan,
            family=job.family,
            data=job.data or no_data(),
            input=job.input,
            runtime=job.runtime,
            folder=files.path,
            seed=job.recipe.run.seed,
            progress=job.progress,
            train=job.recipe.finetune,
            teacher=lambda: teacher_for(job, dense),
            latency=clock(job),
            measured_on=partial(measured_on, job),
        )
        delta = step.method.plan(model, context, options)
    if job.runtime.is_main:
        seal(files.path)
        write_text(files.plan, delta.to_json())
    return delta


def recover(job: Job) -> None:
    """Fine-tune the pruned model and save it before folding.

    It starts from the dense weights (HetDPT, stage 2), or from those that the last step trained.
    """
    dense = load_dense(job)
    steps = run_steps(job, dense)
    model, plan = steps.pruned(), steps.plan
    if not job.options.structure_only:
        job.progress.stage("Fine-tune the pruned model")
        _measure_before(job, dense, model)
        model = _finetune(job, dense, steps)
    if job.runtime.is_main:
        save_tensors(job.files.unfolded, model.state_dict(), {"plan": plan.digest})
        write_text(job.files.unfolded_plan, plan.to_json())


def estimate_recovery(job: Job) -> Iterator[Work]:
    if not job.options.structure_only:
        yield Work("fine-tune the pruned model", 1, job.recipe.finetune.epochs, job.train_images)


def _measure_before(job: Job, dense: nn.Module, pruned: nn.Module) -> None:
    """Record the held-out accuracy just after pruning: the loss that fine-tuning has to recover."""
    assert job.data is not None
    if not job.data.heldout or job.runtime.broadcast(job.files.before_recovery.is_file()):
        return
    accuracies = {name: heldout_accuracy(job, model) for name, model in (("dense", dense), ("pruned", pruned))}
    job.progress.note("held-out top-1: " + ", ".join(f"{name} {accuracy}" for name, accuracy in accuracies.items()))
    if job.runtime.is_main:
        write_json(job.files.before_recovery, {name: accuracy.to_dict() for name, accuracy in accuracies.items()})


def _finetune(job: Job, dense: nn.Module, steps: Steps) -> nn.Module:
    options, files, step = job.recipe.finetune, job.files, job.steps[-1]
    where = (files.recovery_state, "recovery", files.recovery)
    teacher = teacher_for(job, dense)
    if step.method.dilute is None:
        pruned = steps.pruned()
        train_model(job, pruned, options, *where, TrainingControls(teacher))
        return pruned
    # The layers of the last step fade out; those of the steps before are removed from the start.
    means = job.runtime.broadcast(read_mean_gates(step.files.path) if job.runtime.is_main else None)
    gated = _add_gates(job, deepcopy(steps.model), steps.last, means)
    factor = step.method.dilute(step.options, options.epochs)

    def set_gates(epoch: int) -> None:
        """After an epoch, set all gates to the value of the next one."""
        for site in gated.sites:
            gated.set_gate(site.name, factor(epoch + 1))

    set_gates(-1)
    train_model(job, gated, options, *where, TrainingControls(teacher, after_epoch=set_gates))
    pruned = deepcopy(steps.model)  # without the hooks of the gates
    pruned.load_state_dict(gated.model.state_dict())
    surgery.apply_plan(freeze_gates(pruned, means), steps.last)
    return pruned


def _add_gates(job: Job, model: nn.Module, delta: Plan, means: Mapping[str, Tensor]) -> GatedModel:
    """`model` with a gate on each layer that `delta` removes. means: SwiGLU FFN -> the gate that it fades to."""
    removed = delta.removed
    gateable = [site for site in job.family.sites(model) if site.kind in GATED_KINDS]
    sites = [site for site in gateable if site.name in removed or site.gates in removed]
    options = {
        "attention_bypass": next((removed[site.name] for site in sites if site.kind == "attention"), "drop"),
        "both_pruned_output_act": "gelu" if delta.appended else "none",
        "gated_ffn": next((removed.get(site.name, "drop_ffn") for site in sites if site.gates), "mean_gate"),
    }
    on_device = {ffn: mean.to(job.runtime.device) for ffn, mean in means.items()}
    return GatedModel(model, job.family, sites, **options, gate_means=on_device)
