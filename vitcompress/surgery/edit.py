"""The edits of a plan, except folding: replace and remove modules, and index tensors along every axis of a space.

With an attention, activation, FFN or block, everything is removed that would then compute zero.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitcompress.errors import UnsupportedModelError
from vitcompress.families import Family, Space
from vitcompress.families.base import COMPUTED
from vitcompress.families.edited_block import SITE_PARTS, EditedBlock, move_hooks
from vitcompress.families.gated_ffn import ungate
from vitcompress.plan import Plan

ACTIVATIONS = {"gelu": nn.GELU}
Segment = tuple[int, int, list[int]]  # of an axis: start, length, positions to keep
Segments = dict[str, dict[int, list[Segment]]]  # by tensor and dimension


def remove_sites(model: nn.Module, family: Family, plan: Plan) -> None:
    """Carry out `plan.removed` and `plan.appended`. A block that computes nothing is deleted."""
    sites = {site.name: site for site in family.sites(model)}
    for name, replacement in plan.removed.items():
        site = sites[name]
        if site.gates:
            replace_module(model, site.gates, ungate(model.get_submodule(site.gates), replacement))
        elif site.kind == "activation":
            replace_module(model, name, nn.Identity())
        elif site.kind == "block":
            _drop_block(model, name)
        else:
            _edited_block(model, family, site.block).rewire(SITE_PARTS[site.kind], replacement)
    for name, act in plan.appended.items():
        _edited_block(model, family, name).output_act = ACTIVATIONS[act]()
    for name, block in family.blocks(model).items():
        if isinstance(block, EditedBlock) and not block.branches and block.output_act is None:  # it computes nothing
            _drop_block(model, name)


def _edited_block(model: nn.Module, family: Family, path: str) -> EditedBlock:
    block = EditedBlock.of(model.get_submodule(path), family.wiring)
    replace_module(model, path, block)
    return block


def replace_module(model: nn.Module, path: str, new: nn.Module) -> None:
    """Replace the module at `path` by `new`, which gets its mode (training or evaluation) and its forward hooks."""
    old = model.get_submodule(path)
    new.training = old.training
    model.set_submodule(path, move_hooks(old, new))


def _drop_block(model: Any, path: str) -> None:
    """Delete a block and its entry in timm's `feature_info`. The other blocks keep their numbers."""
    parent, _, leaf = path.rpartition(".")
    delattr(model.get_submodule(parent), leaf)
    if hasattr(model, "feature_info"):
        model.feature_info = [entry for entry in model.feature_info if entry["module"] != path]


def segments_of(spaces: Iterable[Space], kept: Mapping[str, tuple[int, ...]]) -> Segments:
    """What to keep of every tensor that a space in `kept` indexes."""
    segments: Segments = {}
    for space in (space for space in spaces if space.name in kept):
        channels, size = list(kept[space.name]), space.size
        heads = list(dict.fromkeys(c // (size // space.heads) for c in channels))
        for axis in space.axes:
            chosen, length = (heads, space.heads) if axis.per_head else (channels, size)
            order = [axis.offset + copy * length + c for copy in range(axis.copies) for c in chosen]
            segment = (axis.offset, axis.copies * length, order)
            segments.setdefault(axis.tensor, {}).setdefault(axis.dim, []).append(segment)
    return segments


def select_positions(tensor: Tensor, by_dim: Mapping[int, list[Segment]]) -> Tensor:
    """The positions to keep along each dimension: those of the segments, and everything between them."""
    for dim, segments in by_dim.items():
        positions, end = list[int](), 0
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
        if leaf not in (*owner._parameters, *owner._buffers):
            raise UnsupportedModelError(f"this model cannot be pruned: its {path or leaf} {COMPUTED}")
        before = getattr(owner, leaf)
        after = select_positions(before.detach(), by_dim).contiguous()
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
