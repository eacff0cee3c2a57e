"""Layers and channels that a plan keeps in each block of the dense model, for plots and tables."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vitcompress.bench.report.records import RecordOf
from vitcompress.families import Site, Space, family_of
from vitcompress.io.text import Table, natural_key
from vitcompress.models.create import create_on_meta
from vitcompress.plan import Plan, enclosing_module, stage_of

LAYERS = {"attention": "attention", "activation": "activation", "ffn": "FFN"}
WIDTHS = {"residual": "residual", "heads": "heads", "qk": "q and k", "v": "v", "mlp": "FFN", "sr": "reduction"}
WORDS = {"norm_identity": "norm", "double": "2x", "mean_gate": "mean", "drop_gate": "1"}  # of replaced layers
REPLACEMENTS = {
    "drop": "not replaced",
    "norm_identity": "replaced by its normalized input",
    "double": "replaced by doubling its input",
    "identity": "its FFN becomes linear",
    "mean_gate": "its gate becomes a constant",
    "drop_gate": "its gate becomes 1",
}


class Layer(NamedTuple):
    """State of a layer; word: what replaces it."""

    state: Literal["kept", "replaced", "removed"]
    word: str = ""


class Width(NamedTuple):
    """Kept channels (or heads) and those of the dense model. linear: the FFN became one linear layer without any."""

    kept: int
    dense: int
    linear: bool = False


@dataclass(frozen=True)
class Structure:
    """One entry per block, for each kind of layer and width; None if the dense block has none.

    blocks: paths of the dense blocks, then of an attention pool. stage_starts: number of the first block of each stage.
    widths["residual"] repeats the width of a stage in each of its blocks.
    """

    blocks: tuple[str, ...]
    stage_starts: tuple[int, ...]
    layers: dict[str, list[Layer | None]]
    widths: dict[str, list[Width | None]]

    def total(self, kind: str) -> Width:
        """Sum over all blocks; the residual stream of a stage counts once."""
        row = self.widths[kind]
        row = [row[start] for start in self.stage_starts] if kind == "residual" else row
        counted = [width for width in row if width is not None and not width.linear]
        return Width(sum(width.kept for width in counted), sum(width.dense for width in counted))


def describe_structure(plan: Plan) -> Structure:
    """The structure after `plan`, built without weights. Raises InputError if timm cannot build the dense model."""
    dense = create_on_meta(plan.arch, plan.arch_args)
    family = family_of(dense)
    blocks, spaces = tuple(family.blocks(dense)), family.spaces(dense)
    pools = dict.fromkeys(s.attention for s in spaces if s.attention and not enclosing_module(s.attention, blocks))
    places = (*blocks, *pools)
    layers: dict[str, dict[str, Layer]] = {kind: {} for kind in LAYERS}
    widths: dict[str, dict[str, Width]] = {kind: {} for kind in WIDTHS}
    for site in family.sites(dense):
        if site.kind in layers:
            layers[site.kind][site.block] = _layer(plan, site)
    for space in spaces:
        if space.kind == "residual":
            stage = space.name.removesuffix("residual")
            widths["residual"] |= dict.fromkeys((p for p in places if p.startswith(stage)), _width(plan, space))
        elif place := enclosing_module(space.name, places):
            widths[space.kind][place] = _width(plan, space)
            if space.kind == "v":
                heads = 0 if _replacement(plan, space.attention) else plan.heads.get(space.attention, space.heads)
                widths["heads"][place] = Width(heads, space.heads)
    stages = list(map(stage_of, blocks))
    return Structure(
        places,
        tuple(map(stages.index, dict.fromkeys(stages))),
        {kind: [row.get(path) for path in places] for kind, row in layers.items() if row},
        {kind: [row.get(path) for path in places] for kind, row in widths.items() if row},
    )


def _replacement(plan: Plan, name: str) -> str | None:
    """What replaces the module `name` or one that contains it; None if it is kept."""
    return plan.removed.get(enclosing_module(name, plan.removed) or "")


def _layer(plan: Plan, site: Site) -> Layer:
    if site.name in plan.folded:
        return Layer("replaced", "linear")
    if (replacement := _replacement(plan, site.name)) is None:
        return Layer("kept")
    return Layer("replaced", WORDS[replacement]) if replacement in WORDS else Layer("removed")


def _width(plan: Plan, space: Space) -> Width:
    folded = space.name in plan.folded
    removed = space.kind != "residual" and _replacement(plan, space.attention or space.name) is not None
    kept = 0 if folded or removed else len(plan.kept.get(space.name, range(space.size)))
    return Width(kept, space.size, linear=folded)


def describe_removed(plan: RecordOf[Plan]) -> Iterator[str]:
    """One line per removed, appended, folded and padded module, in the order of the model."""
    for name, replacement in sorted(plan.get("removed", {}).items(), key=lambda entry: natural_key(entry[0])):
        yield f"{name}: {replacement} ({REPLACEMENTS[replacement]})"
    for name, activation in sorted(plan.get("appended", {}).items(), key=lambda entry: natural_key(entry[0])):
        yield f"{name}: followed by {activation}"
    if folded := plan.get("folded"):
        yield f"folded into linear layers: {', '.join(sorted(folded, key=natural_key))}"
    if padded := plan.get("padded"):
        yield f"heads padded to one width: {', '.join(sorted(padded, key=natural_key))}"


def width_table(plan: Plan) -> Table | None:
    """Kept channels and heads of each block and of an attention pool; None if the plan keeps all channels."""
    if not plan.kept:
        return None
    structure = describe_structure(plan)
    by_block = zip(structure.blocks, zip(*structure.widths.values(), strict=True), strict=True)
    rows = [[block, *map(_format_width, widths)] for block, widths in by_block]
    return Table("Widths", ["block", *(WIDTHS[kind] for kind in structure.widths)], rows)


def _format_width(width: Width | None) -> str:
    if width is None:
        return "-"
    if width.linear or not width.kept:
        return "linear" if width.linear else "removed"
    return str(width.kept) if width.kept == width.dense else f"{width.kept} of {width.dense}"
