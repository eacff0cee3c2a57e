"""Comparisons of two sets of logits, their limits, and the images of each call."""

import json
import math
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from vitcompress.models.create import create_model
from vitcompress.training.metrics import wilson
from vitcompress.verify import outputs
from vitcompress.verify.outputs import SHARES, Comparison, Limits, Original, comparison_checks, output_checks
from vitcompress.verify.tolerance import _roundoff

LIMITS = Limits(0.01, 0.01, logit=0.01)


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_the_figures_of_a_comparison() -> None:
    expected, got = logits([2.0, 1.0], [0.0, 4.0]), logits([2.0, 1.0], [0.1, 4.0])
    result = outputs.compare(expected, got, LIMITS)
    p = [math.exp(v) / (math.exp(0.0) + math.exp(4.0)) for v in (0.0, 4.0)]
    q = [math.exp(v) / (math.exp(0.1) + math.exp(4.0)) for v in (0.1, 4.0)]
    assert result.kl == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    assert result.error == pytest.approx(0.1 / 4.0)
    assert result.cosine == pytest.approx(4.0 / math.hypot(0.1, 4.0))
    assert (result.flips, result.unexplained, result.images) == (0, 0, 2)


def test_logits_of_any_size_have_the_cosine_of_their_directions() -> None:
    expected, got = logits([2.0, 1.0], [0.0, 4.0]), logits([2.0, 1.0], [0.1, 4.0])
    assert outputs.compare(expected, expected, LIMITS).cosine == 1.0
    tiny = outputs.compare(2.0**-100 * expected, 2.0**-100 * got, LIMITS)
    assert tiny.cosine == pytest.approx(4.0 / math.hypot(0.1, 4.0), abs=1e-15)  # a few roundings in float64


def test_the_cosine_is_that_of_the_image_nearest_to_its_limit() -> None:
    """The limit of the second image is the larger one, and only this image is beyond its limit."""
    expected = logits([4.0, 0.0], [0.1, 0.0])
    got = torch.stack([expected[0], 0.1 * logits([math.cos(1.2), math.sin(1.2)])[0]])
    result = outputs.compare(expected, got, replace(LIMITS, norm=0.02))  # errors up to 0.08: a sine of 0.8
    assert (result.cosine, result.cosine_limit) == pytest.approx((math.cos(1.2), 1 - 0.6))
    assert 1 - result.cosine > result.cosine_limit


def test_a_model_of_one_class_is_compared_by_its_figures() -> None:
    result = outputs.compare(logits([1.0], [-2.0]), logits([1.0], [-1.0]), LIMITS)
    assert (result.flips, result.unexplained, result.kl, result.cosine, result.error) == (0, 0, 0.0, 1.0, 0.5)


def test_logits_in_single_precision_are_compared_in_double() -> None:
    """A KL divergence of 1e-9 is lost in the roundings of probabilities in float32."""
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(3, 10, generator=generator)
    got = expected + 1e-4 * torch.randn(3, 10, generator=generator)
    result = outputs.compare(expected, got, LIMITS)
    assert result == outputs.compare(expected.double(), got.double(), LIMITS)
    assert 0 < result.kl < 1e-7 and 0 < 1 - result.cosine < 1e-7


@pytest.mark.parametrize(("margin", "unexplained"), [(1.9, 0), (2.1, 1)])
def test_two_logits_are_close_within_twice_the_allowed_error(margin: float, unexplained: int) -> None:
    """A quarter of the largest logit, 4: each may be off by 1. The third logit does not matter."""
    expected = logits([3.0, 3.0 - margin, -4.0])
    assert outputs.compare(expected, expected[:, [1, 0, 2]], Limits(0.25, 0.25, 0.25)).unexplained == unexplained


@pytest.mark.parametrize("share", [1e-3, 8e-2])
def test_each_figure_has_its_own_limit(share: float) -> None:
    """See the derivation in the module's docstring."""
    limits = {"flips": 0.0, "kl": 2 * share**2, "cosine": share**2 / 2, "error": share}
    good = Comparison(images=100_000, flips=0, unexplained=0, kl=0.0, cosine=1.0, cosine_limit=share**2 / 2, error=0.0)

    def failing(result: Comparison) -> set[str]:
        checks = comparison_checks(result, Limits(share, share), "a", "here")
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


def test_the_detail_counts_the_flips() -> None:
    (check, *_) = comparison_checks(Comparison(40, 3, 1, 0.0, 1.0, 1.0, 0.0), LIMITS, "a", "fp16 in a runtime")
    low, high = (f"{100 * end:.1f}" for end in wilson(3, 40))
    assert check.detail == (
        f"agrees with the model: 39 of 40 images (3 in another class, 95 % interval {low} to {high} %; "
        "2 of them between near ties, which rounding explains); fp16 in a runtime"
    )


def test_the_shares_are_proportional_to_the_roundings() -> None:
    assert SHARES["fp32"] == 1e-3
    assert SHARES["tf32"] == SHARES["fp16"] == 1e-2  # eleven significant bits both
    assert SHARES["bf16"] / SHARES["fp16"] == _roundoff(torch.bfloat16) / _roundoff(torch.float16)


@pytest.mark.parametrize(("margin", "verdict"), [(0.02, "passed"), (0.5, "failed")])
def test_a_class_may_change_only_where_two_logits_are_close(margin: float, verdict: str) -> None:
    """A share of 1 % of a largest logit of 4 is an error of 0.04 each, so margins below 0.08 may change sign."""
    close = logits([4.0, 4.0 - margin])
    expected = torch.cat([close, logits([0.0, 4.0]).repeat(199, 1)])
    got = expected.clone()
    got[0] = got[0].flip(0)
    checks = {c.name: c for c in comparison_checks(outputs.compare(expected, got, LIMITS), LIMITS, "a", "here")}
    assert checks["a.flips"].verdict == verdict and "of 200 images (1 in another class" in checks["a.flips"].detail


def test_an_image_that_is_evaluated_twice_counts_once() -> None:
    expected = logits([1.0, 2.0], [3.0, 1.0], [1.0, 2.0])
    got = logits([1.0, 2.0], [3.0, 1.0], [2.0, 1.0])
    result = outputs.compare(expected, got, LIMITS, torch.tensor([0, 1, 0]))
    assert (result.images, result.flips, result.unexplained) == (2, 1, 1)


def test_a_model_whose_logits_are_zero_can_be_compared() -> None:
    """Such as one whose head is not trained yet."""
    nothing = torch.zeros(4, 3)
    for got, verdict in ((nothing, "passed"), (nothing + torch.tensor([0.1, 0.0, 0.0]), "failed")):
        result = outputs.compare(nothing, got, LIMITS)
        assert result.error == pytest.approx(float(got.max()))  # nothing to be relative to
        checks = comparison_checks(result, LIMITS, "a", "here")
        assert {check.verdict for check in checks if check.name in ("a.error", "a.cosine")} == {verdict}


def test_near_ties_are_reported_and_do_not_fail() -> None:
    """Even if the class of every image changes: rounding explains it, and the limits of the logits still apply."""
    expected = logits([4.0, 3.99]).repeat(8, 1)
    checks = comparison_checks(outputs.compare(expected, expected.flip(1), LIMITS), LIMITS, "a", "here")
    assert {check.verdict for check in checks} == {"passed"} and checks[0].detail.startswith(
        "agrees with the model: 8 of 8 images (8 in another class"
    )
    comparison = outputs.compare(expected, expected.flip(1), replace(LIMITS, logit=0.001))
    checks = comparison_checks(comparison, LIMITS, "a", "here")
    assert (checks[0].verdict, checks[0].value) == ("failed", 8.0)


@pytest.mark.parametrize(
    ("sizes", "images", "calls"),
    [
        ((1, 3, 8), 5, [[0], [0, 1, 2], [0, 1, 2, 3, 4, 0, 1, 2]]),
        ((1,), 3, [[0], [1], [2]]),
        ((2,), 5, [[0, 1], [2, 3], [4, 0]]),
    ],
)
def test_every_image_is_evaluated_at_any_batch(sizes: tuple[int, ...], images: int, calls: list[list[int]]) -> None:
    assert [rows.tolist() for rows in outputs._rows(sizes, images)] == calls


MODEL = nn.Sequential(nn.Flatten(), nn.Linear(12, 3, bias=False)).requires_grad_(requires_grad=False)
MODEL[1].weight.copy_(torch.eye(3, 12))
IMAGES = torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(0))


def scaled(path: Path, factor: float, precision: str) -> Path:
    """A file with the outputs of `MODEL` times a factor, and metadata with this precision."""
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


ORIGINAL = Original(MODEL, IMAGES)
KINDS = ("flips", "kl", "cosine", "error")


@pytest.mark.parametrize("part", [0.9, 1.1])
def test_a_file_is_allowed_the_share_of_its_own_precision(part: float, tmp_path: Path) -> None:
    """Logits that are larger by a factor have that error, and no other."""
    path = scaled(tmp_path / "model.onnx", 1 + part * SHARES["fp16"], "fp16")
    checks = {check.name: check for check in output_checks(path, ORIGINAL)}
    assert set(checks) == {f"agreement.model.onnx.{kind}" for kind in KINDS}
    error = checks.pop("agreement.model.onnx.error")
    assert (error.verdict, error.tolerance) == ("passed" if part < 1 else "failed", SHARES["fp16"])
    assert error.value == pytest.approx(part * SHARES["fp16"], rel=1e-3)  # the roundings of fp32 over the share
    assert {check.verdict for check in checks.values()} == {"passed"}
    assert all(check.detail.endswith("; fp16 in onnxruntime on cpu, batch 1, 2, 3, 5") for check in checks.values())


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "passed"), (1 + 1e-5, "failed")])
def test_a_file_in_fp32_is_allowed_what_rounding_explains(factor: float, verdict: str, tmp_path: Path) -> None:
    explained = ORIGINAL.rounding(IMAGES, "fp32").logit / float(ORIGINAL.exact(IMAGES).abs().max())
    path = scaled(tmp_path / "model.onnx", factor, "fp32")
    checks = {check.name.rpartition(".")[2]: check for check in output_checks(path, ORIGINAL)}
    assert checks["error"].tolerance == explained < 1e-5
    assert {kind: checks[kind].verdict for kind in KINDS} == dict.fromkeys(KINDS, "passed") | {"error": verdict}


def test_outputs_that_are_not_finite_fail_by_one_check(tmp_path: Path) -> None:
    path = scaled(tmp_path / "model.onnx", math.inf, "fp32")
    (check,) = output_checks(path, Original(MODEL, IMAGES, real=False))
    assert (check.name, check.verdict) == ("agreement.model.onnx", "failed")
    assert check.detail.startswith("outputs at batch 1 are not finite; ") and check.detail.endswith(", on noise")


def test_outputs_of_another_shape_fail_by_one_check(tmp_path: Path) -> None:
    path = scaled(tmp_path / "model.onnx", 1.0, "fp32")
    (check,) = output_checks(path, Original(nn.Sequential(MODEL, nn.Linear(3, 4)), IMAGES))
    assert (check.name, check.verdict) == ("agreement.model.onnx", "failed")
    assert check.detail.startswith("the outputs have the shape 1x3, those of the model 1x4; ")


def test_a_file_that_cannot_be_opened_fails(tmp_path: Path) -> None:
    path = scaled(tmp_path / "model.onnx", 1.0, "fp32")
    path.write_bytes(path.read_bytes()[:50])
    (check,) = output_checks(path, ORIGINAL)
    assert (check.name, check.verdict) == ("agreement.model.onnx", "failed")


def test_limits_of_rounding_hold_for_images_that_are_rounded_most() -> None:
    """Without a last norm, logits grow with the pixels: the nearest ties, dark images, are rounded least."""
    size = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
    model = create_model("vit_tiny_patch16_224", {**size, "final_norm": False, "fc_norm": False, "global_pool": "avg"})
    images = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    images[23] *= 1e4
    with torch.no_grad():
        error = float((model(images).double() - Original(model, images).exact(images)).abs().max())
    assert error < Original(model, images).rounding(images, "fp32").logit < 1e3 * error
