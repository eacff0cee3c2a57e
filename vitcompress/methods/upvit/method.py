"""UP-ViT: prune a model to a standard one, keeping the channels and blocks whose removal changes its outputs most.

"A Unified Pruning Framework for Vision Transformers", https://arxiv.org/abs/2111.15127, and its supplement. Each
channel of each component (residual stream, attention, FFN hidden, spatial reduction) is deleted alone from the dense
model, and scored by how much the outputs change (`importance`). All widths are then cut at once (Table D11: step by
step is worse); blocks are removed one at a time, measured again each time (`ranking`). The result has the sizes of a
named timm model, which loads its weights.

Differs from the released code: scores are read as numbers (there a score like 3.4e-05 ranked as 5), logarithms are
taken in float64, negative rounding is clamped, and all components are scored in one precision.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

from torch import nn

from vitcompress.errors import PlanError
from vitcompress.families import Family
from vitcompress.methods.base import ARBITRARY, MEASURED, Choice, Context, Estimate, Method, StepInfo
from vitcompress.methods.options import UpvitOptions as Options
from vitcompress.methods.scores import UNMEASURED
from vitcompress.methods.upvit.importance import Component, components
from vitcompress.methods.upvit.ranking import Ranker, best, too_few_images
from vitcompress.methods.upvit.report import report
from vitcompress.methods.upvit.target import Target, find_target
from vitcompress.models.create import plan_of
from vitcompress.plan import Plan, is_within, module_of
from vitcompress.training.losses import check_outputs


def plan(model: nn.Module, context: Context, options: Options) -> Plan:
    """Remove the channels and blocks whose removal changes the outputs least, until the target is reached.

    Raises PlanError if the model cannot become the target, or an option has no effect.
    """
    target = find_target(model, context.family, context.plan, options)
    ranker = Ranker(deepcopy(model).to(context.runtime.device), context, options, target)
    if target.surplus or options.score not in UNMEASURED:
        check_outputs(model)
        for remark in too_few_images(context.memo("proxy", lambda: {"images": ranker.loader.total})["images"]):
            context.progress.note(remark)
    removed = ranker.rank_blocks()
    delta = _delta(context.plan, target, removed, ranker.rank_channels(_cut(model, context.family, target, removed)))
    left = ", ".join(sorted({f"{len(channels)} channels" for channels in delta.kept.values()}))
    context.progress.note(f"cut to {target.arch}: {len(delta.removed)} parts removed, spaces left with {left}")
    context.memo("kept", lambda: dict(delta.kept))
    return delta


def structure(model: nn.Module, family: Family, base: Plan, options: Options) -> Plan:
    """A plan of the same size: the first channels are kept, the last blocks of each stage removed. Raises as `plan`."""
    target = find_target(model, family, base, options)
    surplus = [block for stage, blocks in target.stages.items() for block in blocks[target.depths[stage] :]]
    removed = [name for block in surplus for name in block.parts]
    orders = {component: range(component.size)[::-1] for component in _cut(model, family, target, removed)}
    return _delta(base, target, removed, orders)


def _cut(model: nn.Module, family: Family, target: Target, removed: Sequence[str]) -> list[Component]:
    """The components that lose channels or get other heads, without those of removed blocks, attentions and FFNs."""
    spaces = [space for space in family.spaces(model) if not is_within(module_of(space.name), removed)]
    return [component for component in components(spaces) if target.cuts(component)]


def _delta(base: Plan, target: Target, removed: Sequence[str], orders: Mapping[Component, Sequence[int]]) -> Plan:
    """The plan that drops `removed` and cuts the components. orders: their channels, the least important first."""
    kept: dict[str, tuple[int, ...]] = {}
    for component, order in orders.items():
        channels = best(order, target.sizes[component.name][0], target.parts(component))
        kept |= dict.fromkeys((space.name for space in component.spaces), channels)
    heads = {own.name: count for own in orders if (count := target.sizes[own.name][1]) != own.spaces[0].heads}
    standard = {"arch": target.arch, "args": target.arch_args} if target.stages else {}
    return base.delta(removed=dict.fromkeys(removed, "drop"), kept=kept, heads=heads, standard=standard)


def estimate(model: nn.Module, family: Family, options: Options) -> list[Estimate]:
    """The measurements of blocks, and then those of channels."""
    target, alone = find_target(model, family, plan_of(model), options), "alone, one measurement each"
    blocks = Estimate(f"remove every block and hybrid {alone}", target.surplus, 1, images=options.images)
    rows = [blocks] if target.surplus else []
    if options.score in UNMEASURED or not any(map(target.cuts, components(family.spaces(model)))):
        return rows
    if options.score == "fisher":
        return [*rows, Estimate("Gauss-Newton estimate of every channel", 1, options.directions, images=options.images)]
    if options.score == "screened":
        images = options.images if options.screen == "fisher" else options.screen_images
        rows.append(Estimate(f"screen ({options.screen})", 1, 1, images=images))
    return [*rows, Estimate(f"delete every channel {alone}", 1, 1, images=options.images)]


def resize(options: Options, model: nn.Module, family: Family, strength: float) -> Options:
    """Sizes between those of the model and target_args. Raises PlanError for other arguments than sizes of a ViT."""
    spaces = {space.kind: space for space in family.spaces(model)}
    stream = spaces["residual"]  # it has one head
    width, heads, hidden = stream.size, spaces.get("v", stream).heads, spaces.get("mlp", stream).size
    own = {"depth": len(family.blocks(model)), "num_heads": heads, "embed_dim": width, "mlp_ratio": hidden / width}
    if wrong := sorted(set(options.target_args) - set(own)):
        raise PlanError(f"target_args.{wrong[0]} cannot be chosen by a latency", hint=f"set any of {', '.join(own)}")
    sizes = {name: own[name] + strength * (least - own[name]) for name, least in options.target_args.items()}
    units = {"depth": 1, "num_heads": 1, "embed_dim": max(1, round(sizes.get("num_heads", heads))), "mlp_ratio": 0.25}
    args = {name: units[name] * max(1, round(size / units[name])) for name, size in sizes.items()}
    return replace(options, target_args=args)


def describe(options: Options) -> StepInfo:
    """With `random` scores, blocks are measured all the same."""
    return StepInfo(Choice("chance for channels", unscored=ARBITRARY) if options.score == "random" else MEASURED)


SUMMARY = "channels and blocks whose removal changes the outputs least, down to the sizes of a standard model"
UPVIT = Method("upvit", SUMMARY, Options, plan, structure, estimate, describe, report, resize=resize)
