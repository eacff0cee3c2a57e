"""A model that trains in int8 rounds as its file does, and gradients pass the rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import build, images

from vitcompress.exporters.onnx.export import export, measure_quantization
from vitcompress.exporters.onnx.rounded import rounded_logits
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.quantize.calibrate import calibrate
from vitcompress.exporters.quantize.emulate import EightBitProducts, QuantizedTraining
from vitcompress.exporters.quantize.graph import Quantization
from vitcompress.models.create import input_config

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


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("variant", ["rotary_pool", "dinov3", "pvt"])
def test_the_file_computes_what_the_model_was_trained_with(variant: str, precision: Any, tmp_path: Path) -> None:
    """In int8 with the tensors in fp16, in fp8 with the products of attentions; and with one range for each tensor."""
    model, x = build(variant, dtype=torch.float32), images(variant, dtype=torch.float32)
    x = torch.cat([x, x.flip(3)])
    options, about = ExportOptions(precision), {"input": input_config(model)}
    form = "int32_bias" if precision == "int8" else "float_bias"

    def measure(path: Path) -> dict[str, float]:
        return calibrate(path, x, precision)

    settings = measure_quantization(model, options, form, calibrate=measure, **about)  # type: ignore[arg-type]
    module = QuantizedTraining(model, settings, learned=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    module(x).square().mean().backward()
    gradient = module.log_ranges.grad
    assert gradient is not None and (gradient != 0).all(), "every range is trained"
    optimizer.step()
    ranges = {name: value.item() for name, value in module.ranges().items()}
    target = tmp_path / "model.onnx"
    export(model, target, options=options, form=form, calibrate=lambda _: ranges, **about)  # type: ignore[arg-type]
    with torch.no_grad():
        trained, plain = module(x), model(x)
    # A value between two steps may be rounded to either one.
    assert (rounded_logits(target, x) - trained).norm() < 0.1 * (trained - plain).norm()


def test_layers_that_read_one_tensor_train_one_range() -> None:
    model, x = build("plain", dtype=torch.float32), images("plain", dtype=torch.float32)
    settings = Quantization("int8", {"blocks.0.mlp.fc1": 2.0, "blocks.0.attn.qkv": 3.0, "blocks.1.mlp.fc1": 2.0})
    module = QuantizedTraining(model, settings, learned=True)
    module(x).square().mean().backward()
    with torch.no_grad():
        assert module.log_ranges.grad is not None
        module.log_ranges -= module.log_ranges.grad
        first, other, same = map(float, module.ranges().values())
    assert first == same not in (2.0, other)
