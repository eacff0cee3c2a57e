"""The dense model of a recipe, trained or created with existing weights, and the teacher of the fine-tuning."""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from vitcompress.errors import CheckFailedError, DataError, InputError, WeightsError
from vitcompress.io.files import read_json, write_json
from vitcompress.io.manifest import check_unchanged, read_manifest, write_manifest
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.text import describe_value
from vitcompress.models.checkpoint import load_model, write_model
from vitcompress.models.create import check_arguments, create_model, randomize_constants
from vitcompress.models.source import create_named
from vitcompress.models.weights import hub_classes, read_source
from vitcompress.pipeline.folder import claim_folder, remove_unfinished
from vitcompress.pipeline.job import Job
from vitcompress.recipe.load import dense_settings
from vitcompress.training.datasets import Images, few
from vitcompress.training.loaders import EvalLoader
from vitcompress.training.loop import train
from vitcompress.training.losses import FEATURES, Objective, student_of
from vitcompress.training.metrics import Accuracy, evaluate, guessed
from vitcompress.training.options import TrainOptions
from vitcompress.training.trainer import TrainingContext, TrainingControls


def create_dense(job: Job) -> None:
    """Train the dense model, or create it with the recipe's weights, unless another run does so at the same time."""
    with claim_folder(job.dense_folder, job.progress) if job.runtime.is_main else nullcontext():
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


def recorded_source(job: Job) -> dict[str, str]:
    """The `read_source` of the weights that the dense model was created with; empty if it is unknown."""
    return dict((read_manifest(job.dense_folder) or {}).get("source", {}))


def check_source(job: Job) -> None:
    """Raise InputError if the dense model was changed, or weights or images are no longer those that it is from."""
    check_unchanged(job.dense_folder)
    images = (read_manifest(job.dense_folder) or {}).get("images")
    if images and job.data is not None and images != job.data.digest:
        message = f"the images or labels of {job.data.name} are not those that {job.dense_folder} was created with"
        raise DataError(message, hint="use those of then, or remove this folder and start over with --fresh")
    before, weights = recorded_source(job), job.resolved.weights
    known = before and job.weights_problem is None and weights != "hub"  # which may need a network
    if known and (now := read_source(weights, job.base.arch))["sha256"] != before["sha256"]:
        message = "{} has other weights (sha256 {:.12}) than this run was started with, {} ({:.12})"
        hint = "--fresh starts over with them; without it, use the weights of then"
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


def train_model(
    job: Job,
    module: nn.Module,
    options: TrainOptions,
    state: Path,
    label: str,
    record: Path,
    controls: TrainingControls | None = None,
) -> None:
    """Train `module` in place on the job's images. state: folder of the resume state. record: a file for the result."""
    assert job.data is not None
    module.to(job.runtime.device)
    context = TrainingContext(job.input, job.runtime, state, label, job.recipe.run.seed, job.progress)
    result = train(module, job.data.train, job.data.heldout, options, context, controls)
    module.cpu()
    if not job.runtime.is_main:
        return
    if result.accuracy:
        job.progress.note(f"held-out top-1 with the selected weights, of epoch {result.epoch + 1}: {result.accuracy}")
    heldout = {name: value and value.to_dict() for name, value in (("raw", result.raw), ("ema", result.ema))}
    about = {"epochs": len(result.history), "kept_epoch": result.epoch, "kept": result.chosen}
    write_json(record, {**about, "heldout": heldout})


def measure_accuracy(job: Job, model: nn.Module, images: Images) -> Accuracy:
    """The accuracy of `model` on `images`; every process must call this. Raises DataError if there are none."""
    loader = EvalLoader(images, job.input, job.recipe.finetune.batch_size, job.runtime)
    accuracy = evaluate(model.to(job.runtime.device).eval(), loader, job.runtime)
    model.cpu()
    return accuracy


def _check_images(job: Job) -> tuple[str, Images]:
    """The images that the dense model is checked on, and what they are.

    Weights from elsewhere may have been trained on the held-out images, and what their user knows is their accuracy on
    the test images. No choice depends on it. A model that the run trains is checked on the held-out images.
    """
    assert job.data is not None
    if job.recipe.model.weights != "train" and job.data.test:
        return "test", job.data.test
    return "held-out", job.data.heldout


def check_dense(job: Job) -> None:
    """Report the accuracy of the dense model before the first step, which is measured once per run.

    Raises CheckFailedError if it is worse than expected.
    """
    if why_unchecked(job):
        return
    record = job.files.dense_accuracy
    known = job.runtime.broadcast(read_json(record) if job.runtime.is_main and record.is_file() else None)
    accuracy = Accuracy(**known) if known else measure_accuracy(job, load_dense(job), _check_images(job)[1])
    if job.runtime.is_main and not known:
        write_json(record, asdict(accuracy))
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
    return measure_accuracy(job, load_dense(job) if has_dense(job) else _create_dense(job), _check_images(job)[1])


def why_unchecked(job: Job) -> str:
    """Why the accuracy of the dense model is not measured; empty if it is."""
    if job.data is None or not _check_images(job)[1]:
        return "there are no images"
    return "" if job.recipe.model.weights != "random" or job.options.expect is not None else "its weights are random"


def examine_dense(job: Job, accuracy: Accuracy) -> tuple[list[str], CheckFailedError | None]:
    """Notes on the accuracy of the dense model, and the error if it is worse than expected.

    That is, if the expected accuracy is above the upper end of the 95 % interval. The notes warn of a model that is no
    better than always the most frequent class.
    """
    assert job.data is not None
    (kind, images), expect, classes = _check_images(job), job.options.expect, few(job.data.classes)
    low, high = (100 * end for end in accuracy.interval)
    top1 = f"{kind} top-1 {accuracy}, 95 % interval {low:.1f} to {high:.1f} %"
    scale = f"mean {describe_value(job.input.mean)} and standard deviation {describe_value(job.input.std)}"
    notes = [f"dense model: {top1}"]
    if job.recipe.model.weights not in ("random", "train") and guessed(accuracy.correct, images.labels):
        question = f"Was it trained on these classes in this order ({classes}), on images of {scale}?"
        notes.append(f"The dense model is no better than guessing, and every step depends on it. {question}")
    if expect is None or high >= expect:
        return notes, None
    arguments = (f"{key} {value}" for key, value in job.base.arch_args.items() if not isinstance(value, dict))
    causes = f"the preprocessing ({scale}), the order of the classes ({classes}), or the arguments of the model"
    hint = f"likely causes: {causes} ({', '.join(arguments)}); correct them; a stopped run starts over with --fresh"
    return notes, CheckFailedError(f"the dense model is worse than expected: {top1}, expected {expect:g} %", hint=hint)


def is_downloaded(job: Job) -> bool:
    """Whether the fine-tuning needs a teacher from timm's hub."""
    finetune = job.recipe.finetune
    local = finetune.teacher in (None, "dense") or Path(str(finetune.teacher)).is_dir()
    used = finetune.distillation != "none" and not job.options.structure_only
    return used and not local and finetune.teacher_weights is None


def teacher_for(job: Job, dense: nn.Module) -> nn.Module | None:
    """The teacher for the fine-tuning of a pruned model, or None without distillation."""
    if job.recipe.finetune.distillation == "none":
        return None
    if (teacher := _load_teacher(job)) is None:
        return deepcopy(dense)
    name, weights = str(job.recipe.finetune.teacher), job.recipe.finetune.teacher_weights or "hub"
    if job.runtime.is_main and not Path(name).is_dir() and (source := read_source(weights, name.partition("?")[0])):
        job.progress.note("teacher: {weights}, sha256 {sha256}".format(**source))
    return teacher


def _load_teacher(job: Job) -> nn.Module | None:
    """The model of a run folder or a timm name; None if the teacher is the dense model, which the caller has.

    Raises InputError if the teacher is not available, or has another number of classes.
    """
    name = job.recipe.finetune.teacher
    if name is None or name == "dense":
        return None
    arch = name.partition("?")[0]
    if Path(name).is_dir():
        return load_model(name)
    if is_downloaded(job):
        _check_classes(job, hub_classes(arch))
    check_arguments(arch, {}, "finetune.teacher: ")
    try:
        return create_named(name, job.recipe.finetune.teacher_weights or "hub", job.classes)
    except InputError as error:
        weights = "its weights with --set finetune.teacher_weights=FILE (.safetensors or .pth, for the same classes)"
        arguments = f"what they do not show with its name, as in teacher = '{arch}?num_heads=4'"
        hint = f"give {weights}, and {arguments}, or use --set finetune.teacher=dense"
        raise WeightsError(f"teacher {name}: {error.message}", hint=hint) from None


def check_teacher(job: Job, *, download: bool = True) -> None:
    """Raise InputError for a teacher that is not available, or that cannot teach the pruned model.

    download: False checks only the number of classes of a teacher from timm's hub.
    """
    finetune = job.recipe.finetune
    if job.options.structure_only or finetune.distillation == "none":
        return
    if job.steps[-1].method.dilute is not None and finetune.distillation in FEATURES:
        message = f"distillation = {finetune.distillation!r} does not work while layers fade out"
        raise InputError(message, hint="use distillation = 'soft' or 'hard'")
    if not download and is_downloaded(job):
        arch = str(finetune.teacher).partition("?")[0]
        check_arguments(arch, {}, "finetune.teacher: ")
        return _check_classes(job, hub_classes(arch))
    teacher = (_load_teacher(job) or deepcopy(job.blank)).to("meta")
    _check_classes(job, int(getattr(teacher, "num_classes", 0)))
    pruned = deepcopy(job.pruned).train()  # in which patches may be dropped
    images, labels = torch.empty(2, *job.input.size, device="meta"), torch.zeros(2, dtype=torch.long, device="meta")
    for options in job.trainings:
        # Checks the image size, and that the weights of the losses train every head; the call, the shapes of features.
        loss = Objective(pruned, options, teacher=teacher, input=job.input, device=torch.device("meta"))
        if options.distillation in FEATURES:
            loss(student_of(pruned, options.distillation, teacher), images, labels)


def _check_classes(job: Job, classes: int | None) -> None:
    """Raise InputError if a teacher has another number of classes; None is unknown."""
    if classes not in (None, job.classes):
        message = f"the teacher {job.recipe.finetune.teacher} has {classes} classes, the student {job.classes}"
        dense = "finetune.teacher = 'dense', the model before pruning"
        hint = f"use a teacher for the same classes: a run folder, finetune.teacher_weights = FILE, or {dense}"
        raise InputError(message, hint=hint)
