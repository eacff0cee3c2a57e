"""Delete channels for the duration of a forward pass, different ones for each group of images.

A channel is deleted when nothing reads it any more: it is zeroed where a layer reads it, q and k where they are written
(after the bias). A LayerNorm takes its statistics over the channels that are left, which is what cutting them out does
and what setting them to zero does not.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitcompress.families import Axis, Space


@contextmanager
def deletion(model: nn.Module, spaces: Iterable[Space], gates: Mapping[str, Tensor]) -> Iterator[None]:
    """Multiply the channels of each named space by its gates, (groups, channels), while the context is open.

    The batch falls into `groups` equal runs of images, each with its own row of gates: 0 deletes, 1 keeps. Gates may
    require gradients.
    """
    with ExitStack() as stack:
        for space in spaces:
            if space.name in gates:
                for register, hook in _hooks(model, space, gates[space.name]):
                    stack.callback(register(hook).remove)
        yield


def gated_modules(model: nn.Module, space: Space) -> list[nn.Module]:
    """The modules at which `deletion` works for this space."""
    return [model.get_submodule(_owner(axis)) for axis in _gated_axes(model, space)]


def _gated_axes(model: nn.Module, space: Space) -> list[Axis]:
    """The axes of what reads the space: its LayerNorms and the layers with inputs in it; else of its writers."""
    by_module = {axis: model.get_submodule(_owner(axis)) for axis in space.axes if axis.tensor.endswith("weight")}
    readers = [axis for axis, module in by_module.items() if axis.dim == 1 or isinstance(module, nn.LayerNorm)]
    return readers or [axis for axis, module in by_module.items() if isinstance(module, nn.Linear)]


def _owner(axis: Axis) -> str:
    return axis.tensor.rpartition(".")[0]


def _hooks(model: nn.Module, space: Space, gate: Tensor) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
    for axis in _gated_axes(model, space):
        module: Any = model.get_submodule(_owner(axis))
        if isinstance(module, nn.LayerNorm):
            yield module.register_forward_hook, _NormOver(_segment(gate, axis, module.weight.shape[0]))
        elif axis.dim == 1:
            behind = module.weight.ndim - 2  # height and width of a convolution's channels
            yield module.register_forward_pre_hook, _Inputs(_segment(gate, axis, module.weight.shape[1]), behind)
        else:
            yield module.register_forward_hook, _Outputs(_segment(gate, axis, module.out_features))


def _segment(gate: Tensor, axis: Axis, length: int) -> Tensor:
    """Gates of a whole axis of `length`, one where the space has no channel: (groups, length)."""
    own = gate.repeat(1, axis.copies)
    ones = [gate.new_ones(len(gate), n) for n in (axis.offset, length - axis.offset - own.shape[1])]
    return torch.cat([ones[0], own, ones[1]], dim=1) if own.shape[1] < length else own


def _grouped(x: Tensor, gate: Tensor, behind: int = 0) -> tuple[Tensor, Tensor]:
    """x, (groups x images, ..., channels), as (groups, images, ..., channels), and `gate` shaped to multiply it.

    behind: how many dimensions follow that of the channels.
    """
    groups, channels = gate.shape
    sizes = (groups, *[1] * (x.ndim - 1 - behind), channels, *[1] * behind)
    return x.reshape(groups, -1, *x.shape[1:]), gate.to(x.dtype).reshape(sizes)


class _Outputs:
    def __init__(self, gate: Tensor) -> None:
        self.gate = gate

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        x, gate = _grouped(out, self.gate)
        return (x * gate).reshape(out.shape)


class _Inputs:
    def __init__(self, gate: Tensor, behind: int) -> None:
        self.gate, self.behind = gate, behind

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, gate = _grouped(args[0], self.gate, self.behind)
        return ((x * gate).reshape(args[0].shape), *args[1:])


class _NormOver:
    """A LayerNorm whose mean and variance are those of the channels that are left."""

    def __init__(self, gate: Tensor) -> None:
        self.gate = gate

    def __call__(self, module: nn.LayerNorm, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        x, gate = _grouped(args[0], self.gate)
        count = gate.sum(-1, keepdim=True)
        centred = x - (x * gate).sum(-1, keepdim=True) / count
        variance = (centred.square() * gate).sum(-1, keepdim=True) / count
        normal = centred * (variance + module.eps).rsqrt() * module.weight
        shifted: Tensor = normal if module.bias is None else normal + module.bias
        return shifted.reshape(out.shape)
