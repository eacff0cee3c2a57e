"""timm's Beit: BEiT and BEiTv2.

Tokens and heads are those of a VisionTransformer, LayerScales are parameters of the block. Every attention adds a table
of biases by relative position to its scores, one column per head, and has separate biases for q, k (always zero) and v.
"""

from typing import Any, ClassVar

from timm.layers import Mlp
from timm.models.beit import Attention, Beit, Block

from vitcompress.families.attention import SlicedPositionAttention
from vitcompress.families.eva import EvaFamily


class BeitFamily(EvaFamily):
    """An Eva model whose attentions have position tables."""

    name = "beit"
    supported = "timm Beit models (BEiT, BEiTv2) with two-layer MLPs, LayerNorm and one position table per block"
    model_type = Beit
    block_type = Block
    sliced: ClassVar = {Attention: SlicedPositionAttention}
    ffn_types = (Mlp,)
    fixed_size = True

    def problem(self, model: Any) -> str | None:
        if isinstance(model, Beit) and model.rel_pos_bias is not None:
            return "its blocks share one table of relative positions, so that no head of one block can be removed alone"
        return super().problem(model)


BEIT = BeitFamily()
