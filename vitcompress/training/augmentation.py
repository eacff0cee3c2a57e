"""timm's image transforms, mixup and CutMix, configured by one table."""

from collections.abc import Callable
from itertools import chain
from typing import Any, cast

from PIL import Image, ImageOps
from timm.data import Mixup, create_transform
from torch import Tensor

from vitcompress.models.create import InputConfig
from vitcompress.training.options import Augmentation

Transform = Callable[[Image.Image], Tensor]


def image_transform(input: InputConfig, augmentation: Augmentation | None = None) -> Transform:
    """timm's transform from a PIL image to a uint8 tensor (C, H, W), which the prefetcher normalises later: for
    training with an `augmentation`, else for evaluation (resize and crop).
    """
    settings: dict[str, Any] = {"crop_pct": input.crop_pct, "crop_mode": input.crop_mode}
    if a := augmentation:
        settings = {"hflip": a.hflip, "scale": a.scale, "ratio": a.ratio, "no_aug": a.no_aug}
        settings |= {"auto_augment": a.auto_augment, "color_jitter": a.color_jitter or None}
    pixels = {"interpolation": input.interpolation, "mean": input.mean, "std": input.std}
    transform: Any = create_transform(input.size, bool(a), use_prefetcher=True, **pixels, **settings)
    # Posterize in RandAugment, AugMix (`ops`) and AutoAugment (`policy`) may keep no bit, which Pillow rejects.
    for step in getattr(transform, "transforms", ()):
        for operation in (*getattr(step, "ops", ()), *chain(*getattr(step, "policy", ()))):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = _posterize
    return cast(Transform, transform)


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
