"""Block pruning: one block at a time, the one whose removal changes the outputs least.

UP-ViT, appendix C. One of L blocks can be removed in 2L - 1 ways: drop block i, or drop the FFN of block k and the
attention of block k + 1, which leaves one *hybrid* block, the attention of k before the FFN of k + 1. Hybrids do not
cross stages. After each removal everything is measured again on the remaining model.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitcompress import surgery
from vitcompress.errors import PlanError
from vitcompress.families import Family, Site
from vitcompress.methods.upvit.importance import divergence
from vitcompress.plan import Plan
from vitcompress.training.loaders import EvalLoader


@dataclass(frozen=True)
class Block:
    """An attention and the FFN after it, of the same dense block or of two."""

    attention: Site
    ffn: Site

    @property
    def parts(self) -> tuple[str, ...]:
        """The sites to remove: the dense block, or the two parts."""
        same = self.attention.block == self.ffn.block
        return (self.attention.block,) if same else (self.attention.name, self.ffn.name)


@dataclass(frozen=True)
class Candidate:
    """One way to lose a block of a stage: the sites to remove, and the remaining blocks."""

    title: str
    removed: tuple[str, ...]
    stage: str
    remaining: list[Block]


def stage_of(block: str) -> str:
    """The module that contains a block."""
    return block.rpartition(".")[0]


def standard_blocks(model: nn.Module, family: Family) -> dict[str, list[Block]]:
    """Stage -> its blocks in order; a hybrid of an earlier step is one block.

    Raises PlanError if attentions and FFNs do not alternate, because an earlier step removed one of them alone.
    """
    parts: dict[str, list[Site]] = {stage_of(path): [] for path in family.blocks(model)}
    for site in family.sites(model):
        if site.kind in ("attention", "ffn"):
            parts[stage_of(site.block)].append(site)
    for stage, sites in parts.items():
        if [site.kind for site in sites] != ["attention", "ffn"] * (len(sites) // 2):
            raise PlanError(
                f"the attentions and FFNs in {stage} do not alternate, so they form no standard blocks",
                hint="prune blocks before a step that removes attentions or FFNs alone",
            )
    return {stage: list(map(Block, sites[::2], sites[1::2])) for stage, sites in parts.items()}


def candidates(stage: str, blocks: Sequence[Block]) -> Iterator[Candidate]:
    """The 2L - 1 ways in which a stage of L blocks can lose one; none for the last block."""
    for number, block in enumerate(blocks if len(blocks) > 1 else ()):
        before, after = blocks[:number], blocks[number + 1 :]
        yield Candidate(f"block {' + '.join(block.parts)}", block.parts, stage, [*before, *after])
        if after:
            removed = (block.ffn.name, after[0].attention.name)
            hybrid = Block(block.attention, after[0].ffn)
            yield Candidate(f"hybrid: {' and '.join(removed)}", removed, stage, [*before, hybrid, *after[1:]])


def drop_sites(base: Plan, names: Sequence[str]) -> Plan:
    """The plan that drops these blocks, attentions and FFNs, in addition to `base`."""
    return base.delta(removed=dict.fromkeys(names, "drop"))


@torch.inference_mode()
def block_scores(model: nn.Module, plans: Sequence[Plan], reference: Plan, loader: EvalLoader) -> Tensor:
    """KL divergence of the outputs after each of `plans` from those after `reference`, summed over the images of this
    process: (plans,), float64.
    """
    shared = {id(parameter): parameter for parameter in model.parameters()}  # by all copies, which lack some modules
    base, *changed = (surgery.apply_plan(deepcopy(model, {**shared}), plan).eval() for plan in (reference, *plans))
    total = torch.zeros(len(plans), dtype=torch.float64)
    for batch, _ in loader:
        images = batch.to(next(model.parameters()).dtype)
        logits = base(images)
        total += torch.cat([divergence(logits, one(images)) for one in changed]).cpu()
    return total
