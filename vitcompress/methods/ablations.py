"""Ablations of HetDPT, and baselines that measure nothing.

In the HetDPT paper, te_static is table 13, hetdpt_no_step2 table 12, and hetdpt_no_step1 (direct importance) table 11.
"""

from dataclasses import replace
from functools import partial

import numpy as np
from torch import nn

from vitcompress.errors import PlanError
from vitcompress.families import GATED, Family, Site, SiteKind
from vitcompress.methods import depth, transfer_entropy
from vitcompress.methods.base import TRAINED, Choice, Context, Estimate, StepInfo, reject_unused
from vitcompress.methods.hetdpt import collection, search
from vitcompress.methods.hetdpt import method as hetdpt
from vitcompress.methods.options import AllocationOptions, DirectOptions, FixedOptions, RandomOptions, StaticOptions
from vitcompress.training.distributed import derived_seed


def te_static(model: nn.Module, context: Context, options: StaticOptions) -> depth.Blocks:
    context.progress.stage("transfer entropy of every layer")
    sites = depth.all_layers(model, context.family)
    measured = replace(options, attention_bypass=options.te_bypass or options.attention_bypass)
    gated = partial(depth.gate_layers, model, context, sites, measured)
    table = context.memo("transfer_entropy", lambda: transfer_entropy.measure(gated(), sites, context, options.te))
    lowest = {row["site"] for row in sorted(table["rows"], key=lambda row: row["score"])[: options.pruned_layers]}
    return depth.blocks_of(site for site in sites if site.name in lowest)


def no_step2(model: nn.Module, context: Context, options: AllocationOptions) -> depth.Blocks:
    records, split = hetdpt.allocate(model, context, options)
    orders = collection.removal_orders(records)
    return {kind: orders[kind][:count] for kind, count in zip(GATED, split, strict=True)}


def no_step1(model: nn.Module, context: Context, options: DirectOptions) -> depth.Blocks:
    context.progress.stage("direct importance: learnable scores without a budget per type")
    candidates = {site.name for site in depth.all_layers(model, context.family)}
    return search.search(model, context, options, [frozenset(GATED)] * options.pruned_layers, candidates)


def named(options: FixedOptions) -> depth.Blocks:
    """The layers in the options. Raises PlanError if there are none, or one twice."""
    lists: dict[SiteKind, tuple[int, ...]] = {"attention": options.attention, "activation": options.activation}
    if not any(lists.values()) or any(len(set(numbers)) != len(numbers) for numbers in lists.values()):
        message = f"got attention = {list(options.attention)}, activation = {list(options.activation)}"
        raise PlanError(message, hint="name at least one block, each once per list")
    dependent = {"attention": "attention_bypass", "activation": "gated_ffn"}
    reject_unused(options, {dependent[kind]: f"{kind} is empty" for kind, numbers in lists.items() if not numbers})
    return lists


def pick(model: nn.Module, family: Family, options: RandomOptions, seed: int = 0) -> depth.Blocks:
    """Layers in the order of `options.pick`, the same on every process. The last one of each type stays.

    Raises PlanError if there are too few.
    """
    depth.spread_layers(model, family, options)
    sites = [site for site in family.sites(model) if site.kind in GATED]
    if options.pick == "last":
        sites.reverse()
    if options.pick == "random":
        sites = [sites[i] for i in np.random.default_rng(derived_seed("random layers", seed)).permutation(len(sites))]
    left = most = {kind: max(0, len(own) - 1) for kind, own in depth.layers(model, family).items()}
    if options.attention is not None:
        left = dict(zip(GATED, (options.attention, options.pruned_layers - options.attention), strict=True))
        if any(not 0 <= left[kind] <= most[kind] for kind in GATED):
            requested = f"attention is {options.attention} of pruned_layers {options.pruned_layers}"
            removable = f"{most['attention']} attentions and {most['activation']} activations can be removed"
            raise PlanError(f"{requested}, but at most {removable}", hint="change attention or pruned_layers")
    chosen = list[Site]()
    for kind, count in left.items():
        chosen += [site for site in sites if site.kind == kind][:count]
    return depth.blocks_of(sorted(chosen, key=sites.index)[: options.pruned_layers])


TE_STATIC = depth.depth_method(
    "te_static",
    "attentions and activations with the lowest transfer entropy, measured once",
    te_static,
    estimate=lambda model, family, options: [
        Estimate("transfer entropy", len(depth.all_layers(model, family)) + 1, 1, images=options.te.images)
    ],
)

HETDPT_NO_STEP2 = depth.depth_method(
    "hetdpt_no_step2",
    "HetDPT's split of the budget, layers in the order that collection removed them",
    no_step2,
    hetdpt.spread_steps,
    estimate=collection.estimate,
    describe=lambda options: StepInfo(TRAINED, uses_heldout=True),
)

HETDPT_NO_STEP1 = depth.depth_method(
    "hetdpt_no_step1",
    "learnable importance of both types pooled, without a split of the budget",
    no_step1,
    hetdpt.spread_steps,
    estimate=lambda model, family, options: [search.estimate(options)],
    describe=lambda options: StepInfo(TRAINED),
)

RANDOM = depth.depth_method(
    "random",
    "random layers, or the first or last ones",
    lambda model, context, options: pick(model, context.family, options, context.seed),
    pick,
    describe=lambda options: StepInfo(Choice("chance" if options.pick == "random" else f"the {options.pick} ones")),
)

FIXED = depth.depth_method(
    "fixed",
    "the layers that the recipe names",
    lambda model, context, options: named(options),
    lambda model, family, options: named(options),
    describe=lambda options: StepInfo(Choice("the recipe")),
)
