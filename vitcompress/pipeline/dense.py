"""The dense model of a recipe: trained, or created with existing weights."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress.io.files import write_json
from vitcompress.io.run_folder import RunFolder
from vitcompress.models.checkpoint import load_model, write_model
from vitcompress.models.create import create_model, randomize_constants
from vitcompress.models.weights import part_of_weights
from vitcompress.pipeline.folder import lock_folder, record_settings, remove_unfinished
from vitcompress.pipeline.job import Job, Work
from vitcompress.training.datasets import few
from vitcompress.training.loaders import EvalLoader
from vitcompress.training.loop import train
from vitcompress.training.metrics import Accuracy, evaluate, guessed
from vitcompress.training.options import TrainOptions, TrainResult
from vitcompress.training.trainer import TrainingContext, TrainingControls


def dense_plan(job: Job) -> Path:
    """The file that is written last to the folder of the dense model."""
    return RunFolder(job.dense_folder).plan


def create_dense(job: Job) -> None:
    """Train the dense model, or create it with the recipe's weights, unless another run does so at the same time."""
    with lock_folder(job.dense_folder, job.progress) if job.runtime.is_main else nullcontext():
        if job.runtime.broadcast(dense_plan(job).is_file()):  # another run was faster
            return
        if job.runtime.is_main:
            remove_unfinished(job.dense_folder)
        model = _train_dense(job) if job.recipe.model.weights == "train" else _create_with_weights(job)
        if job.runtime.is_main:
            write_model(job.dense_folder, model, job.base)


def load_dense(job: Job) -> nn.Module:
    """The dense model from the disk of the first process: others may not have its folder."""
    return job.runtime.broadcast(load_model(job.dense_folder) if job.runtime.is_main else None)  # type: ignore[no-any-return]


def estimate_dense(job: Job) -> Iterator[Work]:
    if job.recipe.dense is not None:
        yield Work("train the dense model", 1, job.recipe.dense.epochs, job.train_images)


def _create_with_weights(job: Job) -> nn.Module:
    table, seed = job.recipe.model, job.recipe.run.seed
    model = create_model(table.name, job.base.arch_args, table.weights, seed=seed, new_head=table.new_head)
    if table.weights == "random":
        if job.options.structure_only:
            randomize_constants(model, seed)  # the checks need values other than the zeros of an untrained model
    elif job.data is not None and job.data.heldout:
        report_weights(job, model)
    return model


def _train_dense(job: Job) -> nn.Module:
    table, options, files = job.recipe.model, job.recipe.dense, RunFolder(job.dense_folder)
    assert options is not None
    job.progress.stage(f"Train the dense model ({table.name})")
    if job.runtime.is_main:
        record_settings(job.recipe, files.path)
    model = create_model(table.name, job.base.arch_args, seed=job.recipe.run.seed)
    result = train_model(job, model, options, files.state, "dense")
    if job.runtime.is_main:
        write_json(files.training, training_record(result))
    return model


def train_model(
    job: Job,
    module: nn.Module,
    options: TrainOptions,
    folder: Path,
    label: str,
    controls: TrainingControls | None = None,
) -> TrainResult:
    """Train `module` in place on the job's images. folder: of the resume state."""
    assert job.data is not None
    module.to(job.runtime.device)
    context = TrainingContext(job.input, job.runtime, folder, label, job.recipe.run.seed, job.progress)
    result = train(module, job.data.train, job.data.heldout, options, context, controls)
    module.cpu()
    if result.accuracy and job.runtime.is_main:
        job.progress.note(f"held-out top-1 with the selected weights, of epoch {result.epoch + 1}: {result.accuracy}")
    return result


def training_record(result: TrainResult) -> dict[str, Any]:
    """`result` as plain data, without the history."""
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
    accuracy = evaluate(model.to(job.runtime.device).eval(), loader, job.runtime)
    model.cpu()
    return accuracy


def report_weights(job: Job, model: nn.Module) -> None:
    """Report the held-out accuracy of existing weights; warn if it is no better than always the most frequent class."""
    assert job.data is not None
    weights, accuracy = job.recipe.model.weights, heldout_accuracy(job, model)
    if part := part_of_weights(weights):
        job.progress.note(f"dense model: `{part}` of {weights}")
    job.progress.note(f"dense model: held-out top-1 {accuracy}")
    if guessed(accuracy.correct, job.data.heldout.labels):
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (job.input.mean, job.input.std))
        job.progress.note(
            "The dense model is no better than guessing, and every step depends on it. Was it trained on these classes "
            f"in this order ({few(job.data.classes)}), on images of mean {mean} and standard deviation {std}?"
        )
