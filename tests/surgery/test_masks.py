"""Channel masks leave no trace, and their gradient is that of the loss."""

from typing import Any

import pytest
import torch
from contracts import (
    assert_moved,
    assert_same,
    build,
    difference,
    every_variant,
    images,
    kept_channels,
    logits,
    masks,
    sites_of,
    spaces_of,
)
from torch import nn
from torch.nn import functional

from vitcompress.errors import PlanError
from vitcompress.plan import Plan
from vitcompress.surgery import apply_to_copy
from vitcompress.surgery.masks import delete_channels, mask_channels


def trace(model: nn.Module) -> list:
    """Everything that gates could leave behind."""
    hooks = [(n, type(m), len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()]
    return [hooks, list(model.state_dict()), [(n, id(p)) for n, p in model.named_parameters()]]


@every_variant
def test_channel_masks_leave_no_trace(variant: str) -> None:
    model, x = build(variant), images(variant)
    before, expected = trace(model), logits(model, x)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kept = kept_channels(model, {"qk", "v", "mlp", "residual"})
    with mask_channels(model, masks(model, kept)):
        assert trace(model) != before
        assert_moved(logits(model, x), expected)
    assert trace(model) == before
    assert torch.equal(logits(model, x), expected)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_channel_masks_leave_no_trace_of_a_failure() -> None:
    model = build("distilled")
    before = trace(model)
    gates = masks(model, kept_channels(model, {"mlp", "residual"}))
    with pytest.raises(KeyError), mask_channels(model, gates):
        raise KeyError
    assert trace(model) == before
    with mask_channels(model, gates):
        inside = trace(model)
        with (
            pytest.raises(PlanError, match="masked already"),
            mask_channels(model, {spaces_of(model)["residual"]: gates[spaces_of(model)["residual"]]}),
        ):
            pass
        assert trace(model) == inside
    assert trace(model) == before


@every_variant
def test_open_channel_masks_change_nothing_and_have_gradients(variant: str) -> None:
    """The derivative at 1 is the loss's first-order change when a channel goes (Taylor score): sum of w dL/dw."""
    model, x = build(variant), images(variant)
    expected = logits(model, x)
    gates = {
        space: torch.ones(space.size, dtype=torch.float64, requires_grad=True) for space in spaces_of(model).values()
    }
    with mask_channels(model, gates):
        out = model(x)
        out.square().sum().backward()
    assert_same(out.detach(), expected)
    name = f"{sites_of(model, 'block')[1].name}.mlp"
    mlp = model.get_submodule(name)
    rows = torch.zeros(mlp.fc2.in_features, dtype=torch.float64)  # a gated FFN has a gate and a value for each
    for writer in (mlp.fc1, mlp.dwconv) if hasattr(mlp, "dwconv") else (mlp.fc1,):
        rows += (writer.weight * writer.weight.grad).flatten(1).sum(1).view(-1, len(rows)).sum(0)
        rows += 0 if writer.bias is None else (writer.bias * writer.bias.grad).view(-1, len(rows)).sum(0)
    for parameter in getattr(mlp, "norm", nn.Identity()).parameters():
        rows += parameter * parameter.grad
    assert_same(gates[spaces_of(model)[name]].grad, rows.detach())
    assert all(float(gate.grad.abs().max()) > 0 for gate in gates.values())


def test_channel_masks_work_in_half_precision() -> None:
    model = build("layer_scale", dtype=torch.bfloat16)
    x = images("layer_scale", dtype=torch.bfloat16)
    gates = {name: gate.float() for name, gate in masks(model, kept_channels(model, {"qk", "v", "residual"})).items()}
    with mask_channels(model, gates):
        assert logits(model, x).dtype == torch.bfloat16


def test_squares_of_hidden_channels_may_exceed_half_precision() -> None:
    """Under autocast, an inner norm reads float16; its own kernel computes in float32."""
    model, x = build("inner_norms_rotary", dtype=torch.float32), images("inner_norms_rotary", dtype=torch.float32)
    for layer in (block.mlp.fc1 for block in model.blocks):
        layer.weight.data *= 40
    kept = kept_channels(model, {"v", "mlp"})
    expected = logits(apply_to_copy(model, Plan("any", kept=kept)), x)
    gates = {name: gate.float() for name, gate in masks(model, kept).items()}
    for masked in (mask_channels(model, gates), delete_channels(model, gates)):
        with masked, torch.autocast("cpu", torch.float16):
            assert difference(logits(model, x), expected) < 2.0**-8


def test_norms_take_statistics_of_channels_with_any_nonzero_mask() -> None:
    model, x = build("plain"), images("plain")
    mask = torch.linspace(0.5, 1, 16, dtype=torch.float64)
    mask[:4] = 0
    seen: list[Any] = []
    with mask_channels(model, {spaces_of(model)["residual"]: mask}):
        model.norm.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
        model(x)
    (before, after), kept = seen[0], slice(4, None)
    norm = model.norm
    normal = functional.layer_norm(before[..., kept], (12,), norm.weight[kept], norm.bias[kept], norm.eps)
    torch.testing.assert_close(after[..., kept], normal * mask[kept], rtol=1e-10, atol=1e-12)
