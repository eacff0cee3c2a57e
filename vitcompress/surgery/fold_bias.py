"""Fold the constant output of an empty branch (its bias) into the preceding bias of the residual stream.

An attention without v channels, or an FFN without hidden channels, adds only its last bias (times its LayerScale).
Between the old and the new place of this bias, nothing but the branch reads the stream, and the branch ignores it.
"""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from vitcompress.families import Family, Site
from vitcompress.families.base import scale_parameter
from vitcompress.families.edited_block import branches_of, has_output_act


@torch.no_grad()
def fold_branch_bias(model: nn.Module, family: Family, branch: Site, removed: Collection[str] = ()) -> bool:
    """Move the last bias of `branch`, an attention or FFN that adds nothing else, and return whether that was possible.

    It is not possible after an output activation or a bypass, if the preceding layer has no bias or its LayerScale
    contains a zero, and in families without a single entry of the stream.

    removed: attentions and FFNs before `branch` whose bias was moved already.
    """
    own = _bias(model, family, branch.name)
    if not own:
        return True  # the branch adds nothing
    places = _place(model, family, branch, removed)
    gammas = [_gamma(model, family, place) for place in places]
    if not places or not all(gamma.all() for gamma in gammas):
        return False
    constant = _gamma(model, family, own) * model.get_parameter(own).double()
    for place, gamma in zip(places, gammas, strict=True):
        parameter = model.get_parameter(place)
        parameter.copy_(parameter.double() + constant / gamma)
    model.get_parameter(own).zero_()
    return True


def _place(model: nn.Module, family: Family, branch: Site, removed: Collection[str]) -> tuple[str, ...]:
    """The last parameters before `branch` of which every token receives exactly one; empty if there are none."""
    entry = family.entry(model)
    if entry is None:
        return ()
    for name in _branches_before(model, family, branch):
        if name not in removed:
            bias = _bias(model, family, name) if name else ""
            return (bias,) if bias else ()
    return entry


def _branches_before(model: nn.Module, family: Family, branch: Site) -> Iterator[str]:
    """The attentions and FFNs before `branch`, backwards; an empty name for other changes of the stream."""
    names: list[str] = []
    for path, block in family.blocks(model).items():
        for chain in branches_of(block, family.wiring):
            part = next((part for part in (family.wiring.attention, family.wiring.ffn) if part in chain), "")
            name = f"{path}.{part}" if part else ""
            if name == branch.name:
                yield from reversed(names)
                return
            names.append(name)
        if has_output_act(block):
            names.append("")


def _bias(model: nn.Module, family: Family, name: str) -> str:
    """The last bias of the attention or FFN `name`; empty if it has none."""
    axes = (axis for space in family.spaces(model) if space.kind == "residual" for axis in space.axes)
    own = (axis.tensor for axis in axes if axis.dim == 0 and axis.tensor.startswith(f"{name}."))
    return next((tensor for tensor in own if tensor.endswith(".bias")), "")


def _gamma(model: nn.Module, family: Family, bias: str) -> Tensor:
    """The LayerScale after the layer of `bias`; 1 if there is none."""
    for scale, layer in family.scales(model).items():
        if bias == f"{layer}.bias":
            return scale_parameter(model, scale).double()
    return torch.ones((), dtype=torch.float64, device=model.get_parameter(bias).device)
