"""Check that a plan fits a model. Every contradiction is reported before anything is edited."""

import json
from collections.abc import Iterable, Iterator

from torch import nn

from vitcompress.errors import PlanError, UnsupportedModelError, did_you_mean
from vitcompress.families import Family, Site, Space
from vitcompress.families.base import norm_problem
from vitcompress.families.edited_block import SITE_PARTS
from vitcompress.plan import ALLOWED, GATE_REPLACEMENTS, Plan, enclosing_module, module_of, plan_problems


def check_plan(model: nn.Module, family: Family, plan: Plan) -> None:
    """Raise PlanError with everything in `plan` that contradicts `model` or itself; see also `check_maskable`."""
    sites = {site.name: site for site in family.sites(model)}
    spaces = {space.name: space for space in family.spaces(model)}
    check_maskable(model, family, (space for name, space in spaces.items() if name in plan.kept))
    problems = plan_problems(json.loads(plan.to_json())) or [
        *_site_problems(sites, plan),
        *_kept_problems(spaces, plan),
        *_attention_problems(spaces, plan),
        *_fold_problems(model, family, sites, plan),
    ]
    if problems:
        hint = "correct the plan (undo edits of plan.json); after `reset_classifier` with another pooling, plan again"
        raise PlanError("\n  ".join(["the plan does not fit the model:", *problems]), hint=hint)


def check_maskable(model: nn.Module, family: Family, spaces: Iterable[Space]) -> None:
    """Raise UnsupportedModelError unless masks (`surgery.masks`) can do to every axis what slicing does.

    They mask the outputs and inputs of linear layers and convolutions, LayerNorms over the last dimension, LayerScales
    and tokens. Statistics of a BatchNorm, or a parameter that a module adds to its activations, are out of their reach.
    """
    scales = {name for branch in family.wiring.branches for name in branch} - {*SITE_PARTS.values()}
    for space in spaces:
        for axis in space.axes:
            owner = model.get_submodule(axis.owner)
            if axis.per_head or isinstance(owner, nn.Linear | nn.Conv2d):
                continue
            if isinstance(owner, nn.LayerNorm):
                reason = norm_problem(owner)
            else:
                in_stream = axis.dim == 2 or scales.intersection(axis.tensor.split("."))
                reason = None if space.kind == "residual" and in_stream else f"no mask applies to {axis.tensor}"
            if reason is not None:
                message = f"the family {family.name} cannot describe this model: {reason} (space {space.name})"
                raise UnsupportedModelError(message, hint="use a plain layer there, or rewrite it in `Family.prepare`")


def _site_problems(sites: dict[str, Site], plan: Plan) -> Iterator[str]:
    for name, replacement in plan.removed.items():
        if name not in sites:
            close = did_you_mean(name, sites)
            yield f"removed.{name}: the model has no such attention, activation, FFN or block{close}"
        elif replacement not in (allowed := GATE_REPLACEMENTS if sites[name].gates else ALLOWED[sites[name].kind]):
            yield f"removed.{name}: {sites[name].kind} allows {', '.join(allowed)}, got {replacement!r}"
        elif outer := enclosing_module(name.rpartition(".")[0], plan.removed):
            yield f"removed.{name}: it is inside {outer}, which is removed, too"
    for name in plan.appended:
        if name not in sites or sites[name].kind != "block":
            yield f"appended.{name}: the model has no such block"
        elif name in plan.removed:
            yield f"appended.{name}: the block is removed"


def _kept_problems(spaces: dict[str, Space], plan: Plan) -> Iterator[str]:
    for name, kept in plan.kept.items():
        if name not in spaces:
            yield f"kept.{name}: the model has no such space{did_you_mean(name, spaces)}"
        elif max(kept) >= spaces[name].size:
            yield f"kept.{name}: expected one or more distinct channels in 0..{spaces[name].size - 1}"
        elif outer := enclosing_module(module_of(name), plan.removed):
            yield f"kept.{name}: it is inside {outer}, which is removed"


def _attention_problems(spaces: dict[str, Space], plan: Plan) -> Iterator[str]:
    attentions = {space.attention for space in spaces.values()} - {""}
    sliced = {space.attention for space in spaces.values() if space.name in plan.kept}
    for key, name in (*(("heads", name) for name in plan.heads), *(("padded", name) for name in plan.padded)):
        if name not in attentions:
            yield f"{key}.{name}: the model has no such attention"
        elif enclosing_module(name, plan.removed):
            yield f"{key}.{name}: the attention is removed"
        elif key == "heads" and name not in sliced:
            yield f"heads.{name}: got {plan.heads[name]}, but neither its q/k nor its v channels are in kept"
    for space in spaces.values():
        kept = plan.kept.get(space.name, tuple(range(space.size)))
        if len(kept) % (heads := plan.heads.get(space.attention, space.heads)):
            yield f"kept.{space.name}: {len(kept)} channels do not divide into {heads} heads"
        elif problem := _head_problem(space, kept, len(kept) // heads):
            yield f"kept.{space.name}: {problem}"


def _head_problem(space: Space, kept: tuple[int, ...], width: int) -> str:
    """Why heads with positions of their own do not allow these heads of `width` channels; empty if they do."""
    full = space.size // space.heads
    heads = dict.fromkeys(c // full for c in kept)
    if space.whole_heads and (width != full or kept != tuple(h * full + c for h in heads for c in range(full))):
        return "a rotary embedding allows to remove whole heads only, with all other channels in their order"
    mixed = [c // full for c in kept] != [head for head in heads for _ in range(width)]
    tables = any(axis.per_head for axis in space.axes)
    return "a head with parameters of its own cannot consist of channels of several" if mixed and tables else ""


def _fold_problems(model: nn.Module, family: Family, sites: dict[str, Site], plan: Plan) -> Iterator[str]:
    scales = family.scales(model)
    for name in plan.folded:
        site = sites.get(name)
        is_ffn = site is not None and site.kind == "ffn" and family.linear_pair(model, name) is not None
        inside = [s.name for s in sites.values() if s.kind == "activation" and s.name.startswith(f"{name}.")]
        active = [act for act in inside if act not in plan.removed]
        if not is_ffn and name not in scales:
            yield f"folded.{name}: the model has no such FFN of two linear layers, and no such LayerScale"
        elif enclosing_module(name, plan.removed):
            yield f"folded.{name}: it is removed"
        elif active:
            yield f"folded.{name}: its activation {active[0]} is not removed, so it is not linear"
