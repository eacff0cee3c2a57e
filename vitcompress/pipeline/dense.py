"""The dense model of a recipe: trained or created with existing weights, and checked before the first step."""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress.errors import CheckFailedError, DataError, InputError, WeightsError
from vitcompress.io.files import read_record, write_json
from vitcompress.io.manifest import check_unchanged, read_manifest, write_manifest
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.text import describe_differences, describe_value, few
from vitcompress.models.checkpoint import load_model, read_plan, write_model
from vitcompress.models.create import create_model, randomize_constants
from vitcompress.models.weights import read_source
from vitcompress.pipeline.folder import claim_folder, dense_folder, remove_unfinished
from vitcompress.pipeline.job import Job
from vitcompress.pipeline.training import measure_accuracy, train_model
from vitcompress.recipe.load import dense_settings
from vitcompress.recipe.schema import Recipe
from vitcompress.training.data import Splits, images_digest
from vitcompress.training.datasets import Images
from vitcompress.training.metrics import Accuracy, guessed


def create_dense(job: Job) -> None:
    """Train the dense model, or create it with the recipe's weights, unless another run does so at the same time."""
    waits = job.progress if job.runtime.world_size == 1 else None  # other processes would not wait for the first
    with claim_folder(job.dense_folder, waits) if job.runtime.is_main else nullcontext():
        if job.runtime.broadcast(RunFolder(job.dense_folder).manifest.is_file()):  # another run was faster
            return
        if job.runtime.is_main:
            remove_unfinished(job.dense_folder)
        model, files = _create_dense(job), RunFolder(job.dense_folder)
        if options := job.recipe.dense:
            job.progress.stage(f"Train the dense model ({job.recipe.model.name})")
            if job.runtime.is_main:
                write_json(files.settings, dense_settings(job.recipe))
            train_model(job, model, options, files.state, "dense", files.training)
        if job.runtime.is_main:
            write_model(job.dense_folder, model, job.base)
            source = read_source(job.resolved.weights, job.base.arch)
            write_manifest(job.dense_folder, source=source, images=job.data and job.data.digest)
            if source:
                job.progress.note("dense model: {weights}, sha256 {sha256}".format(**source))


def check_source(job: Job) -> None:
    """Raise InputError if the dense model was changed, or is not from the present images, arguments and weights."""
    check_unchanged(job.dense_folder)
    if job.data is not None:
        check_images(job.dense_folder, job.data)
    plans = read_plan(RunFolder(job.dense_folder).plan), job.base
    known = job.data is not None or job.options.structure_only  # else the number of classes may be missing
    if known and (changed := describe_differences(*({"model.args": dict(plan.arch_args)} for plan in plans))):
        message = f"the model is not that of {job.dense_folder}: {'; '.join(changed)}"
        raise InputError(message, hint="restore the recipe's files, or delete this folder and start over with --fresh")
    if job.weights_problem is None and job.resolved.weights != "hub":  # which may need a network
        _check_weights(job.dense_folder, job.resolved.weights)


def check_images(folder: Path, data: Splits) -> None:
    """Raise DataError if the dense model in `folder` was created with other training or held-out images."""
    if read_manifest(folder).get("images") not in (None, data.digest):
        message = f"the images or labels of {data.name} are not those that {folder} was created with"
        raise DataError(message, hint="restore the original images, or delete this folder and start over with --fresh")


def check_finished(recipe: Recipe, folder: Path) -> None:
    """Raise WeightsError if the recipe's file of weights is not the one that the finished run in `folder` used."""
    if (file := Path(recipe.model.weights)).is_absolute() and file.exists():
        _check_weights(dense_folder(recipe, folder), recipe.model.weights)


def _check_weights(folder: Path, weights: str) -> None:
    before = read_manifest(folder).get("source")
    if before and (now := read_source(weights, ""))["sha256"] != before["sha256"]:
        message = "{} has other weights (sha256 {:.12}) than this run was started with, {} ({:.12})"
        hint = "--fresh starts over with them; without it, restore the original weights"
        raise WeightsError(message.format(*now.values(), *before.values()), hint=hint)


def load_dense(job: Job) -> nn.Module:
    """The dense model from the disk of the first process: others may not have its folder."""
    return job.runtime.broadcast(load_model(job.dense_folder) if job.runtime.is_main else None)  # type: ignore[no-any-return]


def _create_dense(job: Job) -> nn.Module:
    table, seed = job.recipe.model, job.recipe.run.seed
    weights = "random" if table.weights == "train" else job.resolved.weights
    model = create_model(job.base.arch, job.base.arch_args, weights, seed=seed, new_head=table.new_head)
    if table.weights == "random" and job.options.structure_only:
        randomize_constants(model, seed)  # the checks need values other than the zeros of an untrained model
    if part := job.resolved.part:
        job.progress.note(f"dense model: `{part}` of {table.weights}")
    return model


def _images_to_check(job: Job) -> tuple[str, Images]:
    """The images that the dense model is checked on, and what they are.

    Weights from elsewhere may have been trained on the held-out images, and what their user knows is their accuracy on
    the test images. No choice depends on it. A model that the run trains is checked on the held-out images.
    """
    assert job.data is not None
    if job.recipe.model.weights != "train" and job.data.test:
        return "test", job.data.test
    return "held-out", job.data.heldout


def check_dense(job: Job) -> None:
    """Report the accuracy of the dense model before the first step, which is measured once for the same images.

    Raises CheckFailedError if it is worse than expected.
    """
    if why_unchecked(job):
        return
    assert job.data is not None
    record, images = job.files.dense_accuracy, _images_to_check(job)[1]
    digest = images_digest(job.data.classes, images)
    stored = read_record(record, dict[str, Accuracy | float]) if job.runtime.is_main else None  # earlier: one accuracy
    known: Any = job.runtime.broadcast((stored or {}).get(digest))
    accuracy = Accuracy(**known) if known else measure_accuracy(job, load_dense(job), images)
    if job.runtime.is_main and not known:
        write_json(record, {digest: asdict(accuracy)})
    notes, problem = examine_dense(job, accuracy)
    for line in notes:
        job.progress.note(line)
    if problem:
        raise problem


def has_dense(job: Job) -> bool:
    """Whether another run or an interrupted one has left the dense model, so that its weights are not needed again."""
    removed = job.options.fresh and job.dense_folder.is_relative_to(job.folder)
    return RunFolder(job.dense_folder).manifest.is_file() and not removed


def preview_dense(job: Job) -> Accuracy:
    """The accuracy of the dense model that a run would start from; writes nothing."""
    return measure_accuracy(job, load_dense(job) if has_dense(job) else _create_dense(job), _images_to_check(job)[1])


def why_unchecked(job: Job) -> str:
    """Why the accuracy of the dense model is not measured; empty if it is."""
    if job.data is None or not _images_to_check(job)[1]:
        return f"there are no images{' with --structure-only' * job.options.structure_only}"
    return "" if job.recipe.model.weights != "random" or job.options.expect is not None else "its weights are random"


def examine_dense(job: Job, accuracy: Accuracy) -> tuple[list[str], CheckFailedError | None]:
    """Notes on the accuracy of the dense model, and the error if it is worse than expected.

    It is worse if the expected accuracy is above the upper end of the 95 % interval. The notes warn of a model that is
    no better than always predicting the most frequent class.
    """
    assert job.data is not None
    (kind, images), expect, classes = _images_to_check(job), job.options.expect, few(job.data.classes)
    low, high = (100 * end for end in accuracy.interval)
    top1 = f"{kind} top-1 {accuracy}, 95 % interval {low:.2f} to {high:.2f} %"
    scale = f"mean {describe_value(job.input.mean)} and standard deviation {describe_value(job.input.std)}"
    scale += f", resized by {job.input.interpolation} with crop_pct {job.input.crop_pct:g}"
    notes = [f"dense model: {top1}"]
    if job.recipe.model.weights not in ("random", "train") and guessed(accuracy.correct, images.labels):
        question = f"Was it trained on these classes in this order ({classes}), on images of {scale}?"
        notes.append(f"The dense model is no better than guessing, and every step depends on it. {question}")
    if expect is None or high >= expect:
        return notes, None
    arguments = (f"{key} {value}" for key, value in job.base.arch_args.items() if not isinstance(value, dict))
    others = f"the preprocessing ({scale}), the order of the classes ({classes})"
    causes = "its training ([dense])" if job.recipe.model.weights == "train" else others
    causes += f", or the arguments of the model ({', '.join(arguments)})"
    hint = f"likely causes: {causes}; correct them, and add --fresh if the run folder exists"
    return notes, CheckFailedError(f"the dense model is worse than expected: {top1}, expected {expect:g} %", hint=hint)
