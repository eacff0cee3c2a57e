"""Keep some channels of a space: index every tensor along every axis of the space."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitcompress.families import Family, Space
from vitcompress.plan import Plan
from vitcompress.surgery.remove import replace_module

Segment = tuple[int, int, list[int]]  # of an axis: start, length, positions to keep
Segments = dict[str, dict[int, list[Segment]]]  # by tensor and dimension


def sliced_state(
    state: Mapping[str, Tensor], spaces: Iterable[Space], kept: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """A copy of `state` with every axis of every space in `kept` indexed, in the order of `kept`.

    Tensors without such an axis are the same objects as in `state`.
    """
    segments = segments_of(spaces, kept)
    return {name: _select(tensor, segments.get(name, {})) for name, tensor in state.items()}


def segments_of(spaces: Iterable[Space], kept: Mapping[str, tuple[int, ...]]) -> Segments:
    """What to keep of every tensor that a space in `kept` indexes."""
    segments: Segments = {}
    for space in spaces:
        if space.name not in kept:
            continue
        channels, size = list(kept[space.name]), space.size
        heads = list(dict.fromkeys(c // (size // space.heads) for c in channels))
        for axis in space.axes:
            chosen, length = (heads, space.heads) if axis.per_head else (channels, size)
            order = [axis.offset + copy * length + c for copy in range(axis.copies) for c in chosen]
            segment = (axis.offset, axis.copies * length, order)
            segments.setdefault(axis.tensor, {}).setdefault(axis.dim, []).append(segment)
    return segments


def _select(tensor: Tensor, by_dim: Mapping[int, list[Segment]]) -> Tensor:
    """The positions to keep along each dimension: those of the segments, and everything between them."""
    for dim, segments in by_dim.items():
        positions: list[int] = []
        end = 0
        for start, length, order in sorted(segments):
            positions += [*range(end, start), *order]
            end = start + length
        positions += range(end, tensor.shape[dim])
        tensor = tensor.index_select(dim, torch.tensor(positions, device=tensor.device))
    return tensor


def slice_channels(model: nn.Module, family: Family, plan: Plan) -> None:
    """Slice every space in `plan.kept` that `model` has, and correct all sizes that modules store.

    Removed modules have no spaces, so `plan.kept` may name more spaces than the model has.
    """
    spaces = family.spaces(model)
    segments = segments_of(spaces, plan.kept)
    for name, by_dim in segments.items():  # one after the other: a large model is never in memory twice
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        before = getattr(owner, leaf)
        after = _select(before.detach(), by_dim).contiguous()
        is_parameter = isinstance(before, nn.Parameter)
        setattr(owner, leaf, nn.Parameter(after, requires_grad=before.requires_grad) if is_parameter else after)
        _correct_sizes(owner)
    sizes = {space.name: len(plan.kept.get(space.name, range(space.size))) for space in spaces}
    for path in dict.fromkeys(space.attention for space in spaces if space.attention):
        of = {space.kind: space for space in spaces if space.attention == path}
        if any(tensor.startswith(f"{path}.") for tensor in segments):
            heads = plan.heads.get(path, of["v"].heads)
            widths = sizes[of["qk"].name], sizes[of["v"].name]
            replace_module(model, path, family.slice_attention(model.get_submodule(path), *widths, heads))
    for space in spaces:
        if space.kind == "residual" and space.name in plan.kept:
            family.set_width(model, space.name, sizes[space.name])


def pad_attentions(model: nn.Module, plan: Plan) -> None:
    """Make the attentions in `plan.padded` zero-pad q, k and v to one width; those of equal widths stay unchanged."""
    for name in plan.padded:
        attention: Any = model.get_submodule(name)
        if hasattr(attention, "padded"):
            attention.padded = True


def _correct_sizes(module: nn.Module) -> None:
    """Set the sizes that a module stores to those of its tensors."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.LayerNorm):
        module.normalized_shape = tuple(module.weight.shape)
    elif isinstance(module, nn.Conv2d):
        module.out_channels, module.in_channels = module.weight.shape[:2]
        if module.groups > 1:  # depth-wise
            module.groups = module.in_channels = module.out_channels
