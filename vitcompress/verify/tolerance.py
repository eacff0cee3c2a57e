"""Tolerances derived from floating-point arithmetic: how much may two evaluations of the same function differ?

Logits: each operation of the model adds an independent error to its result y, with a standard deviation of u |y| for
the unit roundoff u. Sums add another one: n products p_i that are added in random order, with every partial sum
rounded, have a variance of u^2 ((1/3 + (n + 1) / 18) sum p_i^2 + (n + 1) / 9 (sum p_i)^2). Monte Carlo arithmetic
(Parker, Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic, UCLA CSD-970002, 1997) draws these
errors and estimates E M, the mean over draws of the largest error M of all logits. Errors of logits are sums of
many small ones and so nearly Gaussian, whatever their correlation. Then P(M > E M + t s) <= exp(-t^2 / 2) for the
largest standard deviation s (Borell-TIS inequality), and s <= sqrt(pi / 2) E M, so that M exceeds

    (1 + sqrt(pi ln(1 / p))) E M

with a probability of at most p = 1e-6, the rate of false alarms. Two evaluations differ by sqrt(2) times as much,
because variances add. The norm of the errors of an image is the largest of Gaussian variables too, their products with
all unit vectors, so that the same bound holds; so is, for small errors, the root of the KL divergence of an image, as
it is half the variance of its errors under the probabilities of its classes.

Eight bits: each operand of a quantized product is clipped to its range, and adds an independent error of at most half
the distance between the two numbers around it, uniformly distributed. The bound on the largest error is the same.

Folded layers: gamma(n) = n u / (1 - n u) bounds the relative error of n successive roundings, without any probability
(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from vitcompress.exporters.quantize.emulate import EightBitProducts, stored_tensors
from vitcompress.exporters.quantize.graph import Quantization
from vitcompress.exporters.ranges import SeparateOperations
from vitcompress.training.metrics import kl_divergence

FALSE_ALARMS = 1e-6  # p
DRAWS = 2  # E M is the mean of their M; with tens of logits or more, M itself hardly varies
BATCH = 16  # images that a model is evaluated on at once
LOGITS = 1000  # drawn at least, but on no more than BATCH images
# Errors are drawn no smaller than this, and their effect is scaled back: float32, in which they are drawn, would hide
# smaller ones. The square root of float32's roundoff is as far above that as below 1.
SMALLEST_DRAWN = 2.0**-12
_aten = torch.ops.aten
_SUMS = {_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten.convolution}
_COPIES = {_aten.clone, _aten.copy_, _aten._to_copy, _aten.cat, _aten.index, _aten.roll, _aten.constant_pad_nd}


@dataclass(frozen=True)
class Rounding:
    """How much rounding may change a logit, all logits of an image (Euclidean norm), and its KL divergence in nats."""

    logit: float
    norm: float
    kl: float


def pair_limits(model: nn.Module, images: Tensor) -> tuple[float, float]:
    """How much a logit of two evaluations of `model` may differ, in its own precision and in float64.

    images: (count, channels, height, width).
    """
    between = math.sqrt(2) * rounding_limit(model, images).logit
    return between, between * _roundoff(torch.float64) / _model_roundoff(model)


@torch.no_grad()
def model_logits(model: nn.Module, images: Tensor) -> Tensor:
    """The logits of `images`, in batches and the model's own precision: (count, classes). Tokens are flattened."""
    model, dtype = model.eval(), next(model.parameters()).dtype
    return torch.cat([model(part.to(dtype)).flatten(1) for part in torch.split(images, BATCH)])


def exact_logits(model: nn.Module, images: Tensor) -> Tensor:
    """Those of `model` in float64, (count, classes), for images (count, channels, height, width)."""
    with in_float64(model) as wide:
        return model_logits(wide, images)


@torch.no_grad()
def rounding_limit(model: nn.Module, images: Tensor, dtype: torch.dtype | None = None) -> Rounding:
    """How much logits may change if every result is rounded to the precision of `model`.

    Products are added in float32 or better, as in tensor cores. images: (count, channels, height, width). dtype: a
    lower precision, to which the parameters are rounded too, as in an exported file.
    """
    stored = _model_roundoff(model)
    each = stored if dtype is None else max(stored, _roundoff(dtype))
    drawn = max(each, SMALLEST_DRAWN)
    wide = model if stored <= _roundoff(torch.float32) else deepcopy(model).float()
    parameters = dict(wide.named_parameters()) if each > stored else {}
    sums = min(each, _roundoff(torch.float32)) * drawn / each
    generator = torch.Generator().manual_seed(0)

    def perturbed(x: Tensor) -> Tensor:
        errors = _RandomErrors(drawn, sums, generator)
        changed = {name: errors.perturb(value) for name, value in parameters.items()}
        with errors:
            return cast(Tensor, functional_call(wide, changed, (errors.perturb(x),)))

    with SeparateOperations():
        return _limit(wide, images, perturbed, each / drawn)


@torch.no_grad()
def quantization_limit(model: nn.Module, images: Tensor, settings: Quantization) -> Rounding:
    """How much logits may change in a file with these settings. images: (count, channels, height, width)."""
    generator, stored = torch.Generator().manual_seed(0), stored_tensors(model, settings)

    def perturbed(x: Tensor) -> Tensor:
        with EightBitProducts(model, settings, generator):
            return cast(Tensor, functional_call(model, stored, (x,)))

    return _limit(model, images, perturbed, 1.0)


@torch.no_grad()
def storage_limit(model: nn.Module, roundings: Mapping[str, int], images: Tensor) -> float:
    """How much a logit may change because parameters were rounded to the precision of `model`.

    roundings: module -> how often its parameters were rounded. images: (count, channels, height, width).
    """
    each = _model_roundoff(model)
    drawn = max(each, math.sqrt(_roundoff(torch.float64)))
    generator = torch.Generator().manual_seed(0)

    def perturbed(x: Tensor) -> Tensor:
        changed = {
            f"{name}.{key}": value + value * _uniform(value, generator) * drawn * math.sqrt(times)
            for name, times in roundings.items()
            for key, value in wide.get_submodule(name).named_parameters(recurse=False)
        }
        return cast(Tensor, functional_call(wide, changed, (x,)))

    # These errors may be far smaller than the logits, for example beside a large bias: float32 would hide them.
    with in_float64(model) as wide:
        return _limit(wide, images, perturbed, each / drawn).logit


@torch.no_grad()
def fold_excess(
    layers: Sequence[nn.Linear | Tensor], folded: nn.Linear, x: Tensor, folds: int = 1
) -> tuple[float, float]:
    """Compare `folded` with the chain `layers` that it replaces, on inputs `x`, (rows, channels).

    layers: linear layers, and LayerScales as their values, (channels,). Both sides are evaluated in float64, so that
    they differ because the folded weights were rounded to their type once per fold. For every output, with the exact
    product W, b of the chain, u of that type, and |.| element by element,

        |folded(x) - chain(x)| <= ((1 + u)^folds - 1) (|W| |x| + |b|) + gamma_64 (chain of |weights|)(|x|).

    Returns the largest difference, and the largest quotient of difference and bound: at most 1 for a correct fold.
    """
    x, chain, result = x.double(), [_affine_map(layer) for layer in layers], _affine_map(folded)
    difference = (_apply(x, result) - _apply(x, *chain)).abs()
    weight, bias = chain[0]
    for following, offset in chain[1:]:
        weight, bias = following @ weight, following @ bias + offset
    size, u = x.abs(), _roundoff(folded.weight.dtype)
    stored = ((1 + u) ** folds - 1) * _apply(size, (weight.abs(), bias.abs()))
    steps = 2 * (sum(matrix.shape[-1] for matrix, _ in chain) + len(chain) + 1)
    arithmetic = _gamma(steps, torch.float64) * _apply(size, *((w.abs(), b.abs()) for w, b in chain))
    underflow = torch.finfo(folded.weight.dtype).smallest_normal * (size.sum(-1, keepdim=True) + 1)
    return float(difference.max()), float((difference / (stored + arithmetic + underflow)).max())


@contextmanager
def in_float64(model: nn.Module) -> Iterator[nn.Module]:
    """`model` itself in float64, without a copy. On exit it is bit for bit as before."""
    dtypes = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    try:
        yield model.double()
    finally:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.data = tensor.data.to(dtypes[name])


def _affine_map(layer: nn.Linear | Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias in float64."""
    if isinstance(layer, nn.Linear):
        weight = layer.weight.detach().double()
        return weight, weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach().double()
    scale = layer.detach().double()
    return torch.diag(scale), torch.zeros_like(scale)


def _apply(x: Tensor, *maps: tuple[Tensor, Tensor]) -> Tensor:
    for weight, bias in maps:
        x = x @ weight.T + bias
    return x


def _gamma(count: int, dtype: torch.dtype) -> float:
    """The bound on `count` successive roundings."""
    error = count * _roundoff(dtype)
    return error / (1 - error)


def _roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number of a type."""
    return torch.finfo(dtype).eps / 2


def _model_roundoff(model: nn.Module) -> float:
    """That of the least precise of the parameters."""
    return max(_roundoff(parameter.dtype) for parameter in model.parameters())


def _factor(p: float) -> float:
    """The factor k with P(M > k E M) <= p for the largest magnitude M of Gaussian variables."""
    return 1 + math.sqrt(math.pi * math.log(1 / p))


def _limit(wide: nn.Module, images: Tensor, perturbed: Callable[[Tensor], Tensor], scale: float) -> Rounding:
    """The limits that errors of `scale` times those of `perturbed` exceed with a probability of at most FALSE_ALARMS.

    Both are drawn on the first `BATCH` images only, fewer if the model has many classes.
    """
    x = images[: min(BATCH, 1 + LOGITS // model_logits(wide, images[:1]).shape[1])].to(next(wide.parameters()).dtype)
    clean, draws = model_logits(wide, x), [perturbed(x).flatten(1) for _ in range(DRAWS)]
    factor = _factor(FALSE_ALARMS) * scale / DRAWS
    errors = sum(float((logits - clean).abs().max()) for logits in draws)
    norms = sum(float((logits - clean).norm(dim=1).max()) for logits in draws)
    roots = sum(float(kl_divergence(clean, logits).max()) ** 0.5 for logits in draws)
    return Rounding(factor * errors, factor * norms, (factor * roots) ** 2)


class _RandomErrors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, adds random rounding errors to every result of torch."""

    def __init__(self, each: float, sums: float, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.each, self.sums, self.generator = each, sums, generator

    def perturb(self, exact: Tensor) -> Tensor:
        return exact + exact * _uniform(exact, self.generator) * self.each * math.sqrt(3)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) else out
        kind = func.overloadpacket
        if isinstance(first, Tensor) and first.is_floating_point() and not func.is_view and kind not in _COPIES:
            size = first * self.each
            if kind in _SUMS:
                size = size.square_().add_(_variance_of_sums(kind, args, first), alpha=self.sums**2).sqrt_()
            first.addcmul_(size, _uniform(first, self.generator), value=math.sqrt(3))
        return out


def _uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.empty_like(like).uniform_(-1, 1, generator=generator)


def _variance_of_sums(kind: Any, args: Any, out: Tensor) -> Tensor:
    """The variance of the sums in a matrix product or a convolution, in units of u^2."""
    if kind is _aten.convolution:
        images, weight, bias, *rest = args
        n = weight[0].numel()
        squares = kind(images.square(), weight.square(), None, *rest)
        total = out if bias is None else out - bias.view(-1, *[1] * (out.ndim - 2))
    else:
        a, b = args[-2:]
        n, total = a.shape[-1], out if len(args) == 2 else out - args[0]
        squares = a.square() @ b.square()
    return cast(Tensor, squares.mul_(1 / 3 + (n + 1) / 18).addcmul_(total, total, value=(n + 1) / 9))
