"""From scores to numbers of kept channels: thresholds within ranking scopes, aligned widths, a budget met by bisection.

A `Group` is a set of channels with one score each: the hidden channels of one FFN, the heads of one attention, the
channels that all heads of one attention share, one residual stream. Groups of one scope share one threshold, groups of
different scopes are never compared (isomorphic pruning, Fang et al., ECCV 2024). A group always keeps its best
channels, so a number of channels per group says all.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from vitcompress.errors import PlanError
from vitcompress.io.text import format_range

Kind = Literal["residual", "ffn", "head_dim", "head"]
Counts = dict[str, int]
ROUNDS = 40  # halvings of an interval; as fine as a float needs
DISTURBED = 10  # times as long as by itself a call may take while other work runs, at the very most
CLOSE, EXACT = 0.01, 1e-4  # shares of a target within which it counts as met, and nothing nearer is looked for

LATER = "; whatever else runs makes times longer: the same command measures anew and keeps what was trained"


@dataclass(frozen=True)
class Group:
    """Channels of one name, scored (channels,), that are ranked with all others of the same scope."""

    name: str
    kind: Kind
    scores: Tensor
    scope: str

    @property
    def size(self) -> int:
        return len(self.scores)

    def best(self, count: int) -> tuple[int, ...]:
        """The `count` channels with the highest scores, in the order of the model; of equal ones the first."""
        order = self.scores.argsort(descending=True, stable=True)[:count]
        return tuple(sorted(order.tolist()))


@dataclass(frozen=True)
class Units:
    """Kept widths are multiples of these, by kind; heads are counted one by one.

    down: round towards fewer channels, as the released isomorphic pruning does; else to the nearest multiple.
    """

    residual: int = 1
    ffn: int = 1
    head_dim: int = 1
    down: bool = False

    def of(self, kind: Kind) -> int:
        return {"residual": self.residual, "ffn": self.ffn, "head_dim": self.head_dim, "head": 1}[kind]


def normalised(scores: Tensor) -> Tensor:
    """Scores whose mean is 1, so that groups are compared by how unequal their channels are and not by magnitude.

    Raises:
        PlanError: scores that are not finite, or none above zero, among which nothing can be chosen.
    """
    mean = scores.double().mean()
    if not torch.isfinite(mean) or mean <= 0:
        raise PlanError(
            f"channels cannot be ranked: their mean score is {float(mean)}",
            hint="look at more images, or check that the model's weights and gradients are finite",
        )
    return scores.double() / mean


def thresholded(groups: Iterable[Group], keep: Mapping[str, float]) -> Counts:
    """How many channels of each group are among the best share `keep[scope]` of all channels of its scope.

    As many as floor(share * channels) in all, of equal scores the first. Every group keeps at least one.
    """
    counts: Counts = {}
    for scope, members in _scopes(groups).items():
        scores = torch.cat([group.scores for group in members])
        owner = torch.repeat_interleave(torch.tensor([group.size for group in members]))
        kept = scores.argsort(descending=True, stable=True)[: int(len(scores) * keep[scope])]
        found = torch.bincount(owner[kept], minlength=len(members)).tolist()
        counts |= {group.name: max(1, count) for group, count in zip(members, found, strict=True)}
    return counts


def _scopes(groups: Iterable[Group]) -> dict[str, list[Group]]:
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.scope, []).append(group)
    return found


def aligned(count: int, size: int, unit: int, *, down: bool = False) -> int:
    """The multiple of `unit` next to `count` (below it with `down`), at least one and at most what `size` holds.

    A group that loses nothing keeps its size, whatever that is.
    """
    if count >= size:
        return size
    multiple = count // unit if down else math.floor(count / unit + 0.5)
    return unit * min(max(1, multiple), size // unit)


def fitted(groups: Sequence[Group], counts: Mapping[str, int], units: Units) -> Counts:
    """`counts` with every width aligned."""
    return {
        group.name: aligned(counts[group.name], group.size, units.of(group.kind), down=units.down) for group in groups
    }


def check_units(groups: Iterable[Group], units: Units) -> None:
    """Raise PlanError when a width is asked to be a multiple of more than it has."""
    for group in groups:
        if units.of(group.kind) > group.size:
            raise PlanError(
                f"{group.kind} widths are to be multiples of {units.of(group.kind)}, but {group.name} has only "
                f"{group.size}",
                hint=f"set an alignment of {group.size} or less",
            )


# --------------------------------------------------------------------------------------------------------------- budget


@dataclass(frozen=True)
class Target:
    """What the result may cost: `amount` of what `cost(counts)` measures, said to people as `words`.

    rounds: halvings of the interval at most. exact: share of the amount within which nothing nearer is looked for. on:
    the runtime, where the cost is one of it. surely: the cost without what else the machine did, where it is measured.
    """

    amount: float
    cost: Callable[[Counts], float]
    words: str
    rounds: int = ROUNDS
    exact: float = EXACT
    on: str | None = None
    surely: Callable[[Counts], float] | None = None


@dataclass(frozen=True)
class Solution:
    """How a target was met: what the chosen numbers cost, and the least and the most that could be had."""

    counts: Counts
    cost: float
    least: float
    most: float


def shares(keep: Mapping[str, float], strength: float) -> dict[str, float]:
    """Every share to the power s, with s = strength / (1 - strength): 0 keeps all, 0.5 is `keep`, 1 leaves nothing.

    Powers keep the shares in proportion: what is asked to shrink faster does so at every strength.
    """
    if strength >= 1:
        return {scope: float(share == 1) for scope, share in keep.items()}
    return {scope: share ** (strength / (1 - strength)) for scope, share in keep.items()}


def solved(groups: Sequence[Group], keep: Mapping[str, float], units: Units, target: Target) -> Solution:
    """The numbers of kept channels whose cost is nearest to the target, by bisection on one strength for all shares.

    A residual stream touches every layer, so one step of its alignment may change the cost by more than all the rest
    can be fine-tuned by. Its width is therefore set first, to what the target asks for without alignment, and what
    remains is spent on heads and FFNs. Where that does not come within 1 %, the widths next to it are tried as well.

    Raises:
        PlanError: the target is out of reach, with the range that is not; or an alignment larger than a width.
    """
    target = _asked_once(target)
    least, most = check_reach(groups, keep, units, target)
    free = _bisected(groups, keep, Units(), target, {})[0]
    found: list[tuple[Counts, float]] = []
    for shift in (0, -1, 1):
        found.append(_bisected(groups, keep, units, target, _residual(groups, free, units, shift)))
        if abs(found[-1][1] - target.amount) <= CLOSE * target.amount:
            break
    counts, cost = min(found, key=lambda pair: abs(pair[1] - target.amount))
    return Solution(counts, cost, least, most)


def _asked_once(target: Target) -> Target:
    """`target` with its costs remembered by the numbers asked for: each may be a measurement."""
    known: dict[tuple[int, ...], float] = {}

    def cost(counts: Counts) -> float:
        key = tuple(counts.values())
        if key not in known:
            known[key] = target.cost(counts)
        return known[key]

    def surely(counts: Counts) -> float:
        assert target.surely is not None
        known[tuple(counts.values())] = found = min(cost(counts), target.surely(counts))
        return found

    return replace(target, cost=cost, surely=target.surely and surely)


def check_reach(
    groups: Sequence[Group], keep: Mapping[str, float], units: Units, target: Target
) -> tuple[float, float]:
    """The least and the most that this structure can cost. Raises PlanError when the target is not between them.

    A measured least cost is measured again, for longer, before a target is refused for it: other load on the machine
    can only have made it larger.
    """
    check_units(groups, units)
    largest, smallest = (_at(groups, keep, units, strength) for strength in (0.0, 1.0))
    most, least = target.cost(largest), target.cost(smallest)
    if target.surely is not None and least / DISTURBED <= target.amount < least:
        least = min(least, target.surely(smallest))
    if not least <= target.amount <= most:
        asked = target.words.format(target.amount) + (f" on {target.on}" if target.on else "")
        allowed = format_range(target.words.format(least), target.words.format(most))
        raise PlanError(
            f"{asked} cannot be reached: this structure allows {allowed}",
            hint="change the target, or let more kinds of width shrink (keep_ratio, keep_heads, keep_head_dim below 1)"
            f"{LATER if target.on else ''}",
        )
    return least, most


def _at(groups: Sequence[Group], keep: Mapping[str, float], units: Units, strength: float) -> Counts:
    return fitted(groups, thresholded(groups, shares(keep, strength)), units)


def _residual(groups: Sequence[Group], counts: Counts, units: Units, shift: int) -> Counts:
    """Aligned residual widths, `shift` units away from the nearest ones."""
    wished = {g.name: counts[g.name] + shift * units.residual for g in groups if g.kind == "residual"}
    return {g.name: aligned(wished[g.name], g.size, units.residual) for g in groups if g.name in wished}


def _bisected(
    groups: Sequence[Group], keep: Mapping[str, float], units: Units, target: Target, fixed: Counts
) -> tuple[Counts, float]:
    """The numbers nearest to the target, and what they cost, with those in `fixed` left alone."""

    def at(strength: float) -> tuple[Counts, float]:
        counts = {**_at(groups, keep, units, strength), **fixed}
        return counts, target.cost(counts)

    def miss(found: tuple[Counts, float]) -> float:
        return abs(found[1] - target.amount)

    near_enough = target.exact * target.amount
    little, much = 0.0, 1.0
    best = at(little)
    if miss(best) > near_enough:
        best = min(best, at(much), key=miss)
    for _ in range(target.rounds):
        if miss(best) <= near_enough:
            break
        middle = (little + much) / 2
        found = at(middle)
        best = min(best, found, key=miss)  # of equally near ones the earlier
        little, much = (middle, much) if found[1] > target.amount else (little, middle)
    return best
