"""A tiny model, tiny images and a context for running methods for real, in seconds and without any download."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitcompress.families import family_of
from vitcompress.io.progress import Progress
from vitcompress.methods.base import Clock, Context, Measured
from vitcompress.models.create import create_model, input_config
from vitcompress.plan import Plan
from vitcompress.training.data import Splits
from vitcompress.training.datasets import ArrayImages, Images
from vitcompress.training.distributed import Runtime
from vitcompress.training.options import TrainOptions

ARCH = "vit_tiny_patch16_224"
CLASSES = 3


class Untouchable:
    """The test split, of which a method must not read an image."""

    labels = np.arange(CLASSES)

    def __len__(self) -> int:
        return CLASSES

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a method read a test image")


def arguments(depth: int = 3, width: int = 16) -> dict[str, Any]:
    return {
        "img_size": 8,
        "patch_size": 4,
        "in_chans": 1,
        "embed_dim": width,
        "depth": depth,
        "num_heads": 2,
        "num_classes": CLASSES,
    }


def model(depth: int = 3, width: int = 16, **more: Any) -> nn.Module:
    """Random weights, larger than timm's so that every layer matters."""
    vit = create_model(ARCH, arguments(depth, width) | more, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return vit


def images(per_class: int, seed: int) -> ArrayImages:
    """Noise around one pattern per class, 8x8 gray."""
    draw = np.random.default_rng(seed)
    patterns = np.random.default_rng(0).integers(0, 256, (CLASSES, 8, 8))
    labels = np.repeat(np.arange(CLASSES), per_class)
    pixels = np.clip(patterns[labels] * 0.4 + draw.normal(60, 40, (len(labels), 8, 8)), 0, 255)
    return ArrayImages(pixels.astype(np.uint8), labels)


def clock(measure: Callable[[nn.Module, str], float]) -> Clock:
    """A clock without disturbances."""
    return lambda model, goal: Measured(*4 * [measure(model, goal.runtime)])


def context(folder: Path, vit: nn.Module, **changes: Any) -> Context:
    """A context on one CPU process; `changes` replace fields."""
    untouchable: Images = Untouchable()
    splits = Splits("noise", ("a", "b", "c"), images(16, 3), images(8, 4), untouchable)
    args = arguments(len(family_of(vit).blocks(vit)))
    base = Context(
        Plan(ARCH, args),
        family_of(vit),
        splits,
        input_config(vit),
        Runtime(torch.device("cpu")),
        folder,
        0,
        Progress(),
        TrainOptions(epochs=2, batch_size=16, lr=1e-3),
    )
    return replace(base, **changes)
