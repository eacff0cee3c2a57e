"""timm's Beit: BEiT and BEiTv2.

Tokens and heads are those of a VisionTransformer, LayerScales are parameters of the block. Every attention adds a table
of biases by relative position to its scores, one column per head, and has separate biases for q, k (always zero) and v,
which `prepare` moves into the qkv layer.
"""

from typing import Any

from timm.layers import Mlp, PatchEmbed
from timm.models.beit import Attention, Beit, Block
from torch import nn

from vitcompress.families import blocks as shared
from vitcompress.families import eva, vit
from vitcompress.families.attention import SlicedPositionAttention
from vitcompress.families.base import Family

SUPPORTED = "timm Beit models (BEiT, BEiTv2) with two-layer MLPs, LayerNorm and one position table per block"


def problem(model: Any) -> str | None:
    """Why the family does not support `model`, or None."""
    if isinstance(model, Beit) and model.rel_pos_bias is not None:
        return "its blocks share one table of relative positions, so that no head of one block can be removed alone"
    return shared.model_problem(model, Beit, PatchEmbed, vit.blocks, _block_problem)


def _block_problem(block: nn.Module) -> str | None:
    return shared.part_problem(block, Block, (Attention, SlicedPositionAttention), (Mlp,))


BEIT = Family(
    name="beit",
    supported=SUPPORTED,
    wiring=eva.WIRING,
    problem=problem,
    blocks=vit.blocks,
    sites=vit.sites,
    spaces=vit.spaces,
    slice_attention=SlicedPositionAttention,
    set_width=vit.set_width,
    prepare=shared.pack_biases,
    timm_state=shared.unpack_biases,
    linear_pair=shared.linear_pair,
    scales=vit.scales,
    entry=vit.entry,
)
