"""Images as bytes: the normalization of a model's inputs, folded into its first convolution.

For a convolution without padding, with channels c and taps i, j,

    conv(W, b)((x / 255 - mean) / std) = conv(W', b')(x / s),
    W'[:, c] = W[:, c] s / (255 std_c),   b' = b - sum_cij W[:, c, i, j] mean_c / std_c.

s is 1 in fp32. In half precision it is 256: x / 256 is exact there, and W' has no subnormal numbers. A convolution that
pads (PVTv2) adds zeros to normalized images, which no byte represents: there the images are normalized first.
"""

from copy import deepcopy
from typing import cast

import torch
from torch import Tensor, nn

from vitcompress.exporters.precision import HALF, Float32Io, WideSoftmax, convert_precision, in_fp32
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
    model = family_of(model).at_size(in_fp32(model), *input.size[1:])
    if not uint8:
        return convert_precision(model, precision, islands)
    scale = 256 if precision in HALF else 1
    if folds := can_fold_normalization(model):
        model = fold_normalization(model, input, scale)
    return ByteInput(convert_precision(model, precision, islands), scale, None if folds else input).eval()


def can_fold_normalization(model: nn.Module) -> bool:
    """Whether the normalization can be folded into the first convolution: only if that does not pad."""
    stem = model.get_submodule(family_of(model).stem)
    return isinstance(stem, nn.Conv2d) and stem.padding in ((0, 0), 0, "valid")


def fold_normalization(model: nn.Module, input: InputConfig, scale: int) -> nn.Module:
    """A copy of `model` whose first convolution takes x / scale, with x from 0 to 255, instead of normalized images."""
    copy = deepcopy(model)
    stem = copy.get_submodule(family_of(copy).stem)
    assert isinstance(stem, nn.Conv2d)
    mean, std = _statistics(input)
    weight = stem.weight.detach().cpu().double()
    offset = (weight * (mean / std)).sum((1, 2, 3))
    bias = -offset if stem.bias is None else stem.bias.detach().cpu().double() - offset
    stem.weight = nn.Parameter((weight * scale / (LARGEST * std)).to(stem.weight))
    stem.bias = nn.Parameter(bias.to(stem.weight))
    return copy


class ByteInput(nn.Module):
    """A model that takes bytes. input: it normalizes them as stated here; None: its first convolution does."""

    factor: Tensor
    offset: Tensor

    def __init__(self, model: nn.Module, scale: int, input: InputConfig | None = None) -> None:
        super().__init__()
        self.model, self.scale, self.normalizes = model, scale, input is not None
        mean, std = _statistics(input).float() if input else torch.empty(2, 0, 1, 1, dtype=torch.float32)
        self.register_buffer("factor", 1 / (LARGEST * std), persistent=False)
        self.register_buffer("offset", mean / std, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, height, width, channels), 0 to 255 -> logits, (batch, classes)."""
        images = x.to(self.factor.dtype).permute(0, 3, 1, 2)  # TensorRT supports no operation on bytes but a cast
        if self.normalizes:
            images = images * self.factor - self.offset
        elif self.scale != 1:
            images = images / self.scale
        return cast(Tensor, self.model(images))


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
