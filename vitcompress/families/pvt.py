"""timm's PyramidVisionTransformerV2: attention over spatially reduced keys and values, FFNs with a depth-wise conv."""

from typing import Any, ClassVar

from timm.models.pvt_v2 import Attention, Block, MlpWithDepthwiseConv, PyramidVisionTransformerV2
from torch import nn

from vitcompress.families import base
from vitcompress.families.attention import SlicedReductionAttention
from vitcompress.families.edited_block import Wiring


class PvtFamily(base.StagedFamily):
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

    def depths(self, model: Any) -> list[int]:
        return list(model.depths)

    def not_foldable(self, model: nn.Module) -> str:
        return "PVTv2's MLP has a depth-wise 3x3 convolution and cannot be folded exactly"

    def describe_attention(self, model: nn.Module, path: str, attn: Any) -> base.Described:
        name = f"{path}.attn"
        spaces = base.describe_heads(model, path, name, attn)
        axes = [base.input_axis(f"{name}.q"), *base.linear_axes(model, f"{name}.proj")]
        if attn.sr is None:
            return spaces, [*axes, base.input_axis(f"{name}.kv")]
        reduced = (*base.linear_axes(model, f"{name}.sr"), *base.norm_axes(model, f"{name}.norm"))
        spaces.append(base.Space(f"{path}.sr", "sr", attn.sr.out_channels, (*reduced, base.input_axis(f"{name}.kv"))))
        return spaces, [*axes, base.input_axis(f"{name}.sr")]

    def stage_axes(self, model: Any, number: int) -> tuple[list[base.Axis], list[base.Axis]]:
        """The patch embedding; the stage's norm, then the next patch embedding or the classifier."""
        embedding = f"stages.{number}.downsample" if number else "patch_embed"
        first = [*base.linear_axes(model, f"{embedding}.proj"), *base.norm_axes(model, f"{embedding}.norm")]
        last = list(base.norm_axes(model, f"stages.{number}.norm"))
        if number + 1 < len(model.stages):
            last.append(base.input_axis(f"stages.{number + 1}.downsample.proj"))
        elif not base.is_empty(model.head):
            last.append(base.input_axis("head"))
        return first, last

    def set_width(self, model: Any, space: str, width: int) -> None:
        number = int(space.split(".")[1])
        model.feature_info[number]["num_chs"] = width
        if number + 1 == len(model.stages):
            model.num_features = model.head_hidden_size = width


PVT = PvtFamily()
