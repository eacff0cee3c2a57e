"""A model that trains in int8 rounds as its file does, and gradients pass the rounding."""

import pytest
import torch
from contracts import build, images

from vitcompress.exporters.quantize.emulate import EightBitProducts, QuantizedTraining
from vitcompress.exporters.quantize.graph import Quantization

X = images("plain", dtype=torch.float32)
SETTINGS = Quantization("int8", {"blocks.0.mlp.fc1": 2.0, "blocks.1.attn.qkv": 3.0})


@pytest.mark.parametrize("learned", [False, True])
def test_outputs_are_those_of_the_emulation_and_all_weights_learn(learned: bool) -> None:
    model = build("plain", dtype=torch.float32)
    module = QuantizedTraining(model, SETTINGS, learned=learned)
    out = module(X)
    with torch.no_grad():
        plain = model(X)
        with EightBitProducts(model, SETTINGS):
            emulated = model(X)
    assert (out - emulated).abs().max() < 0.5 * (plain - emulated).abs().max()  # logarithms round the ranges
    out.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.get_submodule("blocks.0.mlp").parameters())
    assert (module.log_ranges.grad is not None) == learned
    assert module.ranges().keys() == SETTINGS.ranges.keys()


def test_values_beyond_the_range_train_the_range_alone() -> None:
    """LSQ, equation 3: beyond the range, a value has no gradient, and the range has that of its end."""
    layer = torch.nn.Linear(1, 1, bias=False)
    model = torch.nn.Sequential(layer)
    module = QuantizedTraining(model, Quantization("int8", {"0": 1.0}, weight_bits=8), learned=True)
    x = torch.tensor([[5.0]], requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None and x.grad.item() == 0
    assert module.log_ranges.grad is not None
    # d(range * weight) / d(log range) = range * weight
    torch.testing.assert_close(module.log_ranges.grad, layer.weight.detach().flatten(), rtol=1e-5, atol=0)


def test_eight_bits_are_never_trained_in_half_precision() -> None:
    model, x = build("plain", dtype=torch.float32), images("plain", dtype=torch.float32)
    module = QuantizedTraining(model, Quantization("int8", {"blocks.0.mlp.fc1": 2.0}), learned=True)
    expected = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), expected)
