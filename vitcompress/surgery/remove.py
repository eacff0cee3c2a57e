"""Remove attentions, activations, FFNs and blocks, with everything that would then compute zero."""

from torch import nn

from vitcompress.families import Family
from vitcompress.families.edited_block import EditedBlock
from vitcompress.families.gated_ffn import ungate
from vitcompress.plan import Plan
from vitcompress.surgery.modules import drop_block, replace_module

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
            drop_block(model, name)
        else:
            part = family.wiring.attention if site.kind == "attention" else family.wiring.ffn
            _edited_block(model, family, site.block).rewire(part, _chain(family, part, replacement))
    for name, act in plan.appended.items():
        _edited_block(model, family, name).output_act = ACTIVATIONS[act]()
    for name, block in family.blocks(model).items():
        if isinstance(block, EditedBlock) and block.is_empty:
            drop_block(model, name)


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
