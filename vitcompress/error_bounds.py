"""How far two evaluations of the same function may be apart, derived from the arithmetic and not from experience.

A whole model's answers are held against the limits of `rounding`, which hold with a stated probability; a folded layer
against a bound that always holds: gamma(n) = n u / (1 - n u) bounds the relative error of n roundings in a row, u being
the unit roundoff (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitcompress.rounding import arithmetic_limit, in_float64, narrowest, unit_roundoff

Layer = nn.Linear | Tensor  # of a chain: a linear layer, or a LayerScale as the diagonal that it is, (channels,)


def gamma(count: int, dtype: torch.dtype) -> float:
    """The bound on `count` roundings in a row."""
    error = count * unit_roundoff(dtype)
    return error / (1 - error)


@dataclass(frozen=True)
class Reference:
    """The exact answers of a model with the weights as stored, (images, classes), and how far rounding may lead away.

    tolerance: from them to an evaluation in the model's own precision. between: from one such evaluation to another,
    whose variances add up. exact_between: the same for evaluations in float64.
    """

    exact: Tensor
    tolerance: float
    roundoff: float

    @property
    def between(self) -> float:
        return math.sqrt(2) * self.tolerance

    @property
    def exact_between(self) -> float:
        return self.between * unit_roundoff(torch.float64) / self.roundoff


@torch.no_grad()
def reference(model: nn.Module, images: Tensor) -> Reference:
    """Answers in float64 to `images` (batch, channels, height, width), and what rounding may make of them."""
    limit = arithmetic_limit(model, images)
    with in_float64(model) as wide:
        exact: Tensor = wide(images.double())
    return Reference(exact, limit, unit_roundoff(narrowest(model)))


@torch.no_grad()
def fold_excess(layers: Sequence[Layer], folded: nn.Linear, x: Tensor, folds: int = 1) -> tuple[float, float]:
    """How `folded` compares with the chain `layers` that it stands for, on inputs `x`, (rows, channels).

    Both are evaluated in float64, so what remains is that the folded weights were rounded to their type once per fold.
    For every output, with W, b the exact product of the chain and |.| taken element by element,

        |folded(x) - chain(x)| <= ((1 + u)^folds - 1) (|W| |x| + |b|) + gamma_64 (chain of |weights|)(|x|).

    Returns the largest difference, and the largest quotient of difference and bound: at most 1 for a correct fold.
    """
    x = x.double()
    weight, bias = _exact(layers)
    difference = (_affine(x, *_stored(folded)) - _chain(layers, x)).abs()
    size = x.abs()
    once = unit_roundoff(folded.weight.dtype)
    stored = ((1 + once) ** folds - 1) * _affine(size, weight.abs(), bias.abs())
    steps = 2 * (sum(_stored(layer)[0].shape[-1] for layer in layers) + len(layers) + 1)
    arithmetic = gamma(steps, torch.float64) * _chain(layers, size, absolute=True)
    underflow = torch.finfo(folded.weight.dtype).smallest_normal * (size.sum(-1, keepdim=True) + 1)
    return float(difference.max()), float((difference / (stored + arithmetic + underflow)).max())


def _stored(layer: Layer) -> tuple[Tensor, Tensor]:
    """Weight and bias in float64."""
    if isinstance(layer, nn.Linear):
        weight = layer.weight.detach().double()
        return weight, weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach().double()
    scale = layer.detach().double()
    return torch.diag(scale), torch.zeros_like(scale)


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.T + bias


def _chain(layers: Sequence[Layer], x: Tensor, *, absolute: bool = False) -> Tensor:
    for layer in layers:
        weight, bias = _stored(layer)
        x = _affine(x, weight.abs(), bias.abs()) if absolute else _affine(x, weight, bias)
    return x


def _exact(layers: Sequence[Layer]) -> tuple[Tensor, Tensor]:
    """Weight and bias of the whole chain, in float64."""
    weight, bias = _stored(layers[0])
    for layer in layers[1:]:
        following, offset = _stored(layer)
        weight, bias = following @ weight, following @ bias + offset
    return weight, bias
