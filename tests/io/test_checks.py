"""A check passes up to its limit and not beyond, NaN never does, and what was not run is not passed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vitcompress.io.checks import (
    LEDGER,
    Check,
    Verification,
    largest_difference,
    limit_check,
    problem_check,
    update_verification,
)
from vitcompress.training.metrics import wilson
from vitcompress.verify.outputs import agreement_check


def test_a_changed_answer_passes_only_within_rounding() -> None:
    logits = torch.tensor([[1.0, 0.0], [0.0, 1e-6]])
    flipped = torch.tensor([[1.0, 0.0], [1e-6, 0.0]])
    assert agreement_check("a", logits, flipped, 1e-6).verdict == "passed"
    assert "1 of 2" in agreement_check("a", logits, flipped, 1e-6).detail
    assert agreement_check("a", logits, flipped, 1e-7).verdict == "failed"
    assert agreement_check("a", logits, logits * torch.nan, 1.0).verdict == "failed"


def test_nan_never_passes_and_is_written_as_json() -> None:
    check = limit_check("x", float("nan"), 1.0)
    assert check.verdict == "failed"
    assert json.loads(json.dumps(check.to_dict(), allow_nan=False))["value"] is None


def test_nothing_run_is_not_passed() -> None:
    not_run = Check("a", "not_run", command="there")
    assert not Verification((not_run,)).passed
    assert not Verification(()).passed
    assert Verification((not_run, limit_check("b", 0.0, 0.0))).passed
    assert not_run.to_dict()["passed"] is False


@pytest.mark.parametrize(("value", "verdict"), [(0.0, "passed"), (1.0, "passed"), (1.0 + 2**-52, "failed")])
def test_a_value_passes_up_to_its_tolerance(value: float, verdict: str) -> None:
    assert limit_check("x", value, 1.0, "what") == Check("x", verdict, value, 1.0, "what")  # type: ignore[arg-type]


def test_a_verification_is_written_as_it_is() -> None:
    known = {"name": "x", "value": 1.5, "tolerance": 2.0, "detail": "what", "command": None}
    right, wrong = Check("x", "passed", 1.5, 2.0, "what"), Check("x", "failed", 1.5, 2.0, "what")
    said = [{**known, "verdict": "passed", "passed": True}, {**known, "verdict": "failed", "passed": False}]
    assert [right.to_dict(), wrong.to_dict()] == said
    assert Verification((right,)).to_dict() == {"passed": True, "checks": said[:1]}
    weights = {"tensors": []}
    assert Verification((right, wrong), weights).to_dict() == {"passed": False, "checks": said, "weights": weights}


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_json_has_no_number_for_is_told_in_words(value: float) -> None:
    data = json.loads(json.dumps(Check("x", "failed", value, 1.0, "what").to_dict(), allow_nan=False))
    assert (data["value"], data["tolerance"], data["detail"]) == (None, 1.0, f"what (value: {value})")


def test_a_list_passes_where_it_is_empty_and_its_first_five_are_told() -> None:
    assert problem_check("x", (), "all right") == Check("x", "passed", 0.0, 0.0, "all right")
    assert problem_check("x", iter("ab"), "all right") == Check("x", "failed", 2.0, 0.0, "2 wrong: a, b")
    assert problem_check("x", "abcde", "").detail == "5 wrong: a, b, c, d, e"
    assert problem_check("x", "abcdef", "").detail == "6 wrong: a, b, c, d, e ..."


def test_the_largest_difference_has_no_sign_and_is_taken_in_double() -> None:
    half = torch.tensor([60000.0, 0.0], dtype=torch.float16)  # twice that is beyond float16
    assert largest_difference(half, -half) == largest_difference(-half, half) == 120000.0
    assert largest_difference(torch.tensor([1.0, 5.0]), torch.tensor([3.0, 5.0])) == 2.0
    assert largest_difference(torch.tensor([1.0]), torch.tensor([1.0 + 2.0**-40], dtype=torch.float64)) == 2.0**-40
    assert not largest_difference(torch.tensor([0.0, torch.nan]), torch.zeros(2)) <= float("inf")


def answers(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(("margin", "explained"), [(0.0, True), (1.9, True), (2.1, False)])
def test_a_change_is_explained_by_twice_the_tolerance_between_the_two_best(margin: float, explained: bool) -> None:
    """Each of the two may be off by as much. How far the third lies says nothing; that one changed fails them all."""
    expected = torch.cat([answers([-9.0, 0.0, margin + 1e-9]), answers([0.0, 9.0, 1.0]).repeat(19, 1)])
    got = expected.clone()
    got[0, 1:] = got[0, 1:].flip(0)
    low, high = (f"{100 * end:.1f}" for end in wilson(1, 20))
    within = 1 if explained else 0
    detail = f"1 of 20 top-1 answers differ (95 % interval {low} to {high} %), {within} of them within rounding"
    verdict: Any = "passed" if explained else "failed"
    assert agreement_check("a", expected, got, 1.0) == Check("a", verdict, float(not explained), 0.0, detail)
    (one, two) = (agreement_check("a", expected[:count], expected[:count], 1.0) for count in (1, 20))
    assert one.verdict == two.verdict == "passed" and "0 of 20" in two.detail and "rounding" not in two.detail


@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
def test_an_answer_that_is_not_finite_fails_whatever_the_others_are(wrong: float) -> None:
    expected = answers([1.0, 0.0], [0.0, 1.0])
    got = expected.clone()
    got[1, 0] = wrong
    assert agreement_check("a", expected, got, 9.0).verdict == "failed"


def test_a_model_of_one_class_agrees_with_itself() -> None:
    assert agreement_check("a", answers([1.0], [2.0]), answers([1.5], [0.0]), 0.0).verdict == "passed"


def test_later_verdicts_take_the_place_of_those_that_they_replace_and_of_no_others(tmp_path: Path) -> None:
    weights = {"tensors": [], "files": []}
    Verification((Check("a", "passed"), Check("b.1", "failed"), Check("c", "not_run")), weights).write(tmp_path)
    update_verification(tmp_path, Verification((Check("b.2", "passed"),)), lambda name: name.startswith("b."))
    known = json.loads((tmp_path / LEDGER).read_text())
    assert [check["name"] for check in known["checks"]] == ["a", "c", "b.2"]
    assert known["passed"] is True and known["weights"] == weights
    update_verification(tmp_path, Verification((Check("d", "not_run"),)), lambda name: name == "b.2")
    assert json.loads((tmp_path / LEDGER).read_text())["passed"] is True
    update_verification(tmp_path, Verification((Check("e", "failed"),)), lambda name: False)
    assert json.loads((tmp_path / LEDGER).read_text())["passed"] is False
    update_verification(tmp_path, Verification((Check("f", "not_run"),)), lambda name: True)
    assert json.loads((tmp_path / LEDGER).read_text())["passed"] is False
