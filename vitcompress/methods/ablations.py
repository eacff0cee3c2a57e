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
    StepInfo,
    reject_unused,
)
from vitcompress.methods.depth import KINDS, Bypass, DepthOptions, FixedOptions, Kind
from vitcompress.methods.hetdpt import collection, search
from vitcompress.methods.hetdpt import method as hetdpt
from vitcompress.methods.hetdpt.search import SearchOptions
from vitcompress.methods.transfer_entropy import EntropyOptions
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


Layers = Mapping[Kind, Sequence[int]]


def te_static(model: nn.Module, context: Context, options: StaticOptions) -> Layers:
    context.progress.stage("transfer entropy of every layer")
    sites = depth.all_layers(model, context.family)

    def measure() -> dict[str, Any]:
        gated = depth.gate_layers(model, context, sites, options, options.te_bypass)
        return transfer_entropy.measure(gated, sites, context, options.te)

    ranked = sorted(context.memo("transfer_entropy", measure)["rows"], key=lambda row: row["score"])
    lowest = {row["site"] for row in ranked[: options.pruned_layers]}
    return _by_kind(site for site in sites if site.name in lowest)


def no_step2(model: nn.Module, context: Context, options: hetdpt.AllocationOptions) -> Layers:
    records, split = hetdpt.allocate(model, context, options)
    orders = collection.removal_orders(records)
    return {kind: orders[kind][:count] for kind, count in zip(KINDS, split, strict=True)}


def no_step1(model: nn.Module, context: Context, options: DirectOptions) -> Layers:
    context.progress.stage("direct importance: learnable scores without a budget per type")
    candidates = {site.name for site in depth.all_layers(model, context.family)}
    return search.search(model, context, options, options.search, search.either(options.pruned_layers), candidates)


def unscored(model: nn.Module, family: Family, options: DepthOptions) -> Layers:
    """As many layers by position. Raises PlanError if there are too few."""
    return depth.spread_layers(model, family, options.pruned_layers)


def unscored_no_step2(model: nn.Module, family: Family, options: hetdpt.AllocationOptions) -> Layers:
    hetdpt.check_allocation(model, family, options)
    return unscored(model, family, options)


def unscored_no_step1(model: nn.Module, family: Family, options: DirectOptions) -> Layers:
    search.check_options(options.search)
    return unscored(model, family, options)


def estimate_te_static(model: nn.Module, family: Family, options: StaticOptions) -> list[Estimate]:
    layers = len(depth.all_layers(model, family))
    return [Estimate("transfer entropy", layers + 1, 1, images=options.te.images)]


def estimate_no_step1(model: nn.Module, family: Family, options: DirectOptions) -> list[Estimate]:
    return [search.estimate(options.pruned_layers, options.search)]


def named(options: FixedOptions) -> Layers:
    """The layers in the options. Raises PlanError if there are none, or one twice."""
    lists: dict[Kind, Sequence[int]] = {"attention": options.attention, "activation": options.activation}
    if not any(lists.values()) or any(len(set(numbers)) != len(numbers) for numbers in lists.values()):
        raise PlanError(
            f"got attention = {list(options.attention)}, activation = {list(options.activation)}",
            hint="name at least one block, each once per list",
        )
    dependent = {"attention": "attention_bypass", "activation": "gated_ffn"}
    reject_unused(options, {dependent[kind]: f"{kind} is empty" for kind, numbers in lists.items() if not numbers})
    return lists


def pick(model: nn.Module, family: Family, options: RandomOptions, seed: int = 0) -> Layers:
    """Keeps one layer of each type. The result is the same on every process. Raises PlanError if there are too few."""
    depth.spread_layers(model, family, options.pruned_layers)
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


TE_STATIC = depth.depth_method(
    "te_static",
    "attentions and activations with the lowest transfer entropy, measured once",
    StaticOptions,
    te_static,
    unscored,
    estimate=estimate_te_static,
    describe=lambda options: StepInfo(MEASURED_LAYERS),
)

HETDPT_NO_STEP2 = depth.depth_method(
    "hetdpt_no_step2",
    "HetDPT's split of the budget, layers in the order that collection removed them",
    hetdpt.AllocationOptions,
    no_step2,
    unscored_no_step2,
    estimate=hetdpt.estimate_allocation,
    describe=lambda options: StepInfo(TRAINED, uses_heldout=True),
)

HETDPT_NO_STEP1 = depth.depth_method(
    "hetdpt_no_step1",
    "learnable importance of both types pooled, without a split of the budget",
    DirectOptions,
    no_step1,
    unscored_no_step1,
    estimate=estimate_no_step1,
    describe=lambda options: StepInfo(TRAINED),
)

RANDOM = depth.depth_method(
    "random",
    "random layers, or the first or last ones",
    RandomOptions,
    lambda model, context, options: pick(model, context.family, options, context.seed),
    pick,
    describe=lambda options: StepInfo(Choice("chance" if options.pick == "random" else f"the {options.pick} ones")),
)

FIXED = depth.depth_method(
    "fixed",
    "the layers that the recipe names",
    FixedOptions,
    lambda model, context, options: named(options),
    lambda model, family, options: named(options),
    describe=lambda options: StepInfo(Choice("the recipe")),
)
