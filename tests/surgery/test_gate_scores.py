"""Scores receive the true derivative with respect to their gates, and change nothing themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from contracts import (
    BYPASSES,
    SAME,
    add_gates,
    assert_moved,
    build,
    difference,
    gated,
    images,
    layers,
    logits,
)
from torch import Tensor, nn

from vitcompress.families import Site
from vitcompress.surgery.gates import _StraightThrough


@contextmanager
def interpolated(model: nn.Module, site: Site, bypass: str, scalar: Tensor) -> Iterator[None]:
    """The same interpolation written for autograd: nothing straight-through, `scalar` is a part of the graph."""
    stream: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        stream[:] = [args[0]]

    def mix(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        stand = args[0]
        if site.kind == "attention":
            stand = {"drop": 0 * out, "norm_identity": args[0], "double": stream[0]}[bypass]
        return scalar * out + (1 - scalar) * stand

    doubles = bypass == "double" and site.kind == "attention"
    block = model.get_submodule(site.block)
    target = block.drop_path1 if doubles else model.get_submodule(site.name)
    handles = [block.register_forward_pre_hook(keep), target.register_forward_hook(mix)]
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("bypass", BYPASSES)
@pytest.mark.parametrize("variant", ["plain", "layer_scale", "swin", "pvt"])
def test_a_score_receives_the_derivative_with_respect_to_its_gate(variant: str, bypass: str) -> None:
    """And the weights, before the layer and in it, receive theirs through both branches."""
    model, x = build(variant), images(variant)
    target = torch.tensor([0, 3, 1])
    open_model = gated(deepcopy(model), attention_bypass=bypass)
    for number, site in enumerate(open_model.sites):
        for gate in (1.0, 0.0, 0.25):
            open_model.zero_grad()
            open_model.set_gate(site.name, gate)
            nn.functional.cross_entropy(open_model(x), target).backward()
            score_gradient = open_model.scores[number].grad
            scalar = torch.tensor(gate, dtype=torch.float64, requires_grad=True)
            with interpolated(model, site, bypass, scalar):
                loss = nn.functional.cross_entropy(model(x), target)
                expected, *weights = torch.autograd.grad(loss, [scalar, *model.parameters()])
            assert abs(expected) > 1e-8
            torch.testing.assert_close(score_gradient, expected, rtol=1e-10, atol=0)
            for parameter, gradient in zip(open_model.model.parameters(), weights, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-14)
        open_model.set_gate(site.name, 1.0)


@pytest.mark.parametrize("gate", [1.0, 0.0])
def test_scores_in_float32_receive_the_same(gate: float) -> None:
    model, x = build("plain"), images("plain")
    gradients = []
    for dtype in (torch.float64, torch.float32):
        one = add_gates(deepcopy(model), layers(model)).to(dtype)
        for site in one.sites:
            one.set_gate(site.name, gate)
        one(x.to(dtype)).square().sum().backward()
        gradients.append(torch.stack([score.grad for score in one.scores]).double())
    assert_moved(gradients[0], torch.zeros(4) + gradients[0].mean())
    assert difference(gradients[1], gradients[0]) < SAME * 2.0**29  # the bound of float64, at the roundoff of float32


@pytest.mark.parametrize("gate", [1.0, 0.0])
def test_score_gradients_agree_with_finite_differences(gate: float) -> None:
    """One-sided, of second order, into the range of gates: off by about h**2 f''' / 3, f''' far below 1e4."""
    model, x = build("plain"), images("plain")
    target, step = torch.tensor([0, 3, 1]), 1e-4 if gate == 0.0 else -1e-4
    open_model = gated(model)
    for number, site in enumerate(open_model.sites):
        losses = []
        for distance in (0, 1, 2):
            open_model.set_gate(site.name, gate + distance * step)
            with torch.no_grad():
                losses.append(float(nn.functional.cross_entropy(open_model(x), target)))
        slope = (-3 * losses[0] + 4 * losses[1] - losses[2]) / (2 * step)
        open_model.zero_grad()
        open_model.set_gate(site.name, gate)
        nn.functional.cross_entropy(open_model(x), target).backward()
        assert float(open_model.scores[number].grad) == pytest.approx(slope, abs=1e-4, rel=1e-4)
        assert abs(slope) > 1e-3
        open_model.set_gate(site.name, 1.0)


def test_scores_do_not_change_the_output_and_every_parameter_always_gets_a_gradient() -> None:
    model, x = build("plain"), images("plain")
    open_model = gated(model)
    before = logits(open_model, x)
    with torch.no_grad():
        for number, score in enumerate(open_model.scores):
            score.fill_(number - 1.5)
    assert torch.equal(logits(open_model, x), before)
    assert list(open_model.scores_of().values()) == [-1.5, -0.5, 0.5, 1.5]
    open_model.set_gate("blocks.0.attn", 0.0)
    open_model(x).sum().backward()
    assert all(p.grad is not None for p in open_model.parameters())
    assert float(model.blocks[0].attn.qkv.weight.grad.abs().max()) == 0.0
    assert float(model.blocks[1].attn.qkv.weight.grad.abs().max()) > 0.0


def test_the_score_of_large_activations_in_half_precision_is_finite() -> None:
    branch, other = (torch.full((4,), value, dtype=torch.float16, requires_grad=True) for value in (4e4, -4e4))
    score = torch.zeros((), requires_grad=True)
    _StraightThrough.apply(branch, other, score, 1.0).backward(torch.full((4,), 2.0**-10, dtype=torch.float16))
    exact = 4 * (float(branch[0].detach()) - float(other[0].detach())) * 2.0**-10
    assert score.grad is not None and float(score.grad) == exact
