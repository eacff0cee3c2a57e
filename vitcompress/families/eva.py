"""timm's Eva: DINOv3, EVA, ViTs with rotary position embeddings, Perception Encoder.

Tokens and heads are those of a VisionTransformer. A rotary embedding rotates q and k in pairs of channels, each with a
frequency that depends on its place in the head, so their channels can only be removed with the whole head. LayerScales
are parameters of the block.
"""

from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any, cast

from timm.layers import AttentionRope, GluMlp, Mlp, PatchEmbed
from timm.models.eva import Eva, EvaAttention, EvaBlock
from torch import Tensor, nn

from vitcompress.families import blocks as shared
from vitcompress.families import vit
from vitcompress.families.attention import SlicedRotaryAttention
from vitcompress.families.attention_pool import pool_problem, slice_pool
from vitcompress.families.base import Axis, Family, Part, Space, Wiring, children

SUPPORTED = (
    "timm Eva models (DINOv3, EVA, rotary ViTs) with pre-norm blocks, one layer for q, k and v, a two-layer or gated "
    "MLP and LayerNorm"
)
ATTENTIONS = (EvaAttention, AttentionRope, SlicedRotaryAttention)


def parts(block: nn.Module) -> Mapping[str, Part]:
    """The modules of a block and its LayerScales, which are parameters or None."""
    return {**children(block), **{name: getattr(block, name) for name in ("gamma_1", "gamma_2")}}


WIRING = Wiring(
    branches=(("norm1", "attn", "gamma_1", "drop_path1"), ("norm2", "mlp", "gamma_2", "drop_path2")),
    attention="attn",
    ffn="mlp",
    takes_arguments=frozenset({"attn"}),
    parts=parts,
)


class RotaryTable(nn.Module):
    """A rotary embedding for one grid of patches, precomputed."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def get_embed(self, shape: list[int] | None = None) -> Tensor:
        """Sines and cosines of each patch, (patches, 2 x channels of a head)."""
        return self.table


def at_size(model: Any, height: int, width: int) -> nn.Module:
    """A shallow copy with a rotary table for this size, so that an exported file contains no trigonometry."""
    if model.rope is None:
        return cast(nn.Module, model)
    sized = copy(model)
    sized._modules = dict(model._modules)
    grid, rope = model.patch_embed.dynamic_feat_size((height, width)), deepcopy(model.rope).eval()
    sized.rope = RotaryTable(rope.get_embed(shape=list(grid)))
    return cast(nn.Module, sized)


def problem(model: Any) -> str | None:
    """Why the family does not support `model`, or None."""
    if isinstance(model, Eva) and model.rope_mixed:
        return "each of its layers rotates q and k by its own frequencies (mixed rotary embedding)"
    return shared.model_problem(model, Eva, PatchEmbed, vit.blocks, _block_problem) or pool_problem(
        model.attn_pool, vit.width(model)
    )


def _block_problem(block: Any) -> str | None:
    attn = getattr(block, "attn", None)
    if isinstance(attn, EvaAttention | AttentionRope):
        if not isinstance(attn.qkv, nn.Linear):
            return "its q, k and v have separate layers"
        if not shared.is_empty(attn.q_norm, attn.k_norm, attn.norm, attn.gate):
            return shared.NORMED_ATTENTION
    return shared.part_problem(block, EvaBlock, ATTENTIONS, (Mlp, GluMlp))


def spaces(model: Any) -> tuple[Space, ...]:
    """As in a VisionTransformer; with a rotary embedding, q and k are pruned by heads."""
    return vit.spaces(model, _attention)


def _attention(model: Any, path: str, attn: Any) -> tuple[list[Space], list[Axis]]:
    (qk, v), stream = shared.packed_attention(model, path, attn)
    return [replace(qk, whole_heads=model.rope is not None), v], stream


def slice_attention(attn: nn.Module, qk_dim: int, v_dim: int, num_heads: int) -> nn.Module:
    """SlicedRotaryAttention; for a pool see `slice_pool`."""
    if isinstance(attn, ATTENTIONS):
        return SlicedRotaryAttention(attn, qk_dim, v_dim, num_heads)
    return slice_pool(attn, qk_dim, v_dim, num_heads)


EVA = Family(
    name="eva",
    supported=SUPPORTED,
    wiring=WIRING,
    problem=problem,
    blocks=vit.blocks,
    sites=vit.sites,
    spaces=spaces,
    slice_attention=slice_attention,
    set_width=vit.set_width,
    prepare=shared.pack_biases,
    timm_state=shared.unpack_biases,
    linear_pair=shared.linear_pair,
    scales=vit.scales,
    entry=vit.entry,
    at_size=at_size,
)
