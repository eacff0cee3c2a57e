"""The limits of rounding: their statistics; correct models keep them, and wrong models exceed them."""

import math
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from contracts import build, contract, every_variant, having, images, logits
from layer_plans import depth_plan
from torch import nn

from vitcompress import surgery
from vitcompress.io.checks import largest_difference
from vitcompress.verify.fold import fold_checks
from vitcompress.verify.tolerance import _factor, _roundoff, exact_logits, pair_limits, rounding_limit, storage_limit


@pytest.mark.parametrize("shared", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("count", [1, 40])
def test_the_largest_of_gaussian_variables_rarely_exceeds_the_factor(count: int, shared: float) -> None:
    """For any correlation `shared`: of 50,000 samples at most a share p, plus five deviations of that count."""
    generator = torch.Generator().manual_seed(0)
    one, each = (torch.randn(50_000, n, generator=generator) for n in (1, count))
    largest = (shared**0.5 * one + (1 - shared) ** 0.5 * each).abs().amax(1)
    for p in (0.05, 1e-3):
        exceed = int((largest > _factor(p) * largest.mean()).sum())
        assert exceed <= 50_000 * p + 5 * (50_000 * p) ** 0.5
    assert float(largest.max()) > 1.5 * float(largest.mean())


def test_the_error_of_a_sum_is_that_of_a_random_order() -> None:
    """The variance over 3000 orders is between a quarter of the formula's and all of it: an error is uniform within
    half a unit in the last place, which is u/2 to u times the number. Five standard deviations of it are allowed.
    """
    n, generator = 64, torch.Generator().manual_seed(0)
    terms = torch.rand(n, generator=generator).add_(0.3)
    orders = torch.stack([terms[torch.randperm(n, generator=generator)] for _ in range(3000)])
    total = torch.zeros(3000)
    for column in orders.unbind(1):
        total = total + column
    exact = float(terms.double().sum())
    variance = float((total.double() - exact).square().mean())
    squares = float(terms.double().square().sum())
    u = _roundoff(torch.float32)
    model = u**2 / 3 * (n + 1) / 6 * (2 * exact**2 + squares)
    allowed = 1 + 5 * (2 / 3000) ** 0.5
    assert model / 4 / allowed < variance < model * allowed


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_model_keeps_the_limit_of_its_own_precision(variant: str, dtype: torch.dtype) -> None:
    model, x = build(variant, dtype=dtype), images(variant, dtype=torch.float32)
    difference = largest_difference(logits(model, x.to(dtype)), exact_logits(model, x))
    limit = rounding_limit(model, x).logit
    assert 0 < difference <= limit
    assert pair_limits(model, x)[0] == pytest.approx(math.sqrt(2) * limit)  # the same draws each time


def test_the_limit_is_proportional_to_the_roundoff() -> None:
    """To first order: sums are alike, and bfloat16 rounds 8 times as much. 2 % of that is of second order."""
    model, x = build("plain", dtype=torch.float32), images("plain", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # the same numbers in all types
            parameter.copy_(parameter.bfloat16())
    limits = [rounding_limit(deepcopy(model).to(kind), x).logit for kind in (torch.bfloat16, torch.float16)]
    assert limits[0] / limits[1] == pytest.approx(8, rel=0.1)


def folding() -> tuple[nn.Module, nn.Module, list[str]]:
    """A model in float32 before and after two of its FFNs are folded, and their names."""
    model, base = build("plain", dtype=torch.float32), contract("plain").plan
    plan = base.then(depth_plan(model, base, [1], having(model, "activation", [0, 1])))
    unfolded = surgery.apply_plan(model, plan)
    folded = deepcopy(unfolded)
    return unfolded, folded, list(surgery.fold_linears(folded, plan)[0].folded)


def bias_of_one_channel(model: nn.Module) -> None:
    bias = model.get_parameter("blocks.0.mlp.bias")
    bias[int(bias.abs().argmax())] *= 1 + 1e-3


def two_heads_swapped(model: nn.Module) -> None:
    weight = model.get_parameter("blocks.0.attn.proj.weight")
    weight.copy_(torch.cat([weight[:, 8:], weight[:, :8]], dim=1))


def one_weight(model: nn.Module) -> None:
    model.get_parameter("blocks.1.mlp.weight")[3, 5] *= 1 + 1e-3


@pytest.mark.parametrize("harm", [bias_of_one_channel, two_heads_swapped, one_weight])
def test_a_wrong_fold_fails_end_to_end(harm: Callable[[nn.Module], None]) -> None:
    unfolded, folded, names = folding()
    x = images("plain", dtype=torch.float32)

    def verdict() -> str:
        return next(check.verdict for check in fold_checks(unfolded, folded, names, x) if check.name == "fold")

    assert verdict() == "passed"
    with torch.no_grad():
        harm(folded)
    assert verdict() == "failed"


@pytest.mark.parametrize("size", [1e4, 1e6])
@pytest.mark.parametrize("which", [0, slice(None)])
def test_a_large_bias_behind_a_fold_neither_hides_nor_widens_its_limit(which: int | slice, size: float) -> None:
    """A bias of the classifier adds the same before and after the fold, so it is no part of their difference.
    Float32 logits of that size are 1e-3 and more apart.
    """
    x, checks = images("plain", dtype=torch.float32), []
    for bias, harm in ((0.0, None), (size, None), (size, one_weight)):
        unfolded, folded, names = folding()
        with torch.no_grad():
            for model in (unfolded, folded):
                model.get_parameter("head.bias")[which] += bias
            if harm:
                harm(folded)
        checks.append(next(check for check in fold_checks(unfolded, folded, names, x) if check.name == "fold"))
    plain, biased, harmed = checks
    assert (plain.verdict, biased.verdict, harmed.verdict) == ("passed", "passed", "failed")
    assert biased.tolerance == pytest.approx(plain.tolerance, rel=1e-2)  # rounding of 1e6 in float64 is 1e-10


def test_the_limit_of_weights_that_were_not_rounded_is_0() -> None:
    model, x = build("plain", dtype=torch.float32), images("plain", dtype=torch.float32)
    assert storage_limit(model, {}, x) == 0.0
    once, twice = (storage_limit(model, {"blocks.0.mlp.fc1": times}, x) for times in (1, 2))
    assert twice / once == pytest.approx(2**0.5, rel=0.02)  # the same draws; 2 % is of second order


def test_drawing_errors_does_not_change_the_model() -> None:
    model, x = build("swin", dtype=torch.float32), images("swin", dtype=torch.float32)
    before, state = logits(model, x), {name: value.clone() for name, value in model.state_dict().items()}
    assert rounding_limit(model, x).logit > 0
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(logits(model, x), before)
