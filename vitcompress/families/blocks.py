"""What timm's families have in common: blocks of two residual branches, attention with packed q, k and v, MLPs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from timm.layers import GluMlp, Mlp
from torch import Tensor, nn

from vitcompress.families.base import Axis, LinearPair, Site, Space, input_axis, linear_axes, norm_axes
from vitcompress.families.edited_block import EditedBlock

NORMED_ATTENTION = "its attention normalises q, k or its output, or is gated"  # as the end of a sentence
Stream = Callable[[nn.Module, str, list[Axis]], Space]  # of the stage at a path, from the axes inside its blocks
Describe = Callable[[nn.Module, str, Any], tuple[list[Space], list[Axis]]]  # of a part of the block at a path


def plain(*parts: nn.Module | None) -> bool:
    """Whether none of these modules computes anything."""
    return all(part is None or isinstance(part, nn.Identity) for part in parts)


def norm_refusal(norm: nn.Module) -> str | None:
    """Why this is no LayerNorm that can be sliced, as the end of a sentence."""
    if plain(norm):
        return None
    if not isinstance(norm, nn.LayerNorm):
        return f"its norm is a {type(norm).__name__}"
    return None if norm.elementwise_affine else "its LayerNorm has no weights"


def norms_refusal(model: nn.Module) -> str | None:
    """`norm_refusal` of the first module that is named as a norm and refused."""
    norms = (module for name, module in model.named_modules() if "norm" in name.rpartition(".")[2])
    return next((reason for reason in map(norm_refusal, norms) if reason), None)


def part_refusal(block: nn.Module, blocks: type, attentions: tuple[type, ...], ffns: tuple[type, ...]) -> str | None:
    """The first of a block, its attention and its FFN that is of none of these types, as the end of a sentence."""
    for what, part, kinds in (
        ("blocks are", block, (blocks, EditedBlock)),
        ("attention is a", getattr(block, "attn", None), attentions),
        ("FFN is a", getattr(block, "mlp", None), ffns),
    ):
        if part is not None and type(part) not in kinds:
            return f"its {what} {type(part).__name__}"
    return None


def ffn_refusal(mlp: nn.Module | None) -> str | None:
    """Why this two-layer or gated FFN is not one whose hidden channels can be sliced, as the end of a sentence."""
    if isinstance(mlp, Mlp | GluMlp) and not (plain(mlp.norm) and isinstance(mlp.fc1, nn.Linear)):
        return "its FFN normalises its hidden channels or is convolutional"
    return "its gated FFN has no biases" if isinstance(mlp, GluMlp) and mlp.fc1.bias is None else None


def staged_blocks(model: nn.Module, stages: str) -> dict[str, nn.Module]:
    """The blocks that are left of a model of stages, by path."""
    found: dict[str, nn.Module] = {}
    for stage, module in model.get_submodule(stages).named_children():
        named = module.get_submodule("blocks").named_children()
        found |= {f"{stages}.{stage}.blocks.{name}": block for name, block in named}
    return found


def block_sites(path: str, block: nn.Module, index: int, *, linear_without_act: bool = True) -> Iterator[Site]:
    """Attention, activation, FFN and the block itself, as far as they are there.

    linear_without_act: whether the activation is all that keeps the FFN from being linear; else it is no site.
    """
    if hasattr(block, "attn"):
        yield Site(f"{path}.attn", "attention", path, index, f"{path}.drop_path1")
    act = getattr(getattr(block, "mlp", None), "act", None)
    if linear_without_act and not plain(act):
        gates = f"{path}.mlp" if isinstance(block.mlp, GluMlp) else ""
        yield Site(f"{path}.mlp.act", "activation", path, index, f"{path}.drop_path2", gates)
    if hasattr(block, "mlp"):
        yield Site(f"{path}.mlp", "ffn", path, index, f"{path}.drop_path2")
    yield Site(path, "block", path, index)


def staged_sites(
    model: nn.Module, stages: str, depths: Sequence[int], *, linear_without_act: bool = True
) -> tuple[Site, ...]:
    """`block_sites` of every block, numbered through all stages. depths: blocks of each stage of the dense model."""
    found: list[Site] = []
    for path, block in staged_blocks(model, stages).items():
        _, stage, _, number = path.split(".")
        index = sum(depths[: int(stage)]) + int(number)
        found += block_sites(path, block, index, linear_without_act=linear_without_act)
    return tuple(found)


def equal_widths(*parts: Tensor) -> tuple[Tensor, ...]:
    """q, k and v, (..., channels), each with zeros behind it up to the widest: for kernels of one head width.

    Zeros add nothing to the products of q and k; what they add to the output are the channels beyond v's own.
    """
    widest = max(part.shape[-1] for part in parts)
    return tuple(F.pad(part, (0, widest - part.shape[-1])) if part.shape[-1] < widest else part for part in parts)


def attended(attn: Any, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """What a sliced attention writes, (batch, tokens, channels), from q, k and v, (batch, heads, tokens, channels).

    how: the other arguments of torch's attention. Where `attn` is padded, its kernel sees one width.
    """
    width = v.shape[-1]
    if attn.padded:
        q, k, v = equal_widths(q, k, v)
    x = F.scaled_dot_product_attention(q, k, v, scale=attn.scale, **how)
    if attn.padded:
        x = x[..., :width]
    out: Tensor = attn.proj_drop(attn.proj(x.transpose(1, 2).flatten(2)))
    return out


def packed_attention(model: nn.Module, path: str, attn: Any) -> tuple[list[Space], list[Axis]]:
    """Spaces of an attention with one `qkv` layer, and the residual axes that it reads and writes."""
    name, heads = f"{path}.attn", attn.num_heads
    v_dim = attn.proj.in_features
    qk_dim = (attn.qkv.out_features - v_dim) // 2
    qk = linear_axes(model, f"{name}.qkv", copies=2)
    v = (*linear_axes(model, f"{name}.qkv", offset=2 * qk_dim), input_axis(f"{name}.proj"))
    spaces = [Space(f"{path}.qk", "qk", qk_dim, qk, heads, name), Space(f"{path}.v", "v", v_dim, v, heads, name)]
    return spaces, [input_axis(f"{name}.qkv"), *linear_axes(model, f"{name}.proj")]


def ffn(model: nn.Module, path: str, mlp: Any) -> tuple[list[Space], list[Axis]]:
    """The hidden space of an FFN (none when it is folded), and the residual axes that the FFN reads and writes."""
    name = f"{path}.mlp"
    if isinstance(mlp, nn.Linear):  # folded
        return [], [input_axis(name), *linear_axes(model, name)]
    hidden = mlp.fc2.in_features
    axes = linear_axes(model, f"{name}.fc1", copies=mlp.fc1.out_features // hidden)
    if hasattr(mlp, "dwconv"):
        axes += linear_axes(model, f"{name}.dwconv")
    space = Space(name, "mlp", hidden, (*axes, input_axis(f"{name}.fc2")))
    return [space], [input_axis(f"{name}.fc1"), *linear_axes(model, f"{name}.fc2")]


def child_axes(model: nn.Module, path: str, block: nn.Module, names: tuple[str, ...]) -> list[Axis]:
    """The axes of these norms and LayerScales of a block, as far as it has them."""
    return [axis for name in names if hasattr(block, name) for axis in norm_axes(model, f"{path}.{name}")]


def block_spaces(
    model: nn.Module, path: str, block: nn.Module, norms: tuple[str, ...], attention: Describe
) -> tuple[list[Space], list[Axis]]:
    """Spaces inside a block, and the residual axes of all its parts. attention: as `packed_attention` does it."""
    spaces: list[Space] = []
    stream = child_axes(model, path, block, norms)
    for name, describe in (("attn", attention), ("mlp", ffn)):
        if hasattr(block, name):
            own, axes = describe(model, path, getattr(block, name))
            spaces += own
            stream += axes
    return spaces, stream


def staged_spaces(model: nn.Module, stages: str, attention: Describe, stream: Stream) -> tuple[Space, ...]:
    """The spaces inside the blocks of a model of stages, then one residual stream per stage."""
    inner: list[Space] = []
    residual: dict[str, list[Axis]] = {
        f"{stages}.{name}": [] for name, _ in model.get_submodule(stages).named_children()
    }
    for path, block in staged_blocks(model, stages).items():
        own, axes = block_spaces(model, path, block, ("norm1", "norm2"), attention)
        inner += own
        residual[path.rsplit(".", 2)[0]] += axes
    return (*inner, *(stream(model, stage, axes) for stage, axes in residual.items()))


def last_linear(path: str, part: Any) -> str:
    """The linear layer with which an attention or FFN at `path` ends."""
    if isinstance(part, nn.Linear):  # folded
        return path
    return f"{path}.proj" if hasattr(part, "proj") else f"{path}.fc2"


def linear_pair(model: nn.Module, ffn: str) -> LinearPair | None:
    """fc1 and fc2 of a timm Mlp or of a gated one; None when it is folded already, or of another kind."""
    is_pair = isinstance(model.get_submodule(ffn), Mlp | GluMlp)
    return LinearPair(f"{ffn}.fc1", f"{ffn}.fc2") if is_pair else None
