"""The settings of data and of a training, and its result. Imports neither torch nor timm."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from annotated_types import Ge, Gt, Le, Lt

from vitcompress.io.validation import WHOLE, Doc, Matching
from vitcompress.models.preprocessing import Preprocessing

if TYPE_CHECKING:
    from vitcompress.training.metrics import Accuracy

BUILT_IN = ("digits", "tinted")  # sources that need no files
_SOURCES = (
    "`digits` or `tinted` (built in, from scikit-learn), `imagefolder` (`path`/<split>/<class>/<image>), `timm:` "
    "(timm's reader of such folders), `timm:torch/NAME` (torchvision's data set in `path`); nothing is downloaded"
)
POLICY = Matching(r"^((original|v0)r?|3a|rand|augmix)(-(inc|mmax|[a-z])\d{1,2}(\.\d+)?|-mstd[\d.]+)*$")
Share = Annotated[float, Ge(0), Le(1)]
Fraction = Annotated[float, Ge(0), Lt(1)]
Area = Annotated[float, Gt(0), Le(1)]
Aspect = Annotated[float, Gt(0)]
Seed = Annotated[int, Ge(0), Le(2**63 - 1), WHOLE]
Workers = Annotated[int, Ge(0), Le(1024), WHOLE]
Broken = Literal["error", "skip"]
Distillation = Literal["none", "hard", "soft", "soft_patch", "features"]


@dataclass(frozen=True)
class DataOptions(Preprocessing):
    """Where images are read from, and how they become the input of the model."""

    source: Annotated[str, Doc(_SOURCES)] = "digits"
    path: Annotated[str | None, Doc("folder of the images; a relative one is in the current directory")] = None
    train_split: Annotated[str | None, Doc("name of the training split; None: train")] = None
    test_split: Annotated[str | None, Doc("name of the test split; None: val, validation or test")] = None
    heldout: Annotated[Fraction, Doc("share of the training images that are held out for choices")] = 0.1
    workers: Annotated[Workers, Doc("processes that load images; augmented ones depend on this number")] = 0
    broken: Annotated[Broken, Doc("unreadable images of an imagefolder; `skip` decodes all and omits them")] = "error"

    def moved_to(self, path: str) -> "DataOptions":
        """These options with the images in `path`: class folders, where the source is built in."""
        return replace(self, path=path, source="imagefolder" if self.source in BUILT_IN else self.source)


@dataclass(frozen=True)
class Augmentation:
    """Transforms of training images, with timm's names. The defaults change nothing.

    DeiT's recipe (Touvron et al., 2021, https://arxiv.org/abs/2012.12877, table 9) is no_aug=False,
    auto_augment="rand-m9-mstd0.5-inc1", color_jitter=0.3, reprob=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1, repeats=3.
    """

    no_aug: Annotated[
        bool,
        Doc("images as in the evaluation: no random crop, flip, color or erasing; mixup and noise are set separately"),
    ] = True
    auto_augment: Annotated[str | None, POLICY, Doc("timm's policy string; all but 3a disable color jitter")] = None
    color_jitter: Annotated[float, Ge(0), Doc("strength; 0: off")] = 0.0
    hflip: Annotated[Share, Doc("share of images that are flipped")] = 0.5
    scale: Annotated[tuple[Area, Area], Doc("area of the random crop, as a share of the image")] = (0.08, 1.0)
    ratio: Annotated[tuple[Aspect, Aspect], Doc("aspect ratio (width / height) of the random crop")] = (3 / 4, 4 / 3)
    reprob: Annotated[Share, Doc("share of images with one erased rectangle")] = 0.0
    remode: Annotated[Literal["const", "rand", "pixel"], Doc("content of an erased rectangle")] = "pixel"
    mixup: Annotated[float, Ge(0), Doc("alpha of the Beta distribution; 0: off")] = 0.0
    cutmix: Annotated[float, Ge(0), Doc("alpha of the Beta distribution; 0: off")] = 0.0
    mixup_prob: Annotated[Share, Doc("share of batches with mixup or CutMix")] = 1.0
    mixup_switch_prob: Annotated[Share, Doc("share of those with CutMix, where both are on")] = 0.5
    smoothing: Annotated[Fraction, Doc("label smoothing")] = 0.0
    repeats: Annotated[int, Ge(0), Le(1024), Doc("views of an image per pass (repeated augmentation); 0 or 1: off")] = 0
    noise: Annotated[float, Ge(0), Doc("standard deviation of Gaussian noise on the normalized pixels")] = 0.0

    @property
    def unused(self) -> dict[str, str]:
        """Options that differ from the defaults and have no effect beside the others -> the reason."""
        disabled = ("auto_augment", "color_jitter", "hflip", "scale", "ratio", "reprob", "remode")
        return _unused(
            self,
            (not self.reprob, "reprob is 0", ("remode",)),
            (self.no_aug, "no_aug is true", disabled),
            (not self.mixes, "mixup and cutmix are 0", ("mixup_prob",)),
            (not (self.mixup and self.cutmix), "mixup or cutmix is 0", ("mixup_switch_prob",)),
        )

    @property
    def mixes(self) -> bool:
        """True when images of a batch are mixed, which makes targets soft."""
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True)
class TrainOptions:
    """How a model is trained."""

    epochs: Annotated[int, Ge(0), Le(100_000), Doc("passes over the training images")] = 10
    batch_size: Annotated[int, Ge(1), Le(2**20), Doc("images of one optimizer step, over all processes")] = 128
    accumulate: Annotated[int, Ge(1), Doc("forward passes of an optimizer step: parts of a batch, or own batches")] = 1
    optimizer: Annotated[str, Doc("name of a timm optimizer")] = "adamw"
    lr: Annotated[float, Ge(0), Doc("peak learning rate")] = 1e-3
    lr_base: Annotated[float | None, Gt(0), Doc("peak learning rate per 512 images of batch_size; replaces lr")] = None
    min_lr: Annotated[float, Ge(0), Doc("final learning rate, at most the peak")] = 1e-5
    warmup_epochs: Annotated[int, Ge(0), Doc("epochs in which the learning rate rises from warmup_lr to the peak")] = 0
    warmup_lr: Annotated[float, Ge(0), Doc("initial learning rate")] = 1e-6
    schedule: Annotated[Literal["cosine", "constant"], Doc("of the learning rate after the warm-up")] = "cosine"
    weight_decay: Annotated[float, Ge(0), Doc("of matrices; of all parameters with decay_all")] = 0.05
    decay_all: Annotated[bool, Doc("apply it to vectors and scalars too: norms, biases, tokens, positions")] = False
    betas: Annotated[tuple[float, float] | None, Doc("of the optimizer; None: its default")] = None
    clip_grad: Annotated[float | None, Gt(0), Doc("maximum norm of the gradient")] = None
    drop_path: Annotated[Fraction, Doc("stochastic depth of the last block, rising from 0 at the first")] = 0.0
    ema: Annotated[float | None, Gt(0), Lt(1), Doc("decay of averaged weights, which are kept if better")] = None
    augmentation: Annotated[Augmentation, Doc("transforms of training images")] = field(default_factory=Augmentation)
    distillation: Annotated[Distillation, Doc("how the model learns from its teacher")] = "none"
    alpha: Annotated[float, Ge(0), Doc("weight of the distillation loss")] = 0.5
    label_weight: Annotated[float | None, Ge(0), Doc("weight of the loss with the labels; None: 1 - alpha")] = None
    patch_weight: Annotated[float, Ge(0), Doc('weight of the patch tokens, with distillation = "soft_patch"')] = 1e-3
    temperature: Annotated[float, Gt(0), Doc("by which the logits of model and teacher are divided")] = 1.0
    teacher_smoothing: Annotated[Fraction, Doc('of the labels of the teacher, with distillation = "hard"')] = 0.0
    evaluate_every: Annotated[int, Ge(0), Doc("epochs between evaluations; 0: only after the last epoch")] = 1
    select: Annotated[Literal["last", "best"], Doc("epoch whose weights are kept; `best` on held-out images")] = "last"

    @property
    def peak_lr(self) -> float:
        """The largest learning rate of the schedule."""
        return self.lr if self.lr_base is None else self.lr_base * self.batch_size / 512

    @property
    def unused(self) -> dict[str, str]:
        """Options that differ from the defaults and have no effect beside the others -> the reason."""
        kind = f"distillation is {self.distillation!r}"
        return _unused(
            self,
            (self.lr_base is not None, "lr_base is set", ("lr",)),
            (self.schedule == "constant", "schedule is 'constant'", ("min_lr",)),
            (not self.warmup_epochs, "warmup_epochs is 0", ("warmup_lr",)),
            (not self.evaluate_every, "evaluate_every is 0", ("select",)),
            (self.distillation == "none", kind, ("alpha", "label_weight")),
            (self.distillation in ("none", "hard"), kind, ("temperature",)),  # with features, [quantize] uses it
            (self.distillation != "soft_patch", kind, ("patch_weight",)),
            (self.distillation != "hard", kind, ("teacher_smoothing",)),
        )

    @property
    def share_of_labels(self) -> float:
        """Weight of the labels beside a teacher."""
        return 1 - self.alpha if self.label_weight is None else self.label_weight


def _unused(options: Augmentation | TrainOptions, *rules: tuple[bool, str, tuple[str, ...]]) -> dict[str, str]:
    """Options for which a rule (holds, reason, names) holds, and that differ from the defaults -> the reason."""
    reasons = {name: reason for holds, reason, names in rules if holds for name in names}
    return {name: reasons[name] for name in reasons if getattr(options, name) != getattr(type(options), name)}


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
    raw: "Accuracy | None"
    ema: "Accuracy | None"
    chosen: Literal["raw", "ema"]
    epoch: int  # the epoch (from 0) whose weights were selected; -1 if nothing was trained

    @property
    def accuracy(self) -> "Accuracy | None":
        """Held-out accuracy of the selected weights."""
        return self.ema if self.chosen == "ema" else self.raw
