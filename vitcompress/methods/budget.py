"""Numbers of kept channels: one threshold per scope, aligned widths, and bisection to a target cost.

A `Group` is a set of scored channels: the hidden channels of an FFN, the heads of an attention, the channels within
these heads, or a residual stream. Groups of one scope share a threshold; groups of different scopes are never compared
(isomorphic pruning, Fang et al., ECCV 2024). A group keeps its best channels: their numbers determine a plan.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from vitcompress.errors import PlanError
from vitcompress.io.text import format_range

Kind = Literal["residual", "ffn", "head_dim", "head"]
Counts = dict[str, int]
T = TypeVar("T")
ROUNDS = 40  # bisection steps; as fine as a float
CLOSE, EXACT = 0.01, 1e-4  # relative differences at which a target counts as met, and at which the search ends


@dataclass(frozen=True)
class Group:
    """Channels with scores, (channels,), that are ranked together with all others of the same scope."""

    name: str
    kind: Kind
    scores: Tensor
    scope: str

    @property
    def size(self) -> int:
        return len(self.scores)

    @cached_property
    def order(self) -> list[int]:
        """The channels from the highest score to the lowest; of equal scores the first channel first."""
        return list(self.scores.argsort(descending=True, stable=True).tolist())

    def best(self, count: int) -> tuple[int, ...]:
        """The `count` channels with the highest scores, in ascending order."""
        return tuple(sorted(self.order[:count]))


def normalize(scores: Tensor) -> Tensor:
    """Divide scores by their mean: groups then compete by how unequal their channels are, not by their magnitude.

    Those of a layer that does nothing stay 0, the lowest rank. Raises PlanError if the mean is not finite.
    """
    mean = scores.double().mean()
    if not torch.isfinite(mean):
        message = f"channels cannot be ranked: their mean score is {float(mean)}"
        raise PlanError(message, hint="use more images, or check that the model's weights and gradients are finite")
    return scores.double() / (mean if mean > 0 else 1)


def align(count: int, size: int, unit: int, *, down: bool = False) -> int:
    """The multiple of `unit` nearest to `count` (the next lower one with `down`), between `unit` and `size`.

    A group that loses no channel keeps its size, even if that is not a multiple.
    """
    if count >= size:
        return size
    return unit * min(max(1, count // unit if down else math.floor(count / unit + 0.5)), size // unit)


@dataclass(frozen=True)
class Ranking:
    """Ranked groups and the share of their channels to keep.

    keep: scope -> share of its channels. multiples: kind -> number that kept widths are multiples of; none: 1. down:
    round down, as the released isomorphic pruning does, instead of to the nearest multiple. Raises PlanError if such a
    number is larger than a width that is pruned.
    """

    groups: tuple[Group, ...]
    keep: Mapping[str, float]
    multiples: Mapping[str, int] = field(default_factory=dict)
    down: bool = False

    def __post_init__(self) -> None:
        for group in self.groups:
            if (unit := self.multiples.get(group.kind, 1)) > group.size and self.keep[group.scope] < 1:
                message = f"{group.kind} widths must be multiples of {unit}, but {group.name} has only {group.size}"
                hint = f"set align.{group.kind} (or round_to) of the step to {group.size} or less"
                raise PlanError(message, hint=hint)

    @cached_property
    def _scopes(self) -> dict[str, tuple[list[Group], Tensor]]:
        """Scope -> its groups, and for each channel from the highest score on the index of its group."""
        scopes = {}
        for scope in dict.fromkeys(group.scope for group in self.groups):
            groups = [group for group in self.groups if group.scope == scope]
            order = torch.cat([group.scores for group in groups]).argsort(descending=True, stable=True)
            owners = torch.repeat_interleave(torch.tensor([group.size for group in groups]))
            scopes[scope] = groups, owners[order]
        return scopes

    def counts(self, strength: float = 0.5, *, fixed: Counts | None = None) -> Counts:
        """Group -> number of kept channels: its part of the best floor(share * channels) of the scope, aligned, not 0.

        strength: 0 keeps everything, 0.5 the shares in `keep`, 1 the minimum. In between shares are raised to the power
            strength / (1 - strength), so that scopes shrink in proportion. fixed: groups with another number.
        """
        counts: Counts = {}
        for scope, (groups, owners) in self._scopes.items():
            best = owners[: int(len(owners) * scale_share(self.keep[scope], strength))]
            numbers = torch.bincount(best, minlength=len(groups)).tolist()
            for group, number in zip(groups, numbers, strict=True):
                multiple = self.multiples.get(group.kind, 1)
                counts[group.name] = align(max(1, number), group.size, multiple, down=self.down)
        return counts | (fixed or {})


def scale_share(share: float, strength: float) -> float:
    """`share` to the power strength / (1 - strength); with strength 1, zero unless the share is 1."""
    return float(share == 1) if strength >= 1 else share ** (strength / (1 - strength))


@dataclass(frozen=True)
class Target(Generic[T]):
    """A cost to reach: `amount` in `unit`, as measured by `cost(candidate)`, at most once for equal candidates.

    runtime: where it is measured, if it is a latency. fastest: the cost with the least other load on the machine.
    rounds: largest number of bisection steps. exact: relative difference at which the search ends.
    """

    amount: float
    cost: Callable[[T], float]
    unit: str
    runtime: str = ""
    fastest: Callable[[T], float] | None = None
    rounds: int = ROUNDS
    exact: float = EXACT
    known: dict[str, float] = field(init=False, default_factory=dict)

    def cost_of(self, candidate: T) -> float:
        key = repr(candidate)
        if key not in self.known:
            self.known[key] = self.cost(candidate)
        return self.known[key]

    def difference(self, cost: float) -> float:
        """Relative difference of a cost from the amount, at least 0."""
        return abs(cost - self.amount) / self.amount


def solve(ranking: Ranking, target: Target[Counts]) -> tuple[Counts, dict[str, float]]:
    """Numbers of channels whose cost is nearest to the target; requested, reached, least and largest possible cost.

    First the residual width is fixed, whose channels cost most: that of a solution without alignment, rounded to its
    multiple. (For a latency the solution has alignment: other widths may be slow.) Then the other widths are searched.
    If they miss the target by more than 1 % (a latency by 2 %), the next residual widths are tried. Raises PlanError,
    with the range, if the target is out of reach.
    """
    least, most = check_reach(ranking.counts(0.0), ranking.counts(1.0), target)
    free = bisect((ranking if target.runtime else replace(ranking, multiples={}, down=False)).counts, target)[0]
    results, unit = list[tuple[Counts, float]](), ranking.multiples.get("residual", 1)
    streams = [g for g in ranking.groups if g.kind == "residual" and ranking.keep[g.scope] < 1]
    for shift in (0, -1, 1):
        residual = {group.name: align(free[group.name] + shift * unit, group.size, unit) for group in streams}
        results.append(bisect(partial(ranking.counts, fixed=residual), target))
        if target.difference(results[-1][1]) <= max(CLOSE, target.exact):
            break
    counts, cost = min(results, key=lambda result: target.difference(result[1]))
    return counts, {"amount": target.amount, "reached": cost, "least": least, "most": most}


def check_reach(largest: T, smallest: T, target: Target[T]) -> tuple[float, float]:
    """The smallest and the largest cost of this structure. Raises PlanError if the target is not between them.

    Other load on the machine can only have increased a measured cost, so the fastest part of the measurement counts.
    """
    most, least = target.cost_of(largest), target.cost_of(smallest)
    if target.fastest is not None and target.amount < least:
        least = target.fastest(smallest)
    if least <= target.amount <= most:
        return least, most
    amount, low, high = (f"{value:.4g} {target.unit}" for value in (target.amount, *sorted((least, most))))
    where = f" on {target.runtime}" if target.runtime else ""
    load = "; other load on the machine makes times longer: the same command measures anew and keeps what it trained"
    message = f"{amount}{where} cannot be reached: this structure allows {format_range(low, high)}"
    hint = "change the target, or allow more to be pruned (shares below 1; smaller target_args of upvit)"
    if target.amount > most:
        hint = "nothing has to be removed for this amount: lower it, or leave the step out"
    raise PlanError(message, hint=hint + (load if target.runtime else ""))


def bisect(candidate: Callable[[float], T], target: Target[T]) -> tuple[T, float]:
    """The candidate nearest to the target (of equal ones the first) and its cost.

    candidate: of a strength between 0, the largest, and 1, the smallest.
    """
    low, high, results = 0.0, 1.0, list[tuple[T, float]]()
    for number in range(2 + target.rounds):
        strength = (0.0, 1.0)[number] if number < 2 else (low + high) / 2
        cost = target.cost_of(size := candidate(strength))
        results.append((size, cost))
        if target.difference(cost) <= target.exact:
            break
        if number >= 2:
            low, high = (strength, high) if cost > target.amount else (low, strength)
    return min(results, key=lambda result: target.difference(result[1]))
