"""Parameters and multiply-accumulates of a model, counted by torch on shapes alone."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitcompress.families import family_of
from vitcompress.plan import Plan
from vitcompress.surgery.shapes import sliced

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


def count_cost(model: nn.Module, input_size: tuple[int, int, int]) -> Cost:
    """Count `model` on one image of `input_size` (channels, height, width). The model is left as it is."""
    return _cost(model, _counted(model, input_size)["Global"])


def count_by_module(model: nn.Module, input_size: tuple[int, int, int]) -> dict[str, Cost]:
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


def planned_cost(model: nn.Module, input_size: tuple[int, int, int]) -> Callable[[Plan], Cost] | None:
    """The function that says what `model` costs once sliced by a plan that removes nothing, as `cost.measure` would.

    None where that cannot be told from the whole: multiply-accumulates outside of layers and attentions, and heads
    that are padded.
    """
    family = family_of(model)
    spaces = [space for space in family.spaces(model) if space.attention]
    before = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    parameters = [name for name, _ in model.named_parameters()]
    parts = count_by_module(model, input_size)
    whole = parts[""]
    layers = {f"{path}.weight": part.macs_linear for path, part in parts.items() if f"{path}.weight" in before}
    products = {name: parts[name].macs - parts[name].macs_linear for name in {s.attention for s in spaces}}
    told = (sum(layers.values()), sum(products.values())) == (whole.macs_linear, whole.macs - whole.macs_linear)
    if not told or any(getattr(module, "padded", False) for module in model.modules()):
        return None
    widths = {name: sum(space.size for space in spaces if space.attention == name) for name in products}

    def found(plan: Plan) -> Cost:
        after = sliced(before, model, family, plan)
        linear = sum(macs * prod(after[name]) // prod(before[name]) for name, macs in layers.items())
        left = dict.fromkeys(products, 0)
        for space in spaces:
            left[space.attention] += len(plan.kept.get(space.name, range(space.size)))
        inside = sum(macs * left[name] // widths[name] for name, macs in products.items())
        return Cost(sum(prod(after[name]) for name in parameters), linear + inside, linear)

    return found


@contextmanager
def frozen(model: nn.Module) -> Iterator[nn.Module]:
    """`model` while none of its parameters requires gradients; afterwards the same ones do again.

    Even without gradients, a view of a parameter is said to require them, as that of a pool's latent is. torch's
    ModuleTracker asks such a view for a gradient function, which it does not have, when a module is given it.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield model
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
