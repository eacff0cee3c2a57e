"""Bytes as input: normalizing them inside of the file only changes rounding."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from contracts import build
from torch import Tensor, nn

from vitcompress.exporters.uint8 import build_deployed, from_bytes, to_bytes
from vitcompress.models.create import InputConfig, input_config

INPUT = InputConfig((3, 8, 8), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bicubic", 0.9, "center")


def sized(variant: str) -> tuple[nn.Module, InputConfig]:
    model = build(variant, dtype=torch.float32)
    size = input_config(model).size
    return model, InputConfig(size, INPUT.mean, INPUT.std, "bicubic", 0.9, "center")


def some_bytes(size: tuple[int, int, int], count: int = 4) -> Tensor:
    channels, height, width = size
    shape = (count, height, width, channels)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def normalized(bytes: Tensor, input: InputConfig) -> Tensor:
    """An independent implementation in float64."""
    mean, std = (torch.tensor(v, dtype=torch.float64) for v in (input.mean, input.std))
    return ((bytes.double() / 255 - mean) / std).permute(0, 3, 1, 2)


def test_bytes_survive_normalizing_and_back() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).repeat(3).view(1, 16, 16, 3)
    images = from_bytes(pixels, INPUT)
    assert images.shape == (1, 3, 16, 16) and images.dtype == torch.float32
    assert torch.equal(to_bytes(images, INPUT), pixels)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_is_computed_in_fp32(dtype: torch.dtype) -> None:
    model, input = sized("plain")
    pixels, low = some_bytes(input.size), deepcopy(model).to(dtype)
    expected = deepcopy(low).double()(normalized(pixels, input))
    outputs = build_deployed(low, input, uint8=True).double()(pixels)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=2.0**-17 * float(expected.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("variant", ["plain", "swin", "pvt"])
def test_bytes_give_the_same_outputs_as_images(variant: str) -> None:
    model, input = sized(variant)
    pixels = some_bytes(input.size)
    expected = deepcopy(model).double()(normalized(pixels, input))
    module = build_deployed(model, input, uint8=True).double()
    # factor and offset were rounded to fp32, relative 2**-24, and a few blocks amplify that little.
    torch.testing.assert_close(module(pixels), expected, rtol=0, atol=2.0**-17 * float(expected.abs().max()))
    assert not torch.allclose(module(255 - pixels), expected)


@torch.no_grad()
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("variant", ["plain", "pvt"])
def test_a_file_in_half_precision_gets_images_that_were_normalized_in_fp32(variant: str, precision: str) -> None:
    """Normalizing in bf16 would round the mean to 8 bits."""
    model, input = sized(variant)
    received = list[Tensor]()
    module: Any = build_deployed(model, input, precision, uint8=True)
    *_, narrow = module._forward_pre_hooks  # comes after the one that normalizes
    module.register_forward_pre_hook(lambda _, args: received.append(args[0]))
    module._forward_pre_hooks.move_to_end(narrow)
    pixels = some_bytes(input.size)
    outputs = module(pixels)
    assert received[0].dtype == torch.float32
    exact = normalized(pixels, input)
    assert (received[0] - exact).abs().max() <= 8 * 2.0**-24 * exact.abs().max()
    as_images = build_deployed(model, input, precision, uint8=False)(received[0])
    assert torch.equal(outputs, as_images) and outputs.abs().max() > 0
