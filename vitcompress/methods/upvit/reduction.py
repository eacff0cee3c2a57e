"""UP-ViT's target in relation to the model that is cut down to it."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from vitcompress.errors import PlanError
from vitcompress.families import Family, Space
from vitcompress.methods.upvit.blocks import Block, whole_blocks
from vitcompress.methods.upvit.heads import check
from vitcompress.methods.upvit.importance import Component, components
from vitcompress.methods.upvit.options import Options
from vitcompress.methods.upvit.target import Target, check_target, depths, target
from vitcompress.plan import Plan, is_within


@dataclass(frozen=True)
class Goal:
    """target: the model to arrive at. blocks: path -> block of the model as it is. stages: its blocks, hybrids counted
    once, by stage; empty where only widths are pruned and the blocks are not whole.
    """

    target: Target
    blocks: Mapping[str, nn.Module]
    stages: dict[str, list[Block]]

    def width(self, component: Component) -> int:
        """How many of the component's channels are to stay."""
        return self.target.width(component.spaces[0], self.blocks)

    def heads(self, component: Component) -> int:
        """How many heads an attention is to have."""
        return self.target.heads_of(component.spaces[0], self.blocks)

    def cuts(self, component: Component) -> bool:
        """Whether the component is to lose channels or get other heads."""
        widths = (self.target.width(space, self.blocks) for space in component.spaces)
        return any(width != space.size for width, space in zip(widths, component.spaces, strict=True)) or (
            component.kind == "attention" and self.heads(component) != component.spaces[0].heads
        )


def goal_of(model: nn.Module, family: Family, base: Plan, options: Options) -> Goal:
    """Raises PlanError when no target is given, or UP-ViT cannot lead from `model` to it."""
    if options.target is None and not options.target_args:
        raise PlanError("no target is given", hint="set target = 'deit_tiny_patch16_224', or sizes in target_args")
    if any(axis.per_head for space in family.spaces(model) for axis in space.axes):
        raise PlanError(
            f"UP-ViT cannot prune a {family.name} model: its heads have relative position tables of their own, which a "
            "head made of several has not, and its windows shift by a block's place, which changes when blocks go",
            hint="use upvit on ViT or PVTv2; isomorphic and sero prune this family",
        )
    if any(space.whole_heads for space in family.spaces(model)):
        raise PlanError(
            "UP-ViT cannot prune a model with rotary embeddings: it makes heads out of parts of others, and these "
            "embeddings turn the channels of q and k by their place in the head",
            hint="isomorphic and sero prune this family, heads of q and k as a whole",
        )
    aim = target(options.target or base.arch, {**base.arch_args, **options.target_args})
    goal = Goal(aim, family.blocks(model), _stages(model, family, base, aim))
    counts = {stage: len(of) for stage, of in goal.stages.items()} or depths(family, model)
    check_target(aim, model, family, counts)
    for component in components(family.spaces(model)):
        if component.kind == "attention" and goal.cuts(component):
            _check_attention(component, goal, options)
    return goal


def _stages(model: nn.Module, family: Family, base: Plan, aim: Target) -> dict[str, list[Block]]:
    """Stage -> its standard blocks; empty if the blocks are not standard ones and only widths are pruned.

    Raises:
        PlanError: blocks are to be removed, but earlier steps left blocks that no timm model has.
    """
    try:
        replaced = [name for name, replacement in base.removed.items() if replacement != "drop"]
        if changed := [*replaced, *base.appended]:
            raise PlanError(
                f"{changed[0]} was replaced by an earlier step, so its block is not a standard block of timm",
                hint="prune blocks before the step that removes activations or replaces attentions, or only widths "
                "after it (the target's depth must equal the model's)",
            )
        return whole_blocks(model, family)
    except PlanError:
        if depths(family, model) == aim.depths:
            return {}
        raise


def _check_attention(component: Component, goal: Goal, options: Options) -> None:
    """Raise PlanError where this attention cannot be regrouped into that of the target."""
    sizes = {space.kind: space.size for space in component.spaces}
    if len(set(sizes.values())) > 1:
        raise PlanError(
            f"{component.name} has {sizes['qk']} channels in q and k and {sizes['v']} in v; UP-ViT prunes "
            "them by one number",
            hint="use it before a step that prunes them apart",
        )
    old_heads = component.spaces[0].heads
    check(component.size, old_heads, goal.heads(component), goal.width(component), options.heads)


def left(model: nn.Module, family: Family, removed: Plan) -> list[Space]:
    """The spaces of `model` that are still there after `removed`, with the sizes that they have now."""
    return [
        space
        for space in family.spaces(model)
        if not (is_within(space.name, removed.removed) or is_within(space.attention or space.name, removed.removed))
    ]
