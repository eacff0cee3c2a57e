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

from torch import nn

from vitcompress.families import Family
from vitcompress.methods.base import ARBITRARY, MEASURED, Choice, Context, Estimate, Method, StepInfo
from vitcompress.methods.calibration import calibration_images
from vitcompress.methods.upvit.blocks import removal
from vitcompress.methods.upvit.heads import best, regrouped
from vitcompress.methods.upvit.importance import Component, components
from vitcompress.methods.upvit.options import Options
from vitcompress.methods.upvit.ranking import PROXY_BATCH, UNMEASURED, block_removal, orders, warn_of_few
from vitcompress.methods.upvit.reduction import Goal, goal_of, left
from vitcompress.methods.upvit.report import report
from vitcompress.plan import Plan


def plan(model: nn.Module, context: Context, options: Options) -> Plan:
    """The channels and blocks whose loss moves the answers least, so many of them that the target is left.

    Raises:
        PlanError: the target is no smaller version of the model, or heads and widths do not divide.
    """
    goal = goal_of(model, context.family, context.plan, options)
    loader = calibration_images(context, options.images, PROXY_BATCH)
    warn_of_few(context, options, goal, loader)
    model.to(context.runtime.device)
    try:
        removed = block_removal(model, context, options, goal, loader)
        spaces = left(model, context.family, removal(removed, context.plan))
        wanted = [c for c in components(spaces) if goal.cuts(c)]
        order_of = orders(model, context, options, goal, wanted, loader)
    finally:
        model.cpu()
    found = _plan(context.plan, components(spaces), options, goal, removed, order_of)
    _note(context, found, goal.target.arch)
    return found


def structure(model: nn.Module, family: Family, base: Plan, options: Options) -> Plan:
    """The same sizes with the first channels and the last blocks of each stage gone. Raises PlanError as `plan`."""
    goal = goal_of(model, family, base, options)
    removed: list[str] = []
    for stage, of in goal.stages.items():
        gone = of[goal.target.depths[stage] :]
        removed += [block.attention.block for block in gone if block.attention.block == block.ffn.block]
        split = [block for block in gone if block.attention.block != block.ffn.block]
        removed += [site.name for block in split for site in (block.attention, block.ffn)]
    own = components(left(model, family, removal(removed, base)))
    order_of = {component.name: list(reversed(range(component.size))) for component in own if goal.cuts(component)}
    return _plan(base, own, options, goal, removed, order_of)


def estimate(model: nn.Module, family: Family, options: Options) -> list[Estimate]:
    """What `plan` will measure, for a dry run."""
    if options.score in UNMEASURED:
        return []
    if options.score == "fisher":
        return [Estimate("Gauss-Newton estimate of every channel", 1, options.directions, images=options.images)]
    found = [Estimate("delete every channel alone, one measurement each", 1, 1, images=options.images)]
    if options.score == "screened":
        images = options.images if options.screen == "fisher" else options.screen_images
        found.insert(0, Estimate(f"screen ({options.screen})", 1, 1, images=images))
    return found


def describe(options: Options) -> StepInfo:
    """Parts of the model deleted or its weights compared; or a draw of channels (blocks are measured even so)."""
    return StepInfo(Choice("chance for channels", unscored=ARBITRARY) if options.score == "random" else MEASURED)


def _plan(
    base: Plan,
    own: Sequence[Component],
    options: Options,
    goal: Goal,
    removed: Sequence[str],
    order_of: Mapping[str, Sequence[int]],
) -> Plan:
    """The plan that removes blocks, and cuts each component that has an order (least important first)."""
    kept: dict[str, tuple[int, ...]] = {}
    heads: dict[str, int] = {}
    for component in (component for component in own if component.name in order_of):
        order, width = order_of[component.name], goal.width(component)
        if component.kind == "attention":
            before, after = component.spaces[0].heads, goal.heads(component)
            channels = regrouped(order, before, after, width, options.heads)
            if after != before:
                heads[component.name] = after
        else:
            channels = best(order, width)
        kept |= {space.name: channels for space in component.spaces}
    standard = {"arch": goal.target.arch, "args": goal.target.arch_args} if goal.stages else {}
    gone = removal(removed, base).removed
    return Plan(base.arch, base.arch_args, removed=gone, kept=kept, heads=heads, standard=standard)


def _note(context: Context, found: Plan, arch: str) -> None:
    counts = sorted({f"{len(channels)} channels" for channels in found.kept.values()})
    parts = f"{len(found.removed)} parts removed, spaces left with {', '.join(counts)}"
    context.progress.note(f"cut to {arch}: {parts}")
    context.memo("kept", lambda: {name: list(channels) for name, channels in found.kept.items()})


UPVIT = Method(
    "upvit",
    "channels and blocks whose loss moves the answers least, down to the sizes of a standard model",
    options=Options,
    plan=plan,
    structure=structure,
    estimate=estimate,
    describe=describe,
    report=report,
)
