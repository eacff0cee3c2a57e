"""Training losses: labels, and a teacher's answers to the same images.

Distillation as in DeiT (Touvron et al., 2021, https://arxiv.org/abs/2012.12877, eq. 2 and 3): hard takes the teacher's
decision as a label, soft its distribution. Students have one head or two (`set_distilled_training` of timm's distilled
models): with two, the first learns from labels and the second from the teacher, and inference averages both. So that
no untrained head is ever averaged, a two-headed student without a teacher trains both heads on the labels.
The soft loss is the mean over images; the official code divides by images times classes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from timm.task.distillation import DistillationTeacher
from torch import Tensor, nn
from torch.nn import functional

from vitcompress.errors import InputError
from vitcompress.models import input_config

if TYPE_CHECKING:
    from vitcompress.models import InputConfig

Distillation = Literal["none", "hard", "soft"]


def inner(module: nn.Module) -> nn.Module:
    """The timm model inside a wrapper that holds it as `model` (scores and gates around it), else `module`."""
    held = getattr(module, "model", None)
    return held if isinstance(held, nn.Module) else module


def has_two_heads(module: nn.Module) -> bool:
    """True for timm's distilled models, also inside a wrapper."""
    return hasattr(inner(module), "set_distilled_training")


@contextmanager
def both_heads(module: nn.Module) -> Iterator[None]:
    """While training, a two-headed model answers with both heads instead of their average."""
    if not has_two_heads(module):
        yield
        return
    model: Any = inner(module)
    before = bool(getattr(model, "distilled_training", False))
    model.set_distilled_training(True)
    try:
        yield
    finally:
        model.set_distilled_training(before)


class Teacher:
    """A frozen model that sees the student's batches, normalised its own way."""

    def __init__(self, model: nn.Module, student_input: "InputConfig", device: torch.device) -> None:
        own = input_config(model)
        if own.size != student_input.size:
            raise InputError(
                f"the teacher takes images of {own.size}, the student of {student_input.size}",
                hint="use a teacher with the student's channels and input size",
            )
        self.frozen = DistillationTeacher(model.to(device), device=device)
        # timm fills these from the pretrained settings, which are for 3 channels; ours fit the model as it is.
        self.frozen.mean_kd, self.frozen.std_kd = _channels(own.mean, device), _channels(own.std, device)
        self.mean, self.std = _channels(student_input.mean, device), _channels(student_input.std, device)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """images: normalised for the student, (batch, C, H, W) -> logits, (batch, classes)."""
        logits: Tensor = self.frozen(self.frozen.normalize_input(images, self.mean, self.std))
        return logits


class Objective:
    """The loss of one batch: labels and, with a teacher, (1 - alpha) * labels + alpha * distillation."""

    def __init__(
        self, kind: Distillation, alpha: float, temperature: float, smoothing: float, teacher: Teacher | None
    ) -> None:
        self.kind, self.alpha, self.temperature, self.smoothing = kind, alpha, temperature, smoothing
        self.teacher = teacher

    def __call__(self, network: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        """targets: classes (batch,) or probabilities (batch, classes) -> mean loss, a scalar."""
        answer = network(images)
        first, second = answer if isinstance(answer, tuple) else (answer, answer)
        labels = label_loss(first, targets, self.smoothing)
        if self.teacher is None:
            return labels if first is second else (labels + label_loss(second, targets, self.smoothing)) / 2
        return (1 - self.alpha) * labels + self.alpha * self._distil(second, self.teacher(images))

    def _distil(self, student: Tensor, teacher: Tensor) -> Tensor:
        if student.shape != teacher.shape:
            raise InputError(
                f"the teacher knows {teacher.shape[1]} classes, the student {student.shape[1]}",
                hint="use a teacher for the same classes",
            )
        return hard_loss(student, teacher) if self.kind == "hard" else soft_loss(student, teacher, self.temperature)


def label_loss(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Cross entropy with classes (smoothed here) or with probabilities (smoothed where images were mixed)."""
    return functional.cross_entropy(logits, targets, label_smoothing=smoothing if targets.ndim == 1 else 0.0)


def hard_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """DeiT eq. 3: cross entropy with the teacher's decision; logits (batch, classes)."""
    return functional.cross_entropy(student, teacher.argmax(dim=1))


def soft_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """DeiT eq. 2: T^2 * KL(teacher || student) of softened distributions, mean over images; logits (batch, classes)."""
    log_student = functional.log_softmax(student / temperature, dim=1)
    log_teacher = functional.log_softmax(teacher / temperature, dim=1)
    return functional.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True) * temperature**2


def objective(
    module: nn.Module,
    kind: Distillation,
    alpha: float,
    temperature: float,
    smoothing: float,
    *,
    teacher: nn.Module | None,
    input: "InputConfig",
    device: torch.device,
) -> Objective:
    """The loss for training `module`.

    Raises:
        InputError: distillation without a teacher, or an `alpha` that leaves one of two heads untrained.
    """
    if kind == "none":
        return Objective(kind, alpha, temperature, smoothing, None)
    if teacher is None:
        raise InputError(
            f"distillation = {kind!r} needs a teacher and there is none", hint="name a teacher, or use 'none'"
        )
    if has_two_heads(module) and not 0 < alpha < 1:
        raise InputError(
            f"alpha = {alpha:g} would leave one of the two heads untrained, and inference averages both",
            hint="use an alpha between 0 and 1, both excluded",
        )
    return Objective(kind, alpha, temperature, smoothing, Teacher(teacher, input, device))


def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Per-channel values as (1, C, 1, 1)."""
    return torch.tensor(values, device=device).view(1, -1, 1, 1)
