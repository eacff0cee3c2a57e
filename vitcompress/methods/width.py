"""Widths of a model as groups of ranked channels; plan, cost and latency for numbers of kept channels.

The groups are those of isomorphic pruning (Fang et al., ECCV 2024): residual streams, hidden channels of FFNs, heads,
and the channels within heads, which all heads of an attention and its q, k and v share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from vitcompress import surgery
from vitcompress.families import Space
from vitcompress.methods.budget import Counts, Group, Kind, normalize
from vitcompress.methods.options import Scope
from vitcompress.methods.scores import Scores, check_scores
from vitcompress.models.cost import Cost, copy_to_meta, count_cost
from vitcompress.models.create import input_config
from vitcompress.plan import Plan

ZERO = torch.zeros((), device="cpu")
ALL = "all"  # the common scope of everything but heads


def groups_of(spaces: Sequence[Space], scores: Scores, scope: Scope) -> tuple[Group, ...]:
    """The groups of a model: every residual stream and FFN; the heads of every attention, and the channels within them.

    scope: groups that share a threshold: those of one kind and equal topology, such as the heads of all attentions
        (`isomorphic`); all but heads (`global`); or each group has its own (`local`).
    """

    def group(name: str, kind: Kind, values: Tensor, topology: str = "") -> Group:
        shared = ALL if scope == "global" and kind != "head" else f"{kind} {topology}"
        return Group(name, kind, normalize(values), name + kind if scope == "local" else shared)

    groups = []
    for space in (space for space in spaces if space.kind in ("residual", "mlp")):
        # Equal for spaces that the same layers read and write in the same order: the paper's isomorphic sub-graphs.
        topology = " ".join(f"{axis.tensor.rsplit('.', 2)[-2:]}{axis.dim}{axis.copies}" for axis in space.axes)
        groups.append(group(space.name, "ffn" if space.kind == "mlp" else "residual", scores[space.name], topology))
    for attention in dict.fromkeys(space.attention for space in spaces if space.attention):
        parts = _head_dims(spaces, attention)
        totals = {name: normalize(sum((scores[space.name] for space in own), ZERO)) for name, own in parts.items()}
        per_head = {name: total.view(parts[name][0].heads, -1) for name, total in totals.items()}
        groups.append(group(attention, "head", sum((values.mean(1) for values in per_head.values()), ZERO)))
        single = {name: values for name, values in per_head.items() if not parts[name][0].whole_heads}
        groups += [group(name, "head_dim", values.mean(0)) for name, values in single.items()]
    check_scores("channels", (group.scores.any() for group in groups))
    return tuple(groups)


def _head_dims(spaces: Sequence[Space], attention: str) -> dict[str, list[Space]]:
    """Name of a group of channels within heads -> its spaces: all of the attention if equally wide, else each alone."""
    own = [space for space in spaces if space.attention == attention]
    if len({space.size for space in own}) == 1 and not any(space.whole_heads for space in own):
        return {f"{attention}.head_dim": own}
    return {f"{space.name}.head_dim": [space] for space in own}


@dataclass(frozen=True)
class Candidates:
    """The plan, and the cost after folding, for numbers of kept channels."""

    model: nn.Module
    spaces: Sequence[Space]
    groups: Sequence[Group]
    base: Plan

    def delta(self, counts: Counts) -> Plan:
        """The plan that keeps the best `counts` channels of every group, in addition to `base`."""
        best = {group.name: group.best(counts[group.name]) for group in self.groups}
        kept = {s.name: channels for s in self.spaces if len(channels := self._channels(s, best)) < s.size}
        heads = {s.attention: count for s in self.spaces if s.attention and (count := len(best[s.attention])) < s.heads}
        return self.base.delta(kept=kept, heads=heads)

    def _channels(self, space: Space, best: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The channels of `space` that stay. best: group -> its channels, heads, or channels within heads."""
        if not space.attention:
            return best.get(space.name, tuple(range(space.size)))  # reduced keys and values keep all channels
        width = space.size // space.heads
        group = next(name for name, own in _head_dims(self.spaces, space.attention).items() if space in own)
        return tuple(head * width + dim for head in best[space.attention] for dim in best.get(group, range(width)))

    @cached_property
    def cost(self) -> Callable[[Counts], Cost]:
        """The cost of the deployed model with `counts`, counted on shapes alone."""
        shapes, size = copy_to_meta(self.model), input_config(self.model).size
        return lambda counts: count_cost(deploy(shapes, self.base, self.delta(counts)), size)


def deploy(model: nn.Module, base: Plan, delta: Plan) -> nn.Module:
    """A copy of `model`, which has the plan `base`, after `delta` and folding."""
    sliced = surgery.apply_to_copy(model, delta)
    surgery.fold_linears(sliced, base.then(delta))  # of a standard model of timm nothing is folded
    return sliced
