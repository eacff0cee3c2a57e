"""Isomorphic pruning: rank channels only against channels of the same kind, and cut every kind to a share.

Fang et al., ECCV 2024, https://arxiv.org/abs/2407.04616. Four kinds of structure compete among themselves: residual
width, hidden channels of all FFNs, channels that the heads of an attention share, and heads. Scores come from
`channel_scores` and are divided by their group's mean; so how many channels a block keeps depends on how unequal its
scores are, not on how large. An attention keeps the same channels in all of its heads and in q, k and v.

Differs from the released code: the dense softmax scale is kept (`attention_scale`), every attention keeps a head,
widths are aligned for the runtimes and the shares can be solved for a target (`round_to` and `target = "ratios"` do as
published), timm is not patched, and the result is a plan instead of a pickled model.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from torch import nn

from vitcompress.errors import PlanError
from vitcompress.families import Family, Space
from vitcompress.io.files import read_json
from vitcompress.io.text import format_range
from vitcompress.io.validation import Doc
from vitcompress.methods import budget, latency
from vitcompress.methods.base import (
    MEASURED,
    Chart,
    Choice,
    Clock,
    Context,
    Estimate,
    LatencyTarget,
    Method,
    StepInfo,
    StepReport,
    ranked,
    reject_unused,
)
from vitcompress.methods.budget import Counts, Group, Solution, Target, Units
from vitcompress.methods.scores import UNMEASURED, Criterion, random_scores, scored
from vitcompress.methods.width import ALL, GIGA, MILLION, CandidateClock, Scope, Sizes, groups_of
from vitcompress.plan import Plan

Share = Annotated[float, Gt(0), Le(1)]
Multiple = Annotated[int, Ge(1)]
WORDS = {
    "macs": "{:.4g} G MACs",
    "macs_linear": "{:.4g} G MACs (without attention products)",
    "params": "{:.4g} M parameters",
    "latency": "{:.4g} ms",
}
LATENCY_ROUNDS = 5  # each candidate is exported and measured
MISSED = 0.05  # share by which measurements of a latency scatter; targets that are counted are met to `budget.CLOSE`


@dataclass(frozen=True)
class Alignment:
    """Kept widths are multiples of these. 64 fills the tiles of tensor cores; a head's width in steps of 16 keeps fused
    attention kernels (TensorRT fuses multiples of 8).
    """

    residual: Annotated[Multiple, Doc("of the residual width")] = 64
    ffn: Annotated[Multiple, Doc("of an FFN's channels")] = 64
    head_dim: Annotated[Multiple, Doc("of a head's channels")] = 16


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of isomorphic pruning."""

    keep_ratio: Annotated[Share, Doc("share of residual width and FFN channels kept")] = 0.5
    keep_heads: Annotated[Share, Doc("share of heads kept")] = 0.5
    keep_head_dim: Annotated[Share, Doc("share of a head's channels kept")] = 0.75
    target: Annotated[
        Literal["ratios", "macs", "macs_linear", "params", "latency"],
        Doc(
            "`ratios`: the shares as they are; others scale them to reach `amount`; macs_linear: without "
            "attention products"
        ),
    ] = "ratios"
    amount: Annotated[float | None, Gt(0), Doc("G MACs, M parameters or ms on `latency_on`, as `target` says")] = None
    latency_on: Annotated[Literal["onnxruntime", "torch"], Doc("runtime that a latency is measured in")] = "onnxruntime"
    align: Annotated[Alignment, Doc("multiples that widths are kept at")] = field(default_factory=Alignment)
    round_to: Annotated[Multiple | None, Doc("one multiple for all widths, rounded down as published")] = None
    scope: Annotated[
        Scope,
        Doc("what is ranked together: one kind, everything but heads (`global`), or one layer (`local`: equal blocks)"),
    ] = "isomorphic"
    criterion: Annotated[Criterion, Doc("score of a channel")] = "taylor"
    images: Annotated[int, Ge(1), Doc("number of images over which the gradients are summed")] = 3200
    attention_scale: Annotated[
        Literal["keep", "reset"], Doc("`reset` uses the softmax scale of the new head width, as the released code")
    ] = "keep"

    @property
    def units(self) -> Units:
        if self.round_to is not None:
            return Units(self.round_to, self.round_to, self.round_to, down=True)
        return Units(**asdict(self.align))


def plan(model: nn.Module, context: Context, options: Options) -> Plan:
    """Score all channels once, cut every kind to its share. Kept widths and costs go to `widths.json`."""
    spaces = context.family.spaces(model)
    _check(options, spaces)
    budget.check_units(groups_of(spaces, random_scores(spaces, 0), options.scope), options.units)

    def choose() -> dict[str, Any]:
        context.progress.stage(f"score channels by {options.criterion}")
        scores = scored(model, spaces, context, options.criterion, options.images)
        groups = groups_of(spaces, scores, options.scope)
        sizes = Sizes(model, spaces, groups, context.plan, _clock(context, options))
        with latency.unless_refused(context, options.latency_on):
            counts, met = chosen(groups, options, sizes)
        rows = [
            {"name": g.name, "kind": g.kind, "kept": counts[g.name], "of": g.size, "scores": g.scores.tolist()}
            for g in groups
        ]
        found = {"rows": rows, "cost": sizes.costs(counts).to_dict(), "plan": sizes.delta(counts).to_json()}
        return found if met is None else found | {"target": _reached(options, met)}

    found = context.memo("widths", choose)
    for line in (_sentence(found), *_missed(found)):
        context.progress.note(line)
    delta = Plan.from_json(found["plan"])
    if options.attention_scale == "reset":
        context.hand_over(rescaled(model, spaces, delta))
    return delta


def structure(model: nn.Module, family: Family, base: Plan, options: Options) -> Plan:
    """A plan of the same size without data: channels ranked at random. With `target = "latency"`, the shares as given.

    Raises:
        PlanError: a target out of reach, or an alignment larger than a width.
    """
    groups, sizes = _unscored(model, family, base, options, None)
    return sizes.delta(chosen(groups, options, sizes)[0])


def check_reach(model: nn.Module, family: Family, base: Plan, options: Options, clock: Clock) -> None:
    """Measure the largest and the smallest model. Raises PlanError when the latency asked for is not in between."""
    groups, sizes = _unscored(model, family, base, options, clock)
    if (target := _target(options, sizes)) is not None:
        budget.check_reach(groups, _shares(groups, options), options.units, target)


def _unscored(
    model: nn.Module, family: Family, base: Plan, options: Options, clock: Clock | None
) -> tuple[tuple[Group, ...], Sizes]:
    """Groups ranked at random, which all have the sizes that scores would give."""
    spaces = family.spaces(model)
    _check(options, spaces)
    groups = groups_of(spaces, random_scores(spaces, 0), options.scope)
    timed = None if clock is None else latency.once(clock, options.latency_on)
    return groups, Sizes(model, spaces, groups, base, timed)


def estimate(model: nn.Module, family: Family, options: Options) -> list[Estimate]:
    """One pass over the images, if scores need one."""
    if options.criterion in UNMEASURED:
        return []
    return [Estimate(f"{options.criterion} scores of all channels", 1, 1, images=options.images)]


def describe(options: Options) -> StepInfo:
    choice = Choice("chance") if options.criterion == "random" else MEASURED
    if options.target != "latency":
        return StepInfo(choice)
    unscored = replace(options, criterion="random")
    check = lambda model, family, base, clock: check_reach(model, family, base, options, clock)  # noqa: E731
    return StepInfo(choice, latency=LatencyTarget(options.amount or 0.0, options.latency_on, unscored, check))


def report(folder: Path) -> StepReport:
    return StepReport(tables(folder), remarks(folder), charts(folder))


def tables(folder: Path) -> list[dict[str, Any]]:
    """What is left of every width, and of the target."""
    path = folder / "widths.json"
    if not path.is_file():
        return []
    found = read_json(path)
    rows = [[r["name"], r["kind"].replace("_", " "), str(r["kept"]), str(r["of"])] for r in found["rows"]]
    widths = {"title": "Isomorphic pruning: widths", "columns": ["where", "kind", "kept", "of"], "rows": rows}
    if (aim := found.get("target")) is None:
        return [widths]
    columns = ["asked for", "reached", "least possible", "most possible"]
    rows = [[_said(aim, aim[key]) for key in ("amount", "reached", "least", "most")]]
    return [{"title": "Isomorphic pruning: target", "columns": columns, "rows": rows}, widths]


def remarks(folder: Path) -> list[str]:
    """That the target was missed, if it was."""
    path = folder / "widths.json"
    return _missed(read_json(path)) if path.is_file() else []


def charts(folder: Path) -> list[Chart]:
    """Scores of each kind, one curve per group: what of it went."""
    path = folder / "widths.json"
    rows = read_json(path)["rows"] if path.is_file() else []
    found = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        lines = []
        for row in (row for row in rows if row["kind"] == kind):
            best = sorted(range(row["of"]), key=lambda channel: -row["scores"][channel])
            lines.append(ranked(row["name"], row["scores"], best[: row["kept"]]))
        title = f"Isomorphic pruning: {kind.replace('_', ' ')} scores, mean of each group 1"
        found.append(Chart(title, "share of the group's channels, best first", "score", lines, by_depth=len(lines) > 1))
    return found


def _check(options: Options, spaces: Sequence[Space]) -> None:
    """Raise PlanError for options that are incomplete or have no effect on a model of these spaces."""
    rotary = all(space.whole_heads for space in spaces if space.kind == "qk")
    unused = {
        "amount": options.target == "ratios" and "target is 'ratios'",
        "latency_on": options.target != "latency" and f"target is {options.target!r}",
        "align": options.round_to is not None and "round_to replaces it",
        "images": options.criterion in UNMEASURED and f"criterion is {options.criterion!r}",
        "keep_head_dim": options.scope == "global" and "scope is 'global', which keeps keep_ratio of all channels",
        "attention_scale": rotary and "heads of q and k keep their width in this model",
    }
    if options.keep_head_dim == 1 and options.scope != "global":
        unused["attention_scale"] = "keep_head_dim is 1"
    reject_unused(options, unused)
    if options.amount is None and options.target != "ratios":
        raise PlanError(
            f"target is {options.target!r}, but there is no amount of it",
            hint="give amount in G MACs, M parameters or ms, or set target = 'ratios'",
        )
    if options.keep_ratio == options.keep_heads == options.keep_head_dim == 1:
        raise PlanError(
            "all shares are 1, so nothing would go", hint="set keep_ratio, keep_heads or keep_head_dim below 1"
        )


def _clock(context: Context, options: Options) -> CandidateClock | None:
    """Measures the latency of a model on the runtime asked for; None where no latency is aimed at."""
    if options.target != "latency":
        return None
    if context.latency is None:
        raise PlanError("nothing here can measure a latency", hint="set target to macs or params")
    return latency.kept(context, context.latency, options.latency_on)


def _sentence(found: Mapping[str, Any]) -> str:
    spent, aim = found["cost"], found.get("target", {})
    text = f"{spent['params'] / MILLION:.2f} M parameters, {spent['macs'] / GIGA:.3f} G MACs"
    return text + (f", {_said(aim, aim['reached'])}" if aim.get("kind") == "latency" else "")


def _reached(options: Options, met: Solution) -> dict[str, Any]:
    """How the target was met, as plain data."""
    on = options.latency_on if options.target == "latency" else None
    known = {"kind": options.target, "on": on, "amount": options.amount, "reached": met.cost}
    return known | {"least": met.least, "most": met.most}


def _said(aim: Mapping[str, Any], value: float) -> str:
    return WORDS[aim["kind"]].format(value) + (f" on {aim['on']}" if aim["on"] else "")


def _missed(found: Mapping[str, Any]) -> list[str]:
    """By how much the target was missed, as a sentence; None where it counts as met."""
    aim = found.get("target")
    if aim is None or abs(off := aim["reached"] / aim["amount"] - 1) <= (MISSED if aim["on"] else budget.CLOSE):
        return []
    allowed = format_range(*(WORDS[aim["kind"]].format(aim[key]) for key in ("least", "most")))
    return [
        f"isomorphic pruning missed its target: {_said(aim, aim['amount'])} was asked for, the nearest widths found "
        f"come to {_said(aim, aim['reached'])} ({100 * off:+.1f} %); this structure allows {allowed}, in finer "
        "steps with smaller multiples in align"
    ]


def _shares(groups: Sequence[Group], options: Options) -> dict[str, float]:
    """Scope -> share of its channels that is kept."""
    share = {"residual": options.keep_ratio, "ffn": options.keep_ratio}
    share |= {"head": options.keep_heads, "head_dim": options.keep_head_dim}
    return {g.scope: options.keep_ratio if g.scope == ALL else share[g.kind] for g in groups}


def _target(options: Options, sizes: Sizes) -> Target | None:
    """What is solved for; None with shares as they are, or for a latency without a clock."""
    spend = sizes.measure(options.target)
    if options.amount is None or spend is None:
        return None
    if options.target == "latency" and sizes.clock is not None:
        surely, on = partial(sizes.latency, sizes.clock.undisturbed), options.latency_on
        return Target(options.amount, spend, WORDS["latency"], LATENCY_ROUNDS, budget.CLOSE, on, surely)
    return Target(options.amount, spend, WORDS[options.target])


def chosen(groups: Sequence[Group], options: Options, sizes: Sizes) -> tuple[Counts, Solution | None]:
    """How many channels each group keeps, by the shares as they are or scaled to the target, and how that was met."""
    keep = _shares(groups, options)
    if (target := _target(options, sizes)) is not None:
        met = budget.solved(groups, keep, options.units, target)
        return met.counts, met
    budget.check_units(groups, options.units)
    return budget.fitted(groups, budget.thresholded(groups, keep), options.units), None


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


ISOMORPHIC = Method(
    "isomorphic",
    "widths: residual, FFN, heads and their channels, each kind ranked among its own",
    options=Options,
    plan=plan,
    structure=structure,
    estimate=estimate,
    describe=describe,
    report=report,
)
