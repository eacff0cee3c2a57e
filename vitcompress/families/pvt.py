"""timm's PyramidVisionTransformerV2: attention over spatially reduced keys and values, FFNs with a depth-wise conv."""

from typing import Any

from timm.models.pvt_v2 import Attention, Block, MlpWithDepthwiseConv, PyramidVisionTransformerV2
from torch import Tensor, nn

from vitcompress.families.base import Axis, Family, Site, Space, Wiring, input_axis, linear_axes, norm_axes
from vitcompress.families.blocks import (
    attended,
    norms_refusal,
    part_refusal,
    staged_blocks,
    staged_sites,
    staged_spaces,
)

SUPPORTED = "timm PVTv2 (b0 to b5, and the linear variant) with LayerNorm"
NOT_FOLDABLE = "PVTv2's MLP has a depth-wise 3x3 convolution and cannot be folded exactly"
WIRING = Wiring(
    branches=(("norm1", "attn", "drop_path1"), ("norm2", "mlp", "drop_path2")),
    attention="attn",
    ffn="mlp",
    takes_arguments=frozenset({"attn", "mlp"}),
)


class SlicedReductionAttention(nn.Module):
    """PVTv2's attention with any widths of q/k, v, stream and reduction, over timm's parameters and dense scale.

    Keeping the scale of the dense model is what makes a sliced attention equal to the masked one.
    """

    def __init__(self, dense: Any, qk_dim: int, v_dim: int, num_heads: int) -> None:
        super().__init__()
        self.q, self.kv, self.attn_drop = dense.q, dense.kv, dense.attn_drop
        self.proj, self.proj_drop = dense.proj, dense.proj_drop
        self.pool, self.sr, self.norm, self.act = dense.pool, dense.sr, dense.norm, dense.act
        self.scale, self.padded = dense.scale, False
        self.resize(qk_dim, v_dim, num_heads)

    def resize(self, qk_dim: int, v_dim: int, num_heads: int) -> None:
        """Store the widths that the parameters now have."""
        self.qk_dim, self.v_dim, self.num_heads = qk_dim, v_dim, num_heads

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """x: normalised tokens, (batch, height x width, channels) -> the same shape. feat_size: height, width."""
        batch = x.shape[0]
        k, v = self.kv(self._reduced(x, feat_size)).split((self.qk_dim, self.v_dim), dim=-1)
        q, k, v = (
            part.reshape(batch, -1, self.num_heads, part.shape[-1] // self.num_heads) for part in (self.q(x), k, v)
        )
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return attended(self, q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)

    def _reduced(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """The fewer tokens that keys and values are made of, (batch, reduced tokens, channels)."""
        if self.sr is None:
            return x
        image = x.transpose(1, 2).reshape(x.shape[0], -1, *feat_size)
        image = image if self.pool is None else self.pool(image)
        tokens: Tensor = self.norm(self.sr(image).flatten(2).transpose(1, 2))
        return tokens if self.act is None else self.act(tokens)


def refuses(model: nn.Module) -> str | None:
    """None, or the first thing about `model` that the family does not cover."""
    if not isinstance(model, PyramidVisionTransformerV2):
        return f"it is a {type(model).__name__}"
    reasons = (_block_refusal(block) for block in blocks(model).values())
    return next((reason for reason in reasons if reason), None) or norms_refusal(model)


def _block_refusal(block: nn.Module) -> str | None:
    return part_refusal(block, Block, (Attention, SlicedReductionAttention), (MlpWithDepthwiseConv,))


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that are left, by path."""
    return staged_blocks(model, "stages")


def sites(model: Any) -> tuple[Site, ...]:
    """Per block: attention, FFN and the block itself. Blocks are numbered through all stages."""
    return staged_sites(model, "stages", model.depths, linear_without_act=False)


def spaces(model: Any) -> tuple[Space, ...]:
    """q/k, v, reduction and FFN hidden channels of every block, then the residual streams, one per stage."""
    return staged_spaces(model, "stages", _attention, _stream)


def _stream(model: nn.Module, stage: str, blocks: list[Axis]) -> Space:
    """A stage's residual stream. blocks: its axes inside of the blocks."""
    axes = (*_entry(model, stage), *blocks, *_exit(model, stage))
    return Space(f"{stage}.residual", "residual", _width(model, stage), axes)


def _attention(model: nn.Module, path: str, attn: Any) -> tuple[list[Space], list[Axis]]:
    """Spaces of an attention, and the residual axes that it reads and writes."""
    name, heads, qk_dim = f"{path}.attn", attn.num_heads, attn.q.out_features
    qk = (*linear_axes(model, f"{name}.q"), *linear_axes(model, f"{name}.kv"))
    v = (*linear_axes(model, f"{name}.kv", offset=qk_dim), input_axis(f"{name}.proj"))
    spaces = [
        Space(f"{path}.qk", "qk", qk_dim, qk, heads, name),
        Space(f"{path}.v", "v", attn.proj.in_features, v, heads, name),
    ]
    axes = [input_axis(f"{name}.q"), *linear_axes(model, f"{name}.proj")]
    if attn.sr is None:
        return spaces, [*axes, input_axis(f"{name}.kv")]
    reduction = (*linear_axes(model, f"{name}.sr"), *norm_axes(model, f"{name}.norm"), input_axis(f"{name}.kv"))
    spaces.append(Space(f"{path}.sr", "sr", attn.sr.out_channels, reduction))
    return spaces, [*axes, input_axis(f"{name}.sr")]


def _embedding(stage: str) -> str:
    """The overlapping patch embedding that writes a stage's stream."""
    return "patch_embed" if stage == "stages.0" else f"{stage}.downsample"


def _entry(model: nn.Module, stage: str) -> list[Axis]:
    name = _embedding(stage)
    return [*linear_axes(model, f"{name}.proj"), *norm_axes(model, f"{name}.norm")]


def _exit(model: Any, stage: str) -> list[Axis]:
    """What reads a stage's stream last: its norm, then the next patch embedding or the classifier."""
    following = int(stage.rpartition(".")[2]) + 1
    norm = list(norm_axes(model, f"{stage}.norm"))
    if following < len(model.stages):
        return [*norm, input_axis(f"stages.{following}.downsample.proj")]
    return [*norm, input_axis("head")] if isinstance(model.head, nn.Linear) else norm


def _width(model: nn.Module, stage: str) -> int:
    return len(model.get_parameter(f"{_embedding(stage)}.proj.weight"))


def resized(model: Any, space: str, width: int) -> None:
    """Store a stage's residual width where timm reads it."""
    number = int(space.split(".")[1])
    model.feature_info[number]["num_chs"] = width
    if number + 1 == len(model.stages):
        model.num_features = model.head_hidden_size = width


def slice_attention(attn: Any, qk_dim: int, v_dim: int, num_heads: int) -> nn.Module:
    """timm's own attention while all its widths agree and heads keep theirs, else one with any widths."""
    own: nn.Module = attn
    if isinstance(attn, SlicedReductionAttention):
        attn.resize(qk_dim, v_dim, num_heads)
        return own
    widths = {qk_dim, v_dim, num_heads * attn.head_dim, attn.proj.out_features, attn.kv.in_features}
    if len(widths) > 1:
        return SlicedReductionAttention(attn, qk_dim, v_dim, num_heads)
    attn.dim, attn.num_heads = v_dim, num_heads
    return own


PVT = Family(
    name="pvt",
    supported=SUPPORTED,
    wiring=WIRING,
    refuses=refuses,
    blocks=blocks,
    sites=sites,
    spaces=spaces,
    slice_attention=slice_attention,
    resized=resized,
    not_foldable=NOT_FOLDABLE,
)
