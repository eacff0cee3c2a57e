"""Replace modules; remove attentions, activations, FFNs and blocks, with everything that would then compute zero."""

from typing import Any

from torch import nn

from vitcompress.families import Family
from vitcompress.families.edited_block import EditedBlock
from vitcompress.families.gated_ffn import ungate
from vitcompress.plan import Plan

ACTIVATIONS = {"gelu": nn.GELU}


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
            part = family.wiring.attention if site.kind == "attention" else family.wiring.ffn
            _edited_block(model, family, site.block).rewire(part, _chain(family, part, replacement))
    for name, act in plan.appended.items():
        _edited_block(model, family, name).output_act = ACTIVATIONS[act]()
    for name, block in family.blocks(model).items():
        if isinstance(block, EditedBlock) and block.is_empty:
            _drop_block(model, name)


def _chain(family: Family, part: str, replacement: str) -> tuple[str, ...] | None:
    """The branch without `part`: None for no branch, () for the stream itself, else norm and LayerScale."""
    if replacement == "drop":
        return None
    if replacement == "double":
        return ()
    branch = next(branch for branch in family.wiring.branches if part in branch)
    return tuple(name for name in branch if name != part)


def _edited_block(model: nn.Module, family: Family, path: str) -> EditedBlock:
    block = EditedBlock.of(model.get_submodule(path), family.wiring)
    replace_module(model, path, block)
    return block


def replace_module(model: nn.Module, path: str, new: nn.Module) -> None:
    """Replace the module at `path` by `new`, which gets the mode (training or evaluation) of the old module."""
    parent, _, leaf = path.rpartition(".")
    new.training = model.get_submodule(path).training
    setattr(model.get_submodule(parent), leaf, new)


def _drop_block(model: Any, path: str) -> None:
    """Delete a block and its entry in timm's `feature_info`. The other blocks keep their numbers."""
    parent, _, leaf = path.rpartition(".")
    delattr(model.get_submodule(parent), leaf)
    if hasattr(model, "feature_info"):
        model.feature_info = [entry for entry in model.feature_info if entry["module"] != path]
