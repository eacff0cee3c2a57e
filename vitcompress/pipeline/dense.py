"""The dense model of a recipe: trained, or made from given weights; recipes that train it alike share its folder."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress.io.files import write_json
from vitcompress.models.checkpoint import PLAN, load_model, write_model
from vitcompress.models.create import create_model, randomize_constants
from vitcompress.models.weights import part_of_weights
from vitcompress.pipeline.dense_folder import record_settings
from vitcompress.pipeline.folder import sole_user, sweep
from vitcompress.pipeline.job import Job
from vitcompress.training.datasets import few
from vitcompress.training.loaders import EvalLoader
from vitcompress.training.loop import train
from vitcompress.training.metrics import Accuracy, evaluate, guessed
from vitcompress.training.options import TrainOptions, TrainResult
from vitcompress.training.trainer import TrainingContext, TrainingControls

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
    result = train_model(job, model, options, job.dense_folder / "state", "dense")
    if job.runtime.is_main:
        write_json(job.dense_folder / "training.json", training_record(result))
    return model


def train_model(
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


def training_record(result: TrainResult) -> dict[str, Any]:
    return {
        "epochs": len(result.history),
        "kept_epoch": result.epoch,
        "kept": result.chosen,
        "heldout": {name: value and value.to_dict() for name, value in (("raw", result.raw), ("ema", result.ema))},
    }


def heldout_accuracy(job: Job, model: nn.Module) -> Accuracy:
    """The accuracy of `model` on the held-out images; every process must call this.

    Raises:
        DataError: there are none.
    """
    assert job.data is not None
    loader = EvalLoader(job.data.heldout, job.input, job.recipe.finetune.batch_size, job.runtime)
    found = evaluate(model.to(job.runtime.device).eval(), loader, job.runtime)
    model.cpu()
    return found


def tell_given(job: Job, model: nn.Module) -> None:
    """Say what a dense model with weights of another training comes to, and whether that is more than guessing."""
    assert job.data is not None
    weights, found = job.recipe.model.weights, heldout_accuracy(job, model)
    if part := part_of_weights(weights):
        job.progress.note(f"dense model: `{part}` of {weights}")
    job.progress.note(f"dense model: held-out top-1 {found}")
    if guessed(found.correct, job.data.heldout.labels):
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (job.input.mean, job.input.std))
        job.progress.note(
            "no better than guessing, and everything is chosen by this model: was it trained on these classes, in "
            f"this order ({few(job.data.classes)}), on images of mean {mean} and standard deviation {std}?"
        )
