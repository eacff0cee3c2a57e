"""Parameters and multiply-accumulates of a model as it is, counted by torch on shapes alone."""

from copy import deepcopy
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

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
    ready = not model.training and all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    shapes = model if ready else deepcopy(model).to("meta").eval()  # hundreds of candidates are ready as they are
    dtype = next((p.dtype for p in shapes.parameters()), torch.float32)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        shapes(torch.empty(1, *input_size, device="meta", dtype=dtype))
    work = {str(operator).split(".")[-1]: flops // 2 for operator, flops in counter.get_flop_counts()["Global"].items()}
    linear = sum(work.get(name, 0) for name in LINEAR_OPERATORS)
    return Cost(sum(p.numel() for p in model.parameters()), sum(work.values()), linear)
