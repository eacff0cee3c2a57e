"""The tensor sizes that a plan leaves, by arithmetic on those of the dense model.

Nothing is edited here: what surgery does is checked against these sizes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from vitcompress.families import Family, Site, family_of
from vitcompress.plan import Plan, is_within

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
WHOLE_BRANCH = ("drop", "double")  # with these the norm and the LayerScale of the branch go, too


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the deployed model, or one of the dense model that is gone.

    dense: the dense tensors that it comes from, by name; two where a pair was folded. planned: its size, None when it
    is gone. change: `kept`, `sliced`, `folded` or `removed`.
    """

    name: str
    dense: Mapping[str, Shape]
    planned: Shape | None
    change: str


def planned_tensors(dense: nn.Module, plan: Plan) -> tuple[PlannedTensor, ...]:
    """Every tensor of the `dense` model (as the plan names it; shapes are enough) and what the plan makes of it."""
    family = family_of(dense)
    before = {name: tuple(tensor.shape) for name, tensor in dense.state_dict().items()}
    after = sliced(before, dense, family, plan)
    gone = tuple(_gone(family, family.sites(dense), plan))
    return tuple(_rows(before, after, gone, _pairs(dense, family, plan)))


def _rows(
    before: Shapes, after: Shapes, gone: tuple[str, ...], pairs: dict[str, tuple[str, str]]
) -> Iterator[PlannedTensor]:
    members = {member: ffn for ffn, pair in pairs.items() for member in pair}
    for ffn, (first, second) in pairs.items():
        if not is_within(ffn, gone):
            yield from _folded(ffn, first, second, before, after)
    for name, shape in before.items():
        if is_within(name, gone):
            yield PlannedTensor(name, {name: shape}, None, "removed")
        elif name.rpartition(".")[0] not in members:
            yield PlannedTensor(name, {name: shape}, after[name], "kept" if after[name] == shape else "sliced")


def _folded(ffn: str, first: str, second: str, before: Shapes, after: Shapes) -> Iterator[PlannedTensor]:
    """W2 W1 and W2 b1 + b2 in the place of two layers."""
    outputs, inputs = after[f"{second}.weight"][0], after[f"{first}.weight"][1]
    for leaf, shape in (("weight", (outputs, inputs)), ("bias", (outputs,))):
        parts = {name: before[name] for layer in (first, second) if (name := f"{layer}.{leaf}") in before}
        if parts:
            yield PlannedTensor(f"{ffn}.{leaf}", parts, shape, "folded")


def sliced(before: Shapes, dense: nn.Module, family: Family, plan: Plan) -> Shapes:
    """The sizes `before` of `dense`, with every axis of a kept space as long as the plan says; a gate that is constant
    has no rows.
    """
    lost: dict[str, dict[int, int]] = {}
    for space in family.spaces(dense):
        if space.name not in plan.kept:
            continue
        kept = plan.kept[space.name]
        heads = {channel // (space.size // space.heads) for channel in kept}
        for axis in space.axes:
            less = space.heads - len(heads) if axis.per_head else space.size - len(kept)
            of = lost.setdefault(axis.tensor, {})
            of[axis.dim] = of.get(axis.dim, 0) + axis.copies * less
    after = {
        name: tuple(size - lost.get(name, {}).get(dim, 0) for dim, size in enumerate(shape))
        for name, shape in before.items()
    }
    for site in family.sites(dense):
        pair = family.linear_pair(dense, site.gates) if site.gates and site.name in plan.removed else None
        if pair:
            hidden = after[f"{pair.second}.weight"][1]
            own = [name for leaf in ("weight", "bias") if (name := f"{pair.first}.{leaf}") in after]
            after |= {name: (hidden, *after[name][1:]) for name in own}
    return after


def _pairs(dense: nn.Module, family: Family, plan: Plan) -> dict[str, tuple[str, str]]:
    """Folded FFN -> its two layers."""
    ffns = {site.name for site in family.sites(dense) if site.kind == "ffn"}
    pairs = {name: family.linear_pair(dense, name) for name in plan.folded if name in ffns}
    return {name: (pair.first, pair.second) for name, pair in pairs.items() if pair}


def _gone(family: Family, sites: tuple[Site, ...], plan: Plan) -> Iterator[str]:
    """The modules of which nothing is left."""
    scales = set(plan.folded) - {site.name for site in sites}
    yield from scales
    for site in sites:
        if site.name not in plan.removed or site.kind == "activation":
            continue
        yield site.name
        part = {"attention": family.wiring.attention, "ffn": family.wiring.ffn}.get(site.kind)
        if part and plan.removed[site.name] in WHOLE_BRANCH:
            branch = next(branch for branch in family.wiring.branches if part in branch)
            yield from (f"{site.block}.{child}" for child in branch)
