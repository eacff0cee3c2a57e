"""Isomorphic pruning: rank channels only against channels of the same kind, and cut every kind to a share.

Fang et al., ECCV 2024, https://arxiv.org/abs/2407.04616. Four kinds of structure compete among themselves: residual
width, hidden channels of all FFNs, channels that the heads of an attention share, and heads. Scores come from
`channel_scores` and are divided by their group's mean; how channels are shared out among blocks so depends on how
unequal they are in each, not on how large. An attention keeps the same channels in all of its heads and in q, k and v.

Differs from the released code: the dense softmax scale is kept (`attention_scale`), every attention keeps a head,
widths are aligned for the runtimes and the shares can be solved for a target (`round_to` and `target = "ratios"` do as
published), timm is not patched, and the result is a plan instead of a pickled model.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from vitcompress import budget, cost, models, surgery
from vitcompress.budget import Counts, Group, Target, Units
from vitcompress.checkpoint import read_json
from vitcompress.errors import PlanError
from vitcompress.families import Family, Space
from vitcompress.methods.channel_scores import Criterion, Scores, random_scores, scored
from vitcompress.methods.depth import Stage
from vitcompress.plan import Plan
from vitcompress.workspace import Context

Scope = Literal["isomorphic", "global", "local"]
Share = Annotated[float, Gt(0), Le(1)]
Multiple = Annotated[int, Ge(1)]
WORDS = {
    "macs": "{:.4g} G MACs",
    "macs_linear": "{:.4g} G MACs (without attention products)",
    "params": "{:.4g} M parameters",
    "latency": "{:.4g} ms",
}
MILLION, GIGA = 1e6, 1e9
LATENCY_ROUNDS = 10  # each is a measurement


@dataclass(frozen=True)
class Alignment:
    """Kept widths are multiples of these. 64 fills the tiles of tensor cores; a head's width in steps of 16 keeps fused
    attention kernels (multiples of 8 are the least that TensorRT fuses).
    """

    residual: Multiple = 64
    ffn: Multiple = 64
    head_dim: Multiple = 16


@dataclass(frozen=True, kw_only=True)
class Options:
    """keep_ratio: share of residual width and FFN channels kept; keep_heads, keep_head_dim: of heads, and of a head's
    channels. target: `ratios` takes these shares as they are; the others solve for `amount` (G MACs, M parameters, ms
    for one image) with the shares in proportion, `macs_linear` without the attention's own products. align: multiples
    that widths are kept at; round_to: instead, one multiple for all, rounded down as published. scope: what is ranked
    together: one kind (`isomorphic`), everything but heads (`global`), each layer alone (`local`: equal blocks).
    images: how many the gradients are summed over. attention_scale: `reset` computes with the softmax scale of the new
    head width, as the released code does.
    """

    keep_ratio: Share = 0.5
    keep_heads: Share = 0.5
    keep_head_dim: Share = 0.75
    target: Literal["ratios", "macs", "macs_linear", "params", "latency"] = "ratios"
    amount: Annotated[float, Gt(0)] | None = None
    align: Alignment = field(default_factory=Alignment)
    round_to: Multiple | None = None
    scope: Scope = "isomorphic"
    criterion: Criterion = "taylor"
    images: Annotated[int, Ge(1)] = 3200
    attention_scale: Literal["keep", "reset"] = "keep"

    @property
    def units(self) -> Units:
        if self.round_to is not None:
            return Units(self.round_to, self.round_to, self.round_to, down=True)
        return Units(**asdict(self.align))


def plan(model: nn.Module, context: Context, options: Options) -> Plan:
    """Score all channels once, cut every kind to its share. Kept widths and costs go to `widths.json`."""
    _check(options)
    spaces = context.family.spaces(model)
    budget.check_units(groups_of(spaces, random_scores(spaces, 0), options), options.units)

    def choose() -> dict[str, Any]:
        context.progress.stage(f"score channels by {options.criterion}")
        scores = scored(model, spaces, context, options.criterion, options.images)
        groups = groups_of(spaces, scores, options)
        sizes = Sizes(model, spaces, groups, context.plan, context.latency)
        counts = chosen(groups, options, sizes)
        rows = [{"name": g.name, "kind": g.kind, "kept": counts[g.name], "of": g.size} for g in groups]
        found = {"rows": rows, "cost": sizes.costs(counts).to_dict(), "plan": sizes.delta(counts).to_json()}
        return found | ({"latency_ms": sizes.latency(counts)} if options.target == "latency" else {})

    found = context.memo("widths", choose)
    context.progress.note(_sentence(found))
    delta = Plan.from_json(found["plan"])
    if options.attention_scale == "reset":
        context.hand_over(rescaled(model, spaces, delta))
    return delta


def structure(model: nn.Module, family: Family, base: Plan, options: Options) -> Plan:
    """A plan of the same size without data: channels ranked at random. With `target = "latency"`, the shares as given.

    Raises:
        PlanError: a target out of reach, or an alignment larger than a width.
    """
    _check(options)
    spaces = family.spaces(model)
    groups = groups_of(spaces, random_scores(spaces, 0), options)
    sizes = Sizes(model, spaces, groups, base, None)
    return sizes.delta(chosen(groups, options, sizes))


def stages(options: Options, prunable: int) -> list[Stage]:
    """The one pass over images that scores need, for a dry run."""
    looks = options.criterion in ("taylor", "gradient")
    return [Stage(f"{options.criterion} scores of all channels", 1, 1, images=options.images)] if looks else []


def tables(folder: Path) -> list[dict[str, Any]]:
    """What is left of every width."""
    path = folder / "widths.json"
    if not path.is_file():
        return []
    rows = [[r["name"], r["kind"].replace("_", " "), str(r["kept"]), str(r["of"])] for r in read_json(path)["rows"]]
    return [{"title": "Isomorphic pruning: widths", "columns": ["where", "kind", "kept", "of"], "rows": rows}]


def _check(options: Options) -> None:
    if (options.amount is None) != (options.target == "ratios"):
        raise PlanError(
            f"target is {options.target!r} and amount is {options.amount}",
            hint='give an amount (G MACs, M parameters or ms) exactly where target is not "ratios"',
        )
    if options.keep_ratio == options.keep_heads == options.keep_head_dim == 1:
        raise PlanError(
            "all shares are 1, so nothing would go", hint="set keep_ratio, keep_heads or keep_head_dim below 1"
        )


def _sentence(found: Mapping[str, Any]) -> str:
    spent = found["cost"]
    text = f"{spent['params'] / MILLION:.2f} M parameters, {spent['macs'] / GIGA:.3f} G MACs"
    return text + (f", {found['latency_ms']:.3f} ms" if "latency_ms" in found else "")


# --------------------------------------------------------------------------------------------------------------- groups


def groups_of(spaces: Sequence[Space], scores: Scores, options: Options) -> tuple[Group, ...]:
    """What is ranked: every residual stream and FFN, and of every attention its heads and its heads' channels."""
    found: list[Group] = []
    for space in spaces:
        if space.kind in ("residual", "mlp"):
            kind: budget.Kind = "residual" if space.kind == "residual" else "ffn"
            found.append(_group(space.name, kind, scores[space.name], options, _topology(space)))
    for path, own in _attentions(spaces).items():
        per_head = _by_head(own, scores)
        found.append(_group(path, "head", sum(part.mean(1) for part in per_head), options))  # type: ignore[arg-type]
        found += [
            _group(name, "head_dim", part.mean(0), options)
            for name, part in zip(_dim_names(own), per_head, strict=True)
        ]
    return tuple(found)


def _group(name: str, kind: budget.Kind, scores: Tensor, options: Options, topology: str = "") -> Group:
    shared = "all" if options.scope == "global" and kind != "head" else f"{kind} {topology}"
    return Group(name, kind, budget.normalised(scores), name + kind if options.scope == "local" else shared)


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
    """Whether q, k and v are as wide as each other, so that they can keep the same channels."""
    return len({space.size for space in own}) == 1


def _by_head(own: Sequence[Space], scores: Scores) -> list[Tensor]:
    """Scores (heads, channels of a head): of q, k and v together where they are as wide, else of q/k and of v."""
    if _tied(own):
        return [budget.normalised(sum(scores[s.name] for s in own)).view(own[0].heads, -1)]  # type: ignore[arg-type]
    return [budget.normalised(scores[space.name]).view(space.heads, -1) for space in own]


def _dim_names(own: Sequence[Space]) -> list[str]:
    return [own[0].attention + ".head_dim"] if _tied(own) else [f"{space.name}.head_dim" for space in own]


# ---------------------------------------------------------------------------------------------------------------- sizes


def chosen(groups: Sequence[Group], options: Options, sizes: "Sizes") -> Counts:
    """How many channels each group keeps, by the shares as they are or scaled to the target."""
    share = {"residual": options.keep_ratio, "ffn": options.keep_ratio}
    share |= {"head": options.keep_heads, "head_dim": options.keep_head_dim}
    keep = {g.scope: options.keep_ratio if g.scope == "all" else share[g.kind] for g in groups}
    budget.check_units(groups, options.units)
    spend = sizes.measure(options.target)
    if options.amount is None or spend is None:
        return budget.fitted(groups, budget.thresholded(groups, keep), options.units)
    rounds = LATENCY_ROUNDS if options.target == "latency" else budget.ROUNDS
    target = Target(options.amount, spend, WORDS[options.target], rounds)
    return budget.solved(groups, keep, options.units, target)


class Sizes:
    """What numbers of kept channels come to: the plan, its cost when all is folded, its latency."""

    def __init__(
        self,
        model: nn.Module,
        spaces: Sequence[Space],
        groups: Sequence[Group],
        base: Plan,
        clock: Callable[[nn.Module], float] | None,
    ) -> None:
        self.spaces, self.groups, self.base, self.clock = spaces, {g.name: g for g in groups}, base, clock
        self.model = model
        self.shapes = deepcopy(model).to("meta")
        self.input_size = models.input_config(model).size

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
        dims = self.groups[name].best(counts[name])
        return tuple(head * width + dim for head in heads for dim in dims)

    def measure(self, target: str) -> Callable[[Counts], float] | None:
        """The function that says what counts cost in the unit of `target`; None where nothing is to be measured."""
        if target == "latency":
            return self.latency if self.clock is not None else None
        scale = {"macs": GIGA, "macs_linear": GIGA, "params": MILLION}.get(target)
        return None if scale is None else lambda counts: float(getattr(self.costs(counts), target)) / scale

    def costs(self, counts: Counts) -> cost.Cost:
        """Of the model as it will be deployed, counted on shapes alone."""
        return cost.measure(_deployed(self.shapes, self.base, self.delta(counts)), self.input_size)

    def latency(self, counts: Counts) -> float:
        """Milliseconds of the model as it will be deployed."""
        assert self.clock is not None
        return self.clock(_deployed(self.model, self.base, self.delta(counts)))


def _deployed(model: nn.Module, base: Plan, delta: Plan) -> nn.Module:
    sliced = surgery.applied(model, delta)
    surgery.fold(sliced, base)
    return sliced


def rescaled(model: nn.Module, spaces: Sequence[Space], delta: Plan) -> nn.Module:
    """A copy in which, once sliced by `delta`, the dense softmax scale does what that of the new head width would.

    d^-0.5 of a head of width d becomes d'^-0.5 when q k grows by (d / d')^0.5: each of q and k by the fourth root.
    """
    copy = deepcopy(model)
    for space in spaces:
        if space.kind != "qk" or space.name not in delta.kept:
            continue
        before = space.size // space.heads
        after = len(delta.kept[space.name]) // delta.heads.get(space.attention, space.heads)
        for axis in space.axes:
            if not axis.per_head:
                part = copy.get_parameter(axis.tensor).data.narrow(axis.dim, axis.offset, axis.copies * space.size)
                part.mul_((before / after) ** 0.25)
    return copy
