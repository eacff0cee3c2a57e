"""timm's SwinTransformer (v1 and S3): shifting windows, relative position tables, one residual stream per stage.

A Swin block shifts its tokens, pads and cuts them into windows, and undoes it all after the attention. Without the
attention these steps cancel, so they go with it. In a block whose wiring changes for another reason they move into the
attention (`ShiftedWindowAttention`).
"""

import math
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

from vitcompress.families import blocks as shared
from vitcompress.families.attention import SlicedWindowAttention
from vitcompress.families.base import Axis, Family, Site, Space, Wiring, children, input_axis, linear_axes, norm_axes

SUPPORTED = "timm SwinTransformers (v1 and S3) with LayerNorm and two-layer MLPs"


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
        windows = super().forward(windows, self._mask(x)).view(-1, *self.window_size, channels)
        x = window_reverse(windows, self.window_size, padded_height, padded_width)[:, :height, :width]
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


def problem(model: Any) -> str | None:
    """Why the family does not support `model`, or None."""
    return shared.model_problem(model, SwinTransformer, PatchEmbed, blocks, _block_problem)


def _block_problem(block: nn.Module) -> str | None:
    attentions = (WindowAttention, SlicedWindowAttention, ShiftedWindowAttention)
    return shared.part_problem(block, SwinTransformerBlock, attentions, (Mlp,))


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The remaining blocks by path."""
    return shared.staged_blocks(model, "layers")


def sites(model: Any) -> tuple[Site, ...]:
    """Attention, activation, FFN and block, for every remaining block."""
    return shared.list_sites(blocks(model), [stage.depth for stage in model.layers])


def spaces(model: Any) -> tuple[Space, ...]:
    """q/k, v and FFN hidden channels of every block, then the residual streams, one per stage."""
    return shared.staged_spaces(model, "layers", shared.packed_attention, _stream)


def _stream(model: nn.Module, stage: str, blocks: list[Axis]) -> Space:
    """The residual stream of a stage. blocks: its axes inside the blocks."""
    axes = (*_entry(model, stage), *blocks, *_exit(model, stage))
    return Space(f"{stage}.residual", "residual", _width(model, stage), axes)


def _merging(model: nn.Module, stage: str) -> str | None:
    """Path of the patch merging at the start of `stage`, if any."""
    name = f"{stage}.downsample"
    return name if isinstance(model.get_submodule(name), PatchMerging) else None


def _entry(model: nn.Module, stage: str) -> list[Axis]:
    """The axes of the layer that first writes the stream: the patch embedding or a patch merging."""
    if merging := _merging(model, stage):
        return list(linear_axes(model, f"{merging}.reduction"))
    return [*linear_axes(model, "patch_embed.proj"), *norm_axes(model, "patch_embed.norm")]


def _exit(model: Any, stage: str) -> list[Axis]:
    """The axes of what reads the stream last: the next patch merging (four neighbours), or norm and classifier."""
    following = int(stage.rpartition(".")[2]) + 1
    if following < len(model.layers) and (merging := _merging(model, f"layers.{following}")):
        norm = (Axis(axis.tensor, 0, copies=4) for axis in norm_axes(model, f"{merging}.norm"))
        return [*norm, Axis(f"{merging}.reduction.weight", 1, copies=4)]
    head = [input_axis("head.fc")] if isinstance(model.head.fc, nn.Linear) else []
    return [*norm_axes(model, "norm"), *head]


def _width(model: nn.Module, stage: str) -> int:
    merging = _merging(model, stage)
    return len(model.get_parameter(f"{merging}.reduction.weight" if merging else "patch_embed.proj.weight"))


def set_width(model: Any, space: str, width: int) -> None:
    """Store the width of a residual stream in the attributes that timm reads."""
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
    problem=problem,
    blocks=blocks,
    sites=sites,
    spaces=spaces,
    slice_attention=slice_attention,
    set_width=set_width,
    linear_pair=shared.linear_pair,
)
