"""What a model is cut down to: the widths, heads and numbers of blocks of a standard timm model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from vitcompress.errors import PlanError
from vitcompress.families import Family, Space, family_of
from vitcompress.models.create import create_on_meta
from vitcompress.plan import enclosing_module

KINDS = {
    "residual": "stream",
    "qk": "attention (q and k)",
    "v": "attention (v)",
    "mlp": "FFN",
    "sr": "spatial reduction",
}


@dataclass(frozen=True)
class Target:
    """The model to arrive at.

    arch, arch_args: as timm builds it. depths: stage (the module that holds the blocks) -> number of blocks. widths,
    heads: per (stage or residual space, kind of space). frame: what width pruning never changes, see `frame`.
    """

    arch: str
    arch_args: dict[str, Any]
    depths: dict[str, int]
    widths: dict[tuple[str, str], int]
    heads: dict[tuple[str, str], int]
    frame: dict[str, tuple[int | None, ...]]

    def width(self, space: Space, blocks: Mapping[str, nn.Module]) -> int:
        """How many channels of `space` are to stay."""
        return self.widths[self._key(space, blocks)]

    def heads_of(self, space: Space, blocks: Mapping[str, nn.Module]) -> int:
        """How many heads the attention of `space` is to have."""
        return self.heads[self._key(space, blocks)]

    def _key(self, space: Space, blocks: Mapping[str, nn.Module]) -> tuple[str, str]:
        key = place(space, blocks)
        if key not in self.widths:
            raise PlanError(
                f"{self.arch} has no {KINDS[space.kind]} channels in {key[0]}", hint="choose another target"
            )
        return key


def place(space: Space, blocks: Mapping[str, nn.Module]) -> tuple[str, str]:
    """What identifies corresponding spaces of two models: the stage, or the space itself, and its kind."""
    inside = enclosing_module(space.name, blocks)
    return (space.name if inside is None else stage_of(inside), space.kind)


def stage_of(block: str) -> str:
    """The module that holds a block."""
    return block.rpartition(".")[0]


def depths(family: Family, model: nn.Module) -> dict[str, int]:
    """How many blocks each stage of `model` holds."""
    found: dict[str, int] = {}
    for path in family.blocks(model):
        found[stage_of(path)] = found.get(stage_of(path), 0) + 1
    return found


def target(arch: str, arch_args: Mapping[str, Any]) -> Target:
    """The target that timm builds as `arch` with `arch_args`. Raises InputError where timm cannot."""
    model = create_on_meta(arch, arch_args)
    family = family_of(model)
    blocks = family.blocks(model)
    widths, heads = {}, {}
    for space in family.spaces(model):
        widths[place(space, blocks)] = space.size
        heads[place(space, blocks)] = space.heads
    return Target(arch, dict(arch_args), depths(family, model), widths, heads, frame(family, model))


def frame(family: Family, model: nn.Module) -> dict[str, tuple[int | None, ...]]:
    """Parameter -> its shape, with None where a space runs; parameters of blocks once per stage.

    Two models of one frame differ in widths and in numbers of blocks only: the same patches, tokens and classes.
    """
    cut = {(axis.tensor, axis.dim) for space in family.spaces(model) for axis in space.axes}
    blocks, found = family.blocks(model), {}
    for name, parameter in model.named_parameters():
        shape = tuple(None if (name, dim) in cut else size for dim, size in enumerate(parameter.shape))
        path = enclosing_module(name, blocks)
        place = name if path is None else f"{stage_of(path)}.*{name.removeprefix(path)}"
        found[place] = shape
    return found


def _frame_problems(goal: Target, own: Mapping[str, tuple[int | None, ...]]) -> Iterator[str]:
    """What differs between target and model that no pruning changes, told by the first parameter that shows it."""
    for name in [*own, *(name for name in goal.frame if name not in own)]:
        here, there = own.get(name), goal.frame.get(name)
        if here != there:
            sizes = [
                "no such parameter" if shape is None else str(tuple("any" if n is None else n for n in shape))
                for shape in (there, here)
            ]
            yield f"it takes other images, patches, tokens or classes ({name}: {sizes[0]} there, {sizes[1]} here)"
            return


def check_target(goal: Target, model: nn.Module, family: Family, current_depths: Mapping[str, int]) -> None:
    """Raise PlanError where `goal` is no smaller version of `model`.

    current_depths: blocks per stage, hybrids counted once.
    """
    blocks = family.blocks(model)
    places = {space: place(space, blocks) for space in family.spaces(model)}
    problems = list(_frame_problems(goal, frame(family, model)))
    if set(goal.depths) != set(current_depths):
        problems.append(f"it has blocks in {', '.join(goal.depths)}, the model in {', '.join(current_depths)}")
    grows = [*_deeper(goal, current_depths), *(() if problems else _wider(goal, places))]
    problems += [f"it has {text}" for text in dict.fromkeys(grows)]
    if not problems and not _is_smaller(goal, places, current_depths):
        problems.append("it is as large as the model")
    if problems:
        raise PlanError(
            f"the target {goal.arch} is not a smaller version of the model: {'; '.join(problems)}",
            hint="name a smaller model of the same kind, or give smaller sizes in target_args",
        )


def _deeper(goal: Target, current_depths: Mapping[str, int]) -> Iterator[str]:
    """Where the target has more blocks."""
    for stage, count in current_depths.items():
        if goal.depths.get(stage, 0) > count:
            yield f"{goal.depths[stage]} blocks in {stage}, the model {count}"


def _wider(goal: Target, places: Mapping[Space, tuple[str, str]]) -> Iterator[str]:
    """Where the target has more channels or heads."""
    for space, key in places.items():
        if goal.widths.get(key, 0) > space.size:
            yield f"{goal.widths[key]} {KINDS[space.kind]} channels in {key[0]}, the model {space.size}"
        if goal.heads.get(key, space.heads) > space.heads:
            yield f"{goal.heads[key]} heads in {key[0]}, the model {space.heads}"


def _is_smaller(goal: Target, places: Mapping[Space, tuple[str, str]], current_depths: Mapping[str, int]) -> bool:
    """Whether the target has fewer blocks or channels anywhere."""
    fewer_blocks = any(goal.depths.get(stage, 0) < count for stage, count in current_depths.items())
    return fewer_blocks or any(0 < goal.widths.get(key, 0) < space.size for space, key in places.items())
