"""timm's PyramidVisionTransformerV2: attention over spatially reduced keys and values, FFNs with a depth-wise conv."""

from typing import Any, ClassVar

from timm.models.pvt_v2 import Attention, Block, MlpWithDepthwiseConv, PyramidVisionTransformerV2
from torch import nn

from vitcompress.families.attention import SlicedReductionAttention
from vitcompress.families.base import (
    Axis,
    Described,
    Space,
    StagedFamily,
    describe_heads,
    input_axis,
    is_empty,
    linear_axes,
    norm_axes,
)
from vitcompress.families.edited_block import Wiring


class PvtFamily(StagedFamily):
    """One residual stream per stage, each begun by an overlapping patch embedding and ended by a norm."""

    name = "pvt"
    supported = "timm PVTv2 (b0 to b5, and the linear variant) with LayerNorm"
    model_type = PyramidVisionTransformerV2
    stem_type = nn.Module
    block_type = Block
    sliced: ClassVar = {Attention: SlicedReductionAttention}
    ffn_types = (MlpWithDepthwiseConv,)
    wiring = Wiring(
        branches=(("norm1", "attn", "drop_path1"), ("norm2", "mlp", "drop_path2")),
        takes_arguments=frozenset({"attn", "mlp"}),
    )
    stages = "stages"
    not_foldable = "PVTv2's MLP has a depth-wise 3x3 convolution and cannot be folded exactly"

    def depths(self, model: Any) -> list[int]:
        return list(model.depths)

    def describe_attention(self, model: nn.Module, path: str, attn: Any) -> Described:
        name = f"{path}.attn"
        spaces = describe_heads(model, path, name, attn)
        axes = [input_axis(f"{name}.q"), *linear_axes(model, f"{name}.proj")]
        if attn.sr is None:
            return spaces, [*axes, input_axis(f"{name}.kv")]
        reduction = (*linear_axes(model, f"{name}.sr"), *norm_axes(model, f"{name}.norm"), input_axis(f"{name}.kv"))
        spaces.append(Space(f"{path}.sr", "sr", attn.sr.out_channels, reduction))
        return spaces, [*axes, input_axis(f"{name}.sr")]

    def stage_axes(self, model: Any, number: int) -> tuple[list[Axis], list[Axis]]:
        """The patch embedding; the stage's norm, then the next patch embedding or the classifier."""
        embedding = f"stages.{number}.downsample" if number else "patch_embed"
        first = [*linear_axes(model, f"{embedding}.proj"), *norm_axes(model, f"{embedding}.norm")]
        last = list(norm_axes(model, f"stages.{number}.norm"))
        if number + 1 < len(model.stages):
            last.append(input_axis(f"stages.{number + 1}.downsample.proj"))
        elif not is_empty(model.head):
            last.append(input_axis("head"))
        return first, last

    def set_width(self, model: Any, space: str, width: int) -> None:
        number = int(space.split(".")[1])
        model.feature_info[number]["num_chs"] = width
        if number + 1 == len(model.stages):
            model.num_features = model.head_hidden_size = width


PVT = PvtFamily()
