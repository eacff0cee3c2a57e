"""Recover the accuracy of the pruned model by training, with a distillation teacher."""

from collections.abc import Callable
from copy import deepcopy

from torch import nn

from vitcompress import surgery
from vitcompress.io.files import write_json, write_text
from vitcompress.io.tensors import save_tensors
from vitcompress.methods import METHODS
from vitcompress.pipeline.dense import heldout_accuracy, train_model, training_record
from vitcompress.pipeline.job import Job
from vitcompress.pipeline.prune import Steps
from vitcompress.pipeline.teacher import teacher_for
from vitcompress.plan import Plan
from vitcompress.surgery.gates import GATED_KINDS, GatedModel
from vitcompress.training.trainer import TrainingControls
from vitcompress.verify.fold import UNFOLDED, UNFOLDED_PLAN

# -------------------------------------------------------------------------------------------------------------- recover


def recover(job: Job, dense: nn.Module, steps: Steps) -> None:
    """Train the pruned model, from the dense weights (HetDPT, stage 2) or those that the last step left, and keep it
    as it is before folding.
    """
    if job.runtime.broadcast((job.folder / UNFOLDED_PLAN).is_file()):
        return
    model, plan = steps.pruned(), steps.plan
    if not job.structure_only:
        job.progress.stage("Recover by training the pruned model")
        _before(job, dense, model)
        model = _recovered(job, dense, steps)
    if job.runtime.is_main:
        save_tensors(job.folder / UNFOLDED, model.state_dict(), {"plan": plan.digest})
        write_text(job.folder / UNFOLDED_PLAN, plan.to_json())


def _before(job: Job, dense: nn.Module, pruned: nn.Module) -> None:
    """Held-out accuracy just after pruning, which tells how much there is to recover."""
    assert job.data is not None
    path = job.state / "before_recovery.json"
    if not job.data.heldout or job.runtime.broadcast(path.is_file()):
        return
    found = {name: heldout_accuracy(job, model) for name, model in (("dense", dense), ("pruned", pruned))}
    job.progress.note("held-out top-1: " + ", ".join(f"{name} {accuracy}" for name, accuracy in found.items()))
    if job.runtime.is_main:
        write_json(path, {name: accuracy.to_dict() for name, accuracy in found.items()})


def _recovered(job: Job, dense: nn.Module, steps: Steps) -> nn.Module:
    options, folder = job.recipe.finetune, job.state / "recovery"
    teacher, step = teacher_for(job, dense), job.recipe.steps[-1]
    fade = METHODS[step.method].dilute
    if fade is None:
        pruned = steps.pruned()
        result = train_model(job, pruned, options, folder, "recovery", TrainingControls(teacher))
    else:
        # The last step's layers fade out; what the steps before removed is gone from the start.
        gated = _gated(job, deepcopy(steps.model), steps.last)
        move = _mover(gated, fade(step.options, options.epochs))
        move(-1)
        result = train_model(job, gated, options, folder, "recovery", TrainingControls(teacher, after_epoch=move))
        pruned = deepcopy(steps.model)  # without the gates' hooks
        pruned.load_state_dict(gated.model.state_dict())
        surgery.apply_plan(pruned, steps.last)
    if job.runtime.is_main:
        write_json(job.state / "recovery.json", training_record(result))
    return pruned


def _gated(job: Job, model: nn.Module, delta: Plan) -> GatedModel:
    """`model` with a gate on each layer that `delta` removes."""
    removed = delta.removed
    own = [site for site in job.family.sites(model) if site.kind in GATED_KINDS]
    sites = [site for site in own if site.name in removed or site.gates in removed]
    bypass = next((removed[site.name] for site in sites if site.kind == "attention"), "drop")
    gated_ffn = next((removed.get(site.name, "drop_ffn") for site in sites if site.gates), "mean_gate")
    act = "gelu" if delta.appended else "none"
    return GatedModel(
        model, job.family, sites, attention_bypass=bypass, both_pruned_output_act=act, gated_ffn=gated_ffn
    )


def _mover(gated: GatedModel, factor: Callable[[int], float]) -> Callable[[int], None]:
    """After epoch e, set all gates to what epoch e + 1 trains with."""

    def move(epoch: int) -> None:
        for site in gated.sites:
            gated.set_gate(site.name, factor(epoch + 1))

    return move
