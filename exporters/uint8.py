"""Images as bytes, (batch, height, width, channels): a model that normalizes them itself."""

from typing import Any

import torch
from torch import Tensor, nn

from vitcompress.exporters.precision import convert_precision, in_fp32
from vitcompress.families import family_of
from vitcompress.models.create import InputConfig

LARGEST = 255
FACTOR, OFFSET = "byte_factor", "byte_offset"  # buffers of a model that takes bytes


def build_deployed(
    model: nn.Module, input: InputConfig, precision: str = "fp32", islands: tuple[str, ...] = (), *, uint8: bool
) -> nn.Module:
    """The module that is exported: `model` in `precision`. Raises like `convert_precision`.

    Its inputs are normalized images, (batch, channels, height, width), or with `uint8` numbers from 0 to 255 of any
    type, (batch, height, width, channels).
    """
    model = convert_precision(family_of(model).at_size(in_fp32(model), *input.size[1:]), precision, islands)
    if uint8:
        mean, std = _statistics(input).float()
        model.register_buffer(FACTOR, 1 / (LARGEST * std), persistent=False)
        model.register_buffer(OFFSET, mean / std, persistent=False)
        model.register_forward_pre_hook(_normalize, prepend=True)
    return model


def _normalize(model: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
    """Numbers from 0 to 255, (batch, height, width, channels), as the normalized images that `model` computes with."""
    factor, offset = model.get_buffer(FACTOR), model.get_buffer(OFFSET)
    images = args[0].to(factor.dtype).permute(0, 3, 1, 2)  # TensorRT supports no operation on bytes but a cast
    return (images * factor - offset,)


def to_bytes(images: Tensor, input: InputConfig) -> Tensor:
    """Normalized images, (batch, channels, height, width), as the nearest bytes, (batch, height, width, channels)."""
    mean, std = _statistics(input, images.device)
    values: Tensor = (images.double() * std + mean) * LARGEST
    return values.round().clamp(0, LARGEST).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def from_bytes(bytes: Tensor, input: InputConfig) -> Tensor:
    """Bytes, (batch, height, width, channels), as normalized images in float32, (batch, channels, height, width)."""
    mean, std = _statistics(input, bytes.device)
    images: Tensor = (bytes.permute(0, 3, 1, 2).double() / LARGEST - mean) / std
    return images.float().contiguous()


def _statistics(input: InputConfig, device: torch.device | None = None) -> Tensor:
    """Mean and standard deviation, (2, channels, 1, 1), in float64."""
    return torch.tensor((input.mean, input.std), dtype=torch.float64, device=device)[..., None, None]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module from `build_deployed`, without scalars, by their names in the model."""
    tensors = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
    return {name: tensor for name, tensor in tensors.items() if tensor.dim() and name not in (FACTOR, OFFSET)}
