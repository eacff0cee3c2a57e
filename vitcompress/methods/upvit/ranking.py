"""Blocks and channels in order of their importance, measured by all processes together; each result is kept."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitcompress.methods.base import Context
from vitcompress.methods.calibration import calibration_images
from vitcompress.methods.scores import channel_scores, random_scores
from vitcompress.methods.upvit.blocks import Candidate, candidates, removal, scores, without
from vitcompress.methods.upvit.heads import least_first
from vitcompress.methods.upvit.importance import Component, Importance
from vitcompress.methods.upvit.options import Options
from vitcompress.methods.upvit.proxy import estimates
from vitcompress.methods.upvit.reduction import Goal
from vitcompress.plan import Plan
from vitcompress.training.loaders import EvalLoader

PROXY_BATCH = 64  # images whose answers are compared together
FEW_IMAGES = 1000
UNMEASURED = ("magnitude", "random")  # scores that need no images


def warn_of_few(context: Context, options: Options, goal: Goal, loader: EvalLoader) -> None:
    """Note it when the ranking is measured on too few images."""
    blocks_go = any(len(of) > goal.target.depths[stage] for stage, of in goal.stages.items())
    if blocks_go or options.score not in UNMEASURED:
        found = context.memo("proxy", lambda: {"images": loader.total})
        for line in too_few(found["images"]):
            context.progress.note(line)


def too_few(images: int) -> list[str]:
    """A warning where a ranking by so many images is not reliable, else nothing."""
    if images >= FEW_IMAGES:
        return []
    return [
        f"{images} proxy images are too few to rank channels reliably: UP-ViT (Table D14, ImageNet) reached "
        "73.65 % with 500, no better than without any (74.09 %), 74.62 % with 1000, 75.79 % with 2000, 75.94 % "
        "with 5000; set images to 2000 or more"
    ]


def block_removal(model: nn.Module, context: Context, options: Options, goal: Goal, loader: EvalLoader) -> list[str]:
    """What goes so that each stage has as many blocks as the target, the least important first."""
    depths = goal.target.depths
    blocks, removed = goal.stages, list[str]()
    for number in range(sum(len(of) - depths[stage] for stage, of in blocks.items())):
        ways = [c for stage, of in blocks.items() if len(of) > depths[stage] for c in candidates(of)]
        gone = list(removed)
        reference = removal(gone if options.reference == "current" else [], context.plan)
        plans = [removal([*gone, *way.removed], context.plan) for way in ways]

        def measure(
            ways: list[Candidate] = ways, plans: list[Plan] = plans, reference: Plan = reference
        ) -> dict[str, Any]:
            found = _summed(context, scores(model, plans, reference, loader))
            return {"ways": [way.title for way in ways], "scores": found}

        context.progress.stage(f"block importance: {len(ways)} candidates")
        found = context.memo(f"blocks-{number}", measure)
        chosen = ways[least_first(found["scores"])[0]]
        context.progress.note(f"removed {chosen.title}")
        removed, blocks = [*removed, *chosen.removed], without(blocks, chosen)
    return removed


def _summed(context: Context, scores: Tensor) -> list[float]:
    """The sum over all processes."""
    summed: list[float] = context.runtime.all_sum(scores).tolist()
    return summed


def orders(
    model: nn.Module,
    context: Context,
    options: Options,
    goal: Goal,
    wanted: Sequence[Component],
    loader: EvalLoader,
) -> dict[str, list[int]]:
    """Component -> its channels, the least important first."""
    if not wanted:
        return {}
    context.progress.stage(f"channel importance of {len(wanted)} components ({options.score})")
    if options.score in UNMEASURED:
        return _unmeasured(model, context, options, wanted)
    if options.score == "exact":
        exact = _exact(model, context, options, wanted, loader, {}, "scores")
        return {name: least_first(scores) for name, scores in exact.items()}
    screen = _screen(model, context, options, wanted, loader)
    if options.score == "fisher":
        return {name: least_first(scores) for name, scores in screen.items()}
    band = {c.name: _undecided(c, screen[c.name], goal, options) for c in wanted}
    exact = _exact(model, context, options, wanted, loader, band, "scores")
    return {c.name: _joined(screen[c.name], exact[c.name], band[c.name]) for c in wanted}


def _screen(
    model: nn.Module, context: Context, options: Options, wanted: Sequence[Component], loader: EvalLoader
) -> dict[str, list[float]]:
    """Component -> cheap scores of all its channels: the Gauss-Newton estimate, or exact scores on few images."""
    if options.score == "fisher" or options.screen == "fisher":
        found: dict[str, list[float]] = context.memo("fisher", lambda: _fisher(model, context, options, wanted, loader))
        return found
    few = calibration_images(context, options.screen_images, PROXY_BATCH)
    return _exact(model, context, options, wanted, few, {}, "screen")


def _unmeasured(
    model: nn.Module, context: Context, options: Options, wanted: Sequence[Component]
) -> dict[str, list[int]]:
    """Component -> its channels by the magnitude of their weights (Table D7: l1), or by lot."""
    spaces = [space for component in wanted for space in component.spaces]
    random = options.score == "random"
    scores = random_scores(spaces, context.seed) if random else channel_scores(model, spaces, lambda _, w: w.abs())
    totals = {c.name: torch.stack([scores[space.name] for space in c.spaces]).sum(0) for c in wanted}
    return {name: least_first(total.tolist()) for name, total in totals.items()}


def _fisher(
    model: nn.Module, context: Context, options: Options, wanted: Sequence[Component], loader: EvalLoader
) -> dict[str, list[float]]:
    found = estimates(model, wanted, loader, directions=options.directions)
    return {name: _summed(context, scores) for name, scores in found.items()}


def _exact(
    model: nn.Module,
    context: Context,
    options: Options,
    wanted: Sequence[Component],
    loader: EvalLoader,
    only: Mapping[str, Mapping[int, int]],
    name: str,
) -> dict[str, list[float]]:
    """Exact scores, component by component; each is kept, so a run that was stopped loses at most one."""
    importance = Importance(model, context.family, images_at_once=options.images_at_once)
    found: dict[str, list[float]] = {}
    for number, component in enumerate(wanted):
        tiers = only.get(component.name)
        channels = None if tiers is None else [c for c, tier in tiers.items() if tier == 1]

        def measure(component: Component = component, channels: list[int] | None = channels) -> list[float]:
            return _summed(context, importance.scores(component, loader, channels))

        found[component.name] = context.memo(f"{name}-{component.name}", measure)
        context.progress.update("channel importance", number + 1, len(wanted), component.name)
    return found


def _undecided(component: Component, screen: Sequence[float], goal: Goal, options: Options) -> dict[int, int]:
    """Channel -> 0 surely goes, 1 to be measured, 2 surely stays; the share `band` of each group is to be measured."""
    parts = 1
    if component.kind == "attention":
        parts = {"groups": goal.heads(component), "across": 1, "each": component.spaces[0].heads}[options.heads]
    size = component.size // parts
    cut = size - goal.width(component) // parts
    half = max(1, round(options.band * size / 2))
    found: dict[int, int] = {}
    for part in range(parts):
        ranked = [c for c in least_first(screen) if c // size == part]
        found |= {c: 0 if rank < cut - half else 2 if rank >= cut + half else 1 for rank, c in enumerate(ranked)}
    return found


def _joined(screen: Sequence[float], exact: Sequence[float], tiers: Mapping[int, int]) -> list[int]:
    """Least important first: what the screen was sure of in its own order, what was measured by its score."""
    return sorted(range(len(screen)), key=lambda c: (tiers[c], exact[c] if tiers[c] == 1 else screen[c], c))
