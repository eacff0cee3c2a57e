"""From scores of units to the channels that live: an exact budget in a layout that the runtime can use.

A unit is one channel of a q/k, v or FFN space: in DeiT each owns twice the residual width in weights, so the share of
units removed is the share of the blocks' linear weights removed. The threshold is one over all layers and kinds.

    ragged    single units above the threshold; heads and layers end up as they may. SERo as published, for comparison
    uniform   every head of an attention keeps as many q/k channels, and as many v channels; multiples of `round_to`
    tied      q/k and v keep as many: attention kernels that know one head width
    padded    as uniform, with zeros in the attention up to the wider of q/k and v: the same kernels, SERo's own widths
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vitcompress.errors import PlanError
from vitcompress.families import Space

Layout = Literal["ragged", "uniform", "tied", "padded"]
Threshold = Literal["global", "per_layer"]
Scores = Mapping[str, np.ndarray]
Live = dict[str, np.ndarray]
APART: tuple[Layout, ...] = ("ragged", "uniform")  # q/k and v end at widths of their own
KINDS = ("qk", "v", "mlp")
TIED_WIDTH = 16  # the least head width that fused attention kernels take


@dataclass(frozen=True)
class LayoutRules:
    """How live channels may lie. round_to: widths (per head) are multiples of it."""

    layout: Layout
    round_to: int
    threshold: Threshold = "global"


@dataclass(frozen=True)
class _Ladder:
    """Spaces that grow together, a step at a time: every head of every space to `edges[i]` channels, best first.

    orders: per space, channels of each head from the best to the worst, (heads, channels). values: mean score of the
    units that each step adds, never rising.
    """

    spaces: tuple[Space, ...]
    orders: tuple[np.ndarray, ...]
    edges: tuple[int, ...]
    values: np.ndarray

    def units(self, steps: int) -> int:
        """How many units the first `steps` steps hold."""
        return sum(space.heads for space in self.spaces) * (self.edges[steps - 1] if steps else 0)


def prunable(spaces: Iterable[Space]) -> tuple[Space, ...]:
    """The spaces that lose channels, be it with their heads alone."""
    return tuple(space for space in spaces if space.kind in KINDS)


def unit_spaces(spaces: Iterable[Space]) -> tuple[Space, ...]:
    """The spaces whose channels are units."""
    return tuple(space for space in prunable(spaces) if not space.whole_heads)


def project(spaces: Sequence[Space], scores: Scores, ties: Scores, sparsity: float, rules: LayoutRules) -> Live:
    """Space -> whether each channel lives, (channels,), when `sparsity` of all units goes.

    scores: (channels,) each, the higher the better; equal ones are told apart by `ties`, then by their number.

    Raises:
        PlanError: the layout cannot be that sparse.
    """
    if rules.layout == "ragged":
        _check_some_live(spaces, sparsity)
        return _ragged(spaces, scores, ties, sparsity, rules.threshold)
    _check_alignment(spaces, rules.round_to)
    ladders = [_ladder(group, scores, ties, rules) for group in _groups(spaces, rules.layout)]
    together = [ladders] if rules.threshold == "global" else [[ladder] for ladder in ladders]
    live: Live = {}
    for members in together:
        for ladder, steps in zip(members, _climbed(members, sparsity, strict=len(together) == 1), strict=True):
            live |= _lowest_rungs(ladder, steps)
    return live


def _check_some_live(spaces: Sequence[Space], sparsity: float) -> None:
    total = sum(space.size for space in spaces)
    if round((1 - sparsity) * total) < 1:
        raise PlanError(
            f"sparsity is {sparsity:g}, which takes all {total} units: no layer would be left", hint="lower sparsity"
        )


def _check_alignment(spaces: Sequence[Space], round_to: int) -> None:
    for space in spaces:
        width = space.size // space.heads
        if round_to > width:
            raise PlanError(
                f"round_to is {round_to}, but {space.name} has only {width} channels per head",
                hint=f"set round_to to {width} or less",
            )


def _ragged(spaces: Sequence[Space], scores: Scores, ties: Scores, sparsity: float, threshold: Threshold) -> Live:
    together = [list(spaces)] if threshold == "global" else [[space] for space in spaces]
    live: Live = {}
    for members in together:
        score, tie = (np.concatenate([kind[space.name] for space in members]) for kind in (scores, ties))
        found = np.zeros(len(score), dtype=bool)
        found[_best_first(score, tie)[: _above_quantile(len(score), sparsity)]] = True
        ends = np.cumsum([space.size for space in members])
        live |= dict(zip((space.name for space in members), np.split(found, ends[:-1]), strict=True))
    return live


def _above_quantile(total: int, sparsity: float) -> int:
    """How many of `total` different scores are larger than their `sparsity` quantile, linearly interpolated: what the
    released code keeps (numpy.percentile, strictly above), which may be one more or less than the rounded share.
    """
    return total - 1 - math.floor(sparsity * (total - 1)) if sparsity else total


def _best_first(score: np.ndarray, tie: np.ndarray) -> np.ndarray:
    return np.lexsort((-tie, -score))  # stable: the first of what is equal in both comes first


def _groups(spaces: Sequence[Space], layout: Layout) -> list[tuple[Space, ...]]:
    """The spaces that must end at equal widths."""
    found: dict[str, tuple[Space, ...]] = {}
    for space in spaces:
        key = space.attention if layout == "tied" and space.attention else space.name
        found[key] = (*found.get(key, ()), space)
    for group in found.values():
        if len({space.size // space.heads for space in group}) > 1:
            raise PlanError(
                f"{' and '.join(space.name for space in group)} cannot be tied: their heads differ in width already",
                hint="use layout = 'uniform'",
            )
    return list(found.values())


def _ladder(group: tuple[Space, ...], scores: Scores, ties: Scores, rules: LayoutRules) -> _Ladder:
    width = group[0].size // group[0].heads
    first = max(rules.round_to, TIED_WIDTH) if len(group) > 1 else rules.round_to
    edges = (*range(min(first, width), width, rules.round_to), width)
    orders, ranked = [], []
    for space in group:
        score, tie = (kind[space.name].reshape(space.heads, -1) for kind in (scores, ties))
        order = np.stack([_best_first(*head) for head in zip(score, tie, strict=True)])
        orders.append(order)
        ranked.append(np.take_along_axis(score, order, axis=1))
    steps = np.split(np.concatenate(ranked).mean(axis=0, dtype=np.float64), edges[:-1])
    values = np.minimum.accumulate([step.mean() for step in steps])  # rounding must not turn the order round
    return _Ladder(group, tuple(orders), edges, values)


def _climbed(ladders: Sequence[_Ladder], sparsity: float, *, strict: bool) -> list[int]:
    """Steps taken on each ladder: one everywhere, then the most valuable that the budget still holds."""
    total = sum(ladder.units(len(ladder.edges)) for ladder in ladders)
    room = round((1 - sparsity) * total) - sum(ladder.units(1) for ladder in ladders)
    if room < 0 and strict:
        least = sum(ladder.units(1) for ladder in ladders)
        raise PlanError(
            f"sparsity is {sparsity:g}, but in this layout at most {1 - least / total:.4f} of the units can go",
            hint="lower sparsity or round_to, or use layout = 'ragged'",
        )
    taken, stuck = [1] * len(ladders), set[int]()
    rungs = [(-value, step, i) for i, ladder in enumerate(ladders) for step, value in enumerate(ladder.values) if step]
    for _, step, i in sorted(rungs):
        more = ladders[i].units(step + 1) - ladders[i].units(step)
        if i in stuck or more > room:
            stuck.add(i)  # what lies above it on this ladder is worth less; smaller steps of others may fit
            continue
        room -= more
        taken[i] = step + 1
    return taken


def _lowest_rungs(ladder: _Ladder, steps: int) -> Live:
    live: Live = {}
    for space, order in zip(ladder.spaces, ladder.orders, strict=True):
        found = np.zeros(order.shape, dtype=bool)
        np.put_along_axis(found, order[:, : ladder.edges[steps - 1]], True, axis=1)
        live[space.name] = found.ravel()
    return live


# ----------------------------------------------------------------------------------------------------------- deployment


def deployed(spaces: Sequence[Space], live: Live) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """`Plan.kept` and `Plan.heads` that hold every live channel; spaces that keep all are left out.

    A head without live v channels adds nothing and goes, with its channels that are no units. Where heads are unequal,
    which is so in the ragged layout only, each keeps as many as the widest, and a branch without live channels that is
    not removed (see `empty`) keeps one: `padding` says which channels those are, and that they must be zero.
    """
    kept: dict[str, tuple[int, ...]] = {}
    heads: dict[str, int] = {}
    alive = {space.attention: _alive_heads(live[space.name], space) for space in spaces if space.kind == "v"}
    for space in spaces:
        rows = live.get(space.name, np.ones(space.size, dtype=bool)).reshape(space.heads, -1)
        stay = alive.get(space.attention, range(space.heads))
        width = max(1, *(int(rows[head].sum()) for head in stay))
        if width == rows.shape[1] and len(stay) == space.heads:
            continue
        kept[space.name] = tuple(head * rows.shape[1] + c for head in stay for c in _padded(rows[head], width))
        if len(stay) < space.heads:
            heads[space.attention] = len(stay)
    return kept, heads


def empty(spaces: Sequence[Space], live: Live) -> set[str]:
    """The attentions without a live v channel and the FFNs without a live hidden one: all they add is a bias."""
    return {space.attention or space.name for space in spaces if space.kind != "qk" and not live[space.name].any()}


def padded(spaces: Sequence[Space], kept: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The attentions whose heads `kept` leaves unequal in q/k and v: those that `Plan.padded` is to name."""
    widths: dict[str, set[int]] = {}
    for space in spaces:
        if space.attention:
            widths.setdefault(space.attention, set()).add(len(kept.get(space.name, range(space.size))))
    return tuple(name for name, of in widths.items() if len(of) > 1)


def padding(live: Live, kept: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Space -> channels that are kept for the shape alone. A space that keeps all channels pads with all dead ones."""
    found = {
        name: tuple(c for c in kept.get(name, range(len(channels))) if not channels[c])
        for name, channels in live.items()
    }
    return {name: channels for name, channels in found.items() if channels}


def _alive_heads(v: np.ndarray, space: Space) -> list[int]:
    found: list[int] = np.flatnonzero(v.reshape(space.heads, -1).any(axis=1)).tolist()
    return found or [0]


def _padded(head: np.ndarray, width: int) -> list[int]:
    """The live channels of a head and the first dead ones, `width` in all, in order."""
    order = np.argsort(~head, kind="stable")
    found: list[int] = sorted(order[:width].tolist())
    return found
