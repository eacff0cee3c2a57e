"""Recover the accuracy of the pruned model by fine-tuning with a distillation teacher."""

from copy import deepcopy
from dataclasses import replace

from torch import nn

from vitcompress import surgery
from vitcompress.io.files import write_json, write_text
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import save_tensors
from vitcompress.methods.depth import freeze_gates, read_mean_gates
from vitcompress.models.checkpoint import write_model
from vitcompress.pipeline.dense import heldout_accuracy, load_dense, teacher_for, train_model
from vitcompress.pipeline.job import Job
from vitcompress.pipeline.prune import Steps, run_steps
from vitcompress.surgery.gates import GatedModel
from vitcompress.training.trainer import TrainingControls


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


def train_control(job: Job) -> None:
    """With `control`: train the dense model for as many epochs as the compressed one, as the fine-tuning does."""
    if not job.options.control:
        return
    job.progress.stage("Train the control, the dense model")
    dense, files = load_dense(job), RunFolder(job.files.control)
    options, controls = replace(job.recipe.finetune, epochs=job.extra_epochs), TrainingControls(teacher_for(job, dense))
    train_model(job, dense, options, files.state, "control", files.training, controls)
    if job.runtime.is_main:
        for path in (job.files.report, job.files.accuracy):  # of a run without control, which ends here again
            path.unlink(missing_ok=True)
        write_model(files.path, dense, job.base)


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
    step, controls = job.steps[-1], TrainingControls(teacher_for(job, dense))
    about = (job.recipe.finetune, job.files.recovery_state, "recovery", job.files.recovery)
    pruned = steps.pruned()
    if step.method.dilute is None:
        train_model(job, pruned, *about, controls)
        return pruned
    # The layers of the last step fade out; those of the steps before are removed from the start.
    means = job.runtime.broadcast(read_mean_gates(step.files.path) if job.runtime.is_main else None)
    gated = GatedModel(deepcopy(steps.model), job.family, steps.last, means)
    factor = step.method.dilute(step.options, job.recipe.finetune.epochs)

    def set_gates(epoch: int) -> None:
        """After an epoch, set all gates to the value of the next one."""
        for site in gated.sites:
            gated.set_gate(site.name, factor(epoch + 1))

    set_gates(-1)
    train_model(job, gated, *about, replace(controls, after_epoch=set_gates))
    pruned = deepcopy(steps.model)  # without the hooks of the gates
    pruned.load_state_dict(gated.model.state_dict())
    surgery.apply_plan(freeze_gates(pruned, means), steps.last)
    return pruned
