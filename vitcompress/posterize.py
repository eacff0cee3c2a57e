"""timm's policies ask for posterizing to 0 bits at their highest magnitudes, which Pillow has refused since version 12.

An image without bits is black, as in earlier versions of Pillow and so in the published trainings.
"""

from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageOps


def posterize(image: Image.Image, bits_to_keep: int, **_: Any) -> Image.Image:
    """`image` with the `bits_to_keep` highest bits of each channel, from 0 (black) to 8 (all of them)."""
    if bits_to_keep <= 0:
        return image.point(lambda _: 0)
    return image if bits_to_keep >= 8 else ImageOps.posterize(image, bits_to_keep)


def allow_no_bits(transform: Any) -> None:
    """Let the augmentation policies in `transform`, as timm composed it, posterize with `posterize`."""
    for operation in _operations(transform):
        if operation.name.startswith("Posterize"):
            operation.aug_fn = posterize


def _operations(transform: Any) -> Iterator[Any]:
    """Of RandAugment and AugMix, which hold them, and of AutoAugment, which holds lists of them."""
    for step in getattr(transform, "transforms", ()):
        yield from getattr(step, "ops", ())
        for policy in getattr(step, "policy", ()):
            yield from policy
