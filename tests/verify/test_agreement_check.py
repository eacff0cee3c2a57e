"""The check of predicted classes allows changes within the tolerance of the logits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from vitcompress.io.checks import Check
from vitcompress.training.metrics import wilson
from vitcompress.verify.outputs import agreement_check


def test_a_changed_class_passes_only_within_the_tolerance() -> None:
    expected = torch.tensor([[1.0, 0.0], [0.0, 1e-6]])
    flipped = torch.tensor([[1.0, 0.0], [1e-6, 0.0]])
    assert agreement_check("a", expected, flipped, 1e-6).verdict == "passed"
    assert "2 of 2" in agreement_check("a", expected, flipped, 1e-6).detail
    assert agreement_check("a", expected, flipped, 1e-7).verdict == "failed"
    assert agreement_check("a", expected, expected * torch.nan, 1.0).verdict == "failed"


def logits(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(("margin", "within"), [(0.0, True), (1.9, True), (2.1, False)])
def test_a_changed_class_is_allowed_within_twice_the_tolerance(margin: float, within: bool) -> None:
    """Each of the two best may have an error of the tolerance. The third does not matter."""
    expected = torch.cat([logits([-9.0, 0.0, margin + 1e-9]), logits([0.0, 9.0, 1.0]).repeat(19, 1)])
    got = expected.clone()
    got[0, 1:] = got[0, 1:].flip(0)
    low, high = (f"{100 * end:.1f}" for end in wilson(1, 20))
    detail = (
        f"agrees with the model: {19 + within} of 20 images (1 in another class, 95 % interval {low} to {high} %; "
        f"{int(within)} of them between near ties, which rounding explains)"
    )
    verdict: Any = "passed" if within else "failed"
    assert agreement_check("a", expected, got, 1.0) == Check("a", verdict, float(not within), 0.0, detail)
    (one, two) = (agreement_check("a", expected[:count], expected[:count], 1.0) for count in (1, 20))
    assert one.verdict == two.verdict == "passed" and "20 of 20" in two.detail and "near" not in two.detail


@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
def test_a_logit_that_is_not_finite_fails(wrong: float) -> None:
    expected = logits([1.0, 0.0], [0.0, 1.0])
    got = expected.clone()
    got[1, 0] = wrong
    assert agreement_check("a", expected, got, 9.0).verdict == "failed"


def test_a_model_of_one_class_agrees_with_itself() -> None:
    assert agreement_check("a", logits([1.0], [2.0]), logits([1.5], [0.0]), 0.0).verdict == "passed"
