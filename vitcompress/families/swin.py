"""timm's SwinTransformer (v1 and S3): shifting windows, relative position tables, one residual stream per stage.

A Swin block shifts its tokens, pads and cuts them into windows, and undoes it all after the attention. Without the
attention these steps cancel, so they go with it. In a block whose wiring changes for another reason they move into the
attention (`ShiftedWindowAttention`).
"""

import math
from dataclasses import replace
from typing import Any, cast

import torch
from timm.layers import Mlp, PatchEmbed
from timm.models.swin_transformer import (
    PatchMerging,
    SwinTransformer,
    SwinTransformerBlock,
    WindowAttention,
    window_partition,
    window_reverse,
)
from torch import Tensor, nn

from vitcompress.families.base import Axis, Family, Site, Space, Wiring, children, input_axis, linear_axes, norm_axes
from vitcompress.families.blocks import (
    equal_widths,
    linear_pair,
    norms_refusal,
    packed_attention,
    part_refusal,
    staged_blocks,
    staged_sites,
    staged_spaces,
)
from vitcompress.families.edited_block import fixed_size

SUPPORTED = "timm SwinTransformers (v1 and S3) with LayerNorm and two-layer MLPs"


class SlicedWindowAttention(nn.Module):
    """Attention within windows, with any widths of q/k and v, over timm's parameters, at the dense softmax scale.

    Keeping the scale of the dense model is what makes a sliced attention equal to the masked one.
    """

    relative_position_bias_table: nn.Parameter
    relative_position_index: Tensor

    def __init__(self, dense: Any, qk_dim: int, v_dim: int, num_heads: int) -> None:
        super().__init__()
        self.relative_position_bias_table = dense.relative_position_bias_table
        self.register_buffer("relative_position_index", dense.relative_position_index, persistent=False)
        self.qkv, self.attn_drop, self.proj, self.proj_drop = dense.qkv, dense.attn_drop, dense.proj, dense.proj_drop
        self.window_size, self.window_area = dense.window_size, dense.window_area
        self.scale, self.padded = dense.scale, getattr(dense, "padded", False)
        self.resize(qk_dim, v_dim, num_heads)

    def resize(self, qk_dim: int, v_dim: int, num_heads: int) -> None:
        """Store the widths that the parameters now have."""
        self.qk_dim, self.v_dim, self.num_heads = qk_dim, v_dim, num_heads

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """What timm's block asks when the input size changes. Raises UnsupportedModelError."""
        raise fixed_size()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: windows, (windows x batch, tokens, channels) -> the same shape.

        mask: what shifted windows add to the scores, (windows, tokens, tokens).
        """
        windows, tokens, _ = x.shape
        parts = self.qkv(x).split((self.qk_dim, self.qk_dim, self.v_dim), dim=-1)
        q, k, v = (part.reshape(windows, tokens, self.num_heads, -1).transpose(1, 2) for part in parts)
        if self.padded:
            q, k, v = equal_widths(q, k, v)
        scores = (q * self.scale) @ k.transpose(-2, -1) + self._position_bias()
        if mask is not None:
            apart = scores.view(-1, mask.shape[0], self.num_heads, tokens, tokens) + mask[None, :, None]
            scores = apart.view(-1, self.num_heads, tokens, tokens)
        x = self.attn_drop(scores.softmax(dim=-1)) @ v
        if self.padded:
            x = x[..., : self.v_dim // self.num_heads]
        out: Tensor = self.proj_drop(self.proj(x.transpose(1, 2).reshape(windows, tokens, self.v_dim)))
        return out

    def _position_bias(self) -> Tensor:
        """Bias of the scores by relative position, (heads, tokens, tokens)."""
        biases = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        return biases.view(self.window_area, self.window_area, -1).permute(2, 0, 1)


class ShiftedWindowAttention(SlicedWindowAttention):
    """The attention of a Swin block with the block's shift, padding and partition: tokens in, tokens out."""

    attn_mask: Tensor | None

    def __init__(self, block: Any) -> None:
        attn = block.attn
        v_dim = attn.proj.in_features
        super().__init__(attn, (attn.qkv.out_features - v_dim) // 2, v_dim, attn.num_heads)
        self.shift_size, self.input_resolution = block.shift_size, block.input_resolution
        self.dynamic_mask = block.dynamic_mask
        self.register_buffer("attn_mask", block.attn_mask, persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: normalised tokens, (batch, height, width, channels) -> the same shape."""
        height, width, channels = x.shape[1:]
        shift = tuple(self.shift_size)
        if any(shift):
            x = torch.roll(x, shifts=(-shift[0], -shift[1]), dims=(1, 2))
        x = self._padded(x)
        padded_height, padded_width = x.shape[1:3]
        windows = window_partition(x, self.window_size).view(-1, self.window_area, channels)
        found = super().forward(windows, self._mask(x)).view(-1, *self.window_size, channels)
        x = window_reverse(found, self.window_size, padded_height, padded_width)[:, :height, :width]
        return torch.roll(x, shifts=shift, dims=(1, 2)) if any(shift) else x

    def _padded(self, x: Tensor) -> Tensor:
        down, right = (-size % window for size, window in zip(x.shape[1:3], self.window_size, strict=True))
        return nn.functional.pad(x, (0, 0, 0, right, 0, down)) if down or right else x

    def _mask(self, x: Tensor) -> Tensor | None:
        """What keeps windows apart that the shift brought together; timm computes it from the attributes it reads."""
        if not self.dynamic_mask:
            return self.attn_mask
        mask: Tensor | None = SwinTransformerBlock.get_attn_mask(cast(Any, self), x)
        return mask


def parts(block: nn.Module) -> dict[str, nn.Module]:
    """The children of a timm block, its attention with shift and partition."""
    return {**children(block), "attn": ShiftedWindowAttention(block)}


WIRING = Wiring(
    branches=(("norm1", "attn", "drop_path1"), ("norm2", "mlp", "drop_path2")),
    attention="attn",
    ffn="mlp",
    parts=parts,
)


def refuses(model: nn.Module) -> str | None:
    """None, or the first thing about `model` that the family does not cover."""
    if not isinstance(model, SwinTransformer):
        return f"it is a {type(model).__name__}"
    if not isinstance(model.patch_embed, PatchEmbed):
        return f"its stem is a {type(model.patch_embed).__name__}"
    reasons = (_block_refusal(block) for block in blocks(model).values())
    return next((reason for reason in reasons if reason), None) or norms_refusal(model)


def _block_refusal(block: nn.Module) -> str | None:
    attentions = (WindowAttention, SlicedWindowAttention, ShiftedWindowAttention)
    return part_refusal(block, SwinTransformerBlock, attentions, (Mlp, nn.Linear))


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that are left, by path."""
    return staged_blocks(model, "layers")


def sites(model: Any) -> tuple[Site, ...]:
    """Per block: attention, activation, FFN and the block itself. Blocks are numbered through all stages."""
    return staged_sites(model, "layers", [stage.depth for stage in model.layers])


def spaces(model: Any) -> tuple[Space, ...]:
    """q/k, v and FFN hidden channels of every block, then the residual streams, one per stage."""
    return staged_spaces(model, "layers", _attention, _stream)


def _stream(model: nn.Module, stage: str, blocks: list[Axis]) -> Space:
    """A stage's residual stream. blocks: its axes inside of the blocks."""
    axes = (*_entry(model, stage), *blocks, *_exit(model, stage))
    return Space(f"{stage}.residual", "residual", _width(model, stage), axes)


def _attention(model: nn.Module, path: str, attn: Any) -> tuple[list[Space], list[Axis]]:
    """As packed attention has them, with a column of the position table for each head."""
    (qk, v), axes = packed_attention(model, path, attn)
    table = Axis(f"{path}.attn.relative_position_bias_table", 1, per_head=True)
    return [replace(qk, axes=(*qk.axes, table)), v], axes


def _stages(model: nn.Module) -> list[str]:
    return [f"layers.{name}" for name, _ in model.get_submodule("layers").named_children()]


def _merging(model: nn.Module, stage: str) -> str | None:
    """The patch merging that `stage` starts with."""
    name = f"{stage}.downsample"
    return name if isinstance(model.get_submodule(name), PatchMerging) else None


def _entry(model: nn.Module, stage: str) -> list[Axis]:
    """What first writes a stage's stream: the patch embedding, or a patch merging."""
    if merging := _merging(model, stage):
        return list(linear_axes(model, f"{merging}.reduction"))
    return [*linear_axes(model, "patch_embed.proj"), *norm_axes(model, "patch_embed.norm")]


def _exit(model: Any, stage: str) -> list[Axis]:
    """What reads a stage's stream last: the next patch merging, four neighbours at a time, or norm and classifier."""
    names = _stages(model)
    following = names[names.index(stage) + 1 :]
    if following and (merging := _merging(model, following[0])):
        norm = (Axis(axis.tensor, 0, copies=4) for axis in norm_axes(model, f"{merging}.norm"))
        return [*norm, Axis(f"{merging}.reduction.weight", 1, copies=4)]
    head = [input_axis("head.fc")] if isinstance(model.head.fc, nn.Linear) else []
    return [*norm_axes(model, "norm"), *head]


def _width(model: nn.Module, stage: str) -> int:
    merging = _merging(model, stage)
    return len(model.get_parameter(f"{merging}.reduction.weight" if merging else "patch_embed.proj.weight"))


def resized(model: Any, space: str, width: int) -> None:
    """Store a stage's residual width where timm reads it."""
    stage = space.removesuffix(".residual")
    number = int(stage.rpartition(".")[2])
    model.feature_info[number]["num_chs"] = width
    if merging := _merging(model, stage):
        model.get_submodule(merging).out_dim = width
    else:
        model.embed_dim = width
    if number + 1 < len(model.layers):
        model.layers[number + 1].dim = model.layers[number + 1].downsample.dim = width
        return
    model.num_features = model.head.in_features = width
    model.head_hidden_size = model.head.num_features = width * model.head.global_pool.feat_mult()


def slice_attention(attn: Any, qk_dim: int, v_dim: int, num_heads: int) -> nn.Module:
    """timm's own attention while heads keep their width, else one with any widths."""
    if isinstance(attn, SlicedWindowAttention):
        attn.resize(qk_dim, v_dim, num_heads)
    elif qk_dim == v_dim and math.isclose((v_dim / num_heads) ** -0.5, attn.scale):
        attn.num_heads = num_heads
    else:
        return SlicedWindowAttention(attn, qk_dim, v_dim, num_heads)
    own: nn.Module = attn
    return own


SWIN = Family(
    name="swin",
    supported=SUPPORTED,
    wiring=WIRING,
    refuses=refuses,
    blocks=blocks,
    sites=sites,
    spaces=spaces,
    slice_attention=slice_attention,
    resized=resized,
    linear_pair=linear_pair,
)
