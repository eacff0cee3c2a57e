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
from vitcompress.recipe.schema import Finetune
from vitcompress.training.losses import FEATURES, check_features, objective


def comes_from_hub(finetune: Finetune) -> bool:
    """Whether the teacher must be downloaded from timm's hub."""
    local = finetune.teacher in (None, "dense") or Path(str(finetune.teacher)).is_dir()
    return finetune.distillation != "none" and not local and finetune.teacher_weights is None


def teacher_for(job: Job, dense: nn.Module) -> nn.Module | None:
    """The teacher for the fine-tuning of a pruned model, or None without distillation."""
    finetune = job.recipe.finetune
    return None if finetune.distillation == "none" else load_teacher(finetune, job.classes) or deepcopy(dense)


def load_teacher(finetune: Finetune, classes: int) -> nn.Module | None:
    """The model of a run folder or a timm name; None if the teacher is the dense model, which the caller has.

    Raises:
        InputError: the teacher is not available, or has another number of classes.
    """
    name = finetune.teacher
    if name is None or name == "dense":
        return None
    if Path(name).is_dir():
        return load_model(name)
    if comes_from_hub(finetune):
        check_hub_classes(finetune, classes)
    try:
        return create_model(name, {"num_classes": classes}, finetune.teacher_weights or "hub")
    except WeightsError as error:
        raise WeightsError(
            f"teacher {name}: {error.message}",
            hint="give its weights with --set finetune.teacher_weights=FILE (.safetensors or .pth, for the same "
            "classes), or use --set finetune.teacher=dense",
        ) from None


def check_hub_classes(finetune: Finetune, classes: int) -> None:
    """Raise InputError if timm's weights of the teacher have another number of classes. Downloads nothing."""
    known = hub_classes(str(finetune.teacher))
    if known is not None:
        _check_classes(finetune, int(known), classes)


def check_teacher(job: Job) -> None:
    """Raise InputError for a teacher that is not available, or that cannot teach the pruned model."""
    finetune = job.recipe.finetune
    if job.structure_only or finetune.distillation == "none":
        return
    if job.steps[-1].method.dilute is not None and finetune.distillation in FEATURES:
        raise InputError(
            f"distillation = {finetune.distillation!r} does not work while layers fade out",
            hint="use distillation = 'soft' or 'hard'",
        )
    teacher = load_teacher(finetune, job.classes)
    teacher = deepcopy(job.blank) if teacher is None else teacher.to("meta")
    _check_classes(finetune, int(getattr(teacher, "num_classes", 0)), job.classes)
    pruned = deepcopy(job.models[-1])
    # Checks the image size, and that the weights of the losses train every head.
    objective(pruned, finetune.loss, teacher=teacher, input=job.input, device=torch.device("meta"))
    check_features(pruned, finetune.distillation, teacher, job.input)


def _check_classes(finetune: Finetune, classes: int, student: int) -> None:
    if classes != student:
        raise InputError(
            f"the teacher {finetune.teacher} has {classes} classes, the student {student}",
            hint="use a teacher for the same classes: a run folder, finetune.teacher_weights = FILE, or "
            "finetune.teacher = 'dense', the model before pruning",
        )
