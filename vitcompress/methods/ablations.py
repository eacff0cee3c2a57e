"""Ablations of HetDPT, and baselines that measure nothing. Numbers are tables of the HetDPT paper.

te_static        the layers of both types with the lowest transfer entropy, each removed alone from the model (13)
hetdpt_no_step2  the split of step 1, then the first layers of the single-type removal orders (12)
hetdpt_no_step1  direct importance: step 2 alone, the lowest score of both types, without a budget per type (11)
random           random layers, or the first or last ones
fixed            layers named in the recipe
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge
from torch import nn

from vitcompress.errors import PlanError
from vitcompress.families import Family, Site
from vitcompress.io.validation import Doc
from vitcompress.methods import depth, transfer_entropy
from vitcompress.methods.base import (
    MEASURED_LAYERS,
    TRAINED,
    Choice,
    Context,
    Estimate,
    Method,
    StepInfo,
    reject_unused,
)
from vitcompress.methods.depth import KINDS, Bypass, DepthOptions, FixedOptions, Kind
from vitcompress.methods.hetdpt import collection, report, search
from vitcompress.methods.hetdpt import method as hetdpt
from vitcompress.methods.hetdpt.search import SearchOptions
from vitcompress.methods.transfer_entropy import EntropyOptions, Measurement
from vitcompress.plan import Plan
from vitcompress.training.distributed import derived_seed


@dataclass(frozen=True, kw_only=True)
class StaticOptions(DepthOptions):
    """Options of a ranking by transfer entropy, measured once."""

    te: EntropyOptions = field(default_factory=EntropyOptions)
    te_bypass: Annotated[Bypass | None, Doc("replacement while measuring; None: attention_bypass")] = None


@dataclass(frozen=True, kw_only=True)
class DirectOptions(DepthOptions):
    """Direct importance: the search of HetDPT's step 2 with all layers as candidates."""

    search: SearchOptions = field(default_factory=SearchOptions)


@dataclass(frozen=True, kw_only=True)
class RandomOptions(DepthOptions):
    """Options of a random or positional choice."""

    pick: Annotated[
        Literal["random", "first", "last"],
        Doc("`random` by the run's seed, or `first` or `last` in forward order (attention before activation)"),
    ] = "random"
    attention: Annotated[int | None, Ge(0), Doc("number of attentions among them; None: random")] = None


def te_static(model: nn.Module, context: Context, options: StaticOptions) -> Plan:
    structure(model, context.family, context.plan, options)
    context.progress.stage("transfer entropy of every layer")
    sites = depth.all_layers(model, context.family)

    def measure() -> dict[str, Any]:
        gated = depth.gate_layers(model, context, sites, options, options.te_bypass)
        return transfer_entropy.table(gated, sites, Measurement.of(context, options.te))

    ranked = sorted(context.memo("transfer_entropy", measure)["rows"], key=lambda row: row["score"])
    lowest = {row["site"] for row in ranked[: options.pruned_layers]}
    return depth.record_choice(model, context, _by_kind(site for site in sites if site.name in lowest), options)


def no_step2(model: nn.Module, context: Context, options: hetdpt.AllocationOptions) -> Plan:
    structure_no_step2(model, context.family, context.plan, options)
    records, split = hetdpt.allocate(model, context, options)
    orders = collection.removal_orders(records)
    chosen = {kind: orders[kind][:count] for kind, count in zip(KINDS, split, strict=True)}
    return depth.record_choice(model, context, chosen, options)


def no_step1(model: nn.Module, context: Context, options: DirectOptions) -> Plan:
    structure_no_step1(model, context.family, context.plan, options)
    context.progress.stage("direct importance: learnable scores without a budget per type")
    candidates = {site.name for site in depth.all_layers(model, context.family)}
    chosen = search.search(model, context, options, options.search, search.either(options.pruned_layers), candidates)
    return depth.record_choice(model, context, chosen, options)


def random(model: nn.Module, context: Context, options: RandomOptions) -> Plan:
    depth.spread_layers(model, context.family, options.pruned_layers)
    return depth.record_choice(model, context, _pick(model, context.family, options, context.seed), options)


def fixed(model: nn.Module, context: Context, options: FixedOptions) -> Plan:
    return depth.record_choice(model, context, _named(options), options)


def structure(model: nn.Module, family: Family, base: Plan, options: DepthOptions) -> Plan:
    """The same number of layers, by position. Raises PlanError if there are too few."""
    return depth.plan_layers(model, base, depth.spread_layers(model, family, options.pruned_layers), options)


def structure_no_step2(model: nn.Module, family: Family, base: Plan, options: hetdpt.AllocationOptions) -> Plan:
    hetdpt.check_allocation(model, family, options)
    return structure(model, family, base, options)


def structure_no_step1(model: nn.Module, family: Family, base: Plan, options: DirectOptions) -> Plan:
    search.check_options(options.search)
    return structure(model, family, base, options)


def structure_random(model: nn.Module, family: Family, base: Plan, options: RandomOptions) -> Plan:
    """Layers drawn as in `random`, with seed 0."""
    depth.spread_layers(model, family, options.pruned_layers)
    return depth.plan_layers(model, base, _pick(model, family, options, seed=0), options)


def structure_fixed(model: nn.Module, family: Family, base: Plan, options: FixedOptions) -> Plan:
    return depth.plan_layers(model, base, _named(options), options)


def estimate_te_static(model: nn.Module, family: Family, options: StaticOptions) -> list[Estimate]:
    layers = len(depth.all_layers(model, family))
    return [Estimate("transfer entropy", layers + 1, 1, images=options.te.images)]


def estimate_no_step1(model: nn.Module, family: Family, options: DirectOptions) -> list[Estimate]:
    return [search.estimate(options.pruned_layers, options.search)]


def _named(options: FixedOptions) -> dict[Kind, Sequence[int]]:
    lists: dict[Kind, Sequence[int]] = {"attention": options.attention, "activation": options.activation}
    if not any(lists.values()) or any(len(set(numbers)) != len(numbers) for numbers in lists.values()):
        raise PlanError(
            f"got attention = {list(options.attention)}, activation = {list(options.activation)}",
            hint="name at least one block, each once per list",
        )
    dependent = {"attention": "attention_bypass", "activation": "gated_ffn"}
    reject_unused(options, {dependent[kind]: f"{kind} is empty" for kind, numbers in lists.items() if not numbers})
    return lists


def _pick(model: nn.Module, family: Family, options: RandomOptions, seed: int) -> dict[Kind, list[int]]:
    """Keeps one layer of each type. The result is the same on every process."""
    sites = depth.in_forward_order(depth.all_layers(model, family))
    if options.pick == "last":
        sites.reverse()
    if options.pick == "random":
        order = np.random.default_rng(derived_seed("random layers", seed)).permutation(len(sites))
        sites = [sites[i] for i in order]
    left = _limits(depth.layers(model, family), options)
    chosen: list[Site] = []
    for site in sites:
        kind = depth.kind_of(site)
        if len(chosen) < options.pruned_layers and left[kind]:
            left[kind] -= 1
            chosen.append(site)
    return _by_kind(chosen)


def _limits(layers: Mapping[Kind, Sequence[Site]], options: RandomOptions) -> dict[Kind, int]:
    """The largest number of layers of each type."""
    most: dict[Kind, int] = {kind: max(0, len(layers[kind]) - 1) for kind in KINDS}
    if options.attention is None:
        return most
    counts: dict[Kind, int] = {"attention": options.attention, "activation": options.pruned_layers - options.attention}
    if any(not 0 <= counts[kind] <= most[kind] for kind in KINDS):
        raise PlanError(
            f"attention is {options.attention} of pruned_layers {options.pruned_layers}, but at most "
            f"{most['attention']} attentions and {most['activation']} activations can be removed",
            hint="change attention or pruned_layers",
        )
    return counts


def _by_kind(sites: Iterable[Site]) -> dict[Kind, list[int]]:
    """The blocks of `sites` by kind, in forward order."""
    chosen = sorted((site.index, site.kind) for site in sites)
    return {kind: [index for index, own in chosen if own == kind] for kind in KINDS}


TE_STATIC = Method(
    "te_static",
    "attentions and activations with the lowest transfer entropy, measured once",
    options=StaticOptions,
    plan=te_static,
    structure=structure,
    estimate=estimate_te_static,
    describe=lambda options: StepInfo(MEASURED_LAYERS),
    report=report.report,
)

HETDPT_NO_STEP2 = Method(
    "hetdpt_no_step2",
    "HetDPT's split of the budget, layers in the order that collection removed them",
    options=hetdpt.AllocationOptions,
    plan=no_step2,
    structure=structure_no_step2,
    estimate=hetdpt.estimate_allocation,
    describe=lambda options: StepInfo(TRAINED, uses_heldout=True),
    report=report.report,
)

HETDPT_NO_STEP1 = Method(
    "hetdpt_no_step1",
    "learnable importance of both types pooled, without a split of the budget",
    options=DirectOptions,
    plan=no_step1,
    structure=structure_no_step1,
    estimate=estimate_no_step1,
    describe=lambda options: StepInfo(TRAINED),
    report=report.report,
)

RANDOM = Method(
    "random",
    "random layers, or the first or last ones",
    options=RandomOptions,
    plan=random,
    structure=structure_random,
    describe=lambda options: StepInfo(Choice("chance" if options.pick == "random" else f"the {options.pick} ones")),
)

FIXED = Method(
    "fixed",
    "the layers that the recipe names",
    options=FixedOptions,
    plan=fixed,
    structure=structure_fixed,
    describe=lambda options: StepInfo(Choice("the recipe")),
)
