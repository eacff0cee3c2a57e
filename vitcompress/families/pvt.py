"""timm's PyramidVisionTransformerV2: attention over spatially reduced keys and values, FFNs with a depth-wise conv."""

from typing import Any

from timm.models.pvt_v2 import Attention, Block, MlpWithDepthwiseConv, PyramidVisionTransformerV2
from torch import nn

from vitcompress.families import blocks as shared
from vitcompress.families.attention import SlicedReductionAttention
from vitcompress.families.base import Axis, Family, Site, Space, Wiring, input_axis, linear_axes, norm_axes

SUPPORTED = "timm PVTv2 (b0 to b5, and the linear variant) with LayerNorm"
NOT_FOLDABLE = "PVTv2's MLP has a depth-wise 3x3 convolution and cannot be folded exactly"
WIRING = Wiring(
    branches=(("norm1", "attn", "drop_path1"), ("norm2", "mlp", "drop_path2")),
    attention="attn",
    ffn="mlp",
    takes_arguments=frozenset({"attn", "mlp"}),
)


def problem(model: Any) -> str | None:
    """Why the family does not support `model`, or None."""
    return shared.model_problem(model, PyramidVisionTransformerV2, nn.Module, blocks, _block_problem)


def _block_problem(block: nn.Module) -> str | None:
    return shared.part_problem(block, Block, (Attention, SlicedReductionAttention), (MlpWithDepthwiseConv,))


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The remaining blocks by path."""
    return shared.staged_blocks(model, "stages")


def sites(model: Any) -> tuple[Site, ...]:
    """Attention, FFN and block, for every remaining block."""
    return shared.list_sites(blocks(model), model.depths, linear_without_act=False)


def spaces(model: Any) -> tuple[Space, ...]:
    """q/k, v, reduction and FFN hidden channels of every block, then the residual streams, one per stage."""
    return shared.staged_spaces(model, "stages", _attention, _stream)


def _stream(model: nn.Module, stage: str, blocks: list[Axis]) -> Space:
    """The residual stream of a stage. blocks: its axes inside the blocks."""
    axes = (*_entry(model, stage), *blocks, *_exit(model, stage))
    return Space(f"{stage}.residual", "residual", _width(model, stage), axes)


def _attention(model: nn.Module, path: str, attn: Any) -> tuple[list[Space], list[Axis]]:
    """Spaces of an attention, and the residual axes that it reads and writes."""
    name = f"{path}.attn"
    spaces = shared.cross_attention(model, path, name, attn)
    axes = [input_axis(f"{name}.q"), *linear_axes(model, f"{name}.proj")]
    if attn.sr is None:
        return spaces, [*axes, input_axis(f"{name}.kv")]
    reduction = (*linear_axes(model, f"{name}.sr"), *norm_axes(model, f"{name}.norm"), input_axis(f"{name}.kv"))
    spaces.append(Space(f"{path}.sr", "sr", attn.sr.out_channels, reduction))
    return spaces, [*axes, input_axis(f"{name}.sr")]


def _embedding(stage: str) -> str:
    """Path of the overlapping patch embedding that writes the stream of a stage."""
    return "patch_embed" if stage == "stages.0" else f"{stage}.downsample"


def _entry(model: nn.Module, stage: str) -> list[Axis]:
    name = _embedding(stage)
    return [*linear_axes(model, f"{name}.proj"), *norm_axes(model, f"{name}.norm")]


def _exit(model: Any, stage: str) -> list[Axis]:
    """The axes of what reads the stream last: its norm, then the next patch embedding or the classifier."""
    following = int(stage.rpartition(".")[2]) + 1
    norm = list(norm_axes(model, f"{stage}.norm"))
    if following < len(model.stages):
        return [*norm, input_axis(f"stages.{following}.downsample.proj")]
    return [*norm, input_axis("head")] if isinstance(model.head, nn.Linear) else norm


def _width(model: nn.Module, stage: str) -> int:
    return len(model.get_parameter(f"{_embedding(stage)}.proj.weight"))


def set_width(model: Any, space: str, width: int) -> None:
    """Store the width of a residual stream in the attributes that timm reads."""
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
    problem=problem,
    blocks=blocks,
    sites=sites,
    spaces=spaces,
    slice_attention=slice_attention,
    set_width=set_width,
    not_foldable=NOT_FOLDABLE,
)
