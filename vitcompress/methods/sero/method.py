"""SERo: structured sparsity explored while training, then sliced and optimised anew.

"Sparse Structure Exploration and Re-optimization for Vision Transformer", UAI 2025. While exploring, the share of
masked units grows as P (1 - (1 - t/T)^3); every few iterations the units with the smallest gradients are masked, all
layers and kinds pooled; weight gradients are scaled by |W| (eq. 5), so that small weights stay small. Then the model is
sliced, and re-optimisation, which is the recipe's [finetune], starts from the explored weights with a fresh optimiser.

Deviations, each with the published way as an option: the gradients that score come from a pass without masks (in the
released code a masked unit's gradient is zero, so it never returns: criterion_pass = "masked"); layouts that runtimes
can use are part of the choice and not made afterwards (layout = "ragged" is the plain threshold). The released code
drops the |W| factor after its first evaluation; here it lasts (weight_scale).
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from vitcompress import surgery
from vitcompress.errors import PlanError, VitcompressError
from vitcompress.families import Family, Space
from vitcompress.methods.base import ARBITRARY, INPUT_MODEL, Choice, Context, Estimate, Method, StepInfo, reject_unused
from vitcompress.methods.sero.exploration import Exploration
from vitcompress.methods.sero.layout import (
    APART,
    Live,
    deployed,
    empty,
    padded,
    padding,
    project,
    prunable,
    unit_spaces,
)
from vitcompress.methods.sero.options import Options, sparsity_at
from vitcompress.methods.sero.report import FILE, record, report
from vitcompress.plan import Plan
from vitcompress.training.options import TrainOptions
from vitcompress.training.trainer import TrainingControls


def plan(model: nn.Module, context: Context, options: Options) -> Plan:
    """Explore on a copy, hand its weights over, and keep the channels that live at the end."""
    structure(model, context.family, context.plan, options)
    copy = deepcopy(model)
    found = _explored(copy, context, options)
    delta = _deployed(copy, context.family, context.plan, found.live, options)
    context.memo(FILE, lambda: record(found, delta, options.sparsity))
    context.hand_over(copy.cpu())
    shares = (f"{kind} {100 * (1 - live / total):.1f} %" for kind, (live, total) in found.counts().items() if total)
    context.progress.note(f"removed units: {', '.join(shares)}")
    return delta


def structure(model: nn.Module, family: Family, base: Plan, options: Options) -> Plan:
    """A plan of the same size without data: every layer and kind loses the same share, the first channels stay.

    Raises:
        PlanError: more than the layout can lose, or no epoch in which masks are at work.
    """
    if options.warmup_epochs >= options.epochs:
        raise PlanError(
            f"warmup_epochs is {options.warmup_epochs} of {options.epochs} epochs, so nothing would be explored",
            hint="raise epochs or lower warmup_epochs",
        )
    gradients = options.criterion.startswith("gradient")
    unused = {
        "round_to": options.layout == "ragged" and "layout is 'ragged'",
        "criterion_pass": not gradients and f"criterion is {options.criterion!r}, which uses no gradients",
    }
    reject_unused(options, unused)
    spaces = prunable(family.spaces(model))
    units = unit_spaces(spaces)
    if not units:
        raise PlanError("the model has no q/k, v or FFN channels to remove", hint="run sero before folding everything")
    if options.layout == "tied" and len(units) < len(spaces):
        raise PlanError(
            "layout is 'tied', but under a rotary embedding q and k lose channels with their heads only, v by itself",
            hint="use layout = 'padded', which keeps the same attention kernels, or 'uniform'",
        )
    scores = {space.name: _by_position(space) for space in units}
    live = project(units, scores, scores, options.sparsity, options.rules)
    return _plan(base, spaces, *deployed(spaces, live), options)


def _deployed(copy: nn.Module, family: Family, base: Plan, live: Live, options: Options) -> Plan:
    """The plan that holds the live channels. `copy` gets weights with which it computes what the masked model did."""
    spaces = prunable(family.spaces(copy))
    kept, heads = deployed(spaces, live)
    _silence(copy, spaces, padding(live, kept))
    nothing, gone = empty(spaces, live), dict[str, str]()
    for site in family.sites(copy):
        if site.name in nothing and surgery.fold_branch_bias(copy, family, site, gone):
            gone[site.name] = "drop"
    left = [space for space in spaces if (space.attention or space.name) not in gone]
    kept = {space.name: kept[space.name] for space in left if space.name in kept}
    return replace(
        _plan(base, left, kept, {name: count for name, count in heads.items() if name not in gone}, options),
        removed=gone,
    )


def _plan(
    base: Plan, spaces: Sequence[Space], kept: dict[str, tuple[int, ...]], heads: dict[str, int], options: Options
) -> Plan:
    wider = padded(spaces, kept) if options.layout == "padded" else ()
    return Plan(base.arch, base.arch_args, kept=kept, heads=heads, padded=wider)


def estimate(model: nn.Module, family: Family, options: Options) -> list[Estimate]:
    return [Estimate("exploration", 1, options.epochs)]


def describe(options: Options) -> StepInfo:
    """The explored weights are handed over. Only padded and tied layouts keep q, k and v equally wide."""
    explored = f"{INPUT_MODEL} while it trained under masks; what follows starts from the weights trained so"
    chance = options.criterion == "random"
    choice = Choice("chance" if chance else "search", None if chance else explored, ARBITRARY)
    widths = "layout=tied (or padded)" if options.layout in APART else ""
    return StepInfo(choice, lambda finetune: _settings(finetune, options), equal_widths=widths)


def _by_position(space: Space) -> np.ndarray:
    """Scores that fall with the channel's place in its head, the same in every layer."""
    width = space.size // space.heads
    return np.tile(1 - (np.arange(width) + 0.5) / width, space.heads)


def _explored(copy: nn.Module, context: Context, options: Options) -> Exploration:
    """`copy`, trained under masks, which are removed again. Raises VitcompressError if no last masks were made."""
    device = context.runtime.device
    found = Exploration(copy.to(device), context.family, options, sparsity_at(options), context.seed)
    try:
        context.run_training(
            copy,
            context.data.train,
            context.data.heldout,
            _settings(context.train, options),
            "exploration",
            controls=TrainingControls(hooks=found),
        )
    finally:
        found.close()
    if found.sparsity != options.sparsity:
        raise VitcompressError(
            "no refresh of the masks in the last epoch saw finite gradients, so the exploration did not end",
            hint="lower the learning rate, or use amp bf16 or none, and start over with --fresh",
        )
    return found


def _settings(base: TrainOptions, options: Options) -> TrainOptions:
    """The recipe's training options on the labels alone; the last weights count, as they belong to the last masks."""
    lr = options.lr or base.peak_lr
    return replace(
        base,
        epochs=options.epochs,
        lr=lr,
        lr_base=None,
        min_lr=min(base.min_lr, lr),
        warmup_epochs=0,
        ema=None,
        distillation="none",
        select="last",
    )


@torch.no_grad()
def _silence(model: nn.Module, spaces: tuple[Space, ...], channels: dict[str, tuple[int, ...]]) -> None:
    """Set everything that writes or reads these channels to zero: they then do nothing, and receive no gradient."""
    tensors = dict(model.named_parameters())
    for space in spaces:
        for axis in space.axes if space.name in channels else ():
            if not axis.per_head:
                places = [axis.offset + i * space.size + c for i in range(axis.copies) for c in channels[space.name]]
                tensor = tensors[axis.tensor]
                tensor.index_fill_(axis.dim, torch.tensor(places, device=tensor.device), 0.0)


SERO = Method(
    "sero",
    "q/k, v and FFN channels: masks explored while training, one threshold over all layers",
    options=Options,
    plan=plan,
    structure=structure,
    estimate=estimate,
    describe=describe,
    report=report,
)
