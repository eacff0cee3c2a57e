"""timm's Eva: DINOv3, EVA, ViTs with rotary position embeddings, Perception Encoder; timm's Beit: BEiT, BEiTv2.

Tokens and heads are those of a VisionTransformer. A rotary embedding rotates q and k in pairs of channels, each with a
frequency that depends on its place in the head, so their channels can only be removed with the whole head. LayerScales
are parameters of the block.
"""

from copy import copy, deepcopy
from dataclasses import replace
from typing import Any, ClassVar, cast

from timm.layers import AttentionPoolLatent, AttentionRope, GluMlp, Mlp, SwiGLU
from timm.models.beit import Attention, Beit, Block
from timm.models.eva import Eva, EvaAttention, EvaBlock
from torch import Tensor, nn

from vitcompress.families.attention import SlicedPool, SlicedPositionAttention, SlicedRotaryAttention
from vitcompress.families.base import Described, join_layers, join_parameters
from vitcompress.families.edited_block import Wiring
from vitcompress.families.gated_ffn import pack
from vitcompress.families.vit import VitFamily


class RotaryTable(nn.Module):
    """A rotary embedding for one grid of patches, precomputed."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def get_embed(self, shape: list[int] | None = None) -> Tensor:
        """Sines and cosines of each patch, (patches, 2 x channels of a head)."""
        return self.table


class EvaFamily(VitFamily):
    """A VisionTransformer with rotary positions, LayerScales as parameters, and separate biases of q, k and v."""

    name = "eva"
    supported = "timm Eva models (DINOv3, EVA-02, rotary ViTs) with pre-norm blocks, LayerNorm, two-layer or gated MLPs"
    model_type = Eva
    block_type = EvaBlock
    sliced: ClassVar = {
        EvaAttention: SlicedRotaryAttention,
        AttentionRope: SlicedRotaryAttention,
        AttentionPoolLatent: SlicedPool,
    }
    ffn_types: tuple[type, ...] = (Mlp, GluMlp, SwiGLU)
    wiring = Wiring(
        branches=(("norm1", "attn", "gamma_1", "drop_path1"), ("norm2", "mlp", "gamma_2", "drop_path2")),
        takes_arguments=frozenset({"attn"}),
    )

    def problem(self, model: Any) -> str | None:
        if isinstance(model, Eva) and model.rope_mixed:
            return "each of its layers rotates q and k by its own frequencies (mixed rotary embedding)"
        return super().problem(model)

    def describe_attention(self, model: Any, path: str, attn: Any) -> Described:
        """With a rotary embedding, q and k are pruned by heads."""
        (qk, v), stream = super().describe_attention(model, path, attn)
        return [replace(qk, whole_heads=getattr(model, "rope", None) is not None), v], stream

    def prepare(self, model: nn.Module) -> None:
        """Join separate layers or biases of q, k and v, and the layers of gate and values of an FFN.

        With separate biases timm uses only the weight of the `qkv` layer, so no hook on the layer would run.
        """
        for module in [*model.modules()]:
            attn: Any = module
            if isinstance(mlp := getattr(module, "mlp", None), SwiGLU):
                module.mlp = pack(mlp)
            if isinstance(getattr(attn, "q_proj", None), nn.Linear):
                attn.qkv = join_layers(attn.q_proj, attn.k_proj, attn.v_proj)
                attn.q_proj = attn.k_proj = attn.v_proj = None
            if getattr(attn, "q_bias", None) is not None and isinstance(attn.qkv, nn.Linear):
                attn.qkv.bias = join_parameters(attn.q_bias, attn.k_bias, attn.v_bias)
                attn.q_bias = attn.k_bias = attn.v_bias = None

    def at_size(self, model: Any, height: int, width: int) -> nn.Module:
        """A shallow copy with a rotary table for this size, so that an exported file contains no trigonometry."""
        if getattr(model, "rope", None) is None:
            return cast(nn.Module, model)
        sized = copy(model)
        sized._modules = dict(model._modules)
        grid, rope = model.patch_embed.dynamic_feat_size((height, width)), deepcopy(model.rope).eval()
        sized.rope = RotaryTable(rope.get_embed(shape=list(grid)))
        return cast(nn.Module, sized)


class BeitFamily(EvaFamily):
    """An Eva model without rotary positions: every attention adds a table of biases by relative position to its scores,
    one column per head, and has separate biases for q, k (always zero) and v.
    """

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


EVA, BEIT = EvaFamily(), BeitFamily()
