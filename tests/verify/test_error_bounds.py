"""The bounds, at numbers whose roundings can be computed by hand."""

import math

import pytest
import torch
from contracts import build, images, logits
from torch import Tensor, nn

from vitcompress.families import family_of
from vitcompress.verify.tolerance import (
    _aten,
    _gamma,
    _variance_of_sums,
    exact_logits,
    fold_excess,
    pair_limits,
    rounding_limit,
)

ULP = 2.0**-23  # between neighbors in float32 from 1 to 2
LARGE = 2.0 - ULP  # the largest number below 2, which one unit in the last place changes by the unit roundoff


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def test_the_bound_on_successive_roundings() -> None:
    """Higham, section 3.1: n u / (1 - n u), with u = 2^-11 in float16."""
    assert _gamma(1024, torch.float16) == 1.0
    assert _gamma(2, torch.float16) == pytest.approx(2 / 2046, rel=1e-15)
    assert _gamma(0, torch.float64) == 0.0


@pytest.mark.parametrize("folds", [1, 2])
@pytest.mark.parametrize("units", [0, 1, 3, 5])
@pytest.mark.parametrize("where", ["weight", "bias"])
def test_a_fold_may_round_each_number_once_per_fold(where: str, units: int, folds: int) -> None:
    """All numbers are positive and rounded the same way, so that nothing cancels and the bound is reached.

    Up to 1e-5, which covers the roundings in float64 and that (1 + u)^2 - 1 is a little more than 2 u.
    """
    weight, bias = torch.full((3, 4), -LARGE), torch.full((3,), -LARGE)
    x = torch.rand(5, 4, generator=torch.Generator().manual_seed(0)) if where == "weight" else torch.zeros(5, 4)
    chain = [linear(torch.eye(4)), linear(weight, bias if where == "bias" else None)]
    folded = linear(weight, bias)
    with torch.no_grad():
        folded.bias.sub_(units * ULP) if where == "bias" else folded.bias.zero_()
        folded.weight.sub_(units * ULP if where == "weight" else 0.0)
    difference, quotient = fold_excess(chain, folded, x, folds=folds)
    reach = float(x.double().sum(1).max()) if where == "weight" else 1.0
    # from 2 on neighbors are two units apart
    assert difference == pytest.approx(units * ULP * reach, rel=1e-5)
    assert quotient == pytest.approx(units / folds, rel=1e-5)


def test_a_layer_scale_is_a_diagonal_matrix() -> None:
    """Two layers and a scale of powers of two: the product is exact, and any other result exceeds the bound."""
    first, second = linear(2 * torch.eye(4, 6)), linear(torch.ones(16, 4), torch.full((16,), 4.0))
    scale = 2.0 ** torch.arange(-8, 8)
    folded = linear(scale[:, None] * (torch.ones(16, 4) @ (2 * torch.eye(4, 6))), 4 * scale)
    x = torch.rand(5, 6, generator=torch.Generator().manual_seed(0)).double()
    assert fold_excess([first, second, scale], folded, x, folds=2)[1] < 1e-6  # float64 against float32
    with torch.no_grad():
        folded.weight[7, 3] += 4 * ULP * folded.weight[7, 3]
    assert fold_excess([first, second, scale], folded, x, folds=2)[1] > 0.1


def test_in_float64_only_the_arithmetic_differs() -> None:
    """A product in float64 keeps the bound of its sums; thirty times that bound gives thirty, within one."""
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((24, 6), (6, 24)))
    bias = torch.randn(6, generator=generator, dtype=torch.float64)
    x = torch.randn(1, 6, generator=generator, dtype=torch.float64)
    chain, folded = [linear(one), linear(two, bias)], linear(two @ one, bias)
    difference, quotient = fold_excess(chain, folded, x)
    assert difference > 0 and quotient <= 1
    terms = (x.abs() @ one.abs().T) @ two.abs().T + bias.abs()
    with torch.no_grad():  # the sums of both layers, of their product, and their biases, on both sides
        folded.bias += 30 * _gamma(2 * (6 + 24 + 2 + 1), torch.float64) * terms[0]
    assert fold_excess(chain, folded, x)[1] == pytest.approx(30, abs=1)


def test_two_evaluations_differ_more_than_one_from_the_exact_result() -> None:
    """Their variances add up; in float64 both are smaller by the quotient of the roundoffs."""
    model, x = build("plain", dtype=torch.float16), images("plain", dtype=torch.float32)
    (between, exact_between), one = pair_limits(model, x), rounding_limit(model, x).logit
    assert between == pytest.approx(one * math.sqrt(2), rel=1e-15)
    assert exact_between == pytest.approx(one * math.sqrt(2) * 2.0**-42, rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_exact_logits_are_those_of_the_model_in_float64_with_its_stored_weights(dtype: torch.dtype) -> None:
    model, x = build("plain", dtype=dtype), images("plain", dtype=torch.float32)
    exact = exact_logits(model, x)
    assert exact.dtype == torch.float64
    assert torch.equal(exact, logits(model.double(), x.double()))
    assert family_of(model).name == "vit" and not exact.requires_grad


def test_a_bias_is_no_part_of_the_sums_of_a_convolution() -> None:
    x, weight, bias = torch.randn(2, 3, 8, 8), torch.randn(5, 3, 4, 4), torch.full((5,), 1e3)
    variances = []
    for b in (None, bias):
        args = (x, weight, b, [4, 4], [0, 0], [1, 1], False, [0, 0], 1)
        variances.append(_variance_of_sums(_aten.convolution, args, _aten.convolution(*args)))
    assert torch.allclose(variances[0], variances[1], rtol=1e-3)
