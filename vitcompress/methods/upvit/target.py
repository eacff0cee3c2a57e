"""The standard timm model that UP-ViT prunes to, and whether the model can become it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from vitcompress.errors import PlanError
from vitcompress.families import Family, Space, family_of
from vitcompress.methods.base import reject_unused
from vitcompress.methods.scores import UNMEASURED
from vitcompress.methods.upvit.blocks import Block, stage_of, standard_blocks
from vitcompress.methods.upvit.heads import check_heads
from vitcompress.methods.upvit.importance import Component, components
from vitcompress.methods.upvit.options import Options
from vitcompress.models.create import create_on_meta
from vitcompress.plan import Plan, enclosing_module

KINDS = {
    "residual": "stream",
    "qk": "attention (q and k)",
    "v": "attention (v)",
    "mlp": "FFN",
    "sr": "spatial reduction",
}
Place = tuple[str, str]  # stage, or name of a space outside of blocks; kind of the space
Frame = dict[str, tuple[int | None, ...]]


@dataclass(frozen=True)
class Target:
    """A standard model, as `timm.create_model(arch, **arch_args)` builds it, and what leads from the model to it.

    stages: stage (the module that contains the blocks) -> blocks of the model; empty if earlier steps changed blocks,
        so that only widths can be pruned and the result is no standard model. depths: stage -> number of blocks.
    sizes: component of the model -> number of its channels and heads in the target.
    """

    arch: str
    arch_args: dict[str, Any]
    stages: dict[str, list[Block]]
    depths: dict[str, int]
    sizes: dict[str, tuple[int, int]]

    @property
    def surplus(self) -> int:
        """Number of blocks to remove."""
        return sum(len(blocks) - self.depths[stage] for stage, blocks in self.stages.items())

    def cuts(self, component: Component) -> bool:
        """Whether the component loses channels or gets another number of heads."""
        width, heads = self.sizes[component.name]
        same_heads = component.kind != "attention" or heads == component.spaces[0].heads
        return not same_heads or any(space.size != width for space in component.spaces)


def find_target(model: nn.Module, family: Family, base: Plan, options: Options) -> Target:
    """The target of `options`.

    Raises:
        PlanError: no target is set, the model cannot become it, or an option has no effect.
        InputError: timm cannot build it.
    """
    if options.target is None and not options.target_args:
        raise PlanError("no target is set", hint="set target = 'deit_tiny_patch16_224', or sizes in target_args")
    spaces = family.spaces(model)
    _check_family(family, spaces)
    arch, arch_args = options.target or base.arch, {**base.arch_args, **options.target_args}
    standard = create_on_meta(arch, arch_args)
    depths = _depths(family_of(standard), standard)
    stages = _stages(model, family, base, depths)
    counts = {stage: len(blocks) for stage, blocks in stages.items()} or _depths(family, model)
    if problems := _problems(model, family, standard, counts, depths):
        raise PlanError(
            f"the target {arch} is not a smaller version of the model: {'; '.join(dict.fromkeys(problems))}",
            hint="name a smaller model of the same kind, or set smaller sizes in target_args",
        )
    places, blocks = _sizes(family_of(standard), standard), family.blocks(model)
    own = components(spaces)
    sizes = {component.name: places[_place(component.spaces[0], blocks)] for component in own}
    target = Target(arch, arch_args, stages, depths, sizes)
    for component in own:
        if component.kind == "attention" and target.cuts(component):
            _check_attention(component, *sizes[component.name], options)
    _check_options(options, target, own)
    return target


def _check_family(family: Family, spaces: tuple[Space, ...]) -> None:
    if any(axis.per_head for space in spaces for axis in space.axes):
        raise PlanError(
            f"UP-ViT does not support {family.name} models: each head has a relative position table, which one formed "
            "from several cannot have, and windows shift by the block's number, which changes with the blocks",
            hint="use upvit on ViT or PVTv2; isomorphic and sero prune this family",
        )
    if any(space.whole_heads for space in spaces):
        raise PlanError(
            "UP-ViT does not support rotary embeddings: it forms heads from parts of others, and these embeddings "
            "rotate the channels of q and k by their position in the head",
            hint="isomorphic and sero prune this family, heads of q and k as a whole",
        )


def _stages(model: nn.Module, family: Family, base: Plan, depths: Mapping[str, int]) -> dict[str, list[Block]]:
    """Stage -> its standard blocks; empty if there are others and only widths are pruned.

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
        return standard_blocks(model, family)
    except PlanError:
        if _depths(family, model) == depths:
            return {}
        raise


def _depths(family: Family, model: nn.Module) -> dict[str, int]:
    """Stage -> number of its blocks."""
    stages = [stage_of(path) for path in family.blocks(model)]
    return {stage: stages.count(stage) for stage in stages}


def _place(space: Space, blocks: Mapping[str, nn.Module]) -> Place:
    """Equal for corresponding spaces of two models."""
    block = enclosing_module(space.name, blocks)
    return (space.name if block is None else stage_of(block), space.kind)


def _sizes(family: Family, model: nn.Module) -> dict[Place, tuple[int, int]]:
    """Channels and heads by place."""
    blocks = family.blocks(model)
    return {_place(space, blocks): (space.size, space.heads) for space in family.spaces(model)}


def _frame(family: Family, model: nn.Module) -> Frame:
    """Parameter -> shape, with None for the dimensions that belong to a space; parameters of blocks once per stage.

    Models with equal frames differ in widths and numbers of blocks only: patches, tokens and classes are the same.
    """
    pruned = {(axis.tensor, axis.dim) for space in family.spaces(model) for axis in space.axes}
    blocks, frame = family.blocks(model), {}
    for name, parameter in model.named_parameters():
        path = enclosing_module(name, blocks)
        key = name if path is None else f"{stage_of(path)}.*{name.removeprefix(path)}"
        frame[key] = tuple(None if (name, dim) in pruned else size for dim, size in enumerate(parameter.shape))
    return frame


def _problems(
    model: nn.Module, family: Family, standard: nn.Module, counts: Mapping[str, int], depths: Mapping[str, int]
) -> list[str]:
    """Why the model, with `counts` blocks per stage, cannot become `standard` by pruning."""
    problems = []
    there, here = _frame(family_of(standard), standard), _frame(family, model)
    if name := next((name for name in {**here, **there} if here.get(name) != there.get(name)), None):
        shapes = (
            "no such parameter" if shape is None else str(tuple("any" if n is None else n for n in shape))
            for shape in (there.get(name), here.get(name))
        )
        problems.append(f"it takes other images, patches, tokens or classes ({name}: {' there, '.join(shapes)} here)")
    if set(depths) != set(counts):
        problems.append(f"it has blocks in {', '.join(depths)}, the model in {', '.join(counts)}")
    comparable = not problems
    deeper = [stage for stage, count in counts.items() if depths.get(stage, 0) > count]
    problems += [f"it has {depths[stage]} blocks in {stage}, the model {counts[stage]}" for stage in deeper]
    if not comparable:
        return problems
    sizes, blocks, smaller = _sizes(family_of(standard), standard), family.blocks(model), depths != counts
    for space in family.spaces(model):
        place = _place(space, blocks)
        channels, heads = sizes[place]
        smaller |= channels < space.size
        if channels > space.size:
            problems.append(f"it has {channels} {KINDS[space.kind]} channels in {place[0]}, the model {space.size}")
        if heads > space.heads:
            problems.append(f"it has {heads} heads in {place[0]}, the model {space.heads}")
    return problems if problems or smaller else ["it is as large as the model"]


def _check_attention(component: Component, width: int, heads: int, options: Options) -> None:
    """Raise PlanError if the attention cannot be regrouped into `heads` heads of `width` channels in all."""
    sizes = {space.kind: space.size for space in component.spaces}
    if len(set(sizes.values())) > 1:
        raise PlanError(
            f"{component.name} has {sizes['qk']} channels in q and k, {sizes['v']} in v; UP-ViT prunes them together",
            hint="use upvit before a step that prunes them separately",
        )
    check_heads(component.size, component.spaces[0].heads, heads, width, options.heads)


def _check_options(options: Options, target: Target, own: tuple[Component, ...]) -> None:
    """Raise PlanError for options without effect."""
    cut = [component for component in own if target.cuts(component)]
    screened = options.score == "screened"
    score = f"score is {options.score!r}" + (f" and screen {options.screen!r}" if screened else "")
    screen = options.screen if screened else options.score
    no_channels = not cut and "no channels are removed"
    reject_unused(
        options,
        {
            "heads": not any(component.kind == "attention" for component in cut) and "no attention is changed",
            "images": not target.surplus and options.score in UNMEASURED and score,
            "reference": target.surplus < 2 and f"the number of removed blocks is {target.surplus}",
            "score": no_channels,
            "screen": not screened and score,
            "band": not screened and score,
            "screen_images": screen != "images" and score,
            "directions": screen != "fisher" and score,
            "images_at_once": no_channels or (options.score not in ("exact", "screened") and score),
        },
    )
