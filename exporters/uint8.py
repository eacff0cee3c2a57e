"""Images as bytes: the normalisation that a model expects, moved into its first convolution.

With a convolution that pads nothing, for channels c and taps i, j,

    conv(W, b)((x / 255 - mean) / std) = conv(W', b')(x / s),
    W'[:, c] = W[:, c] s / (255 std_c),   b' = b - sum_cij W[:, c, i, j] mean_c / std_c.

s is 1 in fp32. In half precision it is 256: x / 256 is exact there, and W' stays among the normal numbers. A
convolution that pads (PVTv2) adds zeros to normalised images, which no byte stands for: there the images are
normalised first.
"""

from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn

from vitcompress.exporters.precision import HALF, Float32Io, WideSoftmax, in_precision
from vitcompress.families import family_of
from vitcompress.models.create import InputConfig

LARGEST = 255


def deployed(
    model: nn.Module, input: InputConfig, precision: str = "fp32", islands: tuple[str, ...] = (), *, uint8: bool = False
) -> nn.Module:
    """The module that is exported: `model` in `precision`, and with `uint8` one that takes bytes.

    With `uint8` it takes (batch, height, width, channels) of 0 to 255 in any type, else normalised images, (batch,
    channels, height, width). Raises as `in_precision`.
    """
    model = at_size(model, input)
    if not uint8:
        return in_precision(model, precision, islands)
    scale = 256 if precision in HALF else 1
    if folds(model):
        return ByteInput(in_precision(folded(model, input, scale), precision, islands), scale).eval()
    return ByteInput(in_precision(model, precision, islands), 1, input).eval()


def at_size(model: nn.Module, input: InputConfig) -> nn.Module:
    """`model`, over the same parameters, for images of the one size of `input`."""
    return family_of(model).at_size(model, *input.size[1:])


def folds(model: nn.Module) -> bool:
    """Whether the first convolution can take the normalisation over, which it can unless it pads."""
    stem = model.get_submodule(family_of(model).stem)
    return isinstance(stem, nn.Conv2d) and stem.padding in ((0, 0), 0, "valid")


def folded(model: nn.Module, input: InputConfig, scale: int = 1) -> nn.Module:
    """A copy of `model` whose first convolution takes x / scale, x in 0 to 255, in place of normalised images."""
    copy = deepcopy(model)
    stem = copy.get_submodule(family_of(copy).stem)
    assert isinstance(stem, nn.Conv2d)
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (input.mean, input.std))
    weight = stem.weight.detach().cpu().double()
    offset = (weight * (mean / std)).sum((1, 2, 3))
    bias = -offset if stem.bias is None else stem.bias.detach().cpu().double() - offset
    stem.weight = nn.Parameter((weight * scale / (LARGEST * std)).to(stem.weight))
    stem.bias = nn.Parameter(bias.to(stem.weight))
    return copy


class ByteInput(nn.Module):
    """A model that takes bytes, and normalises them itself where `input` says how."""

    factor: Tensor
    offset: Tensor

    def __init__(self, model: nn.Module, scale: int, input: InputConfig | None = None) -> None:
        super().__init__()
        self.model, self.scale, self.normalises = model, scale, input is not None
        mean, std = (torch.tensor(values)[:, None, None] for values in ((input.mean, input.std) if input else ((), ())))
        self.register_buffer("factor", 1 / (LARGEST * std), persistent=False)
        self.register_buffer("offset", mean / std, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, height, width, channels), 0 to 255 -> logits, (batch, classes)."""
        images = x.to(self.factor.dtype).permute(0, 3, 1, 2)  # TensorRT does nothing with bytes but convert them
        if self.normalises:
            images = images * self.factor - self.offset
        elif self.scale != 1:
            images = images / self.scale
        out: Tensor = self.model(images)
        return out


def to_bytes(images: Tensor, input: InputConfig) -> Tensor:
    """Normalised images, (batch, channels, height, width), as the nearest bytes, (batch, height, width, channels)."""
    mean, std = _statistics(images, input)
    values = (images.double() * std + mean) * LARGEST
    return values.round().clamp(0, LARGEST).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def from_bytes(bytes: Tensor, input: InputConfig) -> Tensor:
    """Bytes, (batch, height, width, channels), as normalised images in float32, (batch, channels, height, width)."""
    images = bytes.permute(0, 3, 1, 2).double()
    mean, std = _statistics(images, input)
    return ((images / LARGEST - mean) / std).float().contiguous()


def _statistics(images: Tensor, input: InputConfig) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, in the shape of images."""
    mean, std = (torch.tensor(v, dtype=torch.float64, device=images.device) for v in (input.mean, input.std))
    return mean[:, None, None], std[:, None, None]


WRAPPERS: dict[type[nn.Module], str] = {Float32Io: "model", ByteInput: "model", WideSoftmax: "attention"}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module that `deployed` made, by the names that the model itself has for them."""
    return {name: tensor for name, tensor in _named(module, "") if tensor.dim()}


def _named(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    inner = next((getattr(module, name) for kind, name in WRAPPERS.items() if isinstance(module, kind)), None)
    if inner is not None:
        yield from _named(inner, prefix)
        return
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        yield f"{prefix}{name}", tensor
    for name, child in module.named_children():
        yield from _named(child, f"{prefix}{name}.")
