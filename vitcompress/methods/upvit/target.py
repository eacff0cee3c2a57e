"""The standard timm model that UP-ViT's options name, and whether the model can become it.

From H heads to H', a new head consists of channels of H / H' old ones ("Pruning multi-head self-attention", Table D10).
That changes the function, since the products of several old heads are then summed before the softmax.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from vitcompress.errors import InputError, PlanError
from vitcompress.families import Family, Space, family_of
from vitcompress.methods.base import reject_unused
from vitcompress.methods.options import Strategy, UpvitOptions
from vitcompress.methods.scores import UNMEASURED
from vitcompress.methods.upvit.importance import Component, components
from vitcompress.models.create import build_on_meta, create_on_meta, with_changes
from vitcompress.models.standard import Block, standard_blocks
from vitcompress.plan import Plan, enclosing_module, stage_of

OTHER_METHODS = "use upvit on ViT or PVTv2; isomorphic and sero prune this family"
KINDS = {"residual": "stream", "qk": "attention (q, k)", "v": "attention (v)", "mlp": "FFN", "sr": "spatial reduction"}
Place = tuple[str, str]  # stage, or name of a space outside of blocks; kind of the space


@dataclass(frozen=True)
class Target:
    """A standard model, as `timm.create_model(arch, **arch_args)` builds it, and what leads from the model to it.

    stages: stage (the module that contains the blocks) -> blocks of the model; empty if earlier steps changed blocks,
        so that only widths can be pruned and the result is no standard model. depths: stage -> number of blocks.
    sizes: component of the model -> number of its channels and heads in the target. strategy: of forming heads.
    """

    arch: str
    arch_args: Mapping[str, object]
    stages: dict[str, list[Block]]
    depths: dict[str, int]
    sizes: dict[str, tuple[int, int]]
    strategy: Strategy

    @property
    def surplus(self) -> int:
        """Number of blocks to remove."""
        return sum(len(blocks) - self.depths[stage] for stage, blocks in self.stages.items())

    def cuts(self, component: Component) -> bool:
        """Whether the component loses channels or gets another number of heads."""
        return any((space.size, space.heads) != self.sizes[component.name] for space in component.spaces)

    def parts(self, component: Component) -> int:
        """The number of equal parts of the component's channels that each keep as many channels.

        Of an attention, `groups` forms each new head from the best channels of as many contiguous old heads (strategy 1
        of the paper, its best); `across` takes the best of all heads and splits them into new heads in their order (2);
        `each` takes equally many of every old head (3).
        """
        strategy = self.strategy if component.kind == "attention" else "across"
        return {"groups": self.sizes[component.name][1], "across": 1, "each": component.spaces[0].heads}[strategy]


@dataclass(frozen=True)
class _Layout:
    """The structure of a model. depths: stage -> number of its blocks. sizes: channels and heads by place.

    frame: parameter -> shape, with None for the dimensions that belong to a space; parameters of blocks once per stage.
    Models with equal frames differ in widths and numbers of blocks only: patches, tokens and classes are the same.
    """

    depths: dict[str, int]
    sizes: dict[Place, tuple[int, int]]
    frame: dict[str, tuple[int | None, ...]]

    @classmethod
    def of(cls, model: nn.Module, family: Family) -> "_Layout":
        blocks, spaces = family.blocks(model), family.spaces(model)
        stages = list(map(stage_of, blocks))
        pruned = {(axis.tensor, axis.dim) for space in spaces for axis in space.axes}
        frame = {}
        for name, parameter in model.named_parameters():
            path = enclosing_module(name, blocks)
            key = name if path is None else f"{stage_of(path)}.*{name.removeprefix(path)}"
            frame[key] = tuple(None if (name, dim) in pruned else size for dim, size in enumerate(parameter.shape))
        sizes = {_place(space, blocks): (space.size, space.heads) for space in spaces}
        return cls({stage: stages.count(stage) for stage in stages}, sizes, frame)


def _place(space: Space, blocks: Mapping[str, nn.Module]) -> Place:
    """Equal for corresponding spaces of two models."""
    block = enclosing_module(space.name, blocks)
    return (space.name if block is None else stage_of(block), space.kind)


def find_target(model: nn.Module, family: Family, base: Plan, options: UpvitOptions) -> Target:
    """The target of `options`.

    Raises PlanError if none is set, timm cannot build it, the model cannot become it, or an option has no effect.
    """
    name = None if options.target == "latency" else options.target
    if name is None and not options.target_args:
        raise PlanError("no target is set", hint="set sizes, as in target_args = { embed_dim = 192 }, or target")
    spaces, base = family.spaces(model), with_changes(base, model)
    _check_family(family, spaces)
    # After an earlier step the model's own sizes are those of the standard model that it became.
    own = (name is None and base.standard) or {"arch": base.arch, "args": base.arch_args}
    arch, arch_args = name or own["arch"], {**own["args"], **options.target_args}
    try:
        standard = create_on_meta(arch, arch_args)
        there, here = _Layout.of(standard, family_of(standard)), _Layout.of(model, family)
    except InputError as error:
        message = f"the target {arch} cannot be used: {error.message}"
        raise PlanError(message, hint="set other sizes in target_args, or another target") from None
    if standard.state_dict().keys() != build_on_meta(arch, arch_args).state_dict().keys():
        message = f"UP-ViT does not support {family.name} models whose weights have other names in timm"
        raise PlanError(message, hint=OTHER_METHODS)
    try:
        stages = _stages(model, family, base)
    except PlanError:
        if there.depths != here.depths:
            raise
        stages = {}  # only widths are pruned
    here = replace(here, depths={stage: len(blocks) for stage, blocks in stages.items()} or here.depths)
    if base.folded and here.frame != there.frame:
        raise PlanError(f"{base.folded[0]} is folded, as in no model of timm", hint="use upvit before folding")
    places = {space: _place(space, family.blocks(model)) for space in spaces}
    if problems := _problems(places, here, there):
        message = f"the target {arch} is not a smaller version of the model: {'; '.join(dict.fromkeys(problems))}"
        inherited = ", ".join(sorted(base.arch_args.keys() - options.target_args.keys())) if name else ""
        about = f" (those of the model itself are {inherited})" if inherited else ""
        raise PlanError(message, hint=f"name a smaller model of the same kind, or set smaller target_args{about}")
    parts = components(spaces)
    sizes = {component.name: there.sizes[places[component.spaces[0]]] for component in parts}
    target = Target(arch, arch_args, stages, there.depths, sizes, options.heads)
    for component in parts:
        if component.kind == "attention" and target.cuts(component):
            _check_attention(component, target)
    _check_options(options, target, parts)
    return target


def _check_attention(component: Component, target: Target) -> None:
    """Raise PlanError if the new heads cannot be formed from the old ones."""
    qk, v = (next(space.size for space in component.spaces if space.kind == kind) for kind in ("qk", "v"))
    if qk != v:
        message = f"{component.name} has {qk} channels in q and k, {v} in v; UP-ViT prunes them together"
        raise PlanError(message, hint="use upvit before a step that prunes them separately")
    (width, new_heads), heads = target.sizes[component.name], component.spaces[0].heads
    if heads % new_heads:
        message = f"{heads} heads cannot become {new_heads}: each new head consists of the same number of old ones"
        raise PlanError(message, hint=f"choose a number of heads that divides {heads}")
    parts = heads if target.strategy == "each" else new_heads
    if width % parts or qk % parts:
        message = f"{width} of {qk} attention channels do not form {parts} equal parts (heads = {target.strategy!r})"
        raise PlanError(message, hint=f"choose an attention width that {parts} divides")


def _check_family(family: Family, spaces: tuple[Space, ...]) -> None:
    if any(axis.per_head for space in spaces for axis in space.axes):
        own = "a relative position table or other parameters of its own, which one formed from several cannot have"
        raise PlanError(f"UP-ViT does not support {family.name} models: each head has {own}", hint=OTHER_METHODS)
    if any(space.whole_heads for space in spaces):
        rotation = "these embeddings rotate the channels of q and k by their position in the head"
        message = f"UP-ViT does not support rotary embeddings: it forms heads from parts of others, and {rotation}"
        raise PlanError(message, hint="isomorphic and sero prune this family, heads of q and k as a whole")


def _stages(model: nn.Module, family: Family, base: Plan) -> dict[str, list[Block]]:
    """Stage -> its standard blocks. Raises PlanError if earlier steps left blocks that no timm model has."""
    replaced = [name for name, replacement in base.removed.items() if replacement != "drop"]
    if changed := [*replaced, *base.appended]:
        raise PlanError(
            f"{changed[0]} was replaced by an earlier step, so its block is not a standard block of timm",
            hint="prune blocks before the step that removes activations or replaces attentions, or only widths "
            "after it (the target's depth must equal the model's)",
        )
    return standard_blocks(model, family)


def _problems(places: Mapping[Space, Place], here: _Layout, there: _Layout) -> list[str]:
    """Why the model `here` cannot become the one `there` by pruning. places: of the model's spaces."""
    problems = []
    different = [name for name in {**here.frame, **there.frame} if here.frame.get(name) != there.frame.get(name)]
    if different:
        name, frames = different[0], (there.frame, here.frame)
        shape, own = (str(frame.get(name, "no such parameter")).replace("None", "any") for frame in frames)
        problems.append(f"it takes other images, patches, tokens or classes ({name}: {shape} there, {own} here)")
    if set(there.depths) != set(here.depths):
        problems.append(f"it has blocks in {', '.join(there.depths)}, the model in {', '.join(here.depths)}")
    for stage, count in here.depths.items():
        if (depth := there.depths.get(stage, 0)) > count:
            problems.append(f"it has {depth} blocks in {stage}, the model {count}")
    if different or set(there.depths) != set(here.depths):
        return problems
    smaller = there.depths != here.depths or any(there.sizes[place][0] < space.size for space, place in places.items())
    for space, place in places.items():
        channels, heads = there.sizes[place]
        if channels > space.size:
            problems.append(f"it has {channels} {KINDS[space.kind]} channels in {place[0]}, the model {space.size}")
        if heads > space.heads:
            problems.append(f"it has {heads} heads in {place[0]}, the model {space.heads}")
    return problems if problems or smaller else ["it is as large as the model"]


def _check_options(options: UpvitOptions, target: Target, own: tuple[Component, ...]) -> None:
    """Raise PlanError for options without effect."""
    cut = [component for component in own if target.cuts(component)]
    screened = options.score == "screened"
    score = f"score is {options.score!r}" + (f" and screen {options.screen!r}" if screened else "")
    screen = options.screen if screened else options.score
    no_channels = not cut and "no channels are removed"
    unused = {
        "heads": not any(component.kind == "attention" for component in cut) and "no attention is changed",
        "images": not target.surplus and options.score in UNMEASURED and score,
        "reference": target.surplus < 2 and f"the number of removed blocks is {target.surplus}",
        "score": no_channels,
        "screen": not screened and score,
        "band": not screened and score,
        "screen_images": screen != "images" and score,
        "directions": screen != "fisher" and score,
        "images_at_once": no_channels or (options.score not in ("exact", "screened") and score),
    }
    reject_unused(options, unused)
