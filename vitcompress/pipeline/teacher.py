"""The distillation teacher of the fine-tuning, and the checks that it can teach before anything is trained."""

from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from vitcompress.errors import InputError, WeightsError
from vitcompress.models.checkpoint import load_model
from vitcompress.models.create import create_model
from vitcompress.models.weights import hub_classes
from vitcompress.pipeline.job import Job
from vitcompress.training.losses import FEATURES, check_features, objective


def is_downloaded(job: Job) -> bool:
    """Whether the fine-tuning needs a teacher from timm's hub."""
    finetune = job.recipe.finetune
    local = finetune.teacher in (None, "dense") or Path(str(finetune.teacher)).is_dir()
    used = finetune.distillation != "none" and not job.options.structure_only
    return used and not local and finetune.teacher_weights is None


def teacher_for(job: Job, dense: nn.Module) -> nn.Module | None:
    """The teacher for the fine-tuning of a pruned model, or None without distillation."""
    return None if job.recipe.finetune.distillation == "none" else _load_teacher(job) or deepcopy(dense)


def _load_teacher(job: Job) -> nn.Module | None:
    """The model of a run folder or a timm name; None if the teacher is the dense model, which the caller has.

    Raises:
        InputError: the teacher is not available, or has another number of classes.
    """
    name = job.recipe.finetune.teacher
    if name is None or name == "dense":
        return None
    if Path(name).is_dir():
        return load_model(name)
    if is_downloaded(job):
        _check_hub_classes(job)
    try:
        return create_model(name, {"num_classes": job.classes}, job.recipe.finetune.teacher_weights or "hub")
    except WeightsError as error:
        raise WeightsError(
            f"teacher {name}: {error.message}",
            hint="give its weights with --set finetune.teacher_weights=FILE (.safetensors or .pth, for the same "
            "classes), or use --set finetune.teacher=dense",
        ) from None


def check_teacher(job: Job, *, download: bool = True) -> None:
    """Raise InputError for a teacher that is not available, or that cannot teach the pruned model.

    download: False checks only the number of classes of a teacher from timm's hub.
    """
    finetune = job.recipe.finetune
    if job.options.structure_only or finetune.distillation == "none":
        return
    if job.steps[-1].method.dilute is not None and finetune.distillation in FEATURES:
        raise InputError(
            f"distillation = {finetune.distillation!r} does not work while layers fade out",
            hint="use distillation = 'soft' or 'hard'",
        )
    if not download and is_downloaded(job):
        _check_hub_classes(job)
        return
    teacher = (_load_teacher(job) or deepcopy(job.blank)).to("meta")
    _check_classes(job, int(getattr(teacher, "num_classes", 0)))
    pruned = deepcopy(job.pruned)
    # Checks the image size, and that the weights of the losses train every head.
    objective(pruned, finetune, teacher=teacher, input=job.input, device=torch.device("meta"))
    check_features(pruned, finetune.distillation, teacher, job.input)


def _check_hub_classes(job: Job) -> None:
    """Raise InputError if timm's weights of the teacher have another number of classes. Downloads nothing."""
    known = hub_classes(str(job.recipe.finetune.teacher))
    if known is not None:
        _check_classes(job, known)


def _check_classes(job: Job, classes: int) -> None:
    if classes != job.classes:
        raise InputError(
            f"the teacher {job.recipe.finetune.teacher} has {classes} classes, the student {job.classes}",
            hint="use a teacher for the same classes: a run folder, finetune.teacher_weights = FILE, or "
            "finetune.teacher = 'dense', the model before pruning",
        )
