"""Tensor shapes after a plan, computed from those of the dense model without editing it.

Checks compare the result of surgery with these shapes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from vitcompress.families import Family, Site, family_of
from vitcompress.families.edited_block import SITE_PARTS
from vitcompress.plan import Plan, is_within
from vitcompress.surgery.edit import segments_of

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the compressed model, or a removed tensor of the dense model.

    dense: names and shapes of the dense tensors that it is computed from; two for a folded pair. planned: its shape,
    None if it is removed. change: `kept`, `sliced`, `folded` or `removed`.
    """

    name: str
    dense: Mapping[str, Shape]
    planned: Shape | None
    change: str


def planned_tensors(dense: nn.Module, plan: Plan) -> tuple[PlannedTensor, ...]:
    """All tensors of the model after `plan`, and the removed ones. dense: the dense model; it needs only shapes."""
    family = family_of(dense)
    before = {name: tuple(tensor.shape) for name, tensor in dense.state_dict().items()}
    after = sliced_shapes(before, dense, family, plan)
    sites = family.sites(dense)
    removed = tuple(_removed_modules(family, sites, plan))
    ffns = {site.name for site in sites if site.kind == "ffn"}
    pairs = {name: pair for name in plan.folded if name in ffns and (pair := family.linear_pair(dense, name))}
    rows = [row for ffn, pair in pairs.items() for row in _folded(ffn, pair, before, after)]
    members = {member for pair in pairs.values() for member in pair}
    for name, shape in before.items():
        if is_within(name, removed):
            rows.append(PlannedTensor(name, {name: shape}, None, "removed"))
        elif name.rpartition(".")[0] not in members:
            rows.append(PlannedTensor(name, {name: shape}, after[name], "kept" if after[name] == shape else "sliced"))
    return tuple(rows)


def _folded(ffn: str, pair: tuple[str, str], before: Shapes, after: Shapes) -> Iterator[PlannedTensor]:
    """W2 W1 and W2 b1 + b2, which replace two layers."""
    outputs, inputs = after[f"{pair[1]}.weight"][0], after[f"{pair[0]}.weight"][1]
    for leaf, shape in (("weight", (outputs, inputs)), ("bias", (outputs,))):
        if parts := {name: before[name] for layer in pair if (name := f"{layer}.{leaf}") in before}:
            yield PlannedTensor(f"{ffn}.{leaf}", parts, shape, "folded")


def sliced_shapes(before: Shapes, dense: nn.Module, family: Family, plan: Plan) -> Shapes:
    """The shapes `before` of `dense` after slicing. Constant gates of gated FFNs have no rows."""
    after, sliced = dict(before), segments_of(family.spaces(dense), plan.kept)
    for name in before.keys() & sliced.keys():
        sizes = list(before[name])
        for dim, segments in sliced[name].items():
            sizes[dim] -= sum(length - len(kept) for _, length, kept in segments)
        after[name] = tuple(sizes)
    for site in family.sites(dense):
        if site.gates and site.name in plan.removed and (pair := family.linear_pair(dense, site.gates)):
            hidden = after[f"{pair[1]}.weight"][1]
            own = [name for leaf in ("weight", "bias") if (name := f"{pair[0]}.{leaf}") in after]
            after |= {name: (hidden, *after[name][1:]) for name in own}
    return after


def _removed_modules(family: Family, sites: tuple[Site, ...], plan: Plan) -> Iterator[str]:
    """Paths of modules without any remaining tensor."""
    yield from set(plan.folded) - {site.name for site in sites}  # LayerScales
    for site in (site for site in sites if site.name in plan.removed):
        yield site.name
        part = SITE_PARTS.get(site.kind)
        if part and plan.removed[site.name] in ("drop", "double"):  # with norm and LayerScale of the branch
            branch = next(branch for branch in family.wiring.branches if part in branch)
            yield from (f"{site.block}.{child}" for child in branch)
