"""timm's VisionTransformer: ViT, DeiT (one or two heads), DeiT-III, DINOv2, SigLIP."""

from typing import Any

from timm.layers import Attention, AttentionPoolLatent, GluMlp, Mlp, PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from vitcompress.families import blocks as shared
from vitcompress.families.attention import SlicedAttention
from vitcompress.families.attention_pool import SlicedPool, pool_problem, pool_spaces, slice_pool
from vitcompress.families.base import Axis, Family, Site, Space, Wiring, input_axis, linear_axes, norm_axes

SUPPORTED = (
    "timm VisionTransformers with pre-norm blocks of multi-head attention (with or without qkv bias) and a two-layer "
    "or gated MLP, LayerNorm, with or without LayerScale, register tokens, pre-norm, distillation head, class token, "
    "average or attention pooling"
)
WIRING = Wiring(
    branches=(("norm1", "attn", "ls1", "drop_path1"), ("norm2", "mlp", "ls2", "drop_path2")),
    attention="attn",
    ffn="mlp",
    takes_arguments=frozenset({"attn"}),
)
HEADS = ("head", "head_dist")
TOKENS = ("cls_token", "reg_token", "dist_token")


def problem(model: Any) -> str | None:
    """Why the family does not support `model`, or None."""
    return shared.model_problem(model, VisionTransformer, PatchEmbed, blocks, _block_problem) or pool_problem(
        model.attn_pool, width(model)
    )


def _block_problem(block: Any) -> str | None:
    attn = getattr(block, "attn", None)
    if isinstance(attn, Attention) and not shared.is_empty(attn.q_norm, attn.k_norm, attn.norm, attn.gate):
        return shared.NORMED_ATTENTION
    return shared.part_problem(block, Block, (Attention, SlicedAttention), (Mlp, GluMlp))


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The remaining blocks by path."""
    return {f"blocks.{name}": block for name, block in model.get_submodule("blocks").named_children()}


def sites(model: nn.Module) -> tuple[Site, ...]:
    """Attention, activation, FFN and block, for every remaining block."""
    return shared.list_sites(blocks(model))


def spaces(model: Any, attention: shared.Describe = shared.packed_attention) -> tuple[Space, ...]:
    """q/k, v and FFN hidden channels of every block and of a pool, then the residual stream.

    attention: describes the attention of a block.
    """
    inner, axes = shared.block_spaces(model, blocks(model), attention)
    tokens = [Axis(name, 2) for name in (*TOKENS, "pos_embed") if getattr(model, name, None) is not None]
    residual = [*tokens, *linear_axes(model, "patch_embed.proj"), *_norm_axes(model, "patch_embed.norm", "norm_pre")]
    residual += [axis for own in axes.values() for axis in own]
    if (pool := getattr(model, "attn_pool", None)) is not None:
        own, pool_axes = pool_spaces(model, "attn_pool", pool)
        inner += own
        residual += pool_axes
    residual += _norm_axes(model, "norm", "fc_norm")
    residual += [input_axis(name) for name in HEADS if isinstance(getattr(model, name, None), nn.Linear)]
    return (*inner, Space("residual", "residual", width(model), tuple(residual)))


def _norm_axes(model: nn.Module, *names: str) -> list[Axis]:
    present = (name for name in names if hasattr(model, name.partition(".")[0]))
    return [axis for name in present for axis in norm_axes(model, name)]


def width(model: Any) -> int:
    """Channels of the residual stream."""
    return int(model.patch_embed.proj.out_channels)


def scales(model: nn.Module) -> dict[str, str]:
    """LayerScales that directly follow a linear layer, see `Family`."""
    return shared.list_scales(blocks(model))


def set_width(model: Any, space: str, width: int) -> None:
    """Store the width of the residual stream in the attributes that timm reads."""
    model.embed_dim = model.num_features = model.head_hidden_size = width
    for entry in model.feature_info:
        entry["num_chs"] = width


def entry(model: Any) -> tuple[str, ...]:
    """The position embedding if it covers all tokens, else the bias of the patches and the model's own tokens."""
    tokens = tuple(name for name in TOKENS if getattr(model, name, None) is not None)
    stem, positions = model.patch_embed, model.pos_embed
    if not shared.is_empty(getattr(model, "norm_pre", None)):
        return ()
    if positions is not None and positions.shape[1] == stem.num_patches + model.num_prefix_tokens:
        return ("pos_embed",)
    return ("patch_embed.proj.bias", *tokens) if stem.proj.bias is not None and shared.is_empty(stem.norm) else ()


def slice_attention(attn: Any, qk_dim: int, v_dim: int, num_heads: int) -> nn.Module:
    """timm's own attention while heads keep their width, else SlicedAttention; for a pool see `slice_pool`."""
    if isinstance(attn, AttentionPoolLatent | SlicedPool):
        return slice_pool(attn, qk_dim, v_dim, num_heads)
    if type(attn) is Attention and qk_dim == v_dim and v_dim == num_heads * attn.head_dim:
        attn.num_heads, attn.attn_dim = num_heads, v_dim
        dense: nn.Module = attn
        return dense
    return SlicedAttention(attn, qk_dim, v_dim, num_heads)


VIT = Family(
    name="vit",
    supported=SUPPORTED,
    wiring=WIRING,
    problem=problem,
    blocks=blocks,
    sites=sites,
    spaces=spaces,
    slice_attention=slice_attention,
    set_width=set_width,
    linear_pair=shared.linear_pair,
    scales=scales,
    entry=entry,
)
