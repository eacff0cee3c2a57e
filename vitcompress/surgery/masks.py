"""Masks of channels: forward hooks, no new modules, no masks in the weights."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vitcompress.errors import PlanError
from vitcompress.families import Family
from vitcompress.families.base import Space


@contextmanager
def channel_gates(model: nn.Module, family: Family, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Multiply every writer of each named space by its gate, shape (channels,), while the context is open.

    In the residual space token and position parameters are gated too, and every LayerNorm that reads it takes
    its statistics over the channels whose gate is not zero, so a mask of zeros and ones computes what slicing does.
    Gates may require gradients. Afterwards modules, hooks, parameters and their order are what they were; until then
    the state dict of a model with a gated residual space names its token parameters otherwise.

    Raises:
        PlanError: no such space, a gate of another length, or a residual space that is gated already.
    """
    spaces = {space.name: space for space in family.spaces(model)}
    for name, gate in values.items():
        if name not in spaces:
            raise PlanError(f"no such space: {name}; the model has {', '.join(spaces)}")
        if gate.shape != (spaces[name].size,):
            raise PlanError(f"{name} has {spaces[name].size} channels, its gate has the shape {tuple(gate.shape)}")
    with ExitStack() as stack:
        for name, gate in values.items():
            for undo in _gate_space(model, spaces[name], gate):
                stack.callback(undo)
        yield


def _gate_space(model: nn.Module, space: Space, gate: Tensor) -> Iterator[Callable[[], None]]:
    for axis in space.axes:
        path, _, leaf = axis.tensor.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(module, nn.LayerNorm):
            if leaf == "weight":
                yield module.register_forward_hook(_MaskedNorm(gate.repeat(axis.copies))).remove
        elif isinstance(module, nn.Linear | nn.Conv2d):
            if leaf == "weight" and axis.dim == 0:
                full = torch.ones(module.weight.shape[0], dtype=gate.dtype, device=gate.device)
                full = _with_segment(full, gate, axis.offset, axis.copies)
                yield module.register_forward_hook(_ChannelGate(full)).remove
        elif axis.dim == 2:  # tokens, positions, a pool's latent: (1, tokens, channels)
            yield _gate_parameter(module, leaf, gate)


def _with_segment(full: Tensor, gate: Tensor, offset: int, copies: int) -> Tensor:
    end = offset + copies * gate.numel()
    return torch.cat([full[:offset], gate.repeat(copies), full[end:]])


def _gate_parameter(module: nn.Module, leaf: str, gate: Tensor) -> Callable[[], None]:
    """Gate a parameter that is read as it is, which no hook sees."""
    if parametrize.is_parametrized(module, leaf):
        raise PlanError(f"{leaf} is gated already; give all gates of a model to one context")
    order = list(module._parameters)
    parametrize.register_parametrization(module, leaf, _ParameterGate(gate))

    def undo() -> None:
        parametrize.remove_parametrizations(module, leaf, leave_parametrized=False)
        for name in order:  # the parameter came back as the last one; optimisers count on the order
            module._parameters[name] = module._parameters.pop(name)

    return undo


class _ChannelGate:
    def __init__(self, gate: Tensor) -> None:
        self.gate = gate

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        gate = self.gate.to(out.dtype)
        return out * (gate[:, None, None] if isinstance(module, nn.Conv2d) else gate)


class _MaskedNorm:
    def __init__(self, gate: Tensor) -> None:
        self.gate = gate

    def __call__(self, module: nn.LayerNorm, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        x, gate = args[0], self.gate.to(out.dtype)
        alive = (self.gate != 0).to(x.dtype)
        count = alive.sum()
        centred = (x - (x * alive).sum(-1, keepdim=True) / count) * alive
        variance = centred.square().sum(-1, keepdim=True) / count
        normal = centred * (variance + module.eps).rsqrt() * module.weight
        return (normal if module.bias is None else normal + module.bias).to(out.dtype) * gate


class _ParameterGate(nn.Module):
    def __init__(self, gate: Tensor) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, parameter: Tensor) -> Tensor:
        return parameter * self.gate.to(parameter.dtype)
