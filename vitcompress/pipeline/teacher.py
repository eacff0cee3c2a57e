"""The teacher of the recovery's distillation, and whether it can teach, checked before anything is trained."""

from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from vitcompress.errors import InputError, WeightsError
from vitcompress.models.checkpoint import load_model
from vitcompress.models.create import InputConfig, create_model
from vitcompress.models.weights import hub_classes
from vitcompress.pipeline.job import Job
from vitcompress.recipe.schema import Finetune
from vitcompress.training.losses import FEATURES, check_features, objective

CLASSES_HINT = (
    "use a teacher for the same classes: a run folder, finetune.teacher_weights = FILE, or finetune.teacher = 'dense', "
    "the model before pruning"
)


def comes_from_hub(recovery: Finetune) -> bool:
    """Whether this teacher must be fetched from timm's hub."""
    at_hand = recovery.teacher in (None, "dense") or Path(str(recovery.teacher)).is_dir()
    return recovery.distillation != "none" and not at_hand and recovery.teacher_weights is None


def load_teacher(recovery: Finetune, classes: int) -> nn.Module | None:
    """Who teaches during recovery; None is the dense model, which is at hand then. A run folder, or a timm name.

    Raises:
        InputError: the teacher cannot be had, or has another number of classes.
    """
    name = recovery.teacher
    if name is None or name == "dense":
        return None
    if Path(name).is_dir():
        return load_model(name)
    if comes_from_hub(recovery):
        check_hub_classes(recovery, classes)
    try:
        return create_model(name, {"num_classes": classes}, recovery.teacher_weights or "hub")
    except WeightsError as error:
        raise WeightsError(
            f"teacher {name}: {error.message}",
            hint="give its weights with --set finetune.teacher_weights=FILE (.safetensors or .pth, for the same "
            "classes), or use --set finetune.teacher=dense",
        ) from None


def check_hub_classes(recovery: Finetune, classes: int) -> None:
    """Raise InputError when timm's weights of the teacher are for another number of classes; nothing is fetched."""
    known = hub_classes(str(recovery.teacher))
    if known not in (None, classes):
        _check_classes(recovery, int(known or 0), classes)


def check_teacher(
    recovery: Finetune, dense: nn.Module, pruned: nn.Module, input: "InputConfig", *, fades: bool
) -> None:
    """Raise InputError for a teacher that cannot be had, or that cannot teach the model.

    dense, pruned: the model before and after all steps, on the meta device. fades: the pruned layers fade out while
    the model recovers.
    """
    if recovery.distillation == "none":
        return
    if fades and recovery.distillation in FEATURES:
        raise InputError(
            f"distillation = {recovery.distillation!r} does not work while layers fade out",
            hint="use distillation = 'soft' or 'hard'",
        )
    classes = int(getattr(dense, "num_classes", 0))
    knows = deepcopy(dense) if (known := load_teacher(recovery, classes)) is None else known.to("meta")
    _check_classes(recovery, int(getattr(knows, "num_classes", 0)), classes)
    # Size of its images, and a weight of the labels that leaves no head untrained.
    objective(pruned, recovery.loss, teacher=knows, input=input, device=torch.device("meta"))
    check_features(pruned, recovery.distillation, knows, input)


def _check_classes(recovery: Finetune, known: int, classes: int) -> None:
    if known != classes:
        raise InputError(
            f"the teacher {recovery.teacher} has {known} classes, the student {classes}", hint=CLASSES_HINT
        )


def teacher_for(job: Job, dense: nn.Module) -> nn.Module | None:
    """Who teaches while a pruned model recovers; None where nobody does."""
    recovery = job.recipe.finetune
    return None if recovery.distillation == "none" else load_teacher(recovery, job.classes) or deepcopy(dense)
