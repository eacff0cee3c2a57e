"""The scan names layers that overflow in half precision, and the fp32 layers that avoid it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial

import pytest
import torch
from contracts import build, images
from too_large import large_ffn, large_norm, large_pool_scores, large_residual, large_scores
from torch import nn
from torch.nn import functional as F

from vitcompress.errors import PrecisionError
from vitcompress.exporters.precision import convert_precision
from vitcompress.exporters.ranges import (
    CHUNK,
    LARGEST,
    SeparateOperations,
    check_fp16,
    find_overflows,
    required_layers,
    scan_ranges,
)
from vitcompress.verify.tolerance import pair_limits

X = images("plain", dtype=torch.float32)


def plain() -> nn.Module:
    return build("plain", dtype=torch.float32)


@torch.no_grad()
def test_ranges_are_those_of_the_modules() -> None:
    model = plain()
    ranges = scan_ranges(model, X)
    assert ranges.outputs[""] == pytest.approx(float(model(X).abs().max()))
    assert ranges.inside["blocks.0.mlp.fc1"] == pytest.approx(ranges.outputs["blocks.0.mlp.fc1"])
    assert find_overflows(model, ranges) == {} and scan_ranges(deepcopy(model).double(), X) == ranges
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("measure", [scan_ranges, pair_limits])
def test_attention_in_other_threads_stays(measure: Callable[[nn.Module, torch.Tensor], object]) -> None:
    """While one thread measured, attention was computed by other kernels in all of them."""
    model, q = plain(), torch.randn(2, 3, 17, 16)
    attend, seen = partial(F.scaled_dot_product_attention, q, q, q), list[torch.Tensor]()
    fused = attend()
    with ThreadPoolExecutor(1) as other:
        model.get_submodule("blocks.0").register_forward_hook(lambda *_: seen.append(other.submit(attend).result()))
        measure(model, X)
    assert seen and all(torch.equal(output, fused) for output in seen)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not torch.equal(attend(), fused)


@pytest.mark.parametrize("mask", [None, torch.randn(17, 17)])
def test_separate_operations_are_those_of_torch(mask: torch.Tensor | None) -> None:
    q, k, v = torch.randn(3, 2, 3, 17, 16)
    attend = partial(F.scaled_dot_product_attention, q, k, v, attn_mask=mask, scale=0.3)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = attend()
    with SeparateOperations():
        assert torch.equal(attend(), expected)


@pytest.mark.parametrize(
    ("make", "layer", "islands"),
    [
        (large_ffn, "blocks.0.mlp.fc1", ("blocks.0.mlp",)),
        (large_norm, "blocks.0.norm2", ("blocks.0",)),
        (large_scores, "blocks.1.attn", ("blocks.1.attn.softmax",)),
        (large_pool_scores, "attn_pool", ("attn_pool.softmax",)),
    ],
)
def test_overflows_are_named_and_fp32_layers_avoid_them(
    make: Callable[[nn.Module], nn.Module], layer: str, islands: tuple[str, ...]
) -> None:
    model = make(build("attention_pool", dtype=torch.float32))
    with pytest.raises(PrecisionError, match=layer) as caught:
        check_fp16(model, X)
    assert "65504" in caught.value.message and "--islands" in str(caught.value.hint)
    needed = required_layers(model, scan_ranges(model, X))
    assert needed == islands
    check_fp16(model, X, needed)
    with torch.no_grad():
        assert torch.isfinite(convert_precision(model, "fp16", needed)(X)).all()


def test_no_fp32_layer_helps_a_large_residual_stream() -> None:
    model = large_residual(plain())
    for check in (check_fp16, lambda model, images: required_layers(model, scan_ranges(model, images))):
        with pytest.raises(PrecisionError, match="blocks") as caught:
            check(model, X)
        assert "--islands" not in str(caught.value.hint)


def test_a_list_of_blocks_is_no_fp32_layer_as_its_blocks_return_half_precision() -> None:
    model, x = build("dinov3", dtype=torch.float32), images("dinov3", dtype=torch.float32)
    with torch.no_grad():
        model.get_submodule("blocks.0.mlp.fc2").bias.add_(1e7)
    with pytest.raises(PrecisionError, match=r"blocks\.") as caught:
        check_fp16(model, x)
    assert "--islands" not in str(caught.value.hint)


def test_a_weight_that_is_too_large_overflows_by_itself() -> None:
    model = plain()
    with torch.no_grad():
        head = model.get_submodule("head")
        head.weight[:, 0] = 1e5
        model.get_submodule("norm").weight[0] = model.get_submodule("norm").bias[0] = 0
    ranges = scan_ranges(model, X)
    assert ranges.outputs["head"] < ranges.inside["head"] == pytest.approx(1e5)
    assert required_layers(model, ranges) == ("head",)
    check_fp16(model, X, ("head",))
    with pytest.raises(PrecisionError, match=r"head reaches 100000 .*\(1 such layer\)") as caught:
        check_fp16(model, X, offer_islands=False)
    assert "--islands" not in str(caught.value.hint)


def test_scores_that_an_attention_computes_itself_fit_into_fp32() -> None:
    """Attentions of Swin have no fused core."""
    model, x = build("swin", dtype=torch.float32), images("swin", dtype=torch.float32)
    with torch.no_grad():
        qkv = model.get_submodule("layers.0.blocks.0.attn.qkv")
        for parameter in (qkv.weight, qkv.bias):
            parameter[: 2 * len(parameter) // 3] *= 300
        required = required_layers(model, scan_ranges(model, x))
        assert required == ("layers.0.blocks.0.attn.softmax",)
        assert not convert_precision(model, "fp16")(x).isfinite().all()
        deployed, expected = convert_precision(model, "fp16", required)(x), model(x)
    # Half precision rounds by 2**-11 each time, some sixty times from the images to the logits of three blocks.
    torch.testing.assert_close(deployed, expected, rtol=0, atol=60 * 2.0**-11 * float(expected.abs().max()))


def test_a_classifier_in_fp32_may_return_large_logits() -> None:
    model = plain()
    with torch.no_grad():
        model.get_submodule("head").bias.add_(1e5)
    ranges = scan_ranges(model, X)
    assert ranges.outputs[""] > LARGEST and required_layers(model, ranges) == ("head",)
    check_fp16(model, X, ("head",))
    with torch.no_grad():
        assert torch.isfinite(convert_precision(model, "fp16", ("head",))(X)).all()


def test_nan_is_recorded() -> None:
    model = plain()
    ranges = scan_ranges(model, torch.cat([torch.full((CHUNK, *X.shape[1:]), torch.nan), X]))
    assert "blocks.0.mlp.fc1" in find_overflows(model, ranges)
