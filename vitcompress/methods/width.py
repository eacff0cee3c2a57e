"""Widths of a model as groups of ranked channels; plan, cost and latency of given numbers of kept channels.

Four kinds, as in isomorphic pruning (Fang et al., ECCV 2024): residual streams, hidden channels of FFNs, heads, and the
channels of a head, which all heads of an attention and its q, k and v share.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

from torch import Tensor, nn

from vitcompress import surgery
from vitcompress.families import Space
from vitcompress.methods import budget
from vitcompress.methods.budget import Counts, Group
from vitcompress.methods.scores import Scores
from vitcompress.models.cost import Cost, count_cost, planned_cost
from vitcompress.models.create import input_config
from vitcompress.plan import Plan

Scope = Literal["isomorphic", "global", "local"]
ALL = "all"  # the one scope of everything but heads
MILLION, GIGA = 1e6, 1e9
LazyModel = Callable[[], nn.Module]  # a model that is made only where it is needed


@dataclass(frozen=True)
class CandidateClock:
    """Milliseconds of (model as deployed, what was taken from it), as of `Clock`."""

    median: Callable[[LazyModel, Plan], float]
    undisturbed: Callable[[LazyModel, Plan], float]


def groups_of(spaces: Sequence[Space], scores: Scores, scope: Scope) -> tuple[Group, ...]:
    """What is ranked: every residual stream and FFN, and of every attention its heads and its heads' channels."""
    found: list[Group] = []
    for space in spaces:
        if space.kind in ("residual", "mlp"):
            kind: budget.Kind = "residual" if space.kind == "residual" else "ffn"
            found.append(_group(space.name, kind, scores[space.name], scope, _topology(space)))
    for path, own in _attentions(spaces).items():
        per_head = _by_head(own, scores)
        found.append(_group(path, "head", sum(part.mean(1) for part in per_head), scope))  # type: ignore[arg-type]
        dims = zip(_dim_names(own), per_head, strict=True)
        found += [_group(name, "head_dim", part.mean(0), scope) for name, part in dims if name]
    return tuple(found)


def _group(name: str, kind: budget.Kind, scores: Tensor, scope: Scope, topology: str = "") -> Group:
    shared = ALL if scope == "global" and kind != "head" else f"{kind} {topology}"
    return Group(name, kind, budget.normalised(scores), name + kind if scope == "local" else shared)


def _topology(space: Space) -> str:
    """Equal for spaces that the same layers read and write in the same order: the paper's isomorphic sub-graphs."""
    return " ".join(f"{axis.tensor.rsplit('.', 2)[-2:]}{axis.dim}{axis.copies}" for axis in space.axes)


def _attentions(spaces: Sequence[Space]) -> dict[str, list[Space]]:
    found: dict[str, list[Space]] = {}
    for space in spaces:
        if space.attention:
            found.setdefault(space.attention, []).append(space)
    return found


def _tied(own: Sequence[Space]) -> bool:
    """Whether q, k and v are as wide as each other and free to keep the same channels."""
    return len({space.size for space in own}) == 1 and not any(space.whole_heads for space in own)


def _by_head(own: Sequence[Space], scores: Scores) -> list[Tensor]:
    """Scores (heads, channels of a head): of q, k and v together where they are as wide, else of q/k and of v."""
    if _tied(own):
        return [budget.normalised(sum(scores[s.name] for s in own)).view(own[0].heads, -1)]  # type: ignore[arg-type]
    return [budget.normalised(scores[space.name]).view(space.heads, -1) for space in own]


def _dim_names(own: Sequence[Space]) -> list[str]:
    """The groups of a head's channels; an empty name for those that no head loses."""
    if _tied(own):
        return [own[0].attention + ".head_dim"]
    return ["" if space.whole_heads else f"{space.name}.head_dim" for space in own]


class Sizes:
    """What numbers of kept channels come to: the plan, its cost when all is folded, its latency."""

    def __init__(
        self,
        model: nn.Module,
        spaces: Sequence[Space],
        groups: Sequence[Group],
        base: Plan,
        clock: CandidateClock | None,
    ) -> None:
        self.spaces, self.groups, self.base, self.clock = spaces, {g.name: g for g in groups}, base, clock
        self.model = model
        self.shapes = deepcopy(model).to("meta")
        self.input_size = input_config(model).size

    def delta(self, counts: Counts) -> Plan:
        """The plan, on top of `base`, that keeps the best `counts` of every group."""
        kept: dict[str, tuple[int, ...]] = {}
        heads: dict[str, int] = {}
        for space in self.spaces:
            if not space.attention and space.name not in self.groups:  # reduced keys and values keep their channels
                continue
            channels = self._kept(space, counts)
            if len(channels) < space.size:
                kept[space.name] = channels
            if space.attention and counts[space.attention] < space.heads:
                heads[space.attention] = counts[space.attention]
        return Plan(self.base.arch, self.base.arch_args, kept=kept, heads=heads)

    def _kept(self, space: Space, counts: Counts) -> tuple[int, ...]:
        if not space.attention:
            return self.groups[space.name].best(counts[space.name])
        own = [other for other in self.spaces if other.attention == space.attention]
        name = dict(zip(own, _dim_names(own) * (len(own) if _tied(own) else 1), strict=True))[space]
        width = space.size // space.heads
        heads = self.groups[space.attention].best(counts[space.attention])
        dims = self.groups[name].best(counts[name]) if name else range(width)
        return tuple(head * width + dim for head in heads for dim in dims)

    def measure(self, target: str) -> Callable[[Counts], float] | None:
        """The function that says what counts cost in the unit of `target`; None where nothing is to be measured."""
        if target == "latency":
            return None if self.clock is None else partial(self.latency, self.clock.median)
        scale = {"macs": GIGA, "macs_linear": GIGA, "params": MILLION}.get(target)
        return None if scale is None else lambda counts: float(getattr(self.costs(counts), target)) / scale

    def costs(self, counts: Counts) -> Cost:
        """Of the model as it will be deployed, counted on shapes alone."""
        delta = self.delta(counts)
        if self.planned is not None:
            return self.planned(delta)
        return count_cost(_deployed(self.shapes, self.base, delta), self.input_size)

    @cached_property
    def planned(self) -> Callable[[Plan], Cost] | None:
        """`planned_cost` of the model that is sliced; None where its FFNs are folded at some widths only."""
        whole = deepcopy(self.shapes)
        records = surgery.fold_linears(whole, self.base).records
        scales = all(record.reason == surgery.INTO_THE_LINEAR for record in records)
        return planned_cost(whole, self.input_size) if scales else None

    def latency(self, clock: Callable[[LazyModel, Plan], float], counts: Counts) -> float:
        """Milliseconds of the model as it will be deployed."""
        delta = self.delta(counts)
        return clock(partial(_deployed, self.model, self.base, delta), delta)


def _deployed(model: nn.Module, base: Plan, delta: Plan) -> nn.Module:
    sliced = surgery.apply_to_copy(model, delta)
    surgery.fold_linears(sliced, base)
    return sliced
