"""Blocks and channels in order of their importance, measured by all processes together; every result is kept."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitcompress.methods.base import Context
from vitcompress.methods.calibration import calibration_images
from vitcompress.methods.scores import UNMEASURED, channel_scores, random_scores
from vitcompress.methods.upvit.blocks import Candidate, block_scores, candidates, drop_sites
from vitcompress.methods.upvit.heads import least_first
from vitcompress.methods.upvit.importance import Component, Importance
from vitcompress.methods.upvit.options import Options
from vitcompress.methods.upvit.proxy import estimates
from vitcompress.methods.upvit.target import Target
from vitcompress.training.loaders import EvalLoader

PROXY_BATCH = 64  # images whose outputs are compared together
FEW_IMAGES = 1000
Scores = dict[str, list[float]]


def warn_of_few_images(context: Context, options: Options, target: Target, loader: EvalLoader) -> None:
    """Note if the ranking is measured on too few images."""
    if target.surplus or options.score not in UNMEASURED:
        proxy = context.memo("proxy", lambda: {"images": loader.total})
        for line in too_few_images(proxy["images"]):
            context.progress.note(line)


def too_few_images(images: int) -> list[str]:
    """A warning if this number of images gives no reliable ranking."""
    if images >= FEW_IMAGES:
        return []
    return [
        f"{images} proxy images are too few to rank channels reliably: UP-ViT (Table D14, ImageNet) reached "
        "73.65 % with 500, no better than without any (74.09 %), 74.62 % with 1000, 75.79 % with 2000, 75.94 % "
        "with 5000; set images to 2000 or more"
    ]


def rank_blocks(model: nn.Module, context: Context, options: Options, target: Target, loader: EvalLoader) -> list[str]:
    """The sites to remove, the least important first, until each stage has as many blocks as the target."""
    stages, removed = dict(target.stages), list[str]()
    for number in range(target.surplus):
        surplus = {stage: blocks for stage, blocks in stages.items() if len(blocks) > target.depths[stage]}
        ways = [way for stage, blocks in surplus.items() for way in candidates(stage, blocks)]
        context.progress.stage(f"block importance: {len(ways)} candidates")
        before = removed if options.reference == "current" else []
        measure = partial(_measure_blocks, model, context, ways, removed, before, loader)
        scores = context.memo(f"blocks-{number}", measure)["scores"]
        chosen = ways[least_first(scores)[0]]
        context.progress.note(f"removed {chosen.title}")
        removed = [*removed, *chosen.removed]
        stages[chosen.stage] = chosen.remaining
    return removed


def _measure_blocks(
    model: nn.Module,
    context: Context,
    ways: Sequence[Candidate],
    removed: Sequence[str],
    reference: Sequence[str],
    loader: EvalLoader,
) -> dict[str, Any]:
    plans = [drop_sites(context.plan, [*removed, *way.removed]) for way in ways]
    scores = block_scores(model, plans, drop_sites(context.plan, reference), loader)
    return {"ways": [way.title for way in ways], "scores": _sum(context, scores)}


def _sum(context: Context, scores: Tensor) -> list[float]:
    """The sum over all processes."""
    total: list[float] = context.runtime.all_sum(scores).tolist()
    return total


def rank_channels(
    model: nn.Module,
    context: Context,
    options: Options,
    target: Target,
    cut: Sequence[Component],
    loader: EvalLoader,
) -> dict[str, list[int]]:
    """Component -> its channels, the least important first."""
    if not cut:
        return {}
    context.progress.stage(f"channel importance of {len(cut)} components ({options.score})")
    measure = partial(_measure, model, context, options, cut)
    if options.score in UNMEASURED:
        scores = _unmeasured(model, context, options, cut)
    elif options.score == "exact":
        scores = measure(loader, {}, "scores")
    elif options.score == "fisher" or options.screen == "fisher":
        scores = context.memo("fisher", partial(_fisher, model, context, options, cut, loader))
    else:
        few = calibration_images(context, options.screen_images, PROXY_BATCH)
        scores = measure(few, {}, "screen")
    if options.score != "screened":
        return {name: least_first(values) for name, values in scores.items()}
    tiers = {c.name: _tiers(c, scores[c.name], target, options) for c in cut}
    exact = measure(loader, tiers, "scores")
    return {name: _merge(scores[name], exact[name], tiers[name]) for name in tiers}


def _unmeasured(model: nn.Module, context: Context, options: Options, cut: Sequence[Component]) -> Scores:
    """Component -> the magnitude of each channel's weights (Table D7: l1), or random scores."""
    spaces = [space for component in cut for space in component.spaces]
    random = options.score == "random"
    scores = random_scores(spaces, context.seed) if random else channel_scores(model, spaces, lambda _, w: w.abs())
    return {c.name: torch.stack([scores[space.name] for space in c.spaces]).sum(0).tolist() for c in cut}


def _fisher(
    model: nn.Module, context: Context, options: Options, cut: Sequence[Component], loader: EvalLoader
) -> Scores:
    """Component -> Gauss-Newton estimates of its scores."""
    scores = estimates(model, cut, loader, directions=options.directions)
    return {name: _sum(context, values) for name, values in scores.items()}


def _measure(
    model: nn.Module,
    context: Context,
    options: Options,
    cut: Sequence[Component],
    loader: EvalLoader,
    tiers: Mapping[str, Mapping[int, int]],
    name: str,
) -> Scores:
    """Component -> exact scores, kept one by one, so that a killed run loses at most one component.

    tiers: component -> channel -> 1 if it is to be measured; the others get 0. All channels without an entry.
    """
    importance = Importance(model, context.family, images_at_once=options.images_at_once)
    scores: Scores = {}
    for number, component in enumerate(cut):
        tier = tiers.get(component.name, dict.fromkeys(range(component.size), 1))
        channels = [channel for channel, value in tier.items() if value == 1]

        def measure(component: Component = component, channels: list[int] = channels) -> list[float]:
            return _sum(context, importance.scores(component, loader, channels))

        scores[component.name] = context.memo(f"{name}-{component.name}", measure)
        context.progress.update("channel importance", number + 1, len(cut), component.name)
    return scores


def _tiers(component: Component, screen: Sequence[float], target: Target, options: Options) -> dict[int, int]:
    """Channel -> 0: removed, 1: to be measured, 2: kept. The share `band` around the cut of each head is measured."""
    width, heads = target.sizes[component.name]
    parts = 1
    if component.kind == "attention":
        parts = {"groups": heads, "across": 1, "each": component.spaces[0].heads}[options.heads]
    size = component.size // parts
    cut = size - width // parts
    half = max(1, round(options.band * size / 2))
    tiers: dict[int, int] = {}
    for part in range(parts):
        order = [channel for channel in least_first(screen) if channel // size == part]
        tiers |= {c: 0 if rank < cut - half else 2 if rank >= cut + half else 1 for rank, c in enumerate(order)}
    return tiers


def _merge(screen: Sequence[float], exact: Sequence[float], tiers: Mapping[int, int]) -> list[int]:
    """Channels, the least important first: measured ones by their score, the others below and above in their order."""
    return sorted(range(len(screen)), key=lambda c: (tiers[c], exact[c] if tiers[c] == 1 else screen[c], c))
