"""Images as bytes, (batch, height, width, channels): a model that normalizes them itself."""

from typing import cast

import torch
from torch import Tensor, nn

from vitcompress.exporters.precision import Float32Io, WideSoftmax, convert_precision, in_fp32
from vitcompress.families import family_of
from vitcompress.models.create import InputConfig

LARGEST = 255


def build_deployed(
    model: nn.Module, input: InputConfig, precision: str = "fp32", islands: tuple[str, ...] = (), *, uint8: bool
) -> nn.Module:
    """The module that is exported: `model` in `precision`. Raises like `convert_precision`.

    Its inputs are normalized images, (batch, channels, height, width), or with `uint8` numbers from 0 to 255 of any
    type, (batch, height, width, channels).
    """
    model = convert_precision(family_of(model).at_size(in_fp32(model), *input.size[1:]), precision, islands)
    return ByteInput(model, input).eval() if uint8 else model


class ByteInput(nn.Module):
    """A model that takes bytes, and normalizes them in float32 as `input` states."""

    factor: Tensor
    offset: Tensor

    def __init__(self, model: nn.Module, input: InputConfig) -> None:
        super().__init__()
        self.model = model
        mean, std = _statistics(input).float()
        self.register_buffer("factor", 1 / (LARGEST * std), persistent=False)
        self.register_buffer("offset", mean / std, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, height, width, channels), 0 to 255 -> logits, (batch, classes)."""
        images = x.to(self.factor.dtype).permute(0, 3, 1, 2)  # TensorRT supports no operation on bytes but a cast
        return cast(Tensor, self.model(images * self.factor - self.offset))


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
    while isinstance(module, (ByteInput, Float32Io)):
        module = module.model
    tensors = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
    for attention in [name for name, part in module.named_modules() if isinstance(part, WideSoftmax)]:
        inner = f"{attention}.attention."
        tensors = {n.replace(inner, f"{attention}.") if n.startswith(inner) else n: t for n, t in tensors.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor.dim()}
