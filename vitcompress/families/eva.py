"""timm's Eva: DINOv3, ViTs with rotary position embeddings, Perception Encoder; found by structure.

Tokens and heads are a VisionTransformer's. A rotary embedding turns q and k in pairs of channels, each pair by a
frequency of its place in the head, so their channels go only with their head. LayerScales are parameters of the block.
"""

from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any, cast

import torch
from timm.layers import AttentionRope, GluMlp, Mlp, PatchEmbed, apply_rot_embed_cat
from timm.models.eva import Eva, EvaAttention, EvaBlock
from torch import Tensor, nn

from vitcompress.families import attention_pool, blocks, vit
from vitcompress.families.base import Axis, Family, Part, Space, Wiring, children

SUPPORTED = (
    "timm Eva models (DINOv3, rotary ViTs) with pre-norm blocks, one layer for q, k and v, a two-layer or gated MLP "
    "and LayerNorm"
)
SCALES = {"gamma_1": "attn", "gamma_2": "mlp"}  # and the branch that they scale


def parts(block: nn.Module) -> Mapping[str, Part]:
    """Its modules, and its LayerScales, which are None where it has none."""
    return {**children(block), **{name: getattr(block, name) for name in SCALES}}


WIRING = Wiring(
    branches=(("norm1", "attn", "gamma_1", "drop_path1"), ("norm2", "mlp", "gamma_2", "drop_path2")),
    attention="attn",
    ffn="mlp",
    takes_arguments=frozenset({"attn"}),
    parts=parts,
)


class SlicedRotaryAttention(vit.SlicedAttention):
    """`vit.SlicedAttention` whose q and k are turned by the position of their patch; prefix tokens have none."""

    def __init__(self, dense: Any, qk_dim: int, v_dim: int, num_heads: int) -> None:
        super().__init__(dense, qk_dim, v_dim, num_heads)
        self.num_prefix_tokens, self.rotate_half = dense.num_prefix_tokens, dense.rotate_half

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, rope: Tensor | None = None
    ) -> Tensor:
        """x: normalised tokens, (batch, tokens, channels) -> the same shape. rope: sines and cosines of each patch."""
        q, k, v = self.by_head(x)
        if rope is not None:
            q, k = (self._turned(part, rope).type_as(v) for part in (q, k))
        return self.attended(q, k, v, attn_mask, is_causal)

    def _turned(self, part: Tensor, rope: Tensor) -> Tensor:
        prefix, patches = part[:, :, : self.num_prefix_tokens], part[:, :, self.num_prefix_tokens :]
        return torch.cat([prefix, apply_rot_embed_cat(patches, rope, half=self.rotate_half)], dim=2)


ATTENTIONS = (EvaAttention, AttentionRope, SlicedRotaryAttention)


class RotaryTable(nn.Module):
    """A rotary embedding for one grid of patches: what timm computes from the grid, as a table."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def get_embed(self, shape: list[int] | None = None) -> Tensor:
        """Sines and cosines of each patch, (patches, 2 x channels of a head)."""
        return self.table


def at_size(model: Any, height: int, width: int) -> nn.Module:
    """A shallow copy with a table of the positions; the sines and cosines of a file are then told from its weights."""
    if model.rope is None:
        return cast(nn.Module, model)
    found = copy(model)
    found._modules = dict(model._modules)
    grid, rope = model.patch_embed.dynamic_feat_size((height, width)), deepcopy(model.rope).eval()
    found.rope = RotaryTable(rope.get_embed(shape=list(grid)))
    return cast(nn.Module, found)


def refuses(model: nn.Module) -> str | None:
    """None, or the first thing about `model` that the family does not cover."""
    if not isinstance(model, Eva):
        return f"it is a {type(model).__name__}"
    if model.rope_mixed:
        return "each of its layers turns q and k by frequencies of its own (mixed rotary embedding)"
    if not isinstance(model.patch_embed, PatchEmbed):
        return f"its stem is a {type(model.patch_embed).__name__}"
    reasons = (*map(_block_refusal, model.blocks), attention_pool.refusal(model.attn_pool, vit.width(model)))
    return next((reason for reason in reasons if reason), None) or blocks.norms_refusal(model)


def _block_refusal(block: Any) -> str | None:
    if refusal := blocks.part_refusal(block, EvaBlock, ATTENTIONS, (Mlp, GluMlp, nn.Linear)):
        return refusal
    return _attention_refusal(getattr(block, "attn", None)) or blocks.ffn_refusal(getattr(block, "mlp", None))


def _attention_refusal(attn: Any) -> str | None:
    if attn is None or isinstance(attn, SlicedRotaryAttention):
        return None
    if not isinstance(attn.qkv, nn.Linear):
        return "its q, k and v have a layer each"
    if getattr(attn, "q_bias", None) is not None:
        return "the biases of its q and v are apart from their layer"
    return None if blocks.plain(attn.q_norm, attn.k_norm, attn.norm, attn.gate) else blocks.NORMED_ATTENTION


def spaces(model: Any) -> tuple[Space, ...]:
    """As in a VisionTransformer; the LayerScales are parameters of the blocks."""
    gammas = [
        Axis(f"{path}.{name}", 0)
        for path, block in vit.blocks(model).items()
        for name in SCALES
        if getattr(block, name, None) is not None
    ]
    return vit.spaces_with(model, packed_attention, gammas)


def packed_attention(model: nn.Module, path: str, attn: Any) -> tuple[list[Space], list[Axis]]:
    """`common.packed_attention`; where there are rotary embeddings, q and k go by heads."""
    (qk, v), stream = blocks.packed_attention(model, path, attn)
    return [replace(qk, whole_heads=model.rope is not None), v], stream


def scales(model: nn.Module) -> dict[str, str]:
    """LayerScales that directly follow a linear layer. Without its attention, a LayerScale follows a norm and stays."""
    found: dict[str, str] = {}
    for path, block in vit.blocks(model).items():
        for name, part in SCALES.items():
            if getattr(block, name, None) is not None and hasattr(block, part):
                found[f"{path}.{name}"] = blocks.last_linear(f"{path}.{part}", getattr(block, part))
    return found


def slice_attention(attn: nn.Module, qk_dim: int, v_dim: int, num_heads: int) -> nn.Module:
    """SlicedRotaryAttention; or a pool, see `pooling`."""
    if isinstance(attn, ATTENTIONS):
        return SlicedRotaryAttention(attn, qk_dim, v_dim, num_heads)
    return attention_pool.slice_pool(attn, qk_dim, v_dim, num_heads)


EVA = Family(
    name="eva",
    supported=SUPPORTED,
    wiring=WIRING,
    refuses=refuses,
    blocks=vit.blocks,
    sites=vit.sites,
    spaces=spaces,
    slice_attention=slice_attention,
    resized=vit.resized,
    linear_pair=blocks.linear_pair,
    scales=scales,
    entry=vit.entry,
    at_size=at_size,
)
