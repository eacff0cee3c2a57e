"""What lies between two sets of logits, the limits that it is held against, and what images are asked at once."""

import json
import math
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from vitcompress.io.checks import Check
from vitcompress.verify import outputs
from vitcompress.verify.outputs import SHARES, Agreement
from vitcompress.verify.tolerance import unit_roundoff


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_figures_of_a_comparison() -> None:
    expected, got = logits([2.0, 1.0], [0.0, 4.0]), logits([2.0, 1.0], [0.1, 4.0])
    found = outputs.compare(expected, got, 0.01)
    p = [math.exp(v) / (math.exp(0.0) + math.exp(4.0)) for v in (0.0, 4.0)]
    q = [math.exp(v) / (math.exp(0.1) + math.exp(4.0)) for v in (0.1, 4.0)]
    assert found.kl == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    assert found.error == pytest.approx(0.1 / 4.0)
    assert found.cosine == pytest.approx(4.0 / math.hypot(0.1, 4.0))
    assert (found.flips, found.unexplained, found.images) == (0, 0, 2)


def test_answers_of_any_size_have_the_cosine_of_their_directions() -> None:
    expected, got = logits([2.0, 1.0], [0.0, 4.0]), logits([2.0, 1.0], [0.1, 4.0])
    assert outputs.compare(expected, expected, 0.01).cosine == 1.0
    tiny = outputs.compare(2.0**-100 * expected, 2.0**-100 * got, 0.01)
    assert tiny.cosine == pytest.approx(4.0 / math.hypot(0.1, 4.0), abs=1e-15)  # a few roundings in float64


def test_a_model_of_one_class_is_compared_by_its_figures() -> None:
    found = outputs.compare(logits([1.0], [-2.0]), logits([1.0], [-1.0]), 0.01)
    assert (found.flips, found.unexplained, found.kl, found.cosine, found.error) == (0, 0, 0.0, 1.0, 0.5)


def test_answers_in_single_precision_are_compared_in_double() -> None:
    """A KL divergence of 1e-9 is lost in the roundings of probabilities that are held in float32."""
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(3, 10, generator=generator)
    got = expected + 1e-4 * torch.randn(3, 10, generator=generator)
    found = outputs.compare(expected, got, 0.01)
    assert found == outputs.compare(expected.double(), got.double(), 0.01)
    assert 0 < found.kl < 1e-7 and 0 < 1 - found.cosine < 1e-7


@pytest.mark.parametrize(("margin", "unexplained"), [(1.9, 0), (2.1, 1)])
def test_two_answers_are_close_within_twice_the_error_allowed_of_the_largest_logit(
    margin: float, unexplained: int
) -> None:
    """A quarter of 4, which is negative here: each may be off by 1. How far the third answer lies says nothing."""
    expected = logits([3.0, 3.0 - margin, -4.0])
    assert outputs.compare(expected, expected[:, [1, 0, 2]], 0.25).unexplained == unexplained


@pytest.mark.parametrize("share", [1e-3, 8e-2])
def test_each_figure_has_its_own_limit(share: float) -> None:
    """Those that follow from one relative error: see the module's derivation."""
    limits = {"flips": share, "kl": 2 * share**2, "cosine": share**2 / 2, "error": share}
    good = Agreement(images=100_000, flips=0, unexplained=0, kl=0.0, cosine=1.0, error=0.0)

    def failing(found: Agreement) -> set[str]:
        checks = outputs.judged(found, share, "a", "here")
        assert {check.name: check.tolerance for check in checks} == {f"a.{k}": v for k, v in limits.items()}
        return {check.name.removeprefix("a.") for check in checks if check.verdict != "passed"}

    assert failing(good) == set()
    for factor, fails in ((0.99, False), (1.01, True)):
        for kind, change in (
            ("kl", {"kl": factor * limits["kl"]}),
            ("cosine", {"cosine": 1 - factor * limits["cosine"]}),
            ("error", {"error": factor * share}),
        ):
            assert failing(replace(good, **change)) == ({kind} if fails else set())
    assert failing(replace(good, flips=1, unexplained=1)) == {"flips"}


def test_as_many_flips_as_the_share_allows_pass() -> None:
    """The share is not certainly above the limit where the interval contains it."""
    flips = {count: Agreement(1000, count, 0, 0.0, 1.0, 0.0) for count in (10, 30)}
    low = {count: found.interval[0] for count, found in flips.items()}
    assert low[10] < 0.01 < low[30]
    verdicts = {count: outputs.judged(found, 0.01, "a", "here")[0] for count, found in flips.items()}
    assert {count: (check.verdict, check.value) for count, check in verdicts.items()} == {
        10: ("passed", low[10]),
        30: ("failed", low[30]),
    }


def test_the_detail_counts_the_flips() -> None:
    (check, *_) = outputs.judged(Agreement(40, 3, 1, 0.0, 1.0, 0.0), 0.01, "a", "fp16 in a runtime")
    low, high = (f"{100 * end:.1f}" for end in Agreement(40, 3, 1, 0.0, 1.0, 0.0).interval)
    assert check.detail == (
        f"3 of 40 top-1 answers differ (95 % interval {low} to {high} %), "
        "2 of them between answers that were close anyway; fp16 in a runtime"
    )


def test_the_shares_are_as_far_apart_as_the_roundings() -> None:
    assert SHARES["fp32"] == 1e-3
    assert SHARES["tf32"] == SHARES["fp16"] == 1e-2  # eleven significant bits both
    assert SHARES["bf16"] / SHARES["fp16"] == unit_roundoff(torch.bfloat16) / unit_roundoff(torch.float16)


@pytest.mark.parametrize(
    ("verdicts", "overall"),
    [
        (["passed", "passed"], "passed"),
        (["passed", "not_run"], "not_run"),
        (["passed", "not_run", "failed"], "failed"),
        (["failed"], "failed"),
        (["not_run"], "not_run"),
        ([], "not_run"),
    ],
)
def test_the_verdict_on_several_checks(verdicts: list[str], overall: str) -> None:
    assert outputs.verdict(Check(str(n), verdict) for n, verdict in enumerate(verdicts)) == overall  # type: ignore[arg-type]


@pytest.mark.parametrize(("margin", "verdict"), [(0.02, "passed"), (0.5, "failed")])
def test_an_answer_may_change_only_where_two_were_close(margin: float, verdict: str) -> None:
    """With a share of 1 % and a largest logit of 4, logits may be off by 0.04 each, so margins below 0.08 may turn."""
    close = logits([4.0, 4.0 - margin])
    expected = torch.cat([close, logits([0.0, 4.0]).repeat(199, 1)])
    got = expected.clone()
    got[0] = got[0].flip(0)
    checks = {c.name: c for c in outputs.judged(outputs.compare(expected, got, 0.01), 0.01, "a", "here")}
    assert checks["a.flips"].verdict == verdict and "1 of 200" in checks["a.flips"].detail


def test_an_image_that_is_asked_twice_counts_once() -> None:
    expected = logits([1.0, 2.0], [3.0, 1.0], [1.0, 2.0])
    got = logits([1.0, 2.0], [3.0, 1.0], [2.0, 1.0])
    found = outputs.compare(expected, got, 0.01, torch.tensor([0, 1, 0]))
    assert (found.images, found.flips, found.unexplained) == (2, 1, 1)


def test_a_model_that_answers_nothing_but_zeros_can_be_compared() -> None:
    """As one does whose head is not trained yet."""
    nothing = torch.zeros(4, 3)
    for got, verdict in ((nothing, "passed"), (nothing + torch.tensor([0.1, 0.0, 0.0]), "failed")):
        found = outputs.compare(nothing, got, 0.01)
        assert found.error == pytest.approx(float(got.max()))  # nothing to be relative to
        checks = outputs.judged(found, 0.01, "a", "here")
        assert {check.verdict for check in checks if check.name in ("a.error", "a.cosine")} == {verdict}


def test_too_many_changes_fail_even_where_all_were_close() -> None:
    expected = logits([4.0, 3.99]).repeat(100, 1)
    got = expected.clone()
    got[:10] = got[:10].flip(1)
    checks = outputs.judged(outputs.compare(expected, got, 0.01), 0.01, "a", "here")
    assert checks[0].verdict == "failed" and checks[0].value and checks[0].value > 0.01


@pytest.mark.parametrize(
    ("sizes", "images", "asked"),
    [
        ((1, 3, 8), 5, [[0], [0, 1, 2], [0, 1, 2, 3, 4, 0, 1, 2]]),
        ((1,), 3, [[0], [1], [2]]),
        ((2,), 5, [[0, 1], [2, 3], [4, 0]]),
    ],
)
def test_every_image_is_asked_at_whatever_batch(sizes: tuple[int, ...], images: int, asked: list[list[int]]) -> None:
    assert [portion.tolist() for portion in outputs._portions(sizes, images)] == asked


MODEL = nn.Sequential(nn.Flatten(), nn.Linear(12, 3, bias=False)).requires_grad_(requires_grad=False)
MODEL[1].weight.copy_(torch.eye(3, 12))
IMAGES = torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(0))


def scaled(path: Path, factor: float, precision: str) -> Path:
    """A file that answers as `MODEL` times a factor, and says that it computes in this precision."""
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", ["n", 3, 2, 2]), ("y", ["n", 3]))
    )
    weight = numpy_helper.from_array((factor * MODEL[1].weight.T).numpy(), "w")
    nodes = [helper.make_node("Flatten", ["x"], ["f"]), helper.make_node("MatMul", ["f", "w"], ["y"])]
    graph = helper.make_graph(nodes, "scaled", [x], [y], [weight])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    helper.set_model_props(model, {"precision": json.dumps(precision)})
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(("precision", "share"), [("fp32", 1e-3), ("fp16", 1e-2)])
def test_a_file_is_held_against_the_share_of_its_own_precision(precision: str, share: float, tmp_path: Path) -> None:
    """What is larger by a share of itself errs by that share, and by nothing else."""
    for part, verdict in ((0.9, "passed"), (1.1, "failed")):
        path = scaled(tmp_path / "model.onnx", 1 + part * share, precision)
        checks = {check.name: check for check in outputs.file_checks(MODEL, path, IMAGES)}
        assert set(checks) == {f"agreement.model.onnx.{kind}" for kind in ("flips", "kl", "cosine", "error")}
        error = checks.pop("agreement.model.onnx.error")
        assert (error.verdict, error.tolerance) == (verdict, share)
        assert error.value == pytest.approx(part * share, rel=1e-3)  # the roundings of fp32 over the share
        assert {check.verdict for check in checks.values()} == {"passed"}
        where = f"{precision} in onnxruntime on cpu, batch 1, 3, 5"
        assert all(check.detail.endswith(f"; {where}") for check in (error, *checks.values()))


def test_answers_that_are_not_finite_fail_by_one_check_that_says_so(tmp_path: Path) -> None:
    path = scaled(tmp_path / "model.onnx", math.inf, "fp32")
    (check,) = outputs.file_checks(MODEL, path, IMAGES, real=False)
    assert (check.name, check.verdict) == ("agreement.model.onnx", "failed")
    assert check.detail.startswith("answers at batch 1 are not finite; ") and check.detail.endswith(", on noise")


def test_a_file_that_cannot_be_asked_fails(tmp_path: Path) -> None:
    path = scaled(tmp_path / "model.onnx", 1.0, "fp32")
    path.write_bytes(path.read_bytes()[:50])
    (check,) = outputs.file_checks(MODEL, path, IMAGES)
    assert (check.name, check.verdict) == ("agreement.model.onnx", "failed")
