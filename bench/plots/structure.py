"""Which layers and channels a plan leaves in each block of the dense model, for pictures and tables."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from timm.utils.misc import natural_key
from torch import nn

from vitcompress.families import Family, Space, family_of
from vitcompress.models.create import create_on_meta
from vitcompress.plan import Plan, enclosing

Entry = TypeVar("Entry")
LAYERS = {"attention": "attention", "activation": "activation", "ffn": "FFN"}
WIDTHS = {"residual": "residual", "heads": "heads", "qk": "q and k", "v": "v", "mlp": "FFN", "sr": "reduction"}
WORDS = {"norm_identity": "norm", "double": "2x", "identity": "none", "mean_gate": "mean", "drop_gate": "1"}

STAND_INS = {
    "drop": "nothing stands in its place",
    "norm_identity": "its normalised input stands in its place",
    "double": "its input is doubled instead",
    "identity": "its FFN is linear",
    "mean_gate": "its gate is a constant",
    "drop_gate": "its gate is 1",
}


@dataclass(frozen=True)
class Layer:
    """What became of a layer. state: `kept`, `replaced` by what computes less, or `removed`; word: by what."""

    state: str
    word: str = ""


@dataclass(frozen=True)
class Width:
    """Channels (or heads) left of so many. linear: of an FFN that became one linear layer and so has none."""

    left: int
    of: int
    linear: bool = False


@dataclass(frozen=True)
class Structure:
    """The dense model's blocks by path, a pool by attention behind them, and per kind one entry for each, None where it
    never had one. stages: how many of them are blocks of each stage, the pool being of none. widths["residual"] repeats
    a stage's width in each of its blocks.
    """

    blocks: tuple[str, ...]
    stages: tuple[int, ...]
    layers: dict[str, list[Layer | None]]
    widths: dict[str, list[Width | None]]

    def total(self, kind: str) -> tuple[int, int]:
        """Channels left and channels of the dense model, over all blocks; a stage's residual stream counts once."""
        found = [width for width in self._counted(kind) if width is not None and not width.linear]
        return sum(width.left for width in found), sum(width.of for width in found)

    def _counted(self, kind: str) -> list[Width | None]:
        if kind != "residual":
            return self.widths[kind]
        starts = [sum(self.stages[:number]) for number in range(len(self.stages))]
        return [self.widths[kind][start] for start in starts]


def structure_of(plan: Plan) -> Structure:
    """What `plan` leaves of the model that it is for; built without weights. Raises InputError where timm cannot."""
    dense = create_on_meta(plan.arch, plan.arch_args)
    family = family_of(dense)
    blocks = tuple(family.blocks(dense))
    stages: dict[str, int] = {}
    for path in blocks:
        stages[path.rpartition(".")[0]] = stages.get(path.rpartition(".")[0], 0) + 1
    spaces = family.spaces(dense)
    pools = dict.fromkeys(s.attention for s in spaces if s.attention and not enclosing(s.attention, blocks))
    places = (*blocks, *pools)
    layers = {kind: _by_block(places, _layers(plan, family, dense, kind)) for kind in LAYERS}
    return Structure(places, tuple(stages.values()), _present(layers), _present(_widths(plan, spaces, places)))


def _by_block(blocks: tuple[str, ...], found: Iterator[tuple[str, Entry]]) -> list[Entry | None]:
    entries = dict(found)
    return [entries.get(path) for path in blocks]


def _present(rows: dict[str, list[Entry | None]]) -> dict[str, list[Entry | None]]:
    return {kind: row for kind, row in rows.items() if any(entry is not None for entry in row)}


def _gone(plan: Plan, name: str) -> str | None:
    """What replaces `name` or a module around it; None where it is still there."""
    outer = enclosing(name, plan.removed)
    return None if outer is None else plan.removed[outer]


def _layers(plan: Plan, family: Family, dense: nn.Module, kind: str) -> Iterator[tuple[str, Layer]]:
    for site in family.sites(dense):
        if site.kind != kind:
            continue
        stand = _gone(plan, site.name)
        if site.name in plan.folded:
            yield site.block, Layer("replaced", "linear")
        elif stand is None:
            yield site.block, Layer("kept")
        else:
            partly = stand in ("norm_identity", "double", "mean_gate", "drop_gate")
            yield site.block, Layer("replaced", WORDS[stand]) if partly else Layer("removed")


def _widths(plan: Plan, spaces: tuple[Space, ...], blocks: tuple[str, ...]) -> dict[str, list[Width | None]]:
    def row(kind: str, width: Callable[[Space], Width]) -> list[Width | None]:
        own = [(enclosing(space.name, blocks), width(space)) for space in spaces if space.kind == kind]
        return _by_block(blocks, ((block, found) for block, found in own if block))

    found = {kind: row(kind, lambda space: _width(plan, space)) for kind in WIDTHS if kind not in ("residual", "heads")}
    found["heads"] = row("v", lambda space: _heads(plan, space))
    streams = [
        (space.name.removesuffix("residual"), _width(plan, space)) for space in spaces if space.kind == "residual"
    ]
    found["residual"] = [next(width for stage, width in streams if path.startswith(stage)) for path in blocks]
    return {kind: found[kind] for kind in WIDTHS}


def _width(plan: Plan, space: Space) -> Width:
    if space.name in plan.folded:
        return Width(0, space.size, linear=True)
    if space.kind != "residual" and _gone(plan, space.attention or space.name) is not None:
        return Width(0, space.size)
    return Width(len(plan.kept.get(space.name, range(space.size))), space.size)


def _heads(plan: Plan, space: Space) -> Width:
    gone = _gone(plan, space.attention) is not None
    return Width(0 if gone else plan.heads.get(space.attention, space.heads), space.heads)


def stand_ins(plan: Mapping[str, Any]) -> Iterator[str]:
    """What the plan, given as data, took away and what stands there now, in the order of the model."""
    for name, stand in _ordered(plan.get("removed")):
        yield f"{name}: {stand} ({STAND_INS[stand]})"
    for name, act in _ordered(plan.get("appended")):
        yield f"{name}: followed by {act}"
    if folded := plan.get("folded"):
        yield f"folded into linear layers: {', '.join(sorted(folded, key=natural_key))}"
    if padded := plan.get("padded"):
        yield f"heads padded to one width: {', '.join(sorted(padded, key=natural_key))}"


def _ordered(entries: Mapping[str, str] | None) -> list[tuple[str, str]]:
    return sorted((entries or {}).items(), key=lambda entry: natural_key(entry[0]))


def widths(plan: Plan) -> dict[str, Any] | None:
    """Channels and heads left in each block of the dense model, and in a pool, as a table of text; None where the plan
    cuts none.
    """
    if not plan.kept:
        return None
    found = structure_of(plan)
    rows = [
        [block, *(_told(row[number]) for row in found.widths.values())] for number, block in enumerate(found.blocks)
    ]
    return {"title": "Widths", "columns": ["block", *(WIDTHS[kind] for kind in found.widths)], "rows": rows}


def _told(width: Width | None) -> str:
    if width is None:
        return "-"
    if width.linear:
        return "linear"
    return "removed" if not width.left else f"{width.left} of {width.of}" if width.left < width.of else f"{width.left}"
