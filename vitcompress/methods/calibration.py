"""Training and held-out images for methods, never test images. Ranges of int8 are in `pipeline.calibration`."""

from dataclasses import replace
from typing import Any

from torch import nn

from vitcompress.errors import InputError
from vitcompress.methods.base import Context
from vitcompress.training.data import subset
from vitcompress.training.datasets import Images
from vitcompress.training.loaders import EVAL_BATCH, EvalLoader
from vitcompress.training.metrics import evaluate
from vitcompress.training.options import TrainOptions


def search_options(base: TrainOptions, epochs: int, lr: float, min_lr: float, **changes: Any) -> TrainOptions:
    """`base` for a training that serves a choice: labels only, no warm-up, no averaged weights, the last epoch."""
    plain: Any = {"warmup_epochs": 0, "ema": None, "distillation": "none", "select": "last", "lr_base": None}
    return replace(base, epochs=epochs, lr=lr, min_lr=min(min_lr, lr), **plain, **changes)


def accuracy(model: nn.Module, context: Context) -> float:
    """Top-1 in percent on the held-out images, a part of the training set. Leaves `model` in evaluation mode."""
    loader = EvalLoader(_check(context.data.heldout, "held-out"), context.input, EVAL_BATCH, context.runtime)
    return 100 * evaluate(model.eval(), loader, context.runtime).top1


def training_subset(context: Context, images_per_class: int) -> Images:
    """A class-balanced part of the training images, the same one for equal seeds; 0: all of them."""
    images = _check(context.data.train, "training")
    return subset(images, images_per_class, context.seed) if images_per_class else images


def calibration_images(context: Context, count: int, batch: int | None = None) -> EvalLoader:
    """`count` training images (all if there are fewer), balanced over the classes, with evaluation transforms.

    batch: images per process and pass.
    """
    images = subset(_check(context.data.train, "training"), count, context.seed, per_class=False)
    if len(images) < (processes := context.runtime.world_size):
        message = f"{len(images)} images cannot be shared by {processes} processes"
        raise InputError(message, hint="raise the number of images of the step, or start fewer processes")
    return EvalLoader(images, context.input, batch or EVAL_BATCH, context.runtime)


def _check(images: Images, kind: str) -> Images:
    if not len(images):
        message = f"this method needs images, and there are no {kind} images"
        hint = "pass data: a data set of (image, label) pairs or (images, labels) batches; in a recipe set [data]"
        raise InputError(message, hint=hint)
    return images
