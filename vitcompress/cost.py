"""Parameters and multiply-accumulates of a model as it is, counted by torch on shapes alone."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitcompress.frozen import frozen

LINEAR_OPERATORS = ("convolution", "addmm", "mm")


@dataclass(frozen=True)
class Cost:
    """Size and work of one forward pass of one image.

    params: number of parameters. macs: multiply-accumulates, the two matrix products of each attention counted.
    macs_linear: the same without them, the convention behind the pruned rows of the HetDPT tables.
    """

    params: int
    macs: int
    macs_linear: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def measure(model: nn.Module, input_size: tuple[int, int, int]) -> Cost:
    """Count `model` on one image of `input_size` (channels, height, width). The model is left as it is."""
    return _cost(model, _counted(model, input_size)["Global"])


def by_module(model: nn.Module, input_size: tuple[int, int, int]) -> dict[str, Cost]:
    """As `measure`, for each module that takes part, by its name, with all that lies in it; "" is the model."""
    named, root = dict(model.named_modules()), type(model).__name__
    found = {path.removeprefix(root).lstrip("."): work for path, work in _counted(model, input_size).items()}
    return {path: _cost(named[path], work) for path, work in found.items() if path in named}


def _counted(model: nn.Module, input_size: tuple[int, int, int]) -> dict[str, dict[Any, int]]:
    """Floating point operations by module and operator."""
    ready = not model.training and all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    shapes = model if ready else deepcopy(model).to("meta").eval()  # hundreds of candidates are ready as they are
    dtype = next((p.dtype for p in shapes.parameters()), torch.float32)
    with torch.no_grad(), frozen(shapes), FlopCounterMode(display=False) as counter:
        shapes(torch.empty(1, *input_size, device="meta", dtype=dtype))
    return dict(counter.get_flop_counts())


def _cost(module: nn.Module, counts: Mapping[Any, int]) -> Cost:
    work = {str(operator).split(".")[-1]: flops // 2 for operator, flops in counts.items()}
    linear = sum(work.get(name, 0) for name in LINEAR_OPERATORS)
    return Cost(sum(p.numel() for p in module.parameters()), sum(work.values()), linear)
