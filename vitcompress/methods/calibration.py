"""Which images a method looks at: a balanced part of the training set, or the held-out ones; never the test images."""

from torch import nn

from vitcompress.methods.base import Context
from vitcompress.training.data import subset
from vitcompress.training.loaders import EvalLoader, Images
from vitcompress.training.metrics import evaluate


def accuracy(model: nn.Module, context: Context) -> float:
    """Top-1 in percent on the held-out split, which is cut from the training set; never on the test split."""
    loader = EvalLoader(context.data.heldout, context.input, eval_batch(context), context.runtime)
    training = model.training
    try:
        return 100 * evaluate(model.eval(), loader, context.runtime).top1
    finally:
        model.train(training)


def training_part(context: Context, images_per_class: int) -> Images:
    """A class-balanced part of the training set, always the same one for a seed; all of it for 0."""
    data = context.data
    return subset(data.train, images_per_class, context.seed) if images_per_class else data.train


def training_views(context: Context, images: int, batch: int | None = None) -> EvalLoader:
    """About `images` training images, class-balanced, seen through the evaluation transforms, `batch` at a time."""
    per_class = -(-images // len(context.data.classes))
    return EvalLoader(training_part(context, per_class), context.input, batch or eval_batch(context), context.runtime)


def eval_batch(context: Context) -> int:
    """Images per process and pass when nothing is trained; more than a small training batch, as it is faster."""
    return max(128, context.train.batch_size // context.runtime.world_size)
