"""HetDPT: remove attentions and activations together, so that what is left of the FFN can be folded.

"Rethinking Depth Pruning for Vision Transformers: A Heterogeneity-Aware Perspective" (HetDPT; BoundaryDPT is its
earlier version). Stage 1 chooses the layers:

    step 1  collection        single-type and interleaved chains: transfer entropy, fast fine-tuning, held-out accuracy
            allocation      how many layers of each type, predicted from those rows (MAP)
    step 2  search            which layers, by learnable scores and straight-through gradients, within the candidates

Stage 2, the recovery by training, belongs to the pipeline. Each part can be called alone. `diagnostics` measures the
observations behind the method.

Deviations: every choice is made on images held out from the training set (the released code used the test set), ratios
are exact, and what was searched is the same function as what is deployed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge
from torch import nn

from vitcompress.errors import PlanError
from vitcompress.families import Family
from vitcompress.io.validation import Doc
from vitcompress.methods import depth
from vitcompress.methods.base import PUBLISHED, TRAINED, Context, Estimate, Method, StepInfo
from vitcompress.methods.depth import KINDS, DepthOptions, Kind
from vitcompress.methods.hetdpt import collection, diagnostics, report, search
from vitcompress.methods.hetdpt.allocation import TieBreak, allocate_budget, feasible_splits
from vitcompress.methods.hetdpt.collection import CollectionOptions, Record
from vitcompress.methods.hetdpt.search import SearchOptions
from vitcompress.methods.transfer_entropy import EntropyOptions
from vitcompress.plan import Plan

Indices = tuple[Annotated[int, Ge(0)], ...]


@dataclass(frozen=True, kw_only=True)
class AllocationOptions(DepthOptions):
    """Options of step 1."""

    min_pruned_per_type: Annotated[
        int, Ge(0), Doc("least layers of each type; 1 in the paper's listing, 0 in Algorithm 3")
    ] = 1
    tie_break: Annotated[
        TieBreak,
        Doc("between nearly equal predictions: `faster` takes the split with fewer MACs, `none` the best prediction"),
    ] = "faster"
    te: EntropyOptions = field(default_factory=EntropyOptions)
    collection: CollectionOptions = field(default_factory=CollectionOptions)


@dataclass(frozen=True, kw_only=True)
class Options(AllocationOptions):
    """Stage 1 as a whole, or published layers."""

    layers: Annotated[
        Literal["search", "published"], Doc("`search` runs stage 1; `published` takes the published_... lists")
    ] = "search"
    published_attention: Annotated[Indices, Doc('blocks that lose their attention, with layers = "published"')] = ()
    published_activation: Annotated[Indices, Doc('blocks that lose their activation, with layers = "published"')] = ()
    example_attention: Annotated[
        Indices, Doc("assumed result of the search in `--structure-only` and `--dry-run`; default: the last layers")
    ] = ()
    example_activation: Annotated[
        Indices, Doc("assumed result of the search in `--structure-only` and `--dry-run`; default: the last layers")
    ] = ()
    candidates: Annotated[Literal["collected", "all"], Doc("of step 2: layers of the single-type chains, or all")] = (
        "collected"
    )
    search: SearchOptions = field(default_factory=SearchOptions)
    diagnostics: Annotated[bool, Doc("also measure gradient disparity and recovery asymmetry")] = False


def plan(model: nn.Module, context: Context, options: Options) -> Plan:
    """The layers to remove, from the published lists or from stage 1. The model is left as it is."""
    if options.layers == "published":
        return depth.decided(model, context, _listed(options, "published"), options)
    structure(model, context.family, context.plan, options)
    if options.diagnostics:
        diagnose(model, context, options)
    records, (attentions, activations) = allocate(model, context, options)
    context.progress.stage("HetDPT step 2: learnable importance search")
    chosen = search.search(
        model,
        context,
        options,
        options.search,
        search.alternating(attentions, activations),
        _candidates(model, context, options, records),
    )
    return depth.decided(model, context, chosen, options)


def allocate(model: nn.Module, context: Context, options: AllocationOptions) -> tuple[list[Record], tuple[int, int]]:
    """Step 1: the measured rows, and how many attentions and activations to remove. Kept as `allocation.json`."""
    context.progress.stage("HetDPT step 1: collection for the budget allocation")
    records = collection.collect(model, context, options, options.te, options.collection)
    counts = {kind: len(sites) for kind, sites in depth.layers(model, context.family).items()}

    def choose() -> dict[str, Any]:
        found = allocate_budget(
            collection.rows(records, counts),
            (counts["attention"], counts["activation"]),
            options.pruned_layers,
            min_pruned_per_type=options.min_pruned_per_type,
            tie_break=options.tie_break,
            cost=lambda attentions, activations: depth.macs_after(model, context, options, attentions, activations),
        )
        return found.to_json()

    allocation = context.memo("allocation", choose)
    context.progress.note(summarize(allocation))
    return records, (allocation["chosen"][0], allocation["chosen"][1])


def summarize(allocation: dict[str, Any]) -> str:
    """One line on how the budget was split and how certain that is."""
    attentions, activations = allocation["chosen"]
    rivals = [
        f"{s['attention']}+{s['activation']}"
        for s in allocation["splits"]
        if s["near_tie"] and [s["attention"], s["activation"]] != [attentions, activations]
    ]
    lead = "the only split" if allocation["margin"] is None else f"best by {allocation['margin']:.2f} points"
    error = f"cross-validation error {allocation['rmse']:.2f}"
    text = f"budget: {attentions} attentions + {activations} activations ({lead}, {error})"
    return text + (f"; as good within that error: {', '.join(rivals)}" if rivals else "")


def structure(model: nn.Module, family: Family, base: Plan, options: Options) -> Plan:
    """A plan of the right size without scoring anything: the published lists, or layers picked by position.

    Raises:
        PlanError: the budget cannot be spent on this model, or the lists do not match it.
    """
    if options.layers == "published":
        return depth.delta(model, base, _listed(options, "published"), options)
    check_allocation(model, family, options)
    if options.example_attention or options.example_activation:
        return depth.delta(model, base, _listed(options, "example"), options)
    return depth.delta(model, base, depth.any_layers(model, family, options.pruned_layers), options)


def check_allocation(model: nn.Module, family: Family, options: AllocationOptions) -> None:
    """Raise PlanError when the budget has no split on this model, or too few rounds are collected to reach one."""
    depth.check_kinds(family, KINDS)
    found = depth.layers(model, family)
    splits = feasible_splits(
        (len(found["attention"]), len(found["activation"])), options.pruned_layers, options.min_pruned_per_type
    )
    most = max(max(split) for split in splits)
    rounds = options.collection.rounds
    if rounds is not None and rounds < most and getattr(options, "candidates", "collected") == "collected":
        raise PlanError(
            f"collection.rounds is {rounds}, but a split may remove {most} layers of one type",
            hint=f"set collection.rounds to {most} or more, or leave it out",
        )


def estimate(model: nn.Module, family: Family, options: Options) -> list[Estimate]:
    """The trainings and measurements of `plan`."""
    estimates = []
    if options.layers == "search":
        epochs = search.removal_epochs(options.pruned_layers, options.search.factor)[-1]
        estimates = [
            *estimate_allocation(model, family, options),
            Estimate("step 2, importance search", 1, epochs, options.search.images_per_class),
        ]
    if options.diagnostics:
        layers, fast = len(depth.all_layers(model, family)), options.collection
        estimates += [
            Estimate("diagnostics, gradients of the gates", 1, 1, images=options.te.images),
            Estimate("diagnostics, each layer alone", layers, fast.epochs, fast.images_per_class),
        ]
    return estimates


def describe(options: Options) -> StepInfo:
    """The lists of a publication, or the search, which trains copies of the model."""
    listed = options.example_attention or options.example_activation
    searched = replace(TRAINED, unscored="an example in the recipe") if listed else TRAINED
    published = options.layers == "published"
    return StepInfo(PUBLISHED if published else searched, uses_heldout=not published or options.diagnostics)


def estimate_allocation(model: nn.Module, family: Family, options: AllocationOptions) -> list[Estimate]:
    """The trainings and measurements of step 1."""
    counts = {kind: len(sites) for kind, sites in depth.layers(model, family).items()}
    left = collection.candidates_per_round(counts, options.pruned_layers, options.collection)
    fast = options.collection
    return [
        Estimate("step 1, transfer entropy", sum(left) + len(left), 1, images=options.te.images),
        Estimate("step 1, fast fine-tuning", len(left), fast.epochs, fast.images_per_class),
    ]


def diagnose(model: nn.Module, context: Context, options: Options) -> None:
    """Measure both observations; `gradient_disparity.json` and `recovery_asymmetry.json`, drawn with the rest."""
    context.progress.stage("HetDPT diagnostics")
    context.memo(
        "gradient_disparity", lambda: diagnostics.gradient_disparity(model, context, options, options.te.images)
    )
    context.memo(
        "recovery_asymmetry", lambda: diagnostics.recovery_asymmetry(model, context, options, options.collection)
    )


def _listed(options: Options, which: Literal["published", "example"]) -> dict[Kind, Sequence[int]]:
    """The block numbers that the recipe lists. Raises PlanError unless they are as many as are to go."""
    lists: dict[Kind, Sequence[int]] = {kind: getattr(options, f"{which}_{kind}") for kind in KINDS}
    count = sum(len(set(numbers)) for numbers in lists.values())
    if count != options.pruned_layers or count != sum(map(len, lists.values())):
        raise PlanError(
            f"{which}_attention and {which}_activation name {count} different layers, pruned_layers is "
            f"{options.pruned_layers}",
            hint="make the lists and the budget agree"
            + (', or set layers = "search"' if which == "published" else ", or set both lists to []"),
        )
    return lists


def _candidates(model: nn.Module, context: Context, options: Options, records: Sequence[Record]) -> set[str]:
    """The sites that step 2 may remove: all, or the first `pruned_layers` of each type's removal order."""
    sites = depth.layers(model, context.family)
    if options.candidates == "all":
        return {site.name for kind in KINDS for site in sites[kind]}
    orders = collection.removal_orders(records)
    return {site.name for kind in KINDS for site in sites[kind] if site.index in orders[kind][: options.pruned_layers]}


HETDPT = Method(
    "hetdpt",
    "attentions and activations: budget split by prediction, layers by learnable importance",
    options=Options,
    plan=plan,
    structure=structure,
    estimate=estimate,
    describe=describe,
    report=report.report,
)
