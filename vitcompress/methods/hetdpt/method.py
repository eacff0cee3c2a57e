"""HetDPT: remove attentions and activations together; an FFN without its activation is linear and folds.

"Rethinking Depth Pruning for Vision Transformers: A Heterogeneity-Aware Perspective" (HetDPT; BoundaryDPT is its
earlier version). Stage 1 chooses the layers:

    step 1  collection   chains of removals: transfer entropy, fast fine-tuning, held-out accuracy
            allocation   how many layers of each type, predicted from these rows (MAP)
    step 2  search       which layers, by learnable scores and straight-through gradients, among the candidates

Stage 2, the recovery, is the recipe's [finetune]. `diagnostics` measures the observations behind the method. Every
choice uses images held out from the training set (the released code used the test set).
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Literal

from torch import nn

from vitcompress.errors import PlanError
from vitcompress.families import GATED, Family, SiteKind
from vitcompress.methods import depth
from vitcompress.methods.base import PUBLISHED, TRAINED, Context, Estimate, StepInfo, reject_unused
from vitcompress.methods.depth import Blocks
from vitcompress.methods.hetdpt import collection, search
from vitcompress.methods.hetdpt.allocation import FEWEST_ROWS, allocate_budget, feasible_splits
from vitcompress.methods.hetdpt.collection import Record
from vitcompress.methods.options import AllocationOptions, DirectOptions, Indices
from vitcompress.methods.options import HetdptOptions as Options
from vitcompress.methods.width import deploy
from vitcompress.models.cost import count_cost

# Options without effect on published lists.
SEARCHING = ("target", "min_pruned_per_type", "tie_break", "candidates", "example_attention", "example_activation")


def choose(model: nn.Module, context: Context, options: Options) -> Blocks:
    if options.diagnostics:
        context.progress.stage("HetDPT diagnostics")
        context.memo("gradient_disparity", lambda: collection.gradient_disparity(model, context, options))
        context.memo("recovery_asymmetry", lambda: collection.recovery_asymmetry(model, context, options))
    if options.layers == "published":
        return _listed(options, "published")
    records, split = allocate(model, context, options)
    context.progress.stage("HetDPT step 2: learnable importance search")
    orders = collection.removal_orders(records)
    candidates = {
        site.name
        for site in depth.all_layers(model, context.family)
        if options.candidates == "all" or site.index in orders[site.kind][: options.pruned_layers]
    }
    return search.search(model, context, options, search.alternating(*split), candidates)


def allocate(model: nn.Module, context: Context, options: AllocationOptions) -> tuple[list[Record], tuple[int, int]]:
    """Step 1: its rows, and the numbers of attentions and activations to remove, recorded as `allocation.json`."""
    context.progress.stage("HetDPT step 1: collection for the budget allocation")
    records = collection.Collector(model, context, options).run()
    counts = {kind: len(sites) for kind, sites in depth.layers(model, context.family).items()}

    def compute() -> object:
        rows, layers = collection.rows(records, counts), (counts["attention"], counts["activation"])
        return asdict(allocate_budget(rows, layers, options, partial(split_cost, model, context, options, records)))

    allocation: Record = context.memo("allocation", compute)
    attentions, activations = allocation["chosen"]
    near = [(split["attention"], split["activation"]) for split in allocation["splits"] if split["near_tie"]]
    rivals = [f"{split[0]}+{split[1]}" for split in near if split != (attentions, activations)]
    lead = "the only split" if allocation["margin"] is None else f"best by {allocation['margin']:.2f} points"
    certainty = f"{lead}, cross-validation error {allocation['rmse']:.2f}"
    others = f"; within that error as well: {', '.join(rivals)}" if rivals else ""
    context.progress.note(f"budget, attentions + activations: {attentions}+{activations} ({certainty}){others}")
    return records, (attentions, activations)


def split_cost(
    model: nn.Module, context: Context, options: AllocationOptions, records: Sequence[Record], *split: int
) -> float:
    """MACs of a split, folded: without the layers that the chains removed first, and then the first others."""
    orders, layers = collection.removal_orders(records), depth.layers(model, context.family)
    ranked = {kind: list(dict.fromkeys((*orders[kind], *(site.index for site in layers[kind])))) for kind in GATED}
    removed = {kind: ranked[kind][:count] for kind, count in zip(GATED, split, strict=True)}
    deployed = deploy(model, context.plan, depth.plan_layers(model, context.plan, removed, options))
    return float(count_cost(deployed, context.input.size).macs)


def unscored(model: nn.Module, family: Family, options: Options) -> Blocks:
    """The published lists, the example lists, or as many layers by position.

    Raises PlanError if the budget cannot be spent on this model, a list does not match it, or an option has no effect.
    """
    if options.layers == "published":
        reject_unused(options, dict.fromkeys(SEARCHING, "layers is 'published'"))
        collection.check_options(options.collection)
        return _listed(options, "published")
    spread = spread_steps(model, family, options)
    return _listed(options, "example") if options.example_attention or options.example_activation else spread


def spread_steps(model: nn.Module, family: Family, options: AllocationOptions | DirectOptions) -> Blocks:
    """As many layers by position, for step 1, step 2 or both.

    Raises PlanError for an option without effect, and if the budget has no split on this model, or the collection has
    too few rounds for one.
    """
    if isinstance(options, AllocationOptions):
        depth.check_kinds(model, family, GATED)
        collection.check_options(options.collection)
        counts = [len(own) for own in depth.layers(model, family).values()]
        splits = feasible_splits((counts[0], counts[1]), options.pruned_layers, options.min_pruned_per_type)
        most, rounds = max(map(max, splits)), options.collection.rounds
        # With `all`, step 2 takes the layers from elsewhere than the orders of the single-type chains.
        if rounds is not None and rounds < most and getattr(options, "candidates", "collected") == "collected":
            message = f"collection.rounds is {rounds}, but a split may remove {most} layers of one type"
            raise PlanError(message, hint=f"set collection.rounds to {most} or more, or leave it out")
        if (rows := 1 + collection.estimate(model, family, options)[-1].rounds) < FEWEST_ROWS:
            message = f"the collection measures {rows} models, and the accuracy predictor needs {FEWEST_ROWS}"
            raise PlanError(message, hint="raise collection.interleaved or collection.rounds")
    if isinstance(options, DirectOptions) and options.search.schedule == "constant":
        reject_unused(options.search, {"min_lr": "search.schedule is 'constant'"})
    return depth.spread_layers(model, family, options)


def estimate(model: nn.Module, family: Family, options: Options) -> list[Estimate]:
    estimates = []
    if options.layers == "search":
        step_2 = search.estimate(options)
        estimates = [*collection.estimate(model, family, options), replace(step_2, title=f"step 2, {step_2.title}")]
    if options.diagnostics:
        layers, fast = len(depth.all_layers(model, family)), options.collection
        estimates += [
            Estimate("diagnostics, gradients of the gates", 1, 1, images=options.te.images),
            Estimate("diagnostics, each layer alone", layers, fast.epochs, fast.images_per_class),
        ]
    return estimates


def describe(options: Options) -> StepInfo:
    """Published lists, or the search, which trains copies of the model."""
    reason = f"layers is {options.layers!r}"
    if options.layers == "published":
        tables = ("search",) if options.diagnostics else ("te", "collection", "search")
        return StepInfo(PUBLISHED, uses_heldout=options.diagnostics, unused=dict.fromkeys(tables, reason))
    listed = options.example_attention or options.example_activation
    choice = replace(TRAINED, unscored="an example in the recipe") if listed else TRAINED
    unused = dict.fromkeys(("published_attention", "published_activation"), reason)
    return StepInfo(choice, uses_heldout=True, unused=unused)


def _listed(options: Options, which: Literal["published", "example"]) -> Blocks:
    """The block numbers of the recipe. Raises PlanError unless there are `pruned_layers` of them."""
    lists: dict[SiteKind, Indices] = {kind: getattr(options, f"{which}_{kind}") for kind in GATED}
    count, budget = sum(len(set(numbers)) for numbers in lists.values()), options.pruned_layers
    if count != budget or count != sum(map(len, lists.values())):
        message = f"{which}_attention and {which}_activation name {count} different layers, pruned_layers is {budget}"
        other = 'set layers = "search"' if which == "published" else "set both lists to []"
        raise PlanError(message, hint=f"make the lists and the budget agree, or {other}")
    return lists


SUMMARY = "attentions and activations: budget split by prediction, layers by learnable importance"
HETDPT = depth.depth_method("hetdpt", SUMMARY, choose, unscored, estimate=estimate, describe=describe)
