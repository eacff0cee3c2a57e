"""Training losses: labels, and the logits of a teacher for the same images.

Distillation as in DeiT (Touvron et al., 2021, https://arxiv.org/abs/2012.12877, eq. 2 and 3): hard takes the teacher's
decision as a label, soft its distribution. Students have one head or two (`set_distilled_training` of timm's distilled
models): with two, the first learns from labels and the second from the teacher, and inference averages both. So that
no untrained head is ever averaged, a two-headed student without a teacher trains both heads on the labels.
The soft loss is the mean over images; the official code divides by images times classes.

Two more forms are UP-ViT's (supplement, https://arxiv.org/abs/2111.15127): `soft_patch` adds the distance between the
patch tokens of both (eq. D2), those of the student through a linear layer that is learned with it and then dropped;
`features` takes the mean squared distance of the pooled features in place of the soft loss. There the labels count
fully (`label_weight` 1) beside `alpha`. The released code sums the soft loss over the 32 images of a process: its alpha
of 0.2 is 6.4 here, where losses are means.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vitcompress.errors import InputError
from vitcompress.families import unwrap
from vitcompress.io.tensors import check_finite
from vitcompress.models.create import InputConfig, input_config
from vitcompress.training.distributed import derived_seed
from vitcompress.training.options import Distillation, TrainOptions

FEATURES = ("soft_patch", "features")  # losses that compare features, not only logits


def inner(module: nn.Module) -> nn.Module:
    """The timm model inside a wrapper that has it as `model` (scores and gates around it), else `module`."""
    model = getattr(module, "model", None)
    return model if isinstance(model, nn.Module) else module


def check_outputs(module: nn.Module) -> None:
    """Raise InputError for weights that are not finite, and for outputs that are not logits of two or more classes."""
    parameters = dict(inner(module).named_parameters())  # attention on the CPU may hide NaN
    check_finite(parameters, f"this {type(inner(module)).__name__}")
    if getattr(inner(module), "global_pool", None) == "":
        message = "the model has no pooling (global_pool is empty): it outputs logits of every token, not of the image"
        raise InputError(message, hint='create it with another global_pool, such as "avg"')
    if (classes := int(getattr(inner(module), "num_classes", 2))) < 2:
        reason = "one class: no loss and no divergence of its outputs depends on its weights"
        message = f"the model has {reason if classes else 'no classifier: its outputs are features, not logits'}"
        raise InputError(
            message, hint="use num_classes=2 or more; magnitude, as method or criterion, ranks models of features"
        )


def has_two_heads(module: nn.Module) -> bool:
    """True for timm's distilled models, also inside a wrapper."""
    return hasattr(inner(module), "set_distilled_training")


@contextmanager
def both_heads(module: nn.Module) -> Iterator[None]:
    """Let a two-headed model return the logits of both heads, instead of their average, while it trains."""
    model: Any = inner(module)
    with ExitStack() as stack:
        if has_two_heads(module):
            stack.callback(model.set_distilled_training, bool(getattr(model, "distilled_training", False)))
            model.set_distilled_training(True)
        yield


class Teacher:
    """A frozen model on the student's batches, with its own normalization."""

    def __init__(self, model: nn.Module, student: InputConfig, device: torch.device) -> None:
        own = input_config(model) if hasattr(unwrap(model), "pretrained_cfg") else student
        if own.size != student.size:
            message = f"the teacher takes images of {own.size}, the student of {student.size}"
            hint = "use a teacher with the student's channels and input size, in a CNN pretrained_cfg['input_size']"
            raise InputError(message, hint=hint)
        self.model, self.dtype = model.to(device).eval(), next(model.parameters()).dtype
        self.same_pixels = (own.mean, own.std) == (student.mean, student.std)
        values = (student.mean, student.std, own.mean, own.std)
        self.pixels = [torch.tensor(each, device=device).view(1, -1, 1, 1) for each in values]

    @torch.no_grad()
    def __call__(self, images: Tensor, kind: Distillation) -> tuple[Tensor, Any]:
        """images: normalized for the student, (batch, C, H, W) -> as `_logits_and_features`."""
        if not self.same_pixels:
            mean, std, own_mean, own_std = self.pixels
            images = (images * std + mean - own_mean) / own_std
        # Autocast does not mix the half precision of the weights with another one.
        with torch.autocast(images.device.type, enabled=False) if self.dtype.itemsize < 4 else nullcontext():
            return _logits_and_features(self.model, images.to(self.dtype), kind)


class FeatureStudent(nn.Module):
    """A model that also returns its features while it trains.

    For `soft_patch`, a linear layer projects patch tokens to the teacher's width. It is trained and saved with the
    resume state, but is not part of the model.
    """

    def __init__(self, model: nn.Module, teacher: nn.Module, kind: Distillation, seed: int) -> None:
        super().__init__()
        self.model, self.kind, self.training = model, kind, model.training
        widths = [int(getattr(of, "num_features", 0)) for of in (model, teacher)]
        if kind == "features" and widths[0] != widths[1]:
            message = f"the teacher's pooled features have {widths[1]} channels, the student's {widths[0]}"
            raise InputError(message, hint="use distillation = 'soft', or a teacher of the student's width")
        like = next(model.parameters())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed("projection", seed))
            self.projection = nn.Linear(widths[0], widths[1]).to(like) if kind == "soft_patch" else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        """x: images -> logits; while training (logits, features), the features in the teacher's width."""
        if not self.training:
            return self.model(x)
        logits, features = _logits_and_features(self.model, x, self.kind)
        return logits, self.projection(features)


def student_of(module: nn.Module, kind: Distillation, teacher: nn.Module | None, seed: int = 0) -> nn.Module:
    """The module to train: `module` itself, or a wrapper that also returns its features.

    seed: of the wrapper's projection layer. Raises InputError if features differ in width.
    """
    if kind not in FEATURES or teacher is None:
        return module
    return FeatureStudent(module, inner(teacher), kind, seed)


def _logits_and_features(model: Any, images: Tensor, kind: Distillation) -> tuple[Any, Any]:
    """Logits, and by `kind` patch tokens (batch, patches, channels), pooled features (batch, channels) or None."""
    if kind not in FEATURES:
        return model(images), None
    maps = model.forward_features(images)
    logits = model.forward_head(maps)
    return logits, model.forward_head(maps, pre_logits=True) if kind == "features" else _patches(model, maps)


def _patches(model: Any, maps: Tensor) -> Tensor:
    """The output of timm's `forward_features` as patch tokens (batch, patches, channels)."""
    if maps.ndim == 3:
        return maps[:, int(getattr(model, "num_prefix_tokens", 0)) :]
    channels_last = str(getattr(model, "output_fmt", "NCHW")).endswith("NHWC")
    return maps.flatten(1, 2) if channels_last else maps.flatten(2).transpose(1, 2)


class Objective:
    """The loss of one batch: labels and, with a teacher, `options.share_of_labels` * labels + alpha * distillation.

    module: the model that is trained. input: its preprocessing. Raises InputError as `check_outputs`, for distillation
    without another model, or with an `alpha` that leaves one of two heads untrained or gives labels a negative weight.
    """

    def __init__(
        self, module: nn.Module, options: TrainOptions, *, teacher: nn.Module | None, input: InputConfig, device: Any
    ) -> None:
        labels, alpha = options.share_of_labels, options.alpha
        self.options = options
        self.teacher: Teacher | None = None
        if options.distillation not in FEATURES or labels > 0:
            check_outputs(module)
        if options.distillation == "none":
            return
        if teacher is None or not {*module.parameters()}.isdisjoint(teacher.parameters()):
            message = f"distillation = {options.distillation!r} needs a teacher with weights of its own"
            raise InputError(message, hint="set a teacher, such as a copy of the student, or distillation = 'none'")
        if labels < 0:
            message = f"with alpha = {alpha:g} the labels would weigh {labels:g}"
            raise InputError(message, hint="use an alpha up to 1, or set label_weight too, as in label_weight = 1.0")
        if has_two_heads(module) and not (labels > 0 and (alpha > 0 or options.distillation == "features")):
            both = f"alpha = {alpha:g}" + f", label_weight = {labels:g}" * (options.label_weight is not None)
            message = f"{both} would leave one of the two heads untrained, and inference averages both"
            raise InputError(message, hint="use an alpha between 0 and 1, both excluded, and no label_weight of 0")
        self.teacher = Teacher(teacher, input, device)

    def __call__(self, network: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        """targets: classes (batch,) or probabilities (batch, classes) -> mean loss, a scalar."""
        options, teacher = self.options, self.teacher
        output, features = network(images) if options.distillation in FEATURES else (network(images), None)
        first, second = output if isinstance(output, tuple) else (output, output)
        weight = 1.0 if teacher is None else options.share_of_labels
        # The labels train the second head too, unless logits of a teacher do.
        both = second is not first and (teacher is None or options.distillation == "features")
        heads = (first, second) if both else (first,)
        # Probabilities are smoothed where images are mixed.
        smoothing = options.augmentation.smoothing if targets.ndim == 1 else 0.0
        parts = [weight * functional.cross_entropy(head, targets, label_smoothing=smoothing) for head in heads]
        labels = cast(Tensor, sum(parts) / len(parts))
        if teacher is None:
            return labels
        known, wanted = teacher(images, options.distillation)
        if features is None:
            return labels + options.alpha * self._distill(second, known)
        if features.shape != wanted.shape:
            message = f"the teacher's features are {tuple(wanted.shape[1:])}, the student's {tuple(features.shape[1:])}"
            raise InputError(message, hint="use a teacher with the same patches")
        common = torch.promote_types(features.dtype, wanted.dtype)  # torch 2.11 has no gradient for two types
        distance = functional.mse_loss(features.to(common), wanted.to(common))
        if options.distillation == "features":
            return labels + options.alpha * distance
        # eq. D2: a sum over patches of the mean over images and channels
        patches: Tensor = distance * features.shape[1]
        return labels + options.alpha * self._distill(second, known) + options.patch_weight * patches

    def _distill(self, student: Tensor, teacher: Tensor) -> Tensor:
        if student.shape != teacher.shape:
            message = f"the teacher has {teacher.shape[1]} classes, the student {student.shape[1]}"
            raise InputError(message, hint="use a teacher for the same classes")
        if self.options.distillation == "hard":
            return hard_loss(student, teacher, self.options.teacher_smoothing)
        return soft_loss(student, teacher, self.options.temperature)


def hard_loss(student: Tensor, teacher: Tensor, smoothing: float = 0.0) -> Tensor:
    """DeiT eq. 3: cross entropy with the teacher's decision, which may be smoothed; logits (batch, classes)."""
    return functional.cross_entropy(student, teacher.argmax(dim=1), label_smoothing=smoothing)


def soft_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """DeiT eq. 2: T^2 * KL(teacher || student) of softened distributions, mean over images; logits (batch, classes)."""
    # Autocast divides in half precision, and on the CPU takes the logarithm in it: coarser than the two differ.
    logits = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in (student, teacher))
    log_student, log_teacher = (functional.log_softmax(each / temperature, dim=1) for each in logits)
    return functional.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True) * temperature**2
