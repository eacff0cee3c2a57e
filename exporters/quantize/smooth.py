"""Move the scale of each channel from a LayerNorm into the linear layers that read it.

A channel that is much larger than the others leaves them few of the 256 steps of an input in int8. Dividing it by s and
multiplying the weights that read it by s changes no product. As in SmoothQuant (Xiao et al., 2023,
https://arxiv.org/abs/2211.10438, eq. 4, alpha = 1/2), s = sqrt(max|x| / max|w|), rounded to a power of two, so that the
rescaled model computes the same numbers.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitcompress.errors import ArtifactError
from vitcompress.exporters.precision import in_fp32
from vitcompress.exporters.ranges import CHUNK
from vitcompress.families import family_of

MOST = 16  # magnitude of an exponent
Factors = Mapping[str, Sequence[int]]  # LayerNorm -> for each channel the exponent of two that it is divided by


@torch.no_grad()
def measure_factors(model: nn.Module, images: Tensor) -> dict[str, list[int]]:
    """The factors for `model`, from the largest outputs of its LayerNorms on `images`, (count, C, H, W)."""
    copy, readers, state = deepcopy(model).float(), family_of(model).normalized(model), dict(model.named_parameters())
    largest = dict.fromkeys(readers, torch.zeros(1))

    def update(name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        largest[name] = torch.maximum(largest[name], output.abs().flatten(0, -2).amax(0))

    for name in readers:
        copy.get_submodule(name).register_forward_hook(partial(update, name))
    for chunk in torch.split(images, CHUNK):
        copy(chunk)
    factors = {}
    for name, layers in readers.items():
        weights = torch.cat([state[f"{layer}.weight"] for layer in layers]).abs().amax(0)
        factors[name] = ((largest[name] / weights).log2() / 2).round().nan_to_num(0.0).clamp(-MOST, MOST).int().tolist()
    return factors


@torch.no_grad()
def rescale(model: nn.Module, factors: Factors) -> nn.Module:
    """`in_fp32(model)`, with factors a copy that has these. Raises ArtifactError if they do not fit."""
    copy = deepcopy(model).float() if factors else in_fp32(model)
    readers, state = family_of(copy).normalized(copy), dict(copy.named_parameters())
    for name, exponents in factors.items():
        width = len(state[f"{name}.weight"]) if name in readers else 0
        if not width or len(exponents) != width or max(map(abs, exponents)) > MOST:
            raise ArtifactError(f"{name!r:.60} has factors that do not fit the model", hint="export the file again")
        scale = 2.0 ** torch.tensor(exponents).to(state[f"{name}.weight"])
        for parameter in copy.get_submodule(name).parameters():
            parameter.div_(scale)
        for layer in readers[name]:
            state[f"{layer}.weight"].mul_(scale)
    return copy
