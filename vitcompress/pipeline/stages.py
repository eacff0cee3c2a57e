"""From the dense model to the recovered one: train, plan, recover. Each stage leaves its result in the run
folder and does nothing when that result stands.
"""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitcompress import surgery
from vitcompress.io.files import write_json, write_text
from vitcompress.io.tensors import save_tensors
from vitcompress.methods import METHODS
from vitcompress.methods.base import LEFT_WEIGHTS, PUBLISHED, Context, check_sealed, seal
from vitcompress.models.checkpoint import PLAN, load_for, load_model, load_strictly, write_model
from vitcompress.models.create import create_model, randomize_constants
from vitcompress.pipeline.dense import record_settings
from vitcompress.pipeline.folder import sole_user, sweep
from vitcompress.pipeline.heldout import heldout_accuracy, tell_given
from vitcompress.pipeline.job import Job
from vitcompress.pipeline.latency import clock, measured_on
from vitcompress.pipeline.teachers import teacher
from vitcompress.plan import Plan
from vitcompress.surgery.gates import GATED_KINDS, GatedModel
from vitcompress.training.data import no_data
from vitcompress.training.loop import train
from vitcompress.training.options import TrainOptions, TrainResult
from vitcompress.training.trainer import TrainingContext, TrainingControls
from vitcompress.verify.fold import UNFOLDED, UNFOLDED_PLAN
from vitcompress.verify.slice import keep_given

# ---------------------------------------------------------------------------------------------------------------- dense


def dense_model(job: Job) -> nn.Module:
    """The model before pruning: trained here, once for all recipes that train it alike, or with the given weights."""
    folder = job.dense_folder
    with sole_user(folder, job.progress) if job.runtime.is_main else nullcontext():
        if job.runtime.broadcast((folder / PLAN).is_file()):
            job.progress.note(f"dense model: taken from {folder}")
        else:
            _make_dense(job)
    # Always what lies on the disk of the first process: others may have no such folder, and a run that was stopped
    # here goes on from the same tensors.
    return job.runtime.broadcast(load_model(folder) if job.runtime.is_main else None)  # type: ignore[no-any-return]


def _make_dense(job: Job) -> None:
    if job.runtime.is_main:
        sweep(job.dense_folder)
    model = _trained(job) if job.recipe.model.weights == "train" else _given(job)
    if job.runtime.is_main:
        write_model(job.dense_folder, model, job.base)


def _given(job: Job) -> nn.Module:
    """The model with the weights that the recipe names; what they can do is told before anything is built on them."""
    table, seed = job.recipe.model, job.recipe.run.seed
    model = create_model(table.name, job.arch_args, table.weights, seed=seed, new_head=table.new_head)
    if table.weights == "random":
        if job.structure_only:
            randomize_constants(model, seed)  # nothing is trained here: what all checks see must not be mostly zeros
    elif job.data is not None and job.data.heldout:
        tell_given(job, model)
    return model


def _trained(job: Job) -> nn.Module:
    table, options = job.recipe.model, job.recipe.dense
    assert options is not None
    job.progress.stage(f"Train the dense model ({table.name})")
    if job.runtime.is_main:
        record_settings(job.recipe, job.dense_folder)
    model = create_model(table.name, job.arch_args, seed=job.recipe.run.seed)
    result = _train(job, model, options, job.dense_folder / "state", "dense")
    if job.runtime.is_main:
        write_json(job.dense_folder / "training.json", _training(result))
    return model


def _train(
    job: Job,
    module: nn.Module,
    options: TrainOptions,
    folder: Path,
    label: str,
    controls: TrainingControls | None = None,
) -> TrainResult:
    assert job.data is not None
    module.to(job.runtime.device)
    at = TrainingContext(job.input, job.runtime, folder, label, job.recipe.run.seed, job.progress)
    result = train(module, job.data.train, job.data.heldout, options, at, controls)
    module.cpu()
    if result.accuracy and job.runtime.is_main:
        job.progress.note(f"held-out top-1 with the weights kept, of epoch {result.epoch + 1}: {result.accuracy}")
    return result


def _training(result: TrainResult) -> dict[str, Any]:
    return {
        "epochs": len(result.history),
        "kept_epoch": result.epoch,
        "kept": result.chosen,
        "heldout": {name: value and value.to_dict() for name, value in (("raw", result.raw), ("ema", result.ema))},
    }


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
        teacher=lambda: _teacher(job, dense),
        latency=clock(job),
        measured_on=partial(measured_on, job),
    )


def _teacher(job: Job, dense: nn.Module) -> nn.Module | None:
    """Who teaches while a pruned model recovers; None where nobody does."""
    recovery = job.recipe.finetune
    return None if recovery.distillation == "none" else teacher(recovery, job.classes) or deepcopy(dense)


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
    teacher, step = _teacher(job, dense), job.recipe.steps[-1]
    fade = METHODS[step.method].dilute
    if fade is None:
        pruned = steps.pruned()
        result = _train(job, pruned, options, folder, "recovery", TrainingControls(teacher))
    else:
        # The last step's layers fade out; what the steps before removed is gone from the start.
        gated = _gated(job, deepcopy(steps.model), steps.last)
        move = _mover(gated, fade(step.options, options.epochs))
        move(-1)
        result = _train(job, gated, options, folder, "recovery", TrainingControls(teacher, after_epoch=move))
        pruned = deepcopy(steps.model)  # without the gates' hooks
        pruned.load_state_dict(gated.model.state_dict())
        surgery.apply_plan(pruned, steps.last)
    if job.runtime.is_main:
        write_json(job.state / "recovery.json", _training(result))
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
