"""Take away what a branch adds to every token alike, by letting what wrote the stream before it add that.

An attention without v channels, or an FFN without hidden ones, adds its last bias (times its LayerScale). Nothing but
the branch itself reads the stream between the bias's old place and its new one, and the branch no longer depends on it.
"""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from vitcompress.families import Family, Site
from vitcompress.families.base import scale_parameter
from vitcompress.families.edited_block import branches_of, has_output_act


@torch.no_grad()
def fold_constant(model: nn.Module, family: Family, branch: Site, gone: Collection[str] = ()) -> bool:
    """Move the bias with which `branch`, an attention or FFN that adds nothing else, ends; whether there was a place.

    gone: attentions and FFNs before it whose bias was moved already. There is no place behind an output activation or
    a bypass, in a layer without a bias or with a LayerScale of zero, and in families whose stream has no one entry.
    """
    own = _bias(model, family, branch.name)
    if not own:
        return True  # nothing is added
    places = _place(model, family, branch, gone)
    gammas = [_gamma(model, family, place) for place in places]
    if not places or not all(gamma.all() for gamma in gammas):
        return False
    constant = _gamma(model, family, own) * model.get_parameter(own).double()
    for place, gamma in zip(places, gammas, strict=True):
        parameter = model.get_parameter(place)
        parameter.copy_(parameter.double() + constant / gamma)
    model.get_parameter(own).zero_()
    return True


def _place(model: nn.Module, family: Family, branch: Site, gone: Collection[str]) -> tuple[str, ...]:
    """The parameters that each token receives exactly one of, last before `branch`; none where there are no such."""
    if family.entry is None:
        return ()
    for name in _before(model, family, branch):
        if name not in gone:
            bias = _bias(model, family, name) if name else ""
            return (bias,) if bias else ()
    return family.entry(model)


def _before(model: nn.Module, family: Family, branch: Site) -> Iterator[str]:
    """The attentions and FFNs before `branch`, backwards; an empty name where something else changes the stream."""
    found: list[str] = []
    for path, block in family.blocks(model).items():
        for chain in branches_of(block, family.wiring):
            part = next((part for part in (family.wiring.attention, family.wiring.ffn) if part in chain), "")
            name = f"{path}.{part}" if part else ""
            if name == branch.name:
                yield from reversed(found)
                return
            found.append(name)
        if has_output_act(block):
            found.append("")


def _bias(model: nn.Module, family: Family, name: str) -> str:
    """The bias with which the attention or FFN `name` writes the stream; empty where it has none."""
    axes = (axis for space in family.spaces(model) if space.kind == "residual" for axis in space.axes)
    own = (axis.tensor for axis in axes if axis.dim == 0 and axis.tensor.startswith(f"{name}."))
    return next((tensor for tensor in own if tensor.endswith(".bias")), "")


def _gamma(model: nn.Module, family: Family, bias: str) -> Tensor:
    """What the LayerScale behind the layer of `bias` multiplies it by; 1 where there is none."""
    for scale, layer in family.scales(model).items():
        if bias == f"{layer}.bias":
            return scale_parameter(model, scale).double()
    return torch.ones((), dtype=torch.float64, device=model.get_parameter(bias).device)
