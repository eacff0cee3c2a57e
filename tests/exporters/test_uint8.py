"""Bytes as input: folding the normalization into the first convolution only changes rounding."""

from copy import deepcopy

import pytest
import torch
from contracts import build
from torch import Tensor, nn

from vitcompress.exporters.uint8 import build_deployed, can_fold_normalization, fold_normalization, from_bytes, to_bytes
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
@pytest.mark.parametrize(("variant", "scale"), [("plain", 1), ("plain", 256), ("swin", 256)])
def test_the_folded_convolution_is_within_its_rounding_bound(variant: str, scale: int) -> None:
    """In float64 what is left is that W' and b' were rounded to fp32 once: |difference| <= u (|W'| |x| + |b'|), plus

    as many roundings of float64 as either side has terms.
    """
    model, input = sized(variant)
    stem = model.get_submodule("patch_embed.proj")
    folded = fold_normalization(model, input, scale).get_submodule("patch_embed.proj")
    pixels = some_bytes(input.size)
    expected = deepcopy(stem).double()(normalized(pixels, input))
    x = pixels.permute(0, 3, 1, 2).double() / scale
    difference = (deepcopy(folded).double()(x) - expected).abs()
    size = deepcopy(folded).double()
    size.weight.abs_()
    size.bias.abs_()
    terms = 2 * (stem.weight[0].numel() + 4)
    bound = (2.0**-24 + 4 * terms * 2.0**-53) * size(x)
    assert (difference <= bound).all()
    assert not torch.equal(folded.weight, stem.weight)
    assert not (2 * difference <= bound * 1e-3).all()  # the bound is not far above what rounding does


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_convolution_of_a_model_in_half_precision_is_rounded_to_fp32_alone(dtype: torch.dtype) -> None:
    model, input = sized("plain")
    pixels, low = some_bytes(input.size), deepcopy(model).to(dtype)
    expected = deepcopy(low).double()(normalized(pixels, input))
    outputs = build_deployed(low, input, uint8=True).double()(pixels)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=2.0**-17 * float(expected.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize(("variant", "in_front"), [("plain", False), ("swin", False), ("pvt", True)])
def test_bytes_give_the_same_outputs_as_images(variant: str, in_front: bool) -> None:
    model, input = sized(variant)
    assert can_fold_normalization(model) is not in_front
    pixels = some_bytes(input.size)
    expected = deepcopy(model).double()(normalized(pixels, input))
    module = build_deployed(model, input, uint8=True).double()
    # W' and b' (or factor and offset) were rounded to fp32, relative 2**-24, and a few blocks amplify that little.
    torch.testing.assert_close(module(pixels), expected, rtol=0, atol=2.0**-17 * float(expected.abs().max()))
    assert not torch.allclose(module(255 - pixels), expected)


@torch.no_grad()
def test_in_half_precision_the_folded_weights_are_normal_numbers() -> None:
    model, input = sized("plain")
    module = build_deployed(model, input, "fp16", uint8=True)
    weight = module.get_parameter("model.model.patch_embed.proj.weight")
    original = model.get_submodule("patch_embed.proj").weight
    large = original.abs() > 1e-3
    assert weight.dtype == torch.float16
    assert (weight.abs()[large] >= torch.finfo(torch.float16).smallest_normal).all()
