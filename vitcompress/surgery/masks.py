"""Channel masks: forward hooks that change what a model computes and leave its modules and weights alone.

A mask is a tensor of multipliers for the channels of a space, (channels,): 1 keeps a channel, 0 removes it. One of
`delete_channels` may have (groups, channels): the batch consists of equal runs of images, each with its own row.

`mask_channels` multiplies where a space is written, `delete_channels` where it is read. With masks of zeros and ones
both compute what slicing computes; they differ in what a mask between 0 and 1 means, and in its gradients.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vitcompress.errors import PlanError
from vitcompress.families import Axis, Space

Undo = Callable[[], None]  # restores the model


@contextmanager
def mask_channels(model: nn.Module, masks: Mapping[Space, Tensor]) -> Iterator[None]:
    """Multiply the output of every layer that writes a space by the space's mask while the context is open.

    In the residual space, token and position parameters are masked too, and every LayerNorm that reads the space takes
    its statistics over the channels with a nonzero mask. Masks may require gradients. On exit, all modules, hooks,
    parameters and their order are restored; inside the context, the state dict of a model with a masked residual space
    has other names for the token parameters. Raises PlanError for a residual space that is masked already.
    """
    with ExitStack() as stack:
        for space, mask in masks.items():
            for axis in space.axes:
                if axis.dim == 2 or (axis.dim == int(axis.per_head) and axis.tensor.endswith(".weight")):
                    stack.callback(_hook(model, axis, mask, scale=True))
        yield


@contextmanager
def delete_channels(model: nn.Module, masks: Mapping[Space, Tensor]) -> Iterator[None]:
    """Multiply the input of every layer that reads a space by the space's mask while the context is open.

    q and k, which no layer reads, are multiplied where they are written, after the bias. Every LayerNorm that reads the
    space takes statistics weighted by the mask, as if the channels were cut out. Masks may require gradients.
    """
    with ExitStack() as stack:
        for space, mask in masks.items():
            for axis in deleting_axes(model, space):
                stack.callback(_hook(model, axis, mask, scale=False))
        yield


def deleting_axes(model: nn.Module, space: Space) -> list[Axis]:
    """Axes whose owners `delete_channels` hooks: LayerNorms and layers that read the space, or write it (q and k)."""
    modules = {axis: model.get_submodule(axis.owner) for axis in space.axes if axis.tensor.endswith(".weight")}
    readers = [axis for axis, module in modules.items() if axis.dim == 1 or isinstance(module, nn.LayerNorm)]
    return readers or [axis for axis, module in modules.items() if isinstance(module, nn.Linear)]


def _hook(model: nn.Module, axis: Axis, mask: Tensor, *, scale: bool) -> Undo:
    """Mask the outputs (dimension 0 of the weight) or inputs of a layer, or a LayerNorm, or tokens and positions.

    scale: see `_hook_norm`.
    """
    module: Any = model.get_submodule(axis.owner)
    if isinstance(module, nn.LayerNorm):
        return _hook_norm(module, axis, mask, scale=scale)
    if not isinstance(module, nn.Linear | nn.Conv2d):  # tokens, positions, a pool's latent: (1, tokens, channels)
        return _mask_parameter(module, axis.tensor.rpartition(".")[2], mask)
    full, after = _full(mask, axis, module.weight.shape[axis.dim]), 2 * isinstance(module, nn.Conv2d)
    if axis.dim == 0:
        return module.register_forward_hook(lambda module, args, out: _multiply(out, full, after)).remove
    return module.register_forward_pre_hook(lambda module, args: (_multiply(args[0], full, after), *args[1:])).remove


def _hook_norm(module: nn.LayerNorm, axis: Axis, mask: Tensor, *, scale: bool) -> Undo:
    """Take statistics over the masked channels: those with a nonzero mask if the output is scaled by it, too."""
    full = _full(mask, axis, len(module.weight))

    def normalize(module: nn.LayerNorm, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        # At least float32, as in LayerNorm itself: squares of hidden channels overflow float16.
        x, mask = _by_group(args[0].to(torch.promote_types(args[0].dtype, torch.float32)), full)
        weights = (mask != 0).to(x.dtype) if scale else mask
        count = weights.sum(-1, keepdim=True)
        centered = x - (x * weights).sum(-1, keepdim=True) / count
        variance = (centered.square() * weights).sum(-1, keepdim=True) / count
        normal = centered * (variance + module.eps).rsqrt() * module.weight
        normal = normal if module.bias is None else normal + module.bias
        return (normal * mask if scale else normal).to(out.dtype).reshape(out.shape)

    return module.register_forward_hook(normalize).remove


def _mask_parameter(module: nn.Module, leaf: str, mask: Tensor) -> Undo:
    """Mask a parameter that the model reads directly, where no hook can apply."""
    if parametrize.is_parametrized(module, leaf):
        raise PlanError(f"{leaf} is masked already; pass all masks of a model to one context")
    order = list(module._parameters)
    parametrize.register_parametrization(module, leaf, _ParameterMask(mask))

    def undo() -> None:
        parametrize.remove_parametrizations(module, leaf, leave_parametrized=False)
        for name in order:  # the parameter is the last one now; optimizers rely on the order
            module._parameters[name] = module._parameters.pop(name)

    return undo


class _ParameterMask(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, parameter: Tensor) -> Tensor:
        return parameter * self.mask.to(parameter.dtype)


def _full(mask: Tensor, axis: Axis, length: int) -> Tensor:
    """The mask of all `length` entries of an axis, 1 outside the space: (groups, length). A head has its largest."""
    own = mask.reshape(-1, mask.shape[-1])
    own = own.reshape(len(own), length, -1).amax(-1) if axis.per_head else own.repeat(1, axis.copies)
    before, after = (own.new_ones(len(own), n) for n in (axis.offset, length - axis.offset - own.shape[1]))
    return torch.cat([before, own, after], dim=1)


def _multiply(x: Tensor, mask: Tensor, after: int) -> Tensor:
    """`x` times the mask of its channels, which `after` more dimensions follow."""
    grouped, mask = _by_group(x, mask, after)
    return (grouped * mask).reshape(x.shape)


def _by_group(x: Tensor, mask: Tensor, after: int = 0) -> tuple[Tensor, Tensor]:
    """x, (groups x images, ..., channels), as (groups, images, ..., channels), and `mask` shaped to multiply it."""
    groups, channels = mask.shape
    sizes = (groups, *[1] * (x.ndim - 1 - after), channels, *[1] * after)
    return x.reshape(groups, -1, *x.shape[1:]), mask.to(x.dtype).reshape(sizes)
