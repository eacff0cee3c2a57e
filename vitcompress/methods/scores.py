"""How much each channel of each space matters: first-order Taylor scores, and the criteria they are compared with.

Group Taylor importance (Molchanov et al., CVPR 2019, summed over coupled layers as in isomorphic pruning): the score of
a channel is the sum of |w * g| over all weights that the channel runs through, g being the gradient of the loss summed
over the calibration images. Biases, tokens, positions and LayerScales do not score, as in the released code.

    taylor     |w * g|       gradient   |g|
    magnitude  w^2           random     drawn by the seed
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from vitcompress.errors import VitcompressError
from vitcompress.families import Axis, Space
from vitcompress.methods.base import Context
from vitcompress.methods.calibration import training_views

Criterion = Literal["taylor", "magnitude", "gradient", "random"]
UNMEASURED = ("magnitude", "random")  # criteria that need no images
Scores = dict[str, Tensor]
Elements = Callable[[str, Tensor], Tensor]
SCORING = (nn.Linear, nn.Conv2d, nn.LayerNorm)


def scored(model: nn.Module, spaces: Iterable[Space], context: Context, criterion: Criterion, images: int) -> Scores:
    """Space -> scores (channels,) in float64 by `criterion`, gradients taken over `images` training images."""
    if criterion == "random":
        return random_scores(spaces, context.seed)
    if criterion == "magnitude":
        return channel_scores(model, spaces, lambda name, weight: weight.square())
    found = gradients(model, context, images)
    if criterion == "gradient":
        return channel_scores(model, spaces, lambda name, weight: found[name].abs())
    return channel_scores(model, spaces, lambda name, weight: (weight * found[name]).abs())


def random_scores(spaces: Iterable[Space], seed: int) -> Scores:
    """Uniform in 0..1, for a comparison, and where only sizes are of interest."""
    generator = torch.Generator().manual_seed(seed)
    return {space.name: torch.rand(space.size, generator=generator, dtype=torch.float64) for space in spaces}


@torch.no_grad()
def channel_scores(model: nn.Module, spaces: Iterable[Space], elements: Elements) -> Scores:
    """Sum of `elements(name, weight)`, shaped as the weight, over all scoring tensors that a channel runs through."""
    weights = {
        f"{path}.weight": module.weight
        for path, module in model.named_modules()
        if isinstance(module, SCORING) and module.weight is not None
    }
    found = {}
    for space in spaces:
        total = torch.zeros(space.size, dtype=torch.float64)
        for axis in space.axes:
            if axis.tensor in weights and not axis.per_head:
                total += _along(axis, space.size, elements(axis.tensor, weights[axis.tensor]).double().cpu())
        found[space.name] = total
    return found


def _along(axis: Axis, size: int, values: Tensor) -> Tensor:
    """`values` summed over all dimensions but the axis, and over the copies of the space on it: (size,)."""
    rows = values.movedim(axis.dim, 0).flatten(1).sum(1) if values.ndim > 1 else values
    return rows[axis.offset : axis.offset + axis.copies * size].view(axis.copies, size).sum(0)


def gradients(model: nn.Module, context: Context, images: int) -> dict[str, Tensor]:
    """d loss / d weight by name, on the CPU: cross entropy of the model in eval mode, summed over `images` images.

    Evaluation transforms, labels only; a distilled model answers with the mean of its heads. The released code adds up
    the gradients of 50 batch means; up to a constant factor, which no ranking sees, that is this sum, whatever the
    batches are and however they are shared among processes.
    """
    copy = deepcopy(model).to(context.runtime.device).eval().requires_grad_(True)
    for inputs, targets in training_views(context, images):
        functional.cross_entropy(copy(inputs), targets, reduction="sum").backward()  # type: ignore[no-untyped-call]
    none = {name for name, parameter in copy.named_parameters() if parameter.grad is None}
    found = {
        name: context.runtime.all_sum(torch.zeros_like(p) if name in none else p.grad).cpu()  # type: ignore[arg-type]
        for name, p in copy.named_parameters()
    }
    if wrong := [name for name, gradient in found.items() if not torch.isfinite(gradient).all()]:
        raise VitcompressError(
            f"the gradient of {wrong[0]} is not finite, so channels cannot be ranked by it",
            hint="check the dense weights, or rank by criterion = 'magnitude'",
        )
    return found
