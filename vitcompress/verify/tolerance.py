"""How far two evaluations of the same function may be apart, derived from the arithmetic and not from experience.

A whole model's answers are held against the limits of `rounding`, which hold with a stated probability; a folded layer
against a bound that always holds: gamma(n) = n u / (1 - n u) bounds the relative error of n roundings in a row, u being
the unit roundoff (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

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


FALSE_ALARMS = 1e-6  # p: how often a correct model may fail a check
DRAWS = 2  # E M is their mean; with tens of logits or more M itself hardly varies
LOGITS = 1000  # so many are drawn at least, where there are as many: more only take time
# Errors of operations are drawn no smaller than this and their effect is scaled back, or the float32 that they are
# drawn in would drown them: the square root of float32's roundoff is as far above that as below 1.
DRAWN = 2.0**-12
_aten = torch.ops.aten
_SUMS = {_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten.convolution}
_COPIES = {_aten.clone, _aten.copy_, _aten._to_copy, _aten.cat, _aten.index, _aten.roll, _aten.constant_pad_nd}


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number of a type."""
    return torch.finfo(dtype).eps / 2


def narrowest(model: nn.Module) -> torch.dtype:
    """The type of those of `model`'s parameters that hold the fewest digits."""
    return max((parameter.dtype for parameter in model.parameters()), key=unit_roundoff)


def factor(p: float) -> float:
    """The largest of normal deviations exceeds so many times its mean with a probability of at most `p`."""
    return 1 + math.sqrt(math.pi * math.log(1 / p))


@contextmanager
def in_float64(model: nn.Module) -> Iterator[nn.Module]:
    """`model` itself in float64 inside this block, without a second copy of it beside the wider one.

    Afterwards it is bit for bit what it was: float64 holds every value of the narrower types.
    """
    narrow = {name: tensor.dtype for name, tensor in _tensors_of(model)}
    try:
        yield model.double()
    finally:
        for name, tensor in _tensors_of(model):
            tensor.data = tensor.data.to(narrow[name])


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from (*model.named_parameters(), *model.named_buffers())


@torch.no_grad()
def arithmetic_limit(model: nn.Module, images: Tensor) -> float:
    """How far rounding in `model`'s own type may move a logit. Products are added in float32 or better.

    images: (batch, channels, height, width).
    """
    each = unit_roundoff(narrowest(model))
    drawn = max(each, DRAWN)
    wide = model if each <= unit_roundoff(torch.float32) else deepcopy(model).float()
    sums = min(each, unit_roundoff(torch.float32)) * drawn / each
    generator = torch.Generator().manual_seed(0)

    def perturbed(x: Tensor) -> Tensor:
        with _Rounding(drawn, sums, generator) as rounding:
            out: Tensor = wide(rounding.rounded(x))
        return out

    with sdpa_kernel(SDPBackend.MATH):  # as the operations that it consists of
        return _limit(wide, images, perturbed) * each / drawn


@torch.no_grad()
def storage_limit(model: nn.Module, roundings: Mapping[str, int], images: Tensor) -> float:
    """How far a logit may move because weights and biases were rounded to `model`'s own type.

    roundings: module -> how often its parameters were rounded. images: (batch, channels, height, width).
    """
    each = unit_roundoff(narrowest(model))
    drawn = max(each, math.sqrt(unit_roundoff(torch.float64)))
    generator = torch.Generator().manual_seed(0)

    def perturbed(x: Tensor) -> Tensor:
        changed = {
            f"{name}.{key}": value + value * _uniform(value, generator) * drawn * math.sqrt(times)
            for name, times in roundings.items()
            for key, value in wide.get_submodule(name).named_parameters(recurse=False)
        }
        out: Tensor = functional_call(wide, changed, (x,))
        return out

    # What these errors come to may be far smaller than the answers, as beside a large bias: float32 would not show it.
    with in_float64(model) as wide:
        return _limit(wide, images, perturbed) * each / drawn


def _limit(wide: nn.Module, images: Tensor, perturbed: Callable[[Tensor], Tensor]) -> float:
    """What the largest deviation of `perturbed` answers exceeds with the probability FALSE_ALARMS at most."""
    classes = wide(images[:1].to(next(wide.parameters()).dtype)).shape[-1]
    x = images[: 1 + LOGITS // classes].to(next(wide.parameters()).dtype)
    clean = wide(x)
    mean = sum(float((perturbed(x) - clean).abs().max()) for _ in range(DRAWS)) / DRAWS
    return factor(FALSE_ALARMS) * mean


class _Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, every result of torch is off by what its roundings make."""

    def __init__(self, each: float, sums: float, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.each, self.sums, self.generator = each, sums, generator

    def rounded(self, exact: Tensor) -> Tensor:
        return exact + exact * _uniform(exact, self.generator) * self.each * math.sqrt(3)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) else out
        kind = func.overloadpacket
        computed = isinstance(first, Tensor) and first.is_floating_point() and not func.is_view
        if computed and kind not in _COPIES:
            size = first * self.each
            if kind in _SUMS:
                size = size.square_().add_(_variance_of_sums(kind, args, first), alpha=self.sums**2).sqrt_()
            # Uniform as in the model; what adds up in the answers is normal whatever the parts are.
            first.addcmul_(size, _uniform(first, self.generator), value=math.sqrt(3))
        return out


def _uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.empty_like(like).uniform_(-1, 1, generator=generator)


def _variance_of_sums(kind: Any, args: Any, out: Tensor) -> Tensor:
    """The error of adding up in a matrix product or a convolution, in units of the squared roundoff."""
    if kind is _aten.convolution:
        images, weight, bias, *rest = args
        n = weight[0].numel()
        squares = kind(images.square(), weight.square(), None, *rest)
        total = out if bias is None else out - bias.view(-1, *[1] * (out.ndim - 2))
    else:
        a, b = args[-2:]
        n, total = a.shape[-1], out if len(args) == 2 else out - args[0]
        squares = a.square() @ b.square()
    variance: Tensor = squares.mul_(1 / 3 + (n + 1) / 18).addcmul_(total, total, value=(n + 1) / 9)
    return variance
