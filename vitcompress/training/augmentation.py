"""timm's image transforms, mixup and CutMix, configured by one table."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt
from PIL import Image, ImageOps
from timm.data import Mixup, create_transform
from torch import Tensor

from vitcompress.io.validation import Doc
from vitcompress.models.create import InputConfig

Share = Annotated[float, Ge(0), Le(1)]
Transform = Callable[[Image.Image], Tensor]


@dataclass(frozen=True)
class Augmentation:
    """Transforms of training images, with timm's names. The defaults change nothing.

    DeiT's recipe (Touvron et al., 2021, https://arxiv.org/abs/2012.12877, table 9) is no_aug=False,
    auto_augment="rand-m9-mstd0.5-inc1", color_jitter=0.3, reprob=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1, repeats=3.
    """

    no_aug: Annotated[
        bool,
        Doc("disable crop, flip, colour and erasing; mixup, cutmix, smoothing, repeats and noise are set separately"),
    ] = True
    auto_augment: Annotated[str | None, Doc("timm's policy string; disables colour jitter")] = None
    color_jitter: Annotated[float, Ge(0), Doc("strength; 0: off")] = 0.0
    hflip: Annotated[Share, Doc("share of images that are flipped")] = 0.5
    scale: Annotated[tuple[float, float], Doc("area of the random crop, as a share of the image")] = (0.08, 1.0)
    ratio: Annotated[tuple[float, float], Doc("aspect ratio (width / height) of the random crop")] = (3 / 4, 4 / 3)
    reprob: Annotated[Share, Doc("share of images with one erased rectangle")] = 0.0
    remode: Annotated[Literal["const", "rand", "pixel"], Doc("content of an erased rectangle")] = "pixel"
    mixup: Annotated[float, Ge(0), Doc("alpha of the Beta distribution; 0: off")] = 0.0
    cutmix: Annotated[float, Ge(0), Doc("alpha of the Beta distribution; 0: off")] = 0.0
    mixup_prob: Annotated[Share, Doc("share of batches with mixup or CutMix")] = 1.0
    mixup_switch_prob: Annotated[Share, Doc("share of those with CutMix, where both are on")] = 0.5
    smoothing: Annotated[float, Ge(0), Lt(1), Doc("label smoothing")] = 0.0
    repeats: Annotated[int, Ge(0), Doc("views of an image per pass (repeated augmentation); 0 or 1: off")] = 0
    noise: Annotated[float, Ge(0), Doc("standard deviation of Gaussian noise on the normalised pixels")] = 0.0

    @property
    def mixes(self) -> bool:
        """True when images of a batch are mixed, which makes targets soft."""
        return self.mixup > 0 or self.cutmix > 0


DEIT = Augmentation(False, "rand-m9-mstd0.5-inc1", 0.3, reprob=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1, repeats=3)


def train_transform(input: InputConfig, augmentation: Augmentation) -> Transform:
    """timm's training transform from a PIL image to a uint8 tensor (C, H, W)."""
    a = augmentation
    of_crop = {"hflip": a.hflip, "scale": a.scale, "ratio": a.ratio}
    of_colour = {"auto_augment": a.auto_augment, "color_jitter": a.color_jitter or None}
    transform = _transform(input, is_training=True, no_aug=a.no_aug, **of_crop, **of_colour)
    _allow_no_bits(transform)
    return transform


def eval_transform(input: InputConfig) -> Transform:
    """timm's evaluation transform (resize, centre crop) from a PIL image to a uint8 tensor (C, H, W)."""
    return _transform(input, is_training=False, crop_pct=input.crop_pct, crop_mode=input.crop_mode)


def _transform(input: InputConfig, **settings: Any) -> Transform:
    """timm's transform to the size of `input`; the prefetcher normalises images later."""
    pixels = {"interpolation": input.interpolation, "mean": input.mean, "std": input.std}
    transform: Transform = create_transform(input.size, use_prefetcher=True, **pixels, **settings)
    return transform


def mixup(augmentation: Augmentation, classes: int) -> Any:
    """timm's Mixup with this augmentation's settings, or None."""
    a = augmentation
    shares = {"prob": a.mixup_prob, "switch_prob": a.mixup_switch_prob, "label_smoothing": a.smoothing}
    return Mixup(a.mixup, a.cutmix, **shares, num_classes=classes) if a.mixes else None


def _posterize(image: Image.Image, bits_to_keep: int, **_: Any) -> Image.Image:
    """`image` with the `bits_to_keep` highest bits of each channel, from 0 (black) to 8 (all of them)."""
    if bits_to_keep <= 0:
        return image.point(lambda _: 0)
    return image if bits_to_keep >= 8 else ImageOps.posterize(image, bits_to_keep)


def _allow_no_bits(transform: Any) -> None:
    """Let the posterize operation in RandAugment, AugMix (`ops`) and AutoAugment (`policy`) take 0, which Pillow
    rejects.
    """
    for step in getattr(transform, "transforms", ()):
        for operation in (*getattr(step, "ops", ()), *chain(*getattr(step, "policy", ()))):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = _posterize
