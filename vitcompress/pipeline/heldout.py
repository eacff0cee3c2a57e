"""What models do on the held-out images of a run, outside of training."""

from torch import nn

from vitcompress.models.weights import part_of_weights
from vitcompress.pipeline.job import Job
from vitcompress.training.datasets import few
from vitcompress.training.loaders import EvalLoader
from vitcompress.training.metrics import Accuracy, evaluate, guessed


def heldout_accuracy(job: Job, model: nn.Module) -> Accuracy:
    """The accuracy of `model` on the held-out images; every process must call this.

    Raises:
        DataError: there are none.
    """
    assert job.data is not None
    loader = EvalLoader(job.data.heldout, job.input, job.recipe.finetune.batch_size, job.runtime)
    found = evaluate(model.to(job.runtime.device).eval(), loader, job.runtime)
    model.cpu()
    return found


def tell_given(job: Job, model: nn.Module) -> None:
    """Say what a dense model with weights of another training comes to, and whether that is more than guessing."""
    assert job.data is not None
    weights, found = job.recipe.model.weights, heldout_accuracy(job, model)
    if part := part_of_weights(weights):
        job.progress.note(f"dense model: `{part}` of {weights}")
    job.progress.note(f"dense model: held-out top-1 {found}")
    if guessed(found.correct, job.data.heldout.labels):
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (job.input.mean, job.input.std))
        job.progress.note(
            "no better than guessing, and everything is chosen by this model: was it trained on these classes, in "
            f"this order ({few(job.data.classes)}), on images of mean {mean} and standard deviation {std}?"
        )
