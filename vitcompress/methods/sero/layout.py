"""From SERo's scores of units to live channels: an exact budget, in a layout that runtimes can use.

A unit is one channel of a q/k, v or FFN space. In DeiT each unit has twice the residual width in weights, so the share
of removed units is the share of the blocks' linear weights that is removed. One threshold covers all layers and kinds.

    ragged    single units above the threshold; heads and layers have any width. SERo as published, for comparison
    uniform   all heads of an attention keep the same number of q/k and of v channels; multiples of `round_to`
    tied      q/k and v keep the same number: attention kernels that support one head width
    padded    as uniform, with zeros in the attention up to the wider of q/k and v: the same kernels, SERo's own widths
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitcompress.errors import PlanError
from vitcompress.families import Space
from vitcompress.methods.options import Layout, SeroOptions
from vitcompress.plan import Plan

Scores = Mapping[str, np.ndarray]
Live = dict[str, np.ndarray]  # space -> whether each channel is live, (channels,)
UNIT_KINDS = ("qk", "v", "mlp")
TIED_WIDTH = 16  # smallest head width of fused attention kernels


@dataclass(frozen=True)
class _Ladder:
    """Spaces that grow together: after n steps, every head of every space has its best `edges[n - 1]` channels.

    orders: per space, the channels of each head from the best to the worst, (heads, channels). values: mean score of
    the units that each step adds, never increasing.
    """

    spaces: tuple[Space, ...]
    orders: tuple[np.ndarray, ...]
    edges: tuple[int, ...]
    values: np.ndarray

    def units(self, steps: int) -> int:
        """Number of units after `steps` steps, at least one."""
        return sum(space.heads for space in self.spaces) * self.edges[steps - 1]

    def live(self, steps: int) -> Live:
        """The channels after `steps` steps."""
        live: Live = {}
        for space, order in zip(self.spaces, self.orders, strict=True):
            rows = np.zeros(order.shape, dtype=bool)
            np.put_along_axis(rows, order[:, : self.edges[steps - 1]], True, axis=1)
            live[space.name] = rows.ravel()
        return live


def prunable(spaces: Iterable[Space]) -> tuple[Space, ...]:
    """The spaces that lose channels, including those that lose whole heads only."""
    return tuple(space for space in spaces if space.kind in UNIT_KINDS)


def unit_spaces(spaces: Iterable[Space]) -> tuple[Space, ...]:
    """The spaces whose channels are units."""
    return tuple(space for space in prunable(spaces) if not space.whole_heads)


def project(spaces: Sequence[Space], scores: Scores, ties: Scores, sparsity: float, options: SeroOptions) -> Live:
    """The live channels after `sparsity` of all units is removed.

    scores: (channels,) each, higher is better; equal scores are ordered by `ties`, then by channel. Raises
    PlanError if the layout cannot be that sparse.
    """
    if options.layout == "ragged":
        return _project_ragged(spaces, scores, ties, sparsity, is_global=options.threshold == "global")
    for space in spaces:
        if options.round_to > (width := space.size // space.heads):
            message = f"round_to is {options.round_to}, but {space.name} has only {width} channels per head"
            raise PlanError(message, hint=f"set round_to to {width} or less")
    ladders = [_ladder(group, scores, ties, options) for group in _groups(spaces, options.layout)]
    together = [ladders] if options.threshold == "global" else [[ladder] for ladder in ladders]
    live: Live = {}
    for members in together:
        for ladder, steps in zip(members, _climb(members, sparsity, strict=len(together) == 1), strict=True):
            live |= ladder.live(steps)
    return live


def _project_ragged(spaces: Sequence[Space], scores: Scores, ties: Scores, sparsity: float, *, is_global: bool) -> Live:
    """is_global: whether one threshold covers all spaces."""
    total = sum(space.size for space in spaces)
    if round((1 - sparsity) * total) < 1:
        message = f"sparsity is {sparsity:g}, which removes all {total} units: no layer would be left"
        raise PlanError(message, hint="lower sparsity")
    together = [list(spaces)] if is_global else [[space] for space in spaces]
    live: Live = {}
    for members in together:
        score, tie = (np.concatenate([values[space.name] for space in members]) for values in (scores, ties))
        channels = np.zeros(len(score), dtype=bool)
        channels[np.lexsort((-tie, -score))[: _above_quantile(len(score), sparsity)]] = True
        ends = np.cumsum([space.size for space in members])
        live |= dict(zip((space.name for space in members), np.split(channels, ends[:-1]), strict=True))
    return live


def _above_quantile(total: int, sparsity: float) -> int:
    """How many of `total` different scores exceed their `sparsity` quantile, linearly interpolated.

    The released code keeps these (numpy.percentile, strictly above), one more or less than the rounded share.
    """
    return total - 1 - math.floor(sparsity * (total - 1)) if sparsity else total


def _groups(spaces: Sequence[Space], layout: Layout) -> list[tuple[Space, ...]]:
    """The spaces that must have equal widths."""
    groups: dict[str, tuple[Space, ...]] = {}
    for space in spaces:
        key = space.attention if layout == "tied" and space.attention else space.name
        groups[key] = (*groups.get(key, ()), space)
    for group in groups.values():
        if len({space.size // space.heads for space in group}) > 1:
            message = f"{' and '.join(s.name for s in group)} cannot be tied: their heads already differ in width"
            raise PlanError(message, hint="use layout = 'uniform'")
    return list(groups.values())


def _ladder(group: tuple[Space, ...], scores: Scores, ties: Scores, options: SeroOptions) -> _Ladder:
    width = group[0].size // group[0].heads
    first = max(options.round_to, TIED_WIDTH) if len(group) > 1 else options.round_to
    edges = (*range(min(first, width), width, options.round_to), width)
    orders, ranked = [], []
    for space in group:
        score, tie = (values[space.name].reshape(space.heads, -1) for values in (scores, ties))
        order = np.lexsort((-tie, -score))  # of each head; stable: channels equal in both keep their order
        orders.append(order)
        ranked.append(np.take_along_axis(score, order, axis=1))
    steps = np.split(np.concatenate(ranked).mean(axis=0, dtype=np.float64), edges[:-1])
    values = np.minimum.accumulate([step.mean() for step in steps])  # rounding must not reverse the order
    return _Ladder(group, tuple(orders), edges, values)


def _climb(ladders: Sequence[_Ladder], sparsity: float, *, strict: bool) -> list[int]:
    """Steps taken on each ladder: one everywhere, then the most valuable ones within the budget."""
    total = sum(ladder.units(len(ladder.edges)) for ladder in ladders)
    least = sum(ladder.units(1) for ladder in ladders)
    room = round((1 - sparsity) * total) - least
    if room < 0 and strict:
        message = f"sparsity is {sparsity:g}, but this layout can remove at most {1 - least / total:.4f} of the units"
        raise PlanError(message, hint="lower sparsity or round_to (tied heads keep 16), or use layout = 'ragged'")
    taken, stuck = [1] * len(ladders), set[int]()
    rungs = [(-value, step, i) for i, ladder in enumerate(ladders) for step, value in enumerate(ladder.values) if step]
    for _, step, i in sorted(rungs):
        more = ladders[i].units(step + 1) - ladders[i].units(step)
        if i in stuck or more > room:
            stuck.add(i)  # later steps of this ladder are worth less; smaller steps of others may fit
            continue
        room -= more
        taken[i] = step + 1
    return taken


def keep_live(
    base: Plan, spaces: Sequence[Space], live: Live, *, pad: bool = False, removed: Collection[str] = ()
) -> Plan:
    """The plan that drops the attentions and FFNs in `removed` and keeps all live channels of the others.

    A head without live v channels contributes nothing and is removed, with its channels that are no units. If heads are
    unequal (in the ragged layout only), each keeps as many channels as the widest, and a branch without live channels
    that is not removed keeps one: `padding` names these channels, which must be zero.
    pad: pad q, k and v of each attention to the widest of them.
    """
    kept: dict[str, tuple[int, ...]] = {}
    heads: dict[str, int] = {}
    widths: dict[str, set[int]] = {}
    rows_of = {s.name: live.get(s.name, np.ones(s.size, dtype=bool)).reshape(s.heads, -1) for s in spaces}
    alive = {s.attention: np.flatnonzero(rows_of[s.name].any(axis=1)).tolist() for s in spaces if s.kind == "v"}
    for space in (space for space in spaces if (space.attention or space.name) not in removed):
        rows, stay = rows_of[space.name], alive.get(space.attention, range(space.heads)) or [0]
        width = max(1, *(int(rows[head].sum()) for head in stay))
        if space.attention:
            widths.setdefault(space.attention, set()).add(width)
        if width == rows.shape[1] and len(stay) == space.heads:
            continue
        # The live channels of each head and the first dead ones, in ascending order.
        best = {head: sorted(np.argsort(~rows[head], kind="stable")[:width].tolist()) for head in stay}
        kept[space.name] = tuple(head * rows.shape[1] + channel for head in stay for channel in best[head])
        if len(stay) < space.heads:
            heads[space.attention] = len(stay)
    padded = tuple(name for name, own in widths.items() if pad and len(own) > 1)
    return base.delta(removed=dict.fromkeys(removed, "drop"), kept=kept, heads=heads, padded=padded)


def padding(live: Live, kept: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Space -> channels that are kept for the shape alone; all dead channels of a space that keeps every channel."""
    stay = {name: kept.get(name, range(len(channels))) for name, channels in live.items()}
    dead = {name: tuple(c for c in channels if not live[name][c]) for name, channels in stay.items()}
    return {name: channels for name, channels in dead.items() if channels}
