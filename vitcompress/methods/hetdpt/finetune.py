"""The short trainings of HetDPT's stage 1."""

from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Gt
from torch import nn

from vitcompress.io.validation import Doc
from vitcompress.methods.base import Context
from vitcompress.methods.calibration import training_subset
from vitcompress.training.options import TrainOptions


@dataclass(frozen=True, kw_only=True)
class FastTraining:
    """A short training on a class-balanced part of the training set, as in the released code: AdamW, weight decay for
    matrices only, every image once per epoch. Everything else follows the recipe's [finetune].
    """

    images_per_class: Annotated[int, Ge(0), Doc("training images of each class; 0: all")] = 100
    batch_size: Annotated[int | None, Ge(1), Doc("None: that of [finetune]")] = None
    lr: Annotated[float | None, Gt(0), Doc("peak learning rate; None: 5e-5 per 512 images of the batch")] = None
    min_lr: Annotated[float, Ge(0), Doc("final learning rate")] = 1e-5
    weight_decay: Annotated[float, Ge(0), Doc("of matrices")] = 0.05


def fast_options(context: Context, options: FastTraining, epochs: int, images: int) -> TrainOptions:
    """The options of [finetune], shortened: labels only, no warm-up, no averaged weights, the last epoch is kept."""
    # Whole batches for every process, and pairs for mixup.
    step = 2 * context.runtime.world_size * context.train.accumulate
    batch = max(step, min(options.batch_size or context.train.batch_size, images) // step * step)
    lr = options.lr or 5e-5 * batch / 512
    return replace(
        context.train,
        epochs=epochs,
        batch_size=batch,
        lr=lr,
        lr_base=None,
        min_lr=min(options.min_lr, lr),
        warmup_epochs=0,
        schedule="cosine",
        optimizer="adamw",
        betas=None,
        weight_decay=options.weight_decay,
        decay_all=False,
        augmentation=replace(context.train.augmentation, repeats=0),
        ema=None,
        distillation="none",
        select="last",
    )


def fine_tune(model: nn.Module, context: Context, options: FastTraining, epochs: int, name: str, label: str) -> None:
    """Train `model` in place, if there are epochs; of a finished training only load the weights.

    name: of the subfolder for the training's state. label: shown to users, and part of the seed.
    """
    if epochs:
        images = training_subset(context, options.images_per_class)
        settings = fast_options(context, options, epochs, len(images))
        context.run_training(model, images, None, settings, name, label=label)
