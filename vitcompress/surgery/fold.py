"""Multiply consecutive linear layers into one.

y = W2 (W1 x + b1) + b2 = (W2 W1) x + (W2 b1 + b2), computed in float64 and cast once (HetDPT, merging of FFNs without
activation). A LayerScale after a linear layer folds into it: diag(g) (W x + b) = (diag(g) W) x + g b.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vitcompress.families import Family, family_of
from vitcompress.families.base import scale_parameter
from vitcompress.plan import Plan, enclosing_module
from vitcompress.surgery.remove import replace_module

INTO_THE_LINEAR = "into the linear layer before it"  # the reason to fold a LayerScale


@dataclass(frozen=True)
class FoldRecord:
    """The effect of folding one module, or the reason for not folding it.

    params, macs (per token): of the layers involved. rounding: largest difference between the float64 product and the
    stored weights, relative to the largest weight; at most half an epsilon of the stored type.
    """

    module: str
    folded: bool
    reason: str
    params_before: int
    params_after: int
    macs_before: int
    macs_after: int
    rounding: float


@dataclass(frozen=True)
class Folding:
    """The plan including the folded modules, and one record per candidate."""

    plan: Plan
    records: tuple[FoldRecord, ...]


def fold_linears(model: nn.Module, plan: Plan) -> Folding:
    """Fold, in place, every FFN without activation and every LayerScale that follows a linear layer.

    plan: the plan of `model` so far. An FFN is folded only if the product is cheaper than the pair. The output changes
    by rounding only. The attribute `model.plan` is deleted, because it no longer describes the model.
    """
    vars(model).pop("plan", None)
    family = family_of(model)
    sites = family.sites(model)
    ffns = [site.name for site in sites if site.kind == "ffn"]
    active = {enclosing_module(site.name, ffns) for site in sites if site.kind == "activation"}
    linear = [name for name in ffns if name not in active and family.linear_pair(model, name) is not None]
    records = [_fold_ffn(model, family, name) for name in linear]
    records += [_fold_scale(model, family, name) for name in family.scales(model)]
    names = tuple(record.module for record in records if record.folded)
    return Folding(replace(plan, folded=plan.folded + names), tuple(records))


def _fold_ffn(model: nn.Module, family: Family, name: str) -> FoldRecord:
    first, second = _pair(model, family, name)
    inputs, hidden, outputs = first.in_features, first.out_features, second.out_features
    pair_macs, product_macs = hidden * (inputs + outputs), inputs * outputs
    params = _count(first, second)
    if product_macs >= pair_macs:
        reason = f"the pair is cheaper: {pair_macs} instead of {product_macs} multiply-accumulates per token"
        return FoldRecord(name, False, reason, params, params, pair_macs, pair_macs, 0.0)
    rounding = fold_module(model, family, name)
    after = _count(model.get_submodule(name))
    return FoldRecord(name, True, "cheaper than the pair", params, after, pair_macs, product_macs, rounding)


def _fold_scale(model: nn.Module, family: Family, name: str) -> FoldRecord:
    width = scale_parameter(model, name).numel()
    layer = _linear_layer(model, family.scales(model)[name])
    size, macs = _count(layer), layer.weight.numel()
    rounding = fold_module(model, family, name)
    return FoldRecord(name, True, INTO_THE_LINEAR, size + width, size, macs + width, macs, rounding)


def fold_module(model: nn.Module, family: Family, name: str) -> float:
    """Fold one FFN or LayerScale into a linear layer and return the rounding of the cast (see FoldRecord).

    If the plan also removes the linear layer before a folded LayerScale, the LayerScale is only deleted.
    """
    scales = family.scales(model)
    if name in scales:
        layer, gamma = _linear_layer(model, scales[name]), _exact(scale_parameter(model, name))
        weight = gamma[:, None] * _exact(layer.weight)
        bias = None if layer.bias is None else gamma * _exact(layer.bias)
        _drop_scale(model, name)
    elif name in {site.name for site in family.sites(model)}:
        first, second = _pair(model, family, name)
        weight, bias = product(first, second)
        like = second.weight
        layer = nn.Linear(*weight.shape[::-1], bias is not None, device=like.device, dtype=like.dtype)
        layer.requires_grad_(like.requires_grad)
        replace_module(model, name, layer)
    else:
        if any(name == path for path, _ in (*model.named_modules(), *model.named_parameters())):
            _drop_scale(model, name)
        return 0.0
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    if weight.is_meta:
        return 0.0
    largest = weight.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return float((_exact(layer.weight) - weight).abs().max() / largest)


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
    device = torch.device("cpu") if tensor.device.type == "mps" else tensor.device
    return tensor.detach().to(device, torch.float64)


def _pair(model: nn.Module, family: Family, name: str) -> tuple[nn.Linear, nn.Linear]:
    pair = family.linear_pair(model, name)
    assert pair is not None, name
    return _linear_layer(model, pair.first), _linear_layer(model, pair.second)


def _linear_layer(model: nn.Module, path: str) -> nn.Linear:
    layer = model.get_submodule(path)
    assert isinstance(layer, nn.Linear), path
    return layer


def _count(*layers: nn.Module) -> int:
    return sum(p.numel() for layer in layers for p in layer.parameters())
