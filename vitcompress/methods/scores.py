"""Scores of the channels of each space: first-order Taylor scores, and criteria to compare them with.

Group Taylor importance (Molchanov et al., CVPR 2019, summed over coupled layers as in isomorphic pruning): the score of
a channel is the sum of |w * g| over all weights of the channel, where g is the gradient of the loss summed over the
calibration images. Biases, tokens, positions and LayerScales do not score, as in the released code.

    taylor     |w * g|       gradient   |g|
    magnitude  w^2           random     uniform, by the seed
"""

from collections.abc import Callable, Iterable
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional

from vitcompress.errors import PlanError, VitcompressError
from vitcompress.families import Space
from vitcompress.methods.base import Context
from vitcompress.methods.calibration import calibration_images
from vitcompress.methods.options import Criterion
from vitcompress.training.losses import check_outputs

UNMEASURED = ("magnitude", "random")  # criteria that need no images
Scores = dict[str, Tensor]


def check_scores(what: str, nonzero: Iterable[object]) -> None:
    """Raise PlanError if there are scores, and none of them is `nonzero`. what: is ranked by them."""
    if (scores := [bool(one) for one in nonzero]) and not any(scores):
        message = f"{what} cannot be ranked: all scores are 0"
        raise PlanError(message, hint="use more images, or check the model's weights and gradients")


def compute_scores(
    model: nn.Module, spaces: Iterable[Space], context: Context, criterion: Criterion, images: int
) -> Scores:
    """Space -> scores (channels,) in float64 by `criterion`, gradients taken over `images` training images."""
    if criterion == "random":
        return random_scores(spaces, context.seed)
    if criterion == "magnitude":
        return channel_scores(model, spaces, lambda name, weight: weight.square())
    slopes = gradients(model, context, images)
    if criterion == "gradient":
        return channel_scores(model, spaces, lambda name, weight: slopes[name].abs())
    return channel_scores(model, spaces, lambda name, weight: (weight * slopes[name]).abs())


def random_scores(spaces: Iterable[Space], seed: int) -> Scores:
    """Uniform in 0..1: a baseline, and sufficient where only the number of kept channels matters."""
    generator = torch.Generator().manual_seed(seed)
    return {space.name: torch.rand(space.size, generator=generator, dtype=torch.float64) for space in spaces}


@torch.no_grad()
def channel_scores(model: nn.Module, spaces: Iterable[Space], elements: Callable[[str, Tensor], Tensor]) -> Scores:
    """Space -> scores (channels,): `elements(name, weight)`, shaped as the weight, summed over a channel's weights.

    All on the CPU.
    """
    scores = {}
    for space in spaces:
        total = torch.zeros(space.size, dtype=torch.float64)
        for axis in (axis for axis in space.axes if axis.tensor.endswith(".weight") and not axis.per_head):
            owner = model.get_submodule(axis.owner)
            if isinstance(owner, nn.Linear | nn.Conv2d | nn.LayerNorm):
                values = elements(axis.tensor, owner.weight.cpu()).double()
                # Sum over the other dimensions, and then over the copies of the space on this one.
                rows = values.movedim(axis.dim, 0).flatten(1).sum(1) if values.ndim > 1 else values
                rows = rows[axis.offset : axis.offset + axis.copies * space.size]
                total += rows.view(axis.copies, space.size).sum(0)
        scores[space.name] = total
    return scores


def gradients(model: nn.Module, context: Context, images: int) -> dict[str, Tensor]:
    """d loss / d weight by name, on the CPU: cross entropy of the model in eval mode, summed over `images` images.

    With evaluation transforms and labels only; a distilled model outputs the mean of its heads. The released code adds
    the gradients of 50 batch means, which is this sum up to a constant factor and gives the same ranking, for any batch
    size and number of processes. Raises VitcompressError if a gradient is not finite.
    """
    check_outputs(model)
    copy = deepcopy(model).to(context.runtime.device).eval().requires_grad_(True)
    for inputs, targets in calibration_images(context, images):
        functional.cross_entropy(copy(inputs), targets, reduction="sum").backward()  # type: ignore[no-untyped-call]
    slopes = {
        name: context.runtime.all_sum(torch.zeros_like(p) if p.grad is None else p.grad).cpu()
        for name, p in copy.named_parameters()
    }
    if wrong := [name for name, gradient in slopes.items() if not torch.isfinite(gradient).all()]:
        message = f"the gradient of {wrong[0]} is not finite, so channels cannot be ranked by it"
        raise VitcompressError(message, hint="check the dense weights, or rank by criterion = 'magnitude'")
    return slopes
