"""Take whole attentions, activations, FFNs and blocks out of a model; nothing that computes a zero is left behind."""

from torch import nn

from vitcompress.families import Family
from vitcompress.families.edited_block import EditedBlock
from vitcompress.families.gated_ffn import ungated
from vitcompress.plan import Plan
from vitcompress.surgery.modules import drop_block, replace_module

ACTIVATIONS = {"gelu": nn.GELU}


def remove_sites(model: nn.Module, family: Family, plan: Plan) -> None:
    """Do what `plan.removed` and `plan.appended` say. A block with nothing left to compute disappears."""
    sites = {site.name: site for site in family.sites(model)}
    for name, stand in plan.removed.items():
        site = sites[name]
        if site.gates:
            replace_module(model, site.gates, ungated(model.get_submodule(site.gates), stand))
        elif site.kind == "activation":
            replace_module(model, name, nn.Identity())
        elif site.kind == "block":
            drop_block(model, name)
        else:
            part = family.wiring.attention if site.kind == "attention" else family.wiring.ffn
            _edited(model, family, site.block).rewire(part, _chain(family, part, stand))
    for name, act in plan.appended.items():
        _edited(model, family, name).output_act = ACTIVATIONS[act]()
    for name, block in family.blocks(model).items():
        if isinstance(block, EditedBlock) and block.is_empty:
            drop_block(model, name)


def _chain(family: Family, part: str, stand: str) -> tuple[str, ...] | None:
    """What the branch computes once `part` is gone: None no branch, () the stream itself, else norm and LayerScale."""
    if stand == "drop":
        return None
    if stand == "double":
        return ()
    branch = next(branch for branch in family.wiring.branches if part in branch)
    return tuple(name for name in branch if name != part)


def _edited(model: nn.Module, family: Family, path: str) -> EditedBlock:
    block = EditedBlock.of(model.get_submodule(path), family.wiring)
    replace_module(model, path, block)
    return block
