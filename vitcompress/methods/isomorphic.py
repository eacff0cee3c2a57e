"""Isomorphic pruning: rank channels only against channels of the same kind, and keep a share of every kind.

Fang et al., ECCV 2024, https://arxiv.org/abs/2407.04616. Four kinds compete among themselves: residual width, hidden
channels of all FFNs, channels within the heads of an attention, and heads. Scores (`methods.scores`) are divided by the
mean of their group, so the number of channels that a block keeps depends on how unequal its scores are, not on how
large they are. An attention keeps the same channels in all of its heads, and in q, k and v if they are equally wide.

Differs from the released code: the dense softmax scale is kept (`attention_scale`), every attention keeps a head,
widths are aligned for the runtimes and the shares can be scaled to reach a target (`round_to` and `target = "ratios"`
do as published), timm is not patched, and the result is a plan instead of a pickled model.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress.errors import PlanError
from vitcompress.families import Family, Space
from vitcompress.io.text import Columns, Table, format_count, format_range
from vitcompress.methods import base, budget
from vitcompress.methods.base import Context, Estimate, Method, StepInfo, StepReport
from vitcompress.methods.budget import Counts, Ranking, Target, scale_share
from vitcompress.methods.latency import LatencySearch, goal_of, most_candidates
from vitcompress.methods.options import IsomorphicOptions as Options
from vitcompress.methods.scores import UNMEASURED, Scores, compute_scores, random_scores
from vitcompress.methods.width import ALL, Candidates, groups_of
from vitcompress.plan import Plan

UNITS = {  # of a target: size and text
    "macs": (1e9, "G MACs"),
    "macs_linear": (1e9, "G MACs (without attention products)"),
    "params": (1e6, "M parameters"),
}
WIDTHS = "widths"
COSTS = {"requested": "amount", "reached": "reached", "least possible": "least", "most possible": "most"}


def _describe_target(data: Any) -> tuple[dict[str, str], list[str]]:
    """The costs of a counted target by heading, and a sentence if it was missed; nothing without such a target."""
    if (aim := data.get("target")) is None:
        return {}, []
    unit = UNITS[aim["kind"]][1]
    costs = {heading: f"{aim[name]:.4g} {unit}" for heading, name in COSTS.items()}
    if abs(off := aim["reached"] / aim["amount"] - 1) <= budget.CLOSE:
        return costs, []
    allowed = format_range(*(f"{aim[name]:.4g} {unit}" for name in ("least", "most")))
    return costs, [
        f"isomorphic pruning missed its target: {costs['requested']} was requested, the nearest widths have "
        f"{costs['reached']} ({100 * off:+.1f} %); this structure allows {allowed}, in finer steps with smaller "
        "multiples in align"
    ]


def plan(model: nn.Module, context: Context, options: Options) -> Plan:
    """Score all channels once and keep the share of every kind. Kept widths and costs go to `widths.json`."""
    spaces = context.family.spaces(model)
    _rank(spaces, random_scores(spaces, 0), options)  # rejects options before the scores are computed

    def choose() -> dict[str, object]:
        context.progress.stage(f"score channels by {options.criterion}")
        ranking = _rank(spaces, compute_scores(model, spaces, context, options.criterion, options.images), options)
        candidates = Candidates(model, spaces, ranking.groups, context.plan)
        goal = goal_of(options)
        search = LatencySearch(context, goal, model, most_candidates(ISOMORPHIC, options)) if goal else None
        counts, aim = _choose(ranking, candidates, options, search)
        rows = [
            {"name": g.name, "kind": g.kind, "kept": counts[g.name], "of": g.size, "scores": g.scores.tolist()}
            for g in ranking.groups
        ]
        cost, delta = candidates.cost(counts), candidates.delta(counts)
        if options.attention_scale == "reset":
            context.hand_over(reset_attention_scale(model, spaces, delta))
        return {"rows": rows, "cost": vars(cost), "plan": delta.to_json(), **({"target": aim} if aim else {})}

    data = context.memo(WIDTHS, choose)
    cost = data["cost"]
    context.progress.note(f"{format_count(cost['params'])} parameters, {format_count(cost['macs'])} MACs")
    for remark in _describe_target(data)[1]:
        context.progress.note(remark)
    return Plan.from_json(data["plan"])


def structure(model: nn.Module, family: Family, base: Plan, options: Options) -> Plan:
    """A plan of the same size without data: channels ranked at random. With `target = "latency"`, the shares as given.

    Raises PlanError for a target out of reach, an alignment larger than a width, or an option without effect.
    """
    spaces = family.spaces(model)
    ranking = _rank(spaces, random_scores(spaces, 0), options)  # the numbers of channels depend little on scores
    candidates = Candidates(model, spaces, ranking.groups, base)
    return candidates.delta(_choose(ranking, candidates, options)[0])


def resize(options: Options, model: nn.Module, family: Family, strength: float) -> Options:
    names = ("keep_ratio", "keep_heads", *(() if options.scope == "global" else ("keep_head_dim",)))
    shares: dict[str, Any] = {name: scale_share(getattr(options, name), strength) for name in names}
    return replace(options, **shares)


def _rank(spaces: Sequence[Space], scores: Scores, options: Options) -> Ranking:
    """The ranked channels and the share of each scope. Raises PlanError for options that do not fit these spaces."""
    rotary = all(space.whole_heads for space in spaces if space.kind == "qk")
    full = options.keep_head_dim == 1 and options.scope != "global"
    unused: dict[str, str | bool] = {
        "align": options.round_to is not None and "round_to replaces it",
        "images": options.criterion in UNMEASURED and f"criterion is {options.criterion!r}",
        "keep_head_dim": options.scope == "global" and "scope is 'global', which keeps keep_ratio of all channels",
        "attention_scale": (rotary or full) and "the heads of q and k keep their width",
    }
    base.reject_unused(options, unused)
    groups = groups_of(spaces, scores, options.scope)
    shares = {"head": options.keep_heads, "head_dim": options.keep_head_dim}
    keep = {g.scope: options.keep_ratio if g.scope == ALL else shares.get(g.kind, options.keep_ratio) for g in groups}
    multiples = {kind: options.round_to or number for kind, number in asdict(options.align).items()}
    return Ranking(groups, keep, multiples, down=options.round_to is not None)


def _choose(
    ranking: Ranking, candidates: Candidates, options: Options, search: LatencySearch | None = None
) -> tuple[Counts, dict[str, object]]:
    """How many channels each group keeps, and how a counted target was met. A latency needs the `search`."""
    if search is not None:
        counts, _ = budget.solve(ranking, search.target(candidates.delta))
        search.conclude(delta := candidates.delta(counts), delta)
        return counts, {}
    if options.amount is None or options.target == "latency":
        if (counts := ranking.counts()) == ranking.counts(0.0):
            message = "these shares and multiples remove no channel"
            raise PlanError(message, hint="set keep_ratio, keep_heads or keep_head_dim lower, or smaller multiples")
        return counts, {}
    size, unit = UNITS[options.target]
    target = Target[Counts](options.amount, lambda own: getattr(candidates.cost(own), options.target) / size, unit)
    counts, costs = budget.solve(ranking, target)
    return counts, {"kind": options.target, **costs}


def reset_attention_scale(model: nn.Module, spaces: Sequence[Space], delta: Plan) -> nn.Module:
    """A copy that, sliced by `delta`, computes with the dense softmax scale what it would with that of the new width.

    The scale of a head of width d is d^-0.5. To compute with d'^-0.5, q and k are each multiplied by (d / d')^0.25.
    """
    copy = deepcopy(model)
    for space in (space for space in spaces if space.kind == "qk" and space.name in delta.kept):
        before = space.size // space.heads
        after = len(delta.kept[space.name]) // delta.heads.get(space.attention, space.heads)
        for axis in space.axes:
            if not axis.per_head:
                part = copy.get_parameter(axis.tensor).data.narrow(axis.dim, axis.offset, axis.copies * space.size)
                part.mul_((before / after) ** 0.25)
    return copy


def estimate(model: nn.Module, family: Family, options: Options) -> list[Estimate]:
    if options.criterion in UNMEASURED:
        return []
    return [Estimate(f"{options.criterion} scores of all channels", 1, 1, images=options.images)]


def describe(options: Options) -> StepInfo:
    choice = base.Choice("chance") if options.criterion == "random" else base.MEASURED
    return StepInfo(choice, unscored=replace(options, criterion="random", images=Options.images))


def report(folder: Path) -> StepReport:
    """Kept widths, how the target was met, and the scores of each kind."""
    if (data := base.read_memo(folder, WIDTHS)) is None:
        return StepReport()
    rows, (costs, remarks) = data["rows"], _describe_target(data)
    kinds = {row["kind"]: row["kind"].replace("_", " ") for row in rows}
    columns: Columns = {"where": "{name}", "kind": lambda row: kinds[row["kind"]], "kept": "{kept}", "of": "{of}"}
    tables = [Table.of("Isomorphic pruning: widths", columns, rows)]
    if costs:
        tables.insert(0, Table("Isomorphic pruning: target", tuple(costs), (tuple(costs.values()),)))
    charts = []
    for kind, name in kinds.items():
        lines = [base.ranked(row["name"], row["scores"], row["kept"]) for row in rows if row["kind"] == kind]
        title = f"Isomorphic pruning: {name} scores, mean of each group 1"
        x = "share of the group's channels, best first"
        charts.append(base.Chart(title, x, "score", lines, by_depth=len(lines) > 1))
    return StepReport(tables, remarks, charts)


SUMMARY = "widths: residual, FFN, heads and their channels, each kind ranked among its own"
ISOMORPHIC = Method("isomorphic", SUMMARY, Options, plan, structure, estimate, describe, report, resize=resize)
