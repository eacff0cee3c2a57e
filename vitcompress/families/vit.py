"""timm's VisionTransformer: ViT, DeiT (one or two heads), DeiT-III, DINOv2, SigLIP."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from timm.layers import Attention, AttentionPoolLatent, GluMlp, Mlp
from timm.models.vision_transformer import Block, VisionTransformer

from vitcompress.families import base
from vitcompress.families.attention import SlicedAttention, SlicedPool
from vitcompress.families.edited_block import Wiring

TOKENS = ("cls_token", "reg_token", "dist_token")


class VitFamily(base.Family):
    """One residual stream, prefix tokens, two LayerScales per block, and possibly an attention pool."""

    name = "vit"
    supported = (
        "timm VisionTransformers with pre-norm blocks of multi-head attention (with or without qkv bias) and a "
        "two-layer or gated MLP, LayerNorm, with or without LayerScale, register tokens, pre-norm, distillation head, "
        "class token, average or attention pooling"
    )
    model_type = VisionTransformer
    block_type = Block
    sliced: ClassVar = {Attention: SlicedAttention, AttentionPoolLatent: SlicedPool}
    ffn_types: tuple[type, ...] = (Mlp, GluMlp)
    wiring = Wiring(
        branches=(("norm1", "attn", "ls1", "drop_path1"), ("norm2", "mlp", "ls2", "drop_path2")),
        takes_arguments=frozenset({"attn"}),
    )

    def problem(self, model: Any) -> str | None:
        pool = getattr(model, "attn_pool", None)
        return super().problem(model) or base.pool_problem(pool, model.patch_embed.proj.out_channels)

    def block_problem(self, block: Any) -> str | None:
        attn = getattr(block, "attn", None)
        optional = (getattr(attn, name, None) for name in ("q_norm", "k_norm", "gate"))
        if isinstance(attn, tuple(self.sliced)) and not base.is_empty(*optional):
            return "its attention normalizes q or k, or has a gate"
        if getattr(attn, "num_kv_groups", 1) > 1:
            return "its q has more heads than k and v (grouped-query attention)"
        return super().block_problem(block)

    def streams(self, model: Any, axes: Mapping[str, Iterable[base.Axis]]) -> Iterator[base.Space]:
        width = model.patch_embed.proj.out_channels
        tokens = [base.Axis(name, 2) for name in (*TOKENS, "pos_embed") if getattr(model, name, None) is not None]
        residual = [*tokens, *base.linear_axes(model, "patch_embed.proj")]
        residual += [axis for name in ("patch_embed.norm", "norm_pre") for axis in base.norm_axes(model, name)]
        residual += [axis for own in axes.values() for axis in own]
        if getattr(model, "attn_pool", None) is not None:
            spaces, pool = base.describe_pool(model, "attn_pool", model.attn_pool)
            yield from spaces
            residual += pool
        residual += [axis for name in ("norm", "fc_norm") for axis in base.norm_axes(model, name)]
        heads = (name for name in ("head", "head_dist") if not base.is_empty(getattr(model, name, None)))
        yield base.Space("residual", "residual", width, (*residual, *map(base.input_axis, heads)))

    def set_width(self, model: Any, space: str, width: int) -> None:
        model.embed_dim = model.num_features = model.head_hidden_size = width
        for entry in model.feature_info:
            entry["num_chs"] = width

    def entry(self, model: Any) -> tuple[str, ...] | None:
        """The position embedding if it covers all tokens, else the bias of the patches and the model's own tokens."""
        tokens = tuple(name for name in TOKENS if getattr(model, name, None) is not None)
        stem, positions = model.patch_embed, model.pos_embed
        if not base.is_empty(getattr(model, "norm_pre", None)):
            return ()
        if positions is not None and positions.shape[1] == stem.num_patches + model.num_prefix_tokens:
            return ("pos_embed",)
        return ("patch_embed.proj.bias", *tokens) if stem.proj.bias is not None and base.is_empty(stem.norm) else ()


VIT = VitFamily()
