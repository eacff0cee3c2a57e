"""Train and evaluate the models of a run on its images, and find the teacher that they learn from."""

from copy import deepcopy
from itertools import product
from pathlib import Path

import torch
from torch import nn

from vitcompress.errors import InputError, WeightsError
from vitcompress.io.files import write_json
from vitcompress.models.checkpoint import load_model
from vitcompress.models.create import check_arguments, class_names_of
from vitcompress.models.source import create_named
from vitcompress.models.weights import hub_classes, read_source
from vitcompress.pipeline.job import Job
from vitcompress.training.datasets import Images
from vitcompress.training.loaders import EVAL_BATCH, EvalLoader
from vitcompress.training.loop import train
from vitcompress.training.losses import FEATURES, Objective, student_of
from vitcompress.training.metrics import Accuracy, evaluate
from vitcompress.training.options import TrainOptions
from vitcompress.training.trainer import TrainingContext, TrainingControls


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
        epoch = f" with the selected weights, of epoch {result.epoch + 1}" if result.history else ""
        job.progress.note(f"held-out top-1{epoch}: {result.accuracy}")
    heldout = {name: value and value.to_dict() for name, value in (("raw", result.raw), ("ema", result.ema))}
    about = {"epochs": len(result.history), "kept_epoch": result.epoch, "kept": result.chosen}
    write_json(record, {**about, "heldout": heldout})


def measure_accuracy(job: Job, model: nn.Module, images: Images) -> Accuracy:
    """The accuracy of `model` on `images`; every process must call this. Raises DataError if there are none."""
    loader = EvalLoader(images, job.input, EVAL_BATCH, job.runtime)
    accuracy = evaluate(model.to(job.runtime.device).eval(), loader, job.runtime)
    model.cpu()
    return accuracy


def downloads_teacher(job: Job) -> bool:
    """Whether the fine-tuning needs a teacher from timm's hub."""
    finetune = job.recipe.finetune
    local = finetune.teacher in (None, "dense") or Path(str(finetune.teacher)).is_absolute()
    used = finetune.distillation != "none" and not job.options.structure_only
    return used and not local and finetune.teacher_weights is None


def teacher_for(job: Job, dense: nn.Module) -> nn.Module | None:
    """The teacher for the fine-tuning of a pruned model, or None without distillation."""
    if job.recipe.finetune.distillation == "none":
        return None
    teacher = _load_teacher(job, dense)
    name, weights = job.recipe.finetune.teacher or "dense", job.recipe.finetune.teacher_weights or "hub"
    if job.runtime.is_main and not Path(name).is_dir() and (source := read_source(weights, name.partition("?")[0])):
        job.progress.note("teacher: {weights}, sha256 {sha256}".format(**source))
    return teacher


def _load_teacher(job: Job, dense: nn.Module, *, download: bool = True) -> nn.Module | None:
    """The model of a run folder or a timm name, or a copy of the `dense` model.

    download: False returns None for a teacher from timm's hub, of which only the number of classes is checked. Raises
    InputError if the teacher is not available, or has another number of classes.
    """
    name = job.recipe.finetune.teacher
    if name is None or name == "dense":
        return deepcopy(dense)
    arch = name.partition("?")[0]
    if Path(name).is_dir():
        return load_model(name)
    if Path(name).is_absolute():  # as `apply_options` makes all paths
        raise InputError(f"there is no run folder {name}", hint="a file of weights is finetune.teacher_weights")
    check_arguments(arch, {}, "finetune.teacher: ")
    if downloads_teacher(job):
        _check_classes(job, hub_classes(arch))
        if not download:
            return None
    try:
        return create_named(name, job.recipe.finetune.teacher_weights or "hub", job.classes)
    except InputError as error:
        weights = "its weights with --set finetune.teacher_weights=FILE (.safetensors or .pth, for the same classes)"
        arguments = f"what they do not show with its name, as in teacher = '{arch}?num_heads=4'"
        hint = f"give {weights}, and {arguments}, or use --set finetune.teacher=dense"
        raise WeightsError(f"teacher {name}: {error.message}", hint=hint) from None


def check_teacher(job: Job, *, download: bool = True) -> None:
    """Raise InputError for a teacher that is not available (see `_load_teacher`) or cannot teach the pruned model."""
    finetune = job.recipe.finetune
    if job.options.structure_only or finetune.distillation == "none":
        return
    if job.steps[-1].method.dilute is not None and finetune.distillation in FEATURES:
        message = f"distillation = {finetune.distillation!r} does not work while layers fade out"
        raise InputError(message, hint="use distillation = 'soft' or 'hard'")
    if (teacher := _load_teacher(job, job.blank, download=download)) is None:
        return
    teacher = teacher.to("meta")
    _check_classes(job, int(getattr(teacher, "num_classes", 0)))
    names = class_names_of(teacher)
    if names != job.class_names and {*names} == {*job.class_names}:
        message = f"the teacher {finetune.teacher} has the classes of the student in another order"
        raise InputError(message, hint="train one on these class folders, or use finetune.teacher = 'dense'")
    images, labels = torch.empty(2, *job.input.size, device="meta"), torch.zeros(2, dtype=torch.long, device="meta")
    students = [deepcopy(model).train() for model in (job.pruned, job.blank)]  # in which patches may be dropped
    for options, student in product(job.trainings, students[: 1 + job.options.control]):
        # Checks the image size, and that the weights of the losses train every head; the call, the shapes of features.
        loss = Objective(student, options, teacher=teacher, input=job.input, device=torch.device("meta"))
        if options.distillation in FEATURES:
            loss(student_of(student, options.distillation, teacher), images, labels)


def _check_classes(job: Job, classes: int | None) -> None:
    """Raise InputError if a teacher has another number of classes; None is unknown."""
    if classes not in (None, job.classes):
        message = f"the teacher {job.recipe.finetune.teacher} has {classes} classes, the student {job.classes}"
        dense = "finetune.teacher = 'dense', the model before pruning"
        hint = f"use a teacher for the same classes: a run folder, finetune.teacher_weights = FILE, or {dense}"
        raise InputError(message, hint=hint)
