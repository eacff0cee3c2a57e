"""The settings of a training, and its result."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

from annotated_types import Ge, Gt, Lt

from vitcompress.io.validation import Doc
from vitcompress.training.augmentation import Augmentation
from vitcompress.training.metrics import Accuracy

Distillation = Literal["none", "hard", "soft", "soft_patch", "features"]


@dataclass(frozen=True)
class TrainOptions:
    """How a model is trained."""

    epochs: Annotated[int, Ge(0), Doc("passes over the training images")] = 10
    batch_size: Annotated[int, Ge(1), Doc("images of one optimiser step, over all processes")] = 128
    accumulate: Annotated[int, Ge(1), Doc("number of parts into which each process splits its share of a batch")] = 1
    optimizer: Annotated[str, Doc("name of a timm optimiser")] = "adamw"
    lr: Annotated[float, Ge(0), Doc("peak learning rate")] = 1e-3
    lr_base: Annotated[float | None, Gt(0), Doc("peak learning rate per 512 images of batch_size; replaces lr")] = None
    min_lr: Annotated[float, Ge(0), Doc("final learning rate")] = 1e-5
    warmup_epochs: Annotated[int, Ge(0), Doc("epochs in which the learning rate rises from warmup_lr to the peak")] = 0
    warmup_lr: Annotated[float, Ge(0), Doc("initial learning rate")] = 1e-6
    schedule: Annotated[Literal["cosine", "constant"], Doc("of the learning rate after the warm-up")] = "cosine"
    weight_decay: Annotated[float, Ge(0), Doc("of matrices; of all parameters with decay_all")] = 0.05
    decay_all: Annotated[bool, Doc("apply it to vectors and scalars too: norms, biases, tokens, positions")] = False
    betas: Annotated[tuple[float, float] | None, Doc("of the optimiser; None: its default")] = None
    clip_grad: Annotated[float | None, Gt(0), Doc("maximum norm of the gradient")] = None
    drop_path: Annotated[float, Ge(0), Lt(1), Doc("stochastic depth of the last block, rising from 0 at the first")] = (
        0.0
    )
    ema: Annotated[float | None, Gt(0), Lt(1), Doc("decay of averaged weights, evaluated beside the raw ones")] = None
    augmentation: Annotated[Augmentation, Doc("transforms of training images")] = field(default_factory=Augmentation)
    distillation: Annotated[Distillation, Doc("how the model learns from its teacher")] = "none"
    alpha: Annotated[float, Ge(0), Doc("weight of the distillation loss")] = 0.5
    label_weight: Annotated[float | None, Ge(0), Doc("weight of the loss with the labels; None: 1 - alpha")] = None
    patch_weight: Annotated[float, Ge(0), Doc('weight of the patch tokens, with distillation = "soft_patch"')] = 1e-3
    temperature: Annotated[float, Gt(0), Doc("by which the logits of model and teacher are divided")] = 1.0
    teacher_smoothing: Annotated[
        float, Ge(0), Lt(1), Doc('of the labels of the teacher, with distillation = "hard"')
    ] = 0.0
    evaluate_every: Annotated[
        int, Ge(0), Doc("epochs between evaluations; 0: only after the last one, which always counts")
    ] = 1
    select: Annotated[Literal["last", "best"], Doc("epoch whose weights are kept; `best` on the held-out images")] = (
        "last"
    )

    @property
    def peak_lr(self) -> float:
        """The largest learning rate of the schedule."""
        return self.lr if self.lr_base is None else self.lr_base * self.batch_size / 512

    @property
    def share_of_labels(self) -> float:
        """Weight of the labels beside a teacher."""
        return 1 - self.alpha if self.label_weight is None else self.label_weight


class EpochRecord(TypedDict, total=False):
    """One epoch (from 0) in the log. heldout, ema: `Accuracy` of the raw weights and of their average, if evaluated."""

    epoch: int
    loss: float
    lr: float
    heldout: dict[str, Any]
    ema: dict[str, Any]
    seconds: float


@dataclass(frozen=True)
class TrainResult:
    """Result of a training: one record per epoch, held-out accuracy, and which weights were selected."""

    history: list[EpochRecord]
    raw: Accuracy | None
    ema: Accuracy | None
    chosen: Literal["raw", "ema"]
    epoch: int  # the epoch (from 0) whose weights were selected; -1 if nothing was trained

    @property
    def accuracy(self) -> Accuracy | None:
        """Held-out accuracy of the selected weights."""
        return self.ema if self.chosen == "ema" else self.raw
