"""From the dense model to the deployed one: train, plan, recover, fold. Each stage leaves its result in the run
folder and does nothing when that result stands.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress import checkpoint, models, surgery
from vitcompress.checkpoint import write_json, write_text
from vitcompress.data import eval_loader
from vitcompress.evaluate import evaluate
from vitcompress.gates import GatedModel
from vitcompress.methods import METHODS
from vitcompress.pipeline.preflight import Job, teacher
from vitcompress.plan import Plan
from vitcompress.train import TrainOptions, TrainResult, train
from vitcompress.workspace import Context

UNFOLDED, UNFOLDED_PLAN, FOLDING = "unfolded.safetensors", "unfolded_plan.json", "folding.json"


# ---------------------------------------------------------------------------------------------------------------- dense


def dense_model(job: Job) -> nn.Module:
    """The model before pruning: trained here, once for all recipes that train it alike, or with the given weights."""
    folder, table = job.dense_folder, job.recipe.model
    if job.runtime.broadcast((folder / checkpoint.PLAN).is_file()):
        job.progress.note(f"dense model: taken from {folder}")
        return checkpoint.load(folder)
    if table.weights == "train":
        model = _trained(job)
    else:
        seed = job.recipe.run.seed
        model = models.create(table.name, job.arch_args, table.weights, seed=seed, new_head=table.new_head)
    if job.runtime.is_main:
        checkpoint.save_model(folder, model, job.base)
    job.runtime.barrier()
    return model


def _trained(job: Job) -> nn.Module:
    table, options = job.recipe.model, job.recipe.dense
    assert options is not None
    job.progress.stage(f"Train the dense model ({table.name})")
    model = models.create(table.name, job.arch_args, seed=job.recipe.run.seed)
    result = _train(job, model, options, job.dense_folder / "state", "dense")
    if job.runtime.is_main:
        write_json(job.dense_folder / "training.json", _training(result))
    return model


def _train(job: Job, module: nn.Module, options: TrainOptions, folder: Path, label: str, **more: Any) -> TrainResult:
    assert job.data is not None
    module.to(job.runtime.device)
    result = train(
        module,
        job.data.train,
        job.data.heldout,
        options,
        input=job.input,
        runtime=job.runtime,
        folder=folder,
        label=label,
        seed=job.recipe.run.seed,
        progress=job.progress,
        **more,
    )
    module.cpu()
    return result


def _training(result: TrainResult) -> dict[str, Any]:
    return {
        "epochs": len(result.history),
        "kept_epoch": result.epoch,
        "kept": result.chosen,
        "heldout": {name: value and value.to_dict() for name, value in (("raw", result.raw), ("ema", result.ema))},
    }


# ----------------------------------------------------------------------------------------------------------------- plan


def step_folder(job: Job, number: int) -> Path:
    """Where step `number` keeps what it measured."""
    return job.state / f"step-{number}-{job.recipe.steps[number].method}"


def plan_steps(job: Job, dense: nn.Module) -> Plan:
    """The composed plan of all steps, each step made on the model that the steps before left."""
    model, plan = dense, job.base
    for number in range(len(job.recipe.steps)):
        delta = _step_plan(job, number, model, plan, step_folder(job, number))
        model, plan = surgery.applied(model, delta), plan.then(delta)
    return plan


def _step_plan(job: Job, number: int, model: nn.Module, plan: Plan, folder: Path) -> Plan:
    step = job.recipe.steps[number]
    method, path = METHODS[step.method], folder / "plan.json"
    if job.runtime.broadcast(path.is_file()):
        return Plan.from_json(path.read_text())
    if job.structure_only:
        delta = method.structure(model, job.family, plan, step.options)
    else:
        job.progress.stage(f"Step {number + 1} of {len(job.recipe.steps)}: {method.summary}")
        delta = method.plan(model, _context(job, plan, folder), step.options)
    if job.runtime.is_main:
        write_text(path, delta.to_json())
    job.runtime.barrier()
    return delta


def _context(job: Job, plan: Plan, folder: Path) -> Context:
    assert job.data is not None
    return Context(
        job.recipe.model.name,
        job.arch_args,
        plan,
        job.family,
        job.data,
        job.input,
        job.runtime,
        folder,
        job.recipe.run.seed,
        job.progress,
        job.recipe.finetune,
    )


# -------------------------------------------------------------------------------------------------------------- recover


def recover(job: Job, dense: nn.Module, plan: Plan) -> None:
    """Train the pruned model from the dense weights (HetDPT, stage 2), and keep it as it is before folding."""
    if job.runtime.broadcast((job.state / UNFOLDED_PLAN).is_file()):
        return
    model = surgery.applied(dense, plan)
    if not job.structure_only:
        job.progress.stage("Recover by training the pruned model")
        _before(job, dense, model)
        model = _recovered(job, dense, model, plan)
    if job.runtime.is_main:
        checkpoint.save_tensors(job.state / UNFOLDED, model.state_dict(), {"plan": plan.digest})
        write_text(job.state / UNFOLDED_PLAN, plan.to_json())
    job.runtime.barrier()


def _before(job: Job, dense: nn.Module, pruned: nn.Module) -> None:
    """Held-out accuracy just after pruning, which tells how much there is to recover."""
    assert job.data is not None
    path = job.state / "before_recovery.json"
    if job.runtime.broadcast(path.is_file()):
        return
    loader = eval_loader(job.data.heldout, job.input, job.recipe.finetune.batch_size, job.runtime)
    found = {
        name: evaluate(model.to(job.runtime.device).eval(), loader, job.runtime).to_dict()
        for name, model in (("dense", dense), ("pruned", pruned))
    }
    job.progress.note("held-out top-1: " + ", ".join(f"{name} {100 * a['top1']:.1f} %" for name, a in found.items()))
    if job.runtime.is_main:
        write_json(path, found)


def _recovered(job: Job, dense: nn.Module, pruned: nn.Module, plan: Plan) -> nn.Module:
    options, folder = job.recipe.finetune, job.state / "recovery"
    with_teacher = {"teacher": teacher(job) or deepcopy(dense).eval()} if options.distillation != "none" else {}
    dilution = _dilution(job)
    if dilution is None:
        result = _train(job, pruned, options, folder, "recovery", **with_teacher)
    else:
        gated = _gated(job, dense, plan)
        move = _mover(gated, dilution(options.epochs))
        move(-1)
        result = _train(job, gated, options, folder, "recovery", after_epoch=move, **with_teacher)
        free = deepcopy(dense)  # of hooks
        free.load_state_dict(gated.model.state_dict())
        pruned = surgery.apply(free, plan)
    if job.runtime.is_main:
        write_json(job.state / "recovery.json", _training(result))
    return pruned


def _dilution(job: Job) -> Callable[[int], Callable[[int], float]] | None:
    """NOSE's schedule of the gates, where the last step's method has one: epochs -> (epoch -> gate)."""
    last = job.recipe.steps[-1]
    dilute = METHODS[last.method].dilute
    return None if dilute is None else lambda epochs: dilute(last.options, epochs)


def _gated(job: Job, dense: nn.Module, plan: Plan) -> GatedModel:
    sites = [site for site in job.family.sites(dense) if site.name in plan.removed]
    bypass = next((plan.removed[site.name] for site in sites if site.kind == "attention"), "drop")
    return GatedModel(
        deepcopy(dense),
        job.family,
        sites,
        attention_bypass=bypass,
        both_pruned_output_act="gelu" if plan.appended else "none",
    )


def _mover(gated: GatedModel, factor: Callable[[int], float]) -> Callable[[int], None]:
    """After epoch e, set all gates to what epoch e + 1 trains with."""

    def move(epoch: int) -> None:
        for site in gated.sites:
            gated.set_gate(site.name, factor(epoch + 1))

    return move


# ----------------------------------------------------------------------------------------------------------------- fold


def fold(job: Job, plan: Plan) -> nn.Module:
    """The deployed model: what can be multiplied out is, and model.safetensors with plan.json hold it."""
    if (job.folder / checkpoint.PLAN).is_file():
        return checkpoint.load(job.folder)
    job.progress.stage("Fold")
    model = checkpoint.load_parts(job.state / UNFOLDED_PLAN, job.state / UNFOLDED)
    folding = surgery.fold(model, plan)
    write_json(job.state / FOLDING, [asdict(record) for record in folding.records])
    checkpoint.save_model(job.folder, model, folding.plan)
    for record in folding.records:
        verb = "folded" if record.folded else "left as it is"
        job.progress.note(
            f"{record.module}: {verb}, {record.reason}; parameters {record.params_before} -> {record.params_after}"
        )
    return model
