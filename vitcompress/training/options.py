"""The settings of a training, and its result."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from vitcompress.training.augmentation import Augmentation
from vitcompress.training.losses import Distillation, LossOptions
from vitcompress.training.metrics import Accuracy


@dataclass(frozen=True)
class TrainOptions:
    """How a model is trained. `batch_size` counts the images of one optimiser step over all processes."""

    epochs: Annotated[int, Ge(0)] = 10  # passes over the training images
    batch_size: Annotated[int, Ge(1)] = 128  # images of one optimiser step, over all processes
    accumulate: Annotated[int, Ge(1)] = 1  # parts that each process computes its share of a batch in
    optimizer: str = "adamw"  # any name of timm's optimisers
    lr: Annotated[float, Ge(0)] = 1e-3  # peak learning rate
    lr_base: Annotated[float, Gt(0)] | None = None  # instead of lr: the peak per 512 images of batch_size
    min_lr: Annotated[float, Ge(0)] = 1e-5  # where the learning rate ends
    warmup_epochs: Annotated[int, Ge(0)] = 0  # in which it rises from warmup_lr to the peak
    warmup_lr: Annotated[float, Ge(0)] = 1e-6  # where the learning rate begins
    schedule: Literal["cosine", "constant"] = "cosine"  # of the learning rate after the warm-up
    weight_decay: Annotated[float, Ge(0)] = 0.05  # of matrices, unless decay_all
    decay_all: bool = False  # also of vectors and scalars: norms, biases, tokens, positions; else only of matrices
    betas: tuple[float, float] | None = None  # None: the optimiser's own
    clip_grad: Annotated[float, Gt(0)] | None = None  # largest norm of the gradient
    drop_path: Annotated[float, Ge(0), Lt(1)] = 0.0  # stochastic depth of the last block, linear from 0 at the first
    ema: Annotated[float, Gt(0), Lt(1)] | None = None  # decay of the averaged weights, evaluated next to the raw ones
    augmentation: Augmentation = field(default_factory=Augmentation)
    distillation: Distillation = "none"  # how the model is held against its teacher
    alpha: Annotated[float, Ge(0)] = 0.5  # weight of the distillation loss
    label_weight: Annotated[float, Ge(0)] | None = None  # of the loss with the labels; None: 1 - alpha
    patch_weight: Annotated[float, Ge(0)] = 1e-3  # of the patch tokens, with distillation = "soft_patch"
    temperature: Annotated[float, Gt(0)] = 1.0  # that the logits of both are divided by
    teacher_smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0  # of the teacher's decisions, with distillation = "hard"
    evaluate_every: Annotated[int, Ge(0)] = 1  # epochs; the last one always counts, 0 means only that one
    select: Literal["last", "best"] = "last"  # which epoch's weights are kept; best is on the held-out images

    @property
    def peak_lr(self) -> float:
        """The largest learning rate of the schedule."""
        return self.lr if self.lr_base is None else self.lr_base * self.batch_size / 512

    @property
    def loss(self) -> LossOptions:
        """What a batch is judged by."""
        weights = (self.label_weight, self.patch_weight, self.teacher_smoothing)
        return LossOptions(self.distillation, self.alpha, self.temperature, self.augmentation.smoothing, *weights)


@dataclass(frozen=True)
class TrainResult:
    """What a training did: one record per epoch, held-out accuracy of the kept weights, which ones were kept."""

    history: list[dict[str, Any]]
    raw: Accuracy | None
    ema: Accuracy | None
    chosen: Literal["raw", "ema"]
    epoch: int  # the epoch (from 0) whose weights were kept; -1 when nothing was trained

    @property
    def accuracy(self) -> Accuracy | None:
        """Held-out accuracy of the weights that were kept."""
        return self.ema if self.chosen == "ema" else self.raw
