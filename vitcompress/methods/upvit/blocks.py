"""Block pruning: one block at a time, the one whose loss moves the answers least.

UP-ViT, appendix C. Of L blocks there are 2L - 1 ways to lose one: drop block i whole, or drop the FFN of block k and
the attention of block k + 1, which leaves one *hybrid* block, the attention of k before the FFN of k + 1. Hybrids do
not cross stages. After each removal everything is measured again on what is left.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitcompress import surgery
from vitcompress.errors import PlanError
from vitcompress.families import Family, Site
from vitcompress.methods.upvit.importance import divergence
from vitcompress.methods.upvit.target import stage_of
from vitcompress.plan import Plan
from vitcompress.training.loaders import EvalLoader


@dataclass(frozen=True)
class Block:
    """An attention and the FFN behind it, of the same dense block or of two."""

    attention: Site
    ffn: Site

    @property
    def name(self) -> str:
        same = self.attention.block == self.ffn.block
        return self.attention.block if same else f"{self.attention.name} + {self.ffn.name}"


@dataclass(frozen=True)
class Candidate:
    """One way to lose a block: what goes, and the words for it."""

    title: str
    removed: tuple[str, ...]
    stage: str


def whole_blocks(model: nn.Module, family: Family) -> dict[str, list[Block]]:
    """Stage -> its blocks in order, hybrids of earlier steps counted as one.

    Raises:
        PlanError: attentions and FFNs do not alternate, because an earlier step removed one of them alone.
    """
    parts: dict[str, list[Site]] = {stage_of(path): [] for path in family.blocks(model)}
    for site in family.sites(model):
        if site.kind in ("attention", "ffn"):
            parts[stage_of(site.block)].append(site)
    found: dict[str, list[Block]] = {}
    for stage, sites in parts.items():
        kinds = [site.kind for site in sites]
        if kinds != ["attention", "ffn"] * (len(kinds) // 2):
            raise PlanError(
                f"the attentions and FFNs in {stage} do not alternate, so they make no standard blocks",
                hint="prune blocks before a step that removes attentions or FFNs alone",
            )
        found[stage] = [Block(a, f) for a, f in zip(sites[::2], sites[1::2], strict=True)]
    return found


def candidates(blocks: Sequence[Block]) -> list[Candidate]:
    """The 2L - 1 ways in which a stage of L blocks can lose one; none for the last block."""
    if len(blocks) < 2:
        return []
    found = []
    for number, block in enumerate(blocks):
        stage = stage_of(block.attention.block)
        found.append(Candidate(f"block {block.name}", _whole(block), stage))
        if number + 1 < len(blocks):
            following = blocks[number + 1]
            gone = (block.ffn.name, following.attention.name)
            found.append(Candidate(f"hybrid: {gone[0]} and {gone[1]}", gone, stage))
    return found


def _whole(block: Block) -> tuple[str, ...]:
    same = block.attention.block == block.ffn.block
    return (block.attention.block,) if same else (block.attention.name, block.ffn.name)


def without(blocks: Mapping[str, Sequence[Block]], candidate: Candidate) -> dict[str, list[Block]]:
    """The blocks that are left after `candidate`; a hybrid joins two."""
    found = {stage: list(of) for stage, of in blocks.items()}
    own = found[candidate.stage]
    for number, block in enumerate(own):
        if _whole(block) == candidate.removed:
            del own[number]
            return found
        if candidate.removed[0] == block.ffn.name:
            own[number : number + 2] = [Block(block.attention, own[number + 1].ffn)]
            return found
    raise AssertionError(candidate)


def removal(removed: Sequence[str], base: Plan) -> Plan:
    """The plan that drops these blocks, attentions and FFNs; what lies in a dropped block is not named again."""
    kept = [name for name in removed if not any(name.startswith(f"{outer}.") for outer in removed)]
    return Plan(base.arch, base.arch_args, removed=dict.fromkeys(kept, "drop"))


@torch.inference_mode()
def scores(model: nn.Module, plans: Sequence[Plan], reference: Plan, loader: EvalLoader) -> Tensor:
    """KL of the answers after each of `plans` from those after `reference`, summed over this process's share of the
    images: (plans,), float64.
    """
    dtype = next(model.parameters()).dtype
    changed = [_over_the_same_weights(model, plan) for plan in plans]
    base = _over_the_same_weights(model, reference)
    total = torch.zeros(len(plans), dtype=torch.float64)
    for batch, _ in loader:
        images = batch.to(dtype)
        logits = base(images)
        total += torch.cat([divergence(logits, one(images)) for one in changed]).cpu()
    return total


def _over_the_same_weights(model: nn.Module, plan: Plan) -> nn.Module:
    """`model` after `plan`, which removes modules only, without a copy of a single weight."""
    copy = deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    return surgery.apply_plan(copy, plan).eval()
