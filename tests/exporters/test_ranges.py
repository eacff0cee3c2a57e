"""The scan finds what half precision cannot hold, names the layer, and says which islands help."""

from collections.abc import Callable

import pytest
import torch
from contracts import build, images
from too_large import large_ffn, large_pool_scores, large_residual, large_scores
from torch import nn

from vitcompress.errors import PrecisionError
from vitcompress.exporters.precision import in_precision
from vitcompress.exporters.ranges import LARGEST, PART, check_half, needed_islands, scan

X = images("plain", dtype=torch.float32)


def plain() -> nn.Module:
    return build("plain", dtype=torch.float32)


@torch.no_grad()
def test_ranges_are_those_of_the_modules() -> None:
    model = plain()
    found = scan(model, X)
    assert found.given[""] == pytest.approx(float(model(X).abs().max()))
    assert found.inside["blocks.0.mlp.fc1"] == pytest.approx(found.given["blocks.0.mlp.fc1"])
    assert found.overflowing() == {}
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("make", "layer", "islands"),
    [
        (large_ffn, "blocks.0.mlp.fc1", ("blocks.0.mlp",)),
        (large_scores, "blocks.1.attn", ("blocks.1.attn.softmax",)),
        (large_pool_scores, "attn_pool", ("attn_pool.softmax",)),
    ],
)
def test_what_overflows_is_named_and_its_island_helps(
    make: Callable[[nn.Module], nn.Module], layer: str, islands: tuple[str, ...]
) -> None:
    model = make(build("attention_pool", dtype=torch.float32))
    with pytest.raises(PrecisionError, match=layer) as caught:
        check_half(model, X)
    assert "65504" in caught.value.message and "--islands" in str(caught.value.hint)
    needed = needed_islands(model, scan(model, X))
    assert needed == islands
    check_half(model, X, needed)
    with torch.no_grad():
        assert torch.isfinite(in_precision(model, "fp16", needed)(X)).all()


def test_a_residual_stream_that_is_too_large_has_no_island() -> None:
    model = large_residual(plain())
    assert needed_islands(model, scan(model, X)) is None
    with pytest.raises(PrecisionError, match="blocks") as caught:
        check_half(model, X)
    assert "--islands" not in str(caught.value.hint)


def test_a_weight_that_is_too_large_counts_where_its_results_are_not() -> None:
    model = plain()
    with torch.no_grad():
        head = model.get_submodule("head")
        head.weight[:, 0] = 1e5
        model.get_submodule("norm").weight[0] = model.get_submodule("norm").bias[0] = 0
    found = scan(model, X)
    assert found.given["head"] < found.inside["head"] == pytest.approx(1e5)
    assert needed_islands(model, found) == ("head",)
    check_half(model, X, ("head",))
    with pytest.raises(PrecisionError, match="head reaches 100000 ") as caught:
        check_half(model, X, offer_islands=False)
    assert "--islands" not in str(caught.value.hint)


def test_a_classifier_gives_logits_that_only_fp32_holds_when_it_is_an_island() -> None:
    model = plain()
    with torch.no_grad():
        model.get_submodule("head").bias.add_(1e5)
    found = scan(model, X)
    assert found.given[""] > LARGEST and needed_islands(model, found) == ("head",)
    check_half(model, X, ("head",))
    with torch.no_grad():
        assert torch.isfinite(in_precision(model, "fp16", ("head",))(X)).all()


def test_what_is_no_number_is_not_forgotten() -> None:
    found = scan(plain(), torch.cat([torch.full((PART, *X.shape[1:]), torch.nan), X]))
    assert found.overflowing() and "blocks.0.mlp.fc1" in found.overflowing()
