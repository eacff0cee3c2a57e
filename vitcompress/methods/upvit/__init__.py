"""UP-ViT: cut a model down to a standard one, keeping the channels and blocks whose loss would move its answers.

"A Unified Pruning Framework for Vision Transformers", https://arxiv.org/abs/2111.15127, and its supplement. Each
channel of each component (residual stream, attention, FFN hidden, spatial reduction) is deleted alone from the model as
given, and scored by how far the answers move (`importance`). All widths are then cut at once (Table D11: step by step
is worse); blocks go one at a time, measured again each time (`blocks`). The result has the sizes of a named timm model,
as which its weights can be loaded.

Differs from the released code: scores are read as numbers (there a score like 3.4e-05 ranked as 5), logarithms are
taken in float64, negative rounding is clamped, and all components are scored in one precision.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from vitcompress.checkpoint import read_json
from vitcompress.errors import PlanError
from vitcompress.families import Family, Space
from vitcompress.loaders import EvalLoader, eval_loader
from vitcompress.methods.depth import Stage, training_part
from vitcompress.methods.upvit import blocks as depth_pruning
from vitcompress.methods.upvit.blocks import Block, Candidate, candidates, removal, whole_blocks, without
from vitcompress.methods.upvit.fisher import estimates
from vitcompress.methods.upvit.importance import Component, Importance, components
from vitcompress.methods.upvit.regroup import Strategy, best, check, least_first, regrouped
from vitcompress.methods.upvit.target import Target, check_target, depths, target
from vitcompress.plan import Plan
from vitcompress.workspace import Context

PROXY_BATCH = 64  # images whose answers are compared together
FEW_IMAGES = 1000


@dataclass(frozen=True, kw_only=True)
class Options:
    """target: timm name of the model to arrive at; without it the model's own, with other sizes. target_args: what the
    target is built with besides the model's own arguments, as in { embed_dim = 192, num_heads = 3, depth = 10 }.

    heads: how new heads are made of old ones (see `regroup`). images: proxy images, from the training set, the same
    number of each class. reference: while blocks go one after the other, answers are compared with those of the model
    as `given` or of the `current` one.

    score: `exact` deletes each channel; `fisher` ranks by the Gauss-Newton estimate alone; `screened` measures exactly
    only the `band` of channels around the cut, as a screen ranks them: `screen` is the same estimate, with `draws`
    random directions per image, or exact scores on `screen_images` images. images_at_once bounds the memory.
    """

    target: str | None = None
    target_args: dict[str, Any] = field(default_factory=dict)
    heads: Strategy = "groups"
    images: Annotated[int, Ge(1)] = 2000
    reference: Literal["given", "current"] = "given"
    score: Literal["exact", "fisher", "screened"] = "exact"
    screen: Literal["fisher", "images"] = "fisher"
    screen_images: Annotated[int, Ge(1)] = 500
    band: Annotated[float, Gt(0), Le(1)] = 0.5
    draws: Annotated[int, Ge(1)] = 8
    images_at_once: Annotated[int, Ge(1)] = 512


def plan(model: nn.Module, context: Context, options: Options) -> Plan:
    """The channels and blocks whose loss moves the answers least, so many of them that the target is left.

    Raises:
        PlanError: the target is no smaller version of the model, or heads and widths do not divide.
    """
    goal, own = _goal(model, context.family, context.plan, options)
    loader = _proxy(context, options.images)
    _warn(context, loader)
    copy = model.to(context.runtime.device)
    try:
        removed = _block_removal(copy, context, options, goal, own, loader)
        spaces = _left(copy, context.family, removal(removed, context.plan))
        wanted = [c for c in components(spaces) if _is_cut(c, goal, copy, context.family)]
        orders = _orders(copy, context, options, goal, wanted, loader)
    finally:
        model.cpu()
    found = _plan(model, context.family, context.plan, options, goal, own, removed, orders)
    _note(context, found, goal)
    return found


def structure(model: nn.Module, family: Family, base: Plan, options: Options) -> Plan:
    """The same sizes with the first channels and the last blocks of each stage gone. Raises PlanError as `plan`."""
    goal, own = _goal(model, family, base, options)
    removed: list[str] = []
    for stage, of in own.items():
        gone = of[goal.depths[stage] :]
        removed += [block.attention.block for block in gone if block.attention.block == block.ffn.block]
        split = [block for block in gone if block.attention.block != block.ffn.block]
        removed += [site.name for block in split for site in (block.attention, block.ffn)]
    spaces = _left(model, family, removal(removed, base))
    orders = {c.name: list(reversed(range(c.size))) for c in components(spaces) if _is_cut(c, goal, model, family)}
    return _plan(model, family, base, options, goal, own, removed, orders)


def stages(options: Options, prunable: int) -> list[Stage]:
    """What `plan` will measure, for a dry run."""
    if options.score == "fisher":
        return [Stage("Gauss-Newton estimate of every channel", 1, options.draws, images=options.images)]
    found = [Stage("delete every channel alone, one measurement each", 1, 1, images=options.images)]
    if options.score == "screened":
        images = options.images if options.screen == "fisher" else options.screen_images
        found.insert(0, Stage(f"screen ({options.screen})", 1, 1, images=images))
    return found


# ----------------------------------------------------------------------------------------------------------- the target


def _goal(model: nn.Module, family: Family, base: Plan, options: Options) -> tuple[Target, dict[str, list[Block]]]:
    """The target, and the model's blocks by stage; no stage where only widths are pruned and blocks are not whole."""
    if options.target is None and not options.target_args:
        raise PlanError("no target is given", hint="set target = 'deit_tiny_patch16_224', or sizes in target_args")
    if any(axis.per_head for space in family.spaces(model) for axis in space.axes):
        raise PlanError(
            f"UP-ViT cannot prune a {family.name} model: its heads have relative position tables of their own, which a "
            "head made of several has not, and its windows shift by a block's place, which changes when blocks go",
            hint="use upvit on ViT or PVTv2; isomorphic and sero prune this family",
        )
    goal = target(options.target or base.arch, {**base.arch_args, **options.target_args})
    own = _whole(model, family, goal)
    counts = {stage: len(of) for stage, of in own.items()} or depths(family, model)
    check_target(goal, model, family, counts)
    for component in components(family.spaces(model)):
        _check_component(component, goal, model, family, options)
    return goal, own


def _whole(model: nn.Module, family: Family, goal: Target) -> dict[str, list[Block]]:
    try:
        return whole_blocks(model, family)
    except PlanError:
        if depths(family, model) == goal.depths:
            return {}
        raise


def _check_component(component: Component, goal: Target, model: nn.Module, family: Family, options: Options) -> None:
    """Raise PlanError for an attention that cannot be regrouped into that of the target."""
    if component.kind != "attention" or not _is_cut(component, goal, model, family):
        return
    sizes = {space.kind: space.size for space in component.spaces}
    if len(set(sizes.values())) > 1:
        raise PlanError(
            f"{component.name} has {sizes['qk']} channels in q and k and {sizes['v']} in v; UP-ViT prunes "
            "them by one number",
            hint="use it before a step that prunes them apart",
        )
    first = component.spaces[0]
    heads = goal.heads_of(first, family.blocks(model))
    check(first.size, first.heads, heads, _width(component, goal, model, family), options.heads)


def _width(component: Component, goal: Target, model: nn.Module, family: Family) -> int:
    return goal.width(component.spaces[0], family.blocks(model))


def _is_cut(component: Component, goal: Target, model: nn.Module, family: Family) -> bool:
    first = component.spaces[0]
    blocks = family.blocks(model)
    return any(goal.width(space, blocks) != space.size for space in component.spaces) or (
        component.kind == "attention" and goal.heads_of(first, blocks) != first.heads
    )


def _left(model: nn.Module, family: Family, removed: Plan) -> list[Space]:
    """The spaces of `model` that are still there after `removed`, with the sizes that they have now."""

    def goes(space: Space) -> bool:
        names = {f"{space.name}.", f"{space.attention or space.name}."}
        return any(name.startswith(f"{gone}.") for gone in removed.removed for name in names)

    return [space for space in family.spaces(model) if not goes(space)]


# -------------------------------------------------------------------------------------------------------------- scoring


def _proxy(context: Context, images: int) -> EvalLoader:
    """About `images` training images, the same number of each class, through the evaluation transforms."""
    per_class = -(-images // len(context.data.classes))
    return eval_loader(training_part(context, per_class), context.input, PROXY_BATCH, context.runtime)


def _warn(context: Context, loader: EvalLoader) -> None:
    if loader.total < FEW_IMAGES:
        context.progress.note(
            f"{loader.total} proxy images are too few to rank channels reliably: UP-ViT (Table D14, ImageNet) reached "
            "73.65 % with 500, no better than without any (74.09 %), 74.62 % with 1000, 75.79 % with 2000, 75.94 % "
            "with 5000; set images to 2000 or more"
        )


def _block_removal(
    model: nn.Module,
    context: Context,
    options: Options,
    goal: Target,
    own: dict[str, list[Block]],
    loader: EvalLoader,
) -> list[str]:
    """What goes so that each stage has as many blocks as the target, the least important first."""
    left, removed = own, list[str]()
    for number in range(sum(len(of) - goal.depths[stage] for stage, of in own.items())):
        ways = [c for stage, of in left.items() if len(of) > goal.depths[stage] for c in candidates(of)]
        gone = list(removed)
        reference = removal(gone if options.reference == "current" else [], context.plan)
        plans = [removal([*gone, *way.removed], context.plan) for way in ways]

        def measure(
            ways: list[Candidate] = ways, plans: list[Plan] = plans, reference: Plan = reference
        ) -> dict[str, Any]:
            scores = _summed(context, depth_pruning.scores(model, plans, reference, loader))
            return {"ways": [way.title for way in ways], "scores": scores}

        context.progress.stage(f"block importance: {len(ways)} candidates")
        found = context.memo(f"blocks-{number}", measure)
        chosen = ways[least_first(found["scores"])[0]]
        context.progress.note(f"removed {chosen.title}")
        removed, left = [*removed, *chosen.removed], without(left, chosen)
    return removed


def _summed(context: Context, scores: Tensor) -> list[float]:
    """The sum over all processes."""
    device = context.runtime.device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    summed: list[float] = context.runtime.all_sum(scores.to(device, dtype)).tolist()
    return summed


def _orders(
    model: nn.Module,
    context: Context,
    options: Options,
    goal: Target,
    wanted: Sequence[Component],
    loader: EvalLoader,
) -> dict[str, list[int]]:
    """Component -> its channels, the least important first."""
    if not wanted:
        return {}
    context.progress.stage(f"channel importance of {len(wanted)} components ({options.score})")
    screen: dict[str, list[float]] = {}
    if options.score != "exact" and (options.score == "fisher" or options.screen == "fisher"):
        screen = context.memo("fisher", lambda: _fisher(model, context, options, wanted, loader))
    elif options.score == "screened":
        few = _proxy(context, options.screen_images)
        screen = _exact(model, context, options, wanted, few, {}, "screen")
    if options.score == "fisher":
        return {name: least_first(scores) for name, scores in screen.items()}
    band = {c.name: _undecided(c, screen[c.name], goal, model, context.family, options) for c in wanted if screen}
    exact = _exact(model, context, options, wanted, loader, band, "scores")
    if not screen:
        return {name: least_first(scores) for name, scores in exact.items()}
    return {c.name: _joined(screen[c.name], exact[c.name], band[c.name]) for c in wanted}


def _fisher(
    model: nn.Module, context: Context, options: Options, wanted: Sequence[Component], loader: EvalLoader
) -> dict[str, list[float]]:
    seed = 1000 * context.seed + context.runtime.rank
    found = estimates(model, wanted, loader, draws=options.draws, seed=seed)
    return {name: _summed(context, scores) for name, scores in found.items()}


def _exact(
    model: nn.Module,
    context: Context,
    options: Options,
    wanted: Sequence[Component],
    loader: EvalLoader,
    only: Mapping[str, Mapping[int, int]],
    name: str,
) -> dict[str, list[float]]:
    """Exact scores, component by component; each is kept, so a run that was stopped loses at most one."""
    importance = Importance(model, context.family, images_at_once=options.images_at_once)
    found: dict[str, list[float]] = {}
    for number, component in enumerate(wanted):
        tiers = only.get(component.name)
        channels = None if tiers is None else [c for c, tier in tiers.items() if tier == 1]

        def measure(component: Component = component, channels: list[int] | None = channels) -> list[float]:
            return _summed(context, importance.scores(component, loader, channels))

        found[component.name] = context.memo(f"{name}-{component.name}", measure)
        context.progress.update("channel importance", number + 1, len(wanted), component.name)
    return found


def _undecided(
    component: Component, screen: Sequence[float], goal: Target, model: nn.Module, family: Family, options: Options
) -> dict[int, int]:
    """Channel -> 0 surely goes, 1 to be measured, 2 surely stays; the share `band` of each group is to be measured."""
    first, blocks = component.spaces[0], family.blocks(model)
    parts = 1
    if component.kind == "attention":
        parts = {"groups": goal.heads_of(first, blocks), "across": 1, "each": first.heads}[options.heads]
    size = component.size // parts
    cut = size - goal.width(first, blocks) // parts
    half = max(1, round(options.band * size / 2))
    found: dict[int, int] = {}
    for part in range(parts):
        ranked = [c for c in least_first(screen) if c // size == part]
        found |= {c: 0 if rank < cut - half else 2 if rank >= cut + half else 1 for rank, c in enumerate(ranked)}
    return found


def _joined(screen: Sequence[float], exact: Sequence[float], tiers: Mapping[int, int]) -> list[int]:
    """Least important first: what the screen was sure of in its own order, what was measured by its score."""
    return sorted(range(len(screen)), key=lambda c: (tiers[c], exact[c] if tiers[c] == 1 else screen[c], c))


# ------------------------------------------------------------------------------------------------------------- the plan


def _plan(
    model: nn.Module,
    family: Family,
    base: Plan,
    options: Options,
    goal: Target,
    own: Mapping[str, list[Block]],
    removed: Sequence[str],
    orders: Mapping[str, Sequence[int]],
) -> Plan:
    blocks = family.blocks(model)
    kept: dict[str, tuple[int, ...]] = {}
    heads: dict[str, int] = {}
    for component in components(family.spaces(model)):
        if component.name not in orders:
            continue
        first, order = component.spaces[0], orders[component.name]
        width = goal.width(first, blocks)
        if component.kind == "attention":
            count = goal.heads_of(first, blocks)
            channels = regrouped(order, first.heads, count, width, options.heads)
            if count != first.heads:
                heads[component.name] = count
        else:
            channels = best(order, width)
        kept |= {space.name: channels for space in component.spaces}
    standard = {"arch": goal.arch, "args": goal.arch_args} if own else {}
    gone = removal(removed, base)
    return Plan(base.arch, base.arch_args, removed=gone.removed, kept=kept, heads=heads, standard=standard)


def _note(context: Context, found: Plan, goal: Target) -> None:
    counts = sorted({f"{len(channels)} channels" for channels in found.kept.values()})
    context.progress.note(
        f"cut to {goal.arch}: {len(found.removed)} parts removed, spaces left with {', '.join(counts)}"
    )
    context.memo("kept", lambda: {name: list(channels) for name, channels in found.kept.items()})


def tables(folder: Path) -> list[dict[str, Any]]:
    """Which blocks went, and what share of each component's importance is left, from the step's `folder`."""
    found = []
    rounds = [read_json(path) for path in sorted(folder.glob("blocks-*.json"))]
    if rounds:
        rows = []
        for number, record in enumerate(rounds):
            order = least_first(record["scores"])[:2]
            told = [f"{record['ways'][i]} ({record['scores'][i]:.4g})" for i in order]
            rows.append([str(number + 1), *told, *[""] * (2 - len(told))])
        found.append(
            {
                "title": "UP-ViT: blocks, one at a time",
                "columns": ["round", "removed (KL)", "next best (KL)"],
                "rows": rows,
            }
        )
    kept = read_json(folder / "kept.json") if (folder / "kept.json").is_file() else {}
    rows = []
    for path in sorted(folder.glob("scores-*.json")):
        name, scores = path.stem.removeprefix("scores-"), read_json(path)
        channels = kept.get(name) or kept.get(f"{name.removesuffix('attn')}qk") or []
        total = sum(scores) or 1.0
        share = sum(scores[c] for c in channels) / total
        rows.append([name, str(len(scores)), str(len(channels)), f"{total:.4g}", f"{100 * share:.1f} %"])
    if rows:
        columns = ["component", "channels", "kept", "sum of KL", "share of it that is kept"]
        found.append({"title": "UP-ViT: importance of channels", "columns": columns, "rows": rows})
    return found
