"""What HetDPT is compared with: parts of it left out, and choices that measure nothing. All share the same recovery.

te_static        transfer entropy of each layer alone on the dense model, both types pooled, the lowest go (Table 13)
hetdpt_no_step2  the split of step 1, then the first layers of the single-type removal orders (Table 12)
hetdpt_no_step1  direct importance: the search alone, lowest score of both types pooled, no budget per type (Table 11)
random           layers drawn by the seed, or the first or last ones
fixed            layers that are given
Tables of the HetDPT paper.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge
from torch import nn

from vitcompress.errors import PlanError
from vitcompress.families import Family, Site
from vitcompress.io.validation import Doc
from vitcompress.methods import depth, transfer_entropy
from vitcompress.methods.base import MEASURED_LAYERS, TRAINED, Choice, Context, Estimate, Method, StepInfo
from vitcompress.methods.depth import KINDS, Bypass, DepthOptions, GatedFfn, Kind, OutputAct
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


@dataclass(frozen=True, kw_only=True)
class FixedOptions:
    """Layers chosen by the user."""

    attention: Annotated[hetdpt.Indices, Doc("blocks that lose their attention")] = ()
    activation: Annotated[hetdpt.Indices, Doc("blocks that lose their activation")] = ()
    attention_bypass: Bypass = "drop"
    both_pruned_output_act: OutputAct = "none"
    gated_ffn: GatedFfn = "mean_gate"

    @property
    def budget(self) -> DepthOptions:
        return DepthOptions(
            pruned_layers=max(1, len(self.attention) + len(self.activation)),
            attention_bypass=self.attention_bypass,
            both_pruned_output_act=self.both_pruned_output_act,
            gated_ffn=self.gated_ffn,
        )


def te_static(model: nn.Module, context: Context, options: StaticOptions) -> Plan:
    """The layers with the lowest transfer entropy, measured once, each skipped alone, nothing trained."""
    structure(model, context.family, context.plan, options)
    context.progress.stage("transfer entropy of every layer")
    sites = depth.all_layers(model, context.family)

    def measure() -> dict[str, Any]:
        open_model = depth.gated(model, context, sites, options, options.te_bypass)
        on = Measurement.of(context, options.te)
        return transfer_entropy.table(open_model, sites, on)

    ranked = sorted(context.memo("transfer_entropy", measure)["rows"], key=lambda row: row["score"])
    lowest = {row["site"] for row in ranked[: options.pruned_layers]}
    return depth.decided(model, context, _by_kind(sites, lowest), options)


def no_step2(model: nn.Module, context: Context, options: hetdpt.AllocationOptions) -> Plan:
    """Step 1 alone: its split, and as many layers from the front of its removal orders."""
    structure_no_step2(model, context.family, context.plan, options)
    records, split = hetdpt.allocate(model, context, options)
    orders = collection.removal_orders(records)
    chosen = {kind: orders[kind][:count] for kind, count in zip(KINDS, split, strict=True)}
    return depth.decided(model, context, chosen, options)


def no_step1(model: nn.Module, context: Context, options: DirectOptions) -> Plan:
    """Step 2 alone: at each removal the lowest score of both types goes, from all layers."""
    structure(model, context.family, context.plan, options)
    context.progress.stage("direct importance: learnable scores without a budget per type")
    candidates = {site.name for site in depth.all_layers(model, context.family)}
    chosen = search.search(model, context, options, options.search, search.either(options.pruned_layers), candidates)
    return depth.decided(model, context, chosen, options)


def random(model: nn.Module, context: Context, options: RandomOptions) -> Plan:
    """Layers that no measurement chose."""
    structure_random(model, context.family, context.plan, options)
    return depth.decided(model, context, _picked(model, context.family, options, context.seed), options)


def fixed(model: nn.Module, context: Context, options: FixedOptions) -> Plan:
    """The layers that the options name."""
    return depth.decided(model, context, _given(options), options.budget)


def structure(model: nn.Module, family: Family, base: Plan, options: DepthOptions) -> Plan:
    """As many layers, picked by position. Raises PlanError when there are too few."""
    return depth.delta(model, base, depth.any_layers(model, family, options.pruned_layers), options)


def structure_no_step2(model: nn.Module, family: Family, base: Plan, options: hetdpt.AllocationOptions) -> Plan:
    """As many layers, picked by position. Raises PlanError when the budget has no split or too few rounds are
    collected.
    """
    hetdpt.check_allocation(model, family, options)
    return structure(model, family, base, options)


def structure_random(model: nn.Module, family: Family, base: Plan, options: RandomOptions) -> Plan:
    """Layers drawn as `random` draws them, by seed 0. Raises PlanError when there are too few."""
    depth.any_layers(model, family, options.pruned_layers)
    return depth.delta(model, base, _picked(model, family, options, seed=0), options)


def structure_fixed(model: nn.Module, family: Family, base: Plan, options: FixedOptions) -> Plan:
    """The plan itself. Raises PlanError for block numbers that the model does not have."""
    return depth.delta(model, base, _given(options), options.budget)


def describe_random(options: RandomOptions) -> StepInfo:
    return StepInfo(Choice("chance" if options.pick == "random" else f"the {options.pick} ones"))


def estimate_te_static(model: nn.Module, family: Family, options: StaticOptions) -> list[Estimate]:
    layers = len(depth.all_layers(model, family))
    return [Estimate("transfer entropy", layers + 1, 1, images=options.te.images)]


def estimate_no_step1(model: nn.Module, family: Family, options: DirectOptions) -> list[Estimate]:
    epochs = search.removal_epochs(options.pruned_layers, options.search.factor)[-1]
    return [Estimate("importance search", 1, epochs, options.search.images_per_class)]


def _given(options: FixedOptions) -> dict[Kind, Sequence[int]]:
    lists: dict[Kind, Sequence[int]] = {"attention": options.attention, "activation": options.activation}
    if not any(lists.values()) or any(len(set(numbers)) != len(numbers) for numbers in lists.values()):
        raise PlanError(
            f"got attention = {list(options.attention)}, activation = {list(options.activation)}",
            hint="name at least one block, each once per list",
        )
    return lists


def _picked(model: nn.Module, family: Family, options: RandomOptions, seed: int) -> dict[Kind, list[int]]:
    """One layer of each type stays; the draw is the same on every process."""
    sites = depth.in_forward_order(depth.all_layers(model, family))
    if options.pick == "last":
        sites.reverse()
    if options.pick == "random":
        order = np.random.default_rng(derived_seed("random layers", seed)).permutation(len(sites))
        sites = [sites[i] for i in order]
    room = _room(depth.layers(model, family), options)
    chosen: list[Site] = []
    for site in sites:
        kind = depth.kind_of(site)
        if len(chosen) < options.pruned_layers and room[kind]:
            room[kind] -= 1
            chosen.append(site)
    return _by_kind(chosen, {site.name for site in chosen})


def _room(found: Mapping[Kind, Sequence[Site]], options: RandomOptions) -> dict[Kind, int]:
    """How many layers of each type the draw may take."""
    most: dict[Kind, int] = {kind: max(0, len(found[kind]) - 1) for kind in KINDS}
    if options.attention is None:
        return most
    room: dict[Kind, int] = {"attention": options.attention, "activation": options.pruned_layers - options.attention}
    if any(not 0 <= room[kind] <= most[kind] for kind in KINDS):
        raise PlanError(
            f"attention is {options.attention} of pruned_layers {options.pruned_layers}, but at most "
            f"{most['attention']} attentions and {most['activation']} activations may go",
            hint="change attention or pruned_layers",
        )
    return room


def _by_kind(sites: Sequence[Site], names: set[str]) -> dict[Kind, list[int]]:
    return {kind: [site.index for site in sites if site.kind == kind and site.name in names] for kind in KINDS}


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
    structure=structure,
    estimate=estimate_no_step1,
    describe=lambda options: StepInfo(TRAINED),
    report=report.report,
)


RANDOM = Method(
    "random",
    "layers drawn by the seed, or the first or last ones",
    options=RandomOptions,
    plan=random,
    structure=structure_random,
    describe=describe_random,
    report=report.report,
)


FIXED = Method(
    "fixed",
    "the layers that the recipe names",
    options=FixedOptions,
    plan=fixed,
    structure=structure_fixed,
    describe=lambda options: StepInfo(Choice("the recipe")),
    report=report.report,
)
