"""Multiply consecutive linear layers into one, and fold the constant output of an empty branch.

y = W2 (W1 x + b1) + b2 = (W2 W1) x + (W2 b1 + b2), computed in float64 and cast once (HetDPT, merging of FFNs without
activation). A LayerScale after a linear layer folds into it: diag(g) (W x + b) = (diag(g) W) x + g b.

An attention without v channels, or an FFN without hidden channels, adds only its last bias (times its LayerScale). It
folds into the preceding bias of the residual stream: between both places nothing but the branch reads the stream, and
the branch ignores it.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from vitcompress.families import Family, Site, family_of, scale_parameter
from vitcompress.families.edited_block import SITE_PARTS, branches_of, has_output_act
from vitcompress.plan import Plan, enclosing_module
from vitcompress.surgery.edit import replace_module

INTO_THE_LINEAR = "into the linear layer before it"  # the reason to fold a LayerScale


@dataclass(frozen=True)
class FoldRecord:
    """The effect of folding one module, or the reason for not folding it. params: of the layers involved."""

    module: str
    folded: bool
    reason: str
    params_before: int
    params_after: int


def fold_linears(model: nn.Module, plan: Plan) -> tuple[Plan, tuple[FoldRecord, ...]]:
    """Fold, in place, every FFN without activation and every LayerScale that follows a linear layer.

    plan: the plan of `model` so far. An FFN is folded only if the product is cheaper than the pair. The output changes
    by rounding only. The attribute `model.plan` is deleted, because it no longer describes the model. Nothing is folded
    if the plan names a standard model, which has all of these layers. Returns the plan including the folded modules,
    and one record per candidate.
    """
    vars(model).pop("plan", None)
    if plan.standard:
        return plan, ()
    family = family_of(model)
    sites = family.sites(model)
    ffns = [site.name for site in sites if site.kind == "ffn"]
    active = {enclosing_module(site.name, ffns) for site in sites if site.kind == "activation"}
    linear = [name for name in ffns if name not in active and family.linear_pair(model, name) is not None]
    records = [_fold(model, family, name) for name in (*linear, *family.scales(model))]
    names = tuple(record.module for record in records if record.folded)
    return replace(plan, folded=plan.folded + names), tuple(records)


def _fold(model: nn.Module, family: Family, name: str) -> FoldRecord:
    into = family.scales(model).get(name)
    layers = _linear_layers(model, family, name)
    width = scale_parameter(model, name).numel() if into else 0
    params, macs = _count(*layers) + width, sum(layer.weight.numel() for layer in layers) + width
    product_macs = layers[0].in_features * layers[-1].out_features
    if product_macs >= macs:
        reason = f"the pair is cheaper: {macs} instead of {product_macs} multiply-accumulates per token"
        return FoldRecord(name, False, reason, params, params)
    fold_module(model, family, name)
    reason = INTO_THE_LINEAR if into else "cheaper than the pair"
    return FoldRecord(name, True, reason, params, _count(model.get_submodule(into or name)))


def fold_module(model: nn.Module, family: Family, name: str) -> None:
    """Fold one FFN or LayerScale into a linear layer; a LayerScale whose layer the plan removes is only deleted."""
    bias: Tensor | None
    if name in family.scales(model):
        (layer,), gamma = _linear_layers(model, family, name), _exact(scale_parameter(model, name))
        weight = gamma[:, None] * _exact(layer.weight)
        bias = None if layer.bias is None else gamma * _exact(layer.bias)
        _drop_scale(model, name)
    elif name in {site.name for site in family.sites(model)}:
        first, second = _linear_layers(model, family, name)
        weight, bias = product(first, second)
        like, (outputs, inputs) = second.weight, weight.shape
        layer = nn.Linear(inputs, outputs, bias is not None, device="meta", dtype=like.dtype)
        layer.to_empty(device=like.device)  # draws no random numbers
        layer.requires_grad_(any(p.requires_grad for part in (first, second) for p in part.parameters()))
        replace_module(model, name, layer)
    else:
        if any(name == path for path, _ in (*model.named_modules(), *model.named_parameters())):
            _drop_scale(model, name)
        return
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)


def _drop_scale(model: nn.Module, path: str) -> None:
    """Remove the LayerScale at `path`, a module or a parameter."""
    parent, _, leaf = path.rpartition(".")
    owner = model.get_submodule(parent)
    if isinstance(getattr(owner, leaf), nn.Module):
        replace_module(model, path, nn.Identity())
    else:
        setattr(owner, leaf, None)


def product(first: nn.Linear, second: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias, in float64, of `first` followed by `second`; both layers may lack a bias."""
    w1, w2 = _exact(first.weight), _exact(second.weight)
    bias = None if second.bias is None else _exact(second.bias)
    if first.bias is not None:
        through = w2 @ _exact(first.bias)
        bias = through if bias is None else through + bias
    return w2 @ w1, bias


def _exact(tensor: Tensor) -> Tensor:
    """`tensor` in float64; on the CPU if its device does not support float64 (MPS)."""
    return tensor.detach().to("cpu" if tensor.device.type == "mps" else tensor.device, torch.float64)


def _linear_layers(model: nn.Module, family: Family, name: str) -> list[nn.Linear]:
    """The layers that change when `name` is folded: both of an FFN, or the one before a LayerScale."""
    scales = family.scales(model)
    paths = (scales[name],) if name in scales else family.linear_pair(model, name) or ()
    return cast(list[nn.Linear], [model.get_submodule(path) for path in paths])


def _count(*layers: nn.Module) -> int:
    return sum(p.numel() for layer in layers for p in layer.parameters())


@torch.no_grad()
def fold_branch_bias(model: nn.Module, family: Family, branch: Site, removed: Collection[str] = ()) -> bool:
    """Move the last bias of `branch`, an attention or FFN that adds nothing else, and return whether that was possible.

    It is not possible after an output activation or a bypass, if the preceding layer has no bias or its LayerScale is
    zero or so small that the bias overflows, and in families without a single entry of the stream.

    removed: attentions and FFNs before `branch` whose bias was moved already.
    """
    own, entry = _bias(model, family, branch.name), family.entry(model)
    if not own:
        return True  # the branch adds nothing
    if entry is None:
        return False
    # The last parameters before `branch`, of which every token receives exactly one.
    before = next((name for name in _branches_before(model, family, branch) if name not in removed), None)
    names = entry if before is None else filter(None, [_bias(model, family, before)])
    constant = _gamma(model, family, own) * model.get_parameter(own).double()
    biases = {name: model.get_parameter(name) for name in names}
    moved = {name: (bias + constant / _gamma(model, family, name)).to(bias.dtype) for name, bias in biases.items()}
    if not moved or not all(value.isfinite().all() for value in moved.values()):
        return False
    for name, value in moved.items():
        biases[name].copy_(value)
    model.get_parameter(own).zero_()
    return True


def _branches_before(model: nn.Module, family: Family, branch: Site) -> Iterator[str]:
    """The attentions and FFNs before `branch`, backwards; an empty name for other changes of the stream."""
    names: list[str] = []
    for path, block in family.blocks(model).items():
        for chain in branches_of(block, family.wiring):
            part = next((part for part in SITE_PARTS.values() if part in chain), "")
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
