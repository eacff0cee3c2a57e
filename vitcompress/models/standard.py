"""A compressed model as a standard timm model, which loads without a plan (UP-ViT)."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from vitcompress.errors import PlanError, lines_of
from vitcompress.families import Family, Site, family_of
from vitcompress.models.create import create_model
from vitcompress.plan import Plan, enclosing_module, stage_of


@dataclass(frozen=True)
class Block:
    """An attention and the FFN after it, of the same dense block or of two."""

    attention: Site
    ffn: Site

    @property
    def parts(self) -> tuple[str, ...]:
        """The sites to remove: the dense block, or the two parts."""
        same = self.attention.block == self.ffn.block
        return (self.attention.block,) if same else (self.attention.name, self.ffn.name)


def standard_blocks(model: nn.Module, family: Family) -> dict[str, list[Block]]:
    """Stage -> its blocks in order; a hybrid of an earlier step is one block.

    Raises PlanError if attentions and FFNs do not alternate, because an earlier step removed one of them alone.
    """
    parts: dict[str, list[Site]] = {stage_of(path): [] for path in family.blocks(model)}
    for site in family.sites(model):
        if site.kind in ("attention", "ffn"):
            parts[stage_of(site.block)].append(site)
    for stage, sites in parts.items():
        if [site.kind for site in sites] != ["attention", "ffn"] * (len(sites) // 2):
            message = f"the attentions and FFNs in {stage} do not alternate, so they form no standard blocks"
            raise PlanError(message, hint="prune blocks before a step that removes attentions or FFNs alone")
    return {stage: list(map(Block, sites[::2], sites[1::2])) for stage, sites in parts.items()}


def standard_model(model: nn.Module, plan: Plan) -> nn.Module:
    """The timm model of `plan.standard` with the weights of `model`: it computes the same, and loads without a plan.

    An attention-only block and the FFN-only block after it become one block, and blocks are renumbered. Where heads
    became narrower, the dense softmax scale is multiplied into the weights of q, because the standard model uses the
    scale of its own heads.

    Raises PlanError if the weights do not fit that model, and as `standard_blocks`.
    """
    arch, args = plan.standard["arch"], plan.standard["args"]
    standard = create_model(arch, args).to(next(model.parameters()).dtype)
    family = family_of(model)
    prefixes: dict[str, str] = {}  # path of each block -> path of the standard block that contains it
    for stage, blocks in standard_blocks(model, family).items():
        for number, block in enumerate(blocks):
            prefixes |= dict.fromkeys((block.attention.block, block.ffn.block), f"{stage}.{number}")

    def rename(name: str) -> str:
        path = enclosing_module(name, prefixes)
        return name if path is None else prefixes[path] + name.removeprefix(path)

    state = {rename(name): tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for space in (space for space in family.spaces(model) if space.kind == "qk"):
        attention: Any = model.get_submodule(space.attention)
        target: Any = standard.get_submodule(rename(f"{space.attention}.").rstrip("."))
        q = space.axes[0]
        for axis in space.axes:
            if axis.owner == q.owner and attention.scale != target.scale:
                state[rename(axis.tensor)][q.offset : q.offset + space.size] *= attention.scale / target.scale
    try:
        standard.load_state_dict(state, strict=True)
    except RuntimeError as error:
        message = f"the model does not load as {arch}: {lines_of(error)[:2][-1]}"
        raise PlanError(message, hint="remove the steps that change more than widths and whole blocks") from None
    return standard.eval()
