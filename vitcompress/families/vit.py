"""timm's VisionTransformer: ViT, DeiT (one or two heads), DeiT-III, DINOv2, SigLIP; found by structure."""

from collections.abc import Sequence
from typing import Any

from timm.layers import Attention, AttentionPoolLatent, GluMlp, LayerScale, Mlp, PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from vitcompress.families import attention_pool
from vitcompress.families import blocks as shared
from vitcompress.families.base import Axis, Family, Site, Space, Wiring, input_axis, linear_axes, norm_axes
from vitcompress.families.blocks import (
    NORMED_ATTENTION,
    Describe,
    block_sites,
    block_spaces,
    ffn_refusal,
    last_linear,
    linear_pair,
    norms_refusal,
    packed_attention,
    part_refusal,
    plain,
)

SUPPORTED = (
    "timm VisionTransformers with pre-norm blocks of multi-head attention (with or without qkv bias) and a two-layer "
    "or gated MLP, LayerNorm, with or without LayerScale, register tokens, pre-norm, distillation head, class token, "
    "pooled or pooled by attention to a latent"
)
WIRING = Wiring(
    branches=(("norm1", "attn", "ls1", "drop_path1"), ("norm2", "mlp", "ls2", "drop_path2")),
    attention="attn",
    ffn="mlp",
    takes_arguments=frozenset({"attn"}),
)
HEADS = ("head", "head_dist")
TOKENS = ("cls_token", "reg_token", "dist_token", "pos_embed")


class SlicedAttention(nn.Module):
    """Multi-head self-attention with any widths of q/k and v, over timm's `qkv` and `proj`, at the dense softmax scale.

    Keeping the scale of the dense model is what makes a sliced attention equal to the masked one.
    """

    def __init__(self, dense: Any, qk_dim: int, v_dim: int, num_heads: int) -> None:
        super().__init__()
        self.qkv, self.proj = dense.qkv, dense.proj
        self.attn_drop, self.proj_drop = dense.attn_drop, dense.proj_drop
        self.qk_dim, self.v_dim, self.num_heads = qk_dim, v_dim, num_heads
        self.head_dim, self.attn_dim = v_dim // num_heads, v_dim
        self.scale = dense.scale
        self.padded = getattr(dense, "padded", False)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x: normalised tokens, (batch, tokens, channels) -> the same shape."""
        return self.attended(*self.by_head(x), attn_mask, is_causal)

    def by_head(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of tokens: (batch, heads, tokens, channels of a head) each."""
        batch, tokens, _ = x.shape
        parts = self.qkv(x).split((self.qk_dim, self.qk_dim, self.v_dim), dim=-1)
        q, k, v = (part.reshape(batch, tokens, self.num_heads, -1).transpose(1, 2) for part in parts)
        return q, k, v

    def attended(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """What the attention writes, (batch, tokens, channels), from what `by_head` gives."""
        drop = self.attn_drop.p if self.training else 0.0
        return shared.attended(self, q, k, v, attn_mask=attn_mask, dropout_p=drop, is_causal=is_causal)


def refuses(model: nn.Module) -> str | None:
    """None, or the first thing about `model` that the family does not cover."""
    if not isinstance(model, VisionTransformer):
        return f"it is a {type(model).__name__}"
    if not isinstance(model.patch_embed, PatchEmbed):
        return f"its stem is a {type(model.patch_embed).__name__}"
    reasons = (*map(_block_refusal, model.blocks), attention_pool.refusal(model.attn_pool, width(model)))
    return next((reason for reason in reasons if reason), None) or norms_refusal(model)


def _block_refusal(block: Any) -> str | None:
    if refusal := part_refusal(block, Block, (Attention, SlicedAttention), (Mlp, GluMlp, nn.Linear)):
        return refusal
    attn = getattr(block, "attn", None)
    if isinstance(attn, Attention) and not plain(attn.q_norm, attn.k_norm, attn.norm, attn.gate):
        return NORMED_ATTENTION
    return ffn_refusal(getattr(block, "mlp", None))


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that are left, by path."""
    return {f"blocks.{name}": block for name, block in model.get_submodule("blocks").named_children()}


def sites(model: nn.Module) -> tuple[Site, ...]:
    """Per block: attention, activation, FFN and the block itself, as far as they are there."""
    found: list[Site] = []
    for path, block in blocks(model).items():
        found += block_sites(path, block, int(path.rsplit(".", 1)[1]))
    return tuple(found)


def spaces(model: Any) -> tuple[Space, ...]:
    """q/k, v and FFN hidden channels of every block and of a pool, then the residual stream they all read and write."""
    return spaces_with(model, packed_attention)


def spaces_with(model: Any, attention: Describe, more: Sequence[Axis] = ()) -> tuple[Space, ...]:
    """`spaces`, with `attention` to describe attentions, and `more` axes that run over the residual stream."""
    inner: list[Space] = []
    residual: list[Axis] = [*_stem_axes(model), *more]
    for path, block in blocks(model).items():
        own, axes = block_spaces(model, path, block, ("norm1", "ls1", "norm2", "ls2"), attention)
        inner += own
        residual += axes
    if model.attn_pool is not None:
        own, axes = attention_pool.describe(model, "attn_pool", model.attn_pool)
        inner += own
        residual += axes
    residual += [axis for name in ("norm", "fc_norm") for axis in norm_axes(model, name)]
    residual += [input_axis(name) for name in HEADS if isinstance(getattr(model, name, None), nn.Linear)]
    return (*inner, Space("residual", "residual", width(model), tuple(residual)))


def _stem_axes(model: nn.Module) -> tuple[Axis, ...]:
    tokens = tuple(Axis(name, 2) for name in TOKENS if getattr(model, name, None) is not None)
    return (
        *tokens,
        *linear_axes(model, "patch_embed.proj"),
        *norm_axes(model, "patch_embed.norm"),
        *norm_axes(model, "norm_pre"),
    )


def width(model: Any) -> int:
    return int(model.patch_embed.proj.out_channels)


def scales(model: nn.Module) -> dict[str, str]:
    """LayerScales that directly follow a linear layer. Without its attention, a LayerScale follows a norm and stays."""
    found: dict[str, str] = {}
    for path, block in blocks(model).items():
        if isinstance(getattr(block, "ls1", None), LayerScale) and hasattr(block, "attn"):
            found[f"{path}.ls1"] = last_linear(f"{path}.attn", block.attn)
        if isinstance(getattr(block, "ls2", None), LayerScale) and hasattr(block, "mlp"):
            found[f"{path}.ls2"] = last_linear(f"{path}.mlp", block.mlp)
    return found


def resized(model: Any, space: str, width: int) -> None:
    """Store the residual width where timm reads it."""
    model.embed_dim = model.num_features = model.head_hidden_size = width
    for entry in model.feature_info:
        entry["num_chs"] = width


def entry(model: Any) -> tuple[str, ...]:
    """The position embedding where it covers all tokens, else the patches' bias and every token of the model's own."""
    tokens = tuple(name for name in TOKENS if name != "pos_embed" and getattr(model, name, None) is not None)
    stem, positions = model.patch_embed, model.pos_embed
    if not plain(model.norm_pre):
        return ()
    if positions is not None and positions.shape[1] == stem.num_patches + model.num_prefix_tokens:
        return ("pos_embed",)
    return ("patch_embed.proj.bias", *tokens) if stem.proj.bias is not None and plain(stem.norm) else ()


def slice_attention(attn: Any, qk_dim: int, v_dim: int, num_heads: int) -> nn.Module:
    """timm's own attention while heads keep their width, else SlicedAttention; or a pool, see `pooling`."""
    if isinstance(attn, AttentionPoolLatent | attention_pool.SlicedPool):
        return attention_pool.slice_pool(attn, qk_dim, v_dim, num_heads)
    if type(attn) is Attention and qk_dim == v_dim and v_dim == num_heads * attn.head_dim:
        attn.num_heads, attn.attn_dim = num_heads, v_dim
        dense: nn.Module = attn
        return dense
    return SlicedAttention(attn, qk_dim, v_dim, num_heads)


VIT = Family(
    name="vit",
    supported=SUPPORTED,
    wiring=WIRING,
    refuses=refuses,
    blocks=blocks,
    sites=sites,
    spaces=spaces,
    slice_attention=slice_attention,
    resized=resized,
    linear_pair=linear_pair,
    scales=scales,
    entry=entry,
)
