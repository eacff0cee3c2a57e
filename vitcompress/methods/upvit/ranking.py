"""Blocks and channels in order of their importance, measured by all processes together; every result is kept.

Blocks are removed one at a time, the one whose removal changes the outputs least (UP-ViT, appendix C). One of L blocks
can be removed in 2L - 1 ways: drop block i, or drop the FFN of block k and the attention of block k + 1, which leaves
one *hybrid* block, the attention of k before the FFN of k + 1. Hybrids do not cross stages. After each removal
everything is measured again on the remaining model.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitcompress import surgery
from vitcompress.methods.base import Context
from vitcompress.methods.calibration import calibration_images
from vitcompress.methods.options import UpvitOptions
from vitcompress.methods.scores import UNMEASURED, channel_scores, check_scores, random_scores
from vitcompress.methods.upvit.importance import Component, Importance, divergence, estimates
from vitcompress.methods.upvit.target import Target
from vitcompress.models.standard import Block
from vitcompress.plan import Plan
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
class Candidate:
    """One way to lose a block of a stage: the sites to remove, and the remaining blocks."""

    title: str
    removed: tuple[str, ...]
    stage: str
    remaining: list[Block]


def candidates(stage: str, blocks: Sequence[Block]) -> Iterator[Candidate]:
    """The 2L - 1 ways in which a stage of L blocks can lose one; none for the last block."""
    for number, block in enumerate(blocks if len(blocks) > 1 else ()):
        before, after = blocks[:number], blocks[number + 1 :]
        yield Candidate(f"block {' + '.join(block.parts)}", block.parts, stage, [*before, *after])
        if after:
            removed = (block.ffn.name, after[0].attention.name)
            hybrid = Block(block.attention, after[0].ffn)
            yield Candidate(f"hybrid: {' and '.join(removed)}", removed, stage, [*before, hybrid, *after[1:]])


@torch.inference_mode()
def block_scores(model: nn.Module, plans: Sequence[Plan], reference: Plan, loader: EvalLoader) -> Tensor:
    """KL divergence of outputs after each plan from those after `reference`, over this process's images: (plans,)."""
    shared = {id(parameter): parameter for parameter in model.parameters()}  # by all copies, which lack some modules
    base, *changed = (surgery.apply_plan(deepcopy(model, {**shared}), plan).eval() for plan in (reference, *plans))
    total = torch.zeros(len(plans), dtype=torch.float64)
    for images, _ in loader:
        logits = base(images)
        total += torch.cat([divergence(logits, one(images)) for one in changed]).cpu()
    return total


def least_first(scores: Sequence[Any]) -> list[int]:
    """Channels from the least important to the most important; equal ones in ascending order."""
    return sorted(range(len(scores)), key=lambda channel: (scores[channel], channel))


def best(order: Sequence[int], width: int, parts: int = 1) -> tuple[int, ...]:
    """The best `width` channels of `order` (the least important first), as many of each of `parts` equal parts."""
    size, share = len(order) // parts, width // parts
    ordered = ([channel for channel in order if channel // size == part] for part in range(parts))
    return tuple(channel for own in ordered for channel in sorted(own[size - share :]))


@dataclass(frozen=True)
class Ranker:
    """Ranks blocks and channels of `model` by what their removal changes on the images of `loader`."""

    model: nn.Module
    context: Context
    options: UpvitOptions
    target: Target

    @cached_property
    def loader(self) -> EvalLoader:
        """Training images. Raises InputError if there are none; not every score needs them."""
        return calibration_images(self.context, self.options.images, PROXY_BATCH)

    def rank_blocks(self) -> list[str]:
        """The sites to remove, the least important first, until each stage has as many blocks as the target."""
        stages, removed, context = dict(self.target.stages), list[str](), self.context
        for number in range(self.target.surplus):
            surplus = {stage: blocks for stage, blocks in stages.items() if len(blocks) > self.target.depths[stage]}
            ways = [way for stage, blocks in surplus.items() for way in candidates(stage, blocks)]
            context.progress.stage(f"block importance: {len(ways)} candidates")

            def measure(ways: Sequence[Candidate] = ways, removed: Sequence[str] = removed) -> dict[str, object]:
                current = removed if self.options.reference == "current" else []
                lists = (current, *([*removed, *way.removed] for way in ways))
                reference, *plans = (context.plan.delta(removed=dict.fromkeys(names, "drop")) for names in lists)
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
            rough = partial(estimates, self.model, cut, self.loader, directions=options.directions)
            scores = self.context.memo("fisher", lambda: {name: self._sum(own) for name, own in rough().items()})
        else:
            scores = self._measure(cut, calibration_images(self.context, options.screen_images, PROXY_BATCH), "screen")
        check_scores("channels", map(any, scores.values()))
        if options.score != "screened":
            return {c: least_first(scores[c.name]) for c in cut}
        tiers = {c.name: self._tiers(c, scores[c.name]) for c in cut}
        exact = self._measure(cut, self.loader, "scores", tiers)
        # Measured channels by their score, the others below and above in their order.
        merged = {
            c.name: [(tier, (exact if tier == 1 else scores)[c.name][i]) for i, tier in sorted(tiers[c.name].items())]
            for c in cut
        }
        return {c: least_first(merged[c.name]) for c in cut}

    def _sum(self, scores: Tensor) -> list[float]:
        """The sum over all processes."""
        return cast(list[float], self.context.runtime.all_sum(scores).tolist())

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
            only = [channel for channel, tier in tiers[component.name].items() if tier == 1] if tiers else None

            def measure(component: Component = component, only: list[int] | None = only) -> list[float]:
                return self._sum(importance.scores(component, loader, only))

            scores[component.name] = self.context.memo(f"{name}-{component.name}", measure)
            self.context.progress.update("channel importance", number + 1, len(cut), component.name)
        return scores

    def _tiers(self, component: Component, screen: Sequence[float]) -> Tiers:
        """The share `band` of the channels of each head is measured, if possible half of it on each side of the cut."""
        parts = self.target.parts(component)
        size, width = component.size // parts, self.target.sizes[component.name][0] // parts
        measured = min(size, max(2, round(self.options.band * size)))
        first = min(max(0, size - width - measured // 2), size - measured)
        tiers: Tiers = {}
        for part in range(parts):
            order = [channel for channel in least_first(screen) if channel // size == part]
            tiers |= {c: 0 if rank < first else 2 if rank >= first + measured else 1 for rank, c in enumerate(order)}
        return tiers
