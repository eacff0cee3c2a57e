"""Blocks and channels in order of their importance, measured by all processes together; every result is kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitcompress.methods.base import Context
from vitcompress.methods.calibration import calibration_images
from vitcompress.methods.options import UpvitOptions as Options
from vitcompress.methods.scores import UNMEASURED, channel_scores, random_scores
from vitcompress.methods.upvit.blocks import Candidate, block_scores, candidates, drop_sites
from vitcompress.methods.upvit.heads import count_parts, least_first
from vitcompress.methods.upvit.importance import Component, Importance
from vitcompress.methods.upvit.proxy import estimates
from vitcompress.methods.upvit.target import Target
from vitcompress.training.loaders import EvalLoader

PROXY_BATCH = 64  # images whose outputs are compared together
FEW_IMAGES = 1000
Scores = dict[str, list[float]]
Tiers = dict[int, int]  # channel -> 0: removed, 1: to be measured, 2: kept


def too_few_images(images: int) -> list[str]:
    """A warning if this number of images gives no reliable ranking."""
    if images >= FEW_IMAGES:
        return []
    return [
        f"{images} proxy images are too few to rank channels reliably: UP-ViT (Table D14, ImageNet) reached "
        "73.65 % with 500, no better than without any (74.09 %), 74.62 % with 1000, 75.79 % with 2000, 75.94 % "
        "with 5000; set images to 2000 or more"
    ]


@dataclass(frozen=True)
class Ranker:
    """Ranks blocks and channels of `model` by what their removal changes on the images of `loader`."""

    model: nn.Module
    context: Context
    options: Options
    target: Target
    loader: EvalLoader

    def warn_of_few_images(self) -> None:
        if self.target.surplus or self.options.score not in UNMEASURED:
            proxy = self.context.memo("proxy", lambda: {"images": self.loader.total})
            for line in too_few_images(proxy["images"]):
                self.context.progress.note(line)

    def rank_blocks(self) -> list[str]:
        """The sites to remove, the least important first, until each stage has as many blocks as the target."""
        stages, removed, context = dict(self.target.stages), list[str](), self.context
        for number in range(self.target.surplus):
            surplus = {stage: blocks for stage, blocks in stages.items() if len(blocks) > self.target.depths[stage]}
            ways = [way for stage, blocks in surplus.items() for way in candidates(stage, blocks)]
            context.progress.stage(f"block importance: {len(ways)} candidates")

            def measure(ways: Sequence[Candidate] = ways, removed: Sequence[str] = removed) -> dict[str, object]:
                plans = [drop_sites(context.plan, [*removed, *way.removed]) for way in ways]
                reference = drop_sites(context.plan, removed if self.options.reference == "current" else [])
                scores = block_scores(self.model, plans, reference, self.loader)
                return {"ways": [way.title for way in ways], "scores": self._sum(scores)}

            chosen = ways[least_first(context.memo(f"blocks-{number}", measure)["scores"])[0]]
            context.progress.note(f"removed {chosen.title}")
            removed = [*removed, *chosen.removed]
            stages[chosen.stage] = chosen.remaining
        return removed

    def rank_channels(self, cut: Sequence[Component]) -> dict[Component, list[int]]:
        """The channels of each component, the least important first."""
        if not cut:
            return {}
        options = self.options
        self.context.progress.stage(f"channel importance of {len(cut)} components ({options.score})")
        if options.score in UNMEASURED:
            scores = self._score_unmeasured(cut)
        elif options.score == "exact":
            scores = self._measure(cut, self.loader, "scores")
        elif "fisher" in (options.score, options.screen):
            scores = self.context.memo("fisher", lambda: self._estimate(cut))
        else:
            few = calibration_images(self.context, options.screen_images, PROXY_BATCH)
            scores = self._measure(cut, few, "screen")
        if options.score != "screened":
            return {c: least_first(scores[c.name]) for c in cut}
        tiers = {c.name: self._tiers(c, scores[c.name]) for c in cut}
        exact = self._measure(cut, self.loader, "scores", tiers)
        return {c: _merge(scores[c.name], exact[c.name], tiers[c.name]) for c in cut}

    def _sum(self, scores: Tensor) -> list[float]:
        """The sum over all processes."""
        total: list[float] = self.context.runtime.all_sum(scores).tolist()
        return total

    def _estimate(self, cut: Sequence[Component]) -> Scores:
        """Component -> Gauss-Newton estimates of its scores."""
        scores = estimates(self.model, cut, self.loader, directions=self.options.directions)
        return {name: self._sum(values) for name, values in scores.items()}

    def _score_unmeasured(self, cut: Sequence[Component]) -> Scores:
        """Component -> the magnitude of each channel's weights (Table D7: l1), or random scores."""
        spaces = [space for component in cut for space in component.spaces]
        if self.options.score == "random":
            scores = random_scores(spaces, self.context.seed)
        else:
            scores = channel_scores(self.model, spaces, lambda _, weight: weight.abs())
        return {c.name: torch.stack([scores[space.name] for space in c.spaces]).sum(0).tolist() for c in cut}

    def _measure(
        self, cut: Sequence[Component], loader: EvalLoader, name: str, tiers: Mapping[str, Tiers] | None = None
    ) -> Scores:
        """Component -> exact scores, kept one by one, so that a killed run loses at most one component.

        tiers: by component; channels that are not to be measured get 0. None: all are measured.
        """
        importance = Importance(self.model, self.context.family, images_at_once=self.options.images_at_once)
        scores: Scores = {}
        for number, component in enumerate(cut):
            measured = tiers[component.name].items() if tiers else ()
            only = [channel for channel, tier in measured if tier == 1] if tiers else None

            def measure(component: Component = component, only: list[int] | None = only) -> list[float]:
                return self._sum(importance.scores(component, loader, only))

            scores[component.name] = self.context.memo(f"{name}-{component.name}", measure)
            self.context.progress.update("channel importance", number + 1, len(cut), component.name)
        return scores

    def _tiers(self, component: Component, screen: Sequence[float]) -> Tiers:
        """The share `band` of the channels around the cut of each head is measured."""
        width, heads = self.target.sizes[component.name]
        is_attention = component.kind == "attention"
        parts = count_parts(component.spaces[0].heads, heads, self.options.heads) if is_attention else 1
        size = component.size // parts
        cut, half = size - width // parts, max(1, round(self.options.band * size / 2))
        tiers: Tiers = {}
        for part in range(parts):
            order = [channel for channel in least_first(screen) if channel // size == part]
            tiers |= {c: 0 if rank < cut - half else 2 if rank >= cut + half else 1 for rank, c in enumerate(order)}
        return tiers


def _merge(screen: Sequence[float], exact: Sequence[float], tiers: Tiers) -> list[int]:
    """Channels, the least important first: measured ones by their score, the others below and above in their order."""
    return sorted(range(len(screen)), key=lambda c: (tiers[c], exact[c] if tiers[c] == 1 else screen[c], c))
