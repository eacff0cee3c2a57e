"""timm's SwinTransformer (v1 and S3): shifting windows, relative position tables, one residual stream per stage.

A Swin block shifts its tokens, pads and cuts them into windows, and undoes it all after the attention. Without the
attention these steps cancel, so they go with it. In a block whose wiring changes for another reason they move into the
attention (`ShiftedWindowAttention`).
"""

from collections.abc import Callable
from typing import Any, ClassVar, cast

from timm.models.swin_transformer import PatchMerging, SwinTransformer, SwinTransformerBlock, WindowAttention
from torch import Tensor

from vitcompress.families.attention import SlicedWindowAttention
from vitcompress.families.base import Axis, StagedFamily, is_empty, linear_axes, norm_axes
from vitcompress.families.edited_block import Wiring


class ShiftedWindowAttention(SlicedWindowAttention):
    """The attention of a Swin block with the block's shift, padding and partition: tokens in, tokens out."""

    # timm's own methods, which read the attributes that are set below; `_attn` calls `attn` on the windows.
    _attn: Any = SwinTransformerBlock._attn
    get_attn_mask: Any = SwinTransformerBlock.get_attn_mask

    def __init__(self, block: Any) -> None:
        attn = block.attn
        v_dim = attn.proj.in_features
        super().__init__(attn, (attn.qkv.out_features - v_dim) // 2, v_dim, attn.num_heads)
        self.shift_size, self.input_resolution = block.shift_size, block.input_resolution
        self.dynamic_mask = block.dynamic_mask
        self.register_buffer("attn_mask", block.attn_mask, persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: normalized tokens, (batch, height, width, channels) -> the same shape."""
        return cast(Tensor, self._attn(x))

    @property
    def attn(self) -> Callable[..., Tensor]:
        """The attention within windows."""
        return super().forward


class SwinFamily(StagedFamily):
    """One residual stream per stage, each begun by the patch embedding or a patch merging of four neighbors."""

    name = "swin"
    supported = "timm SwinTransformers (v1 and S3) with LayerNorm and two-layer MLPs"
    model_type = SwinTransformer
    block_type = SwinTransformerBlock
    sliced: ClassVar = {WindowAttention: SlicedWindowAttention}
    wiring = Wiring(
        branches=(("norm1", "attn", "drop_path1"), ("norm2", "mlp", "drop_path2")),
        parts=lambda block: {"attn": ShiftedWindowAttention(block)},
    )
    stages = "layers"
    fixed_size = True

    def depths(self, model: Any) -> list[int]:
        return [stage.depth for stage in model.layers]

    def stage_axes(self, model: Any, number: int) -> tuple[list[Axis], list[Axis]]:
        """The patch embedding or a patch merging; the next patch merging, or norm and classifier."""
        if merging := _merging(model, number):
            first = list(linear_axes(model, f"{merging}.reduction"))
        else:
            first = [*linear_axes(model, "patch_embed.proj"), *norm_axes(model, "patch_embed.norm")]
        if merging := _merging(model, number + 1):
            norm = (Axis(axis.tensor, 0, copies=4) for axis in norm_axes(model, f"{merging}.norm"))
            return first, [*norm, Axis(f"{merging}.reduction.weight", 1, copies=4)]
        pooled = Axis("head.fc.weight", 1, copies=model.head.global_pool.feat_mult())  # catavgmax: two of each channel
        return first, [*norm_axes(model, "norm"), *([] if is_empty(model.head.fc) else [pooled])]

    def set_width(self, model: Any, space: str, width: int) -> None:
        number = int(space.split(".")[1])
        model.feature_info[number]["num_chs"] = width
        if merging := _merging(model, number):
            model.get_submodule(merging).out_dim = width
        else:
            model.embed_dim = width
        if number + 1 < len(model.layers):
            model.layers[number + 1].dim = model.layers[number + 1].downsample.dim = width
            return
        model.num_features = model.head.in_features = width
        model.head_hidden_size = model.head.num_features = width * model.head.global_pool.feat_mult()


def _merging(model: Any, number: int) -> str | None:
    """Path of the patch merging at the start of stage `number`, if any."""
    has_merging = number < len(model.layers) and isinstance(model.layers[number].downsample, PatchMerging)
    return f"layers.{number}.downsample" if has_merging else None


SWIN = SwinFamily()
