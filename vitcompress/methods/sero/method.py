"""SERo: structured sparsity explored while training, then sliced and optimized again.

"Sparse Structure Exploration and Re-optimization for Vision Transformer", UAI 2025. During the exploration, the share
of masked units grows as P (1 - (1 - t/T)^3). Every few iterations the units with the smallest gradients are masked, by
one threshold for all layers and kinds; weight gradients are scaled by |W| (eq. 5), so that small weights stay small.
Then the model is sliced, and the re-optimization, the recipe's [finetune], starts from the explored weights with a new
optimizer.

Deviations, each with the published way as an option: scores are gradients of a pass without masks (in the released code
the gradient of a masked unit is zero, so it never returns: criterion_pass = "masked"); layouts that runtimes can use
are part of the choice instead of a later step (layout = "ragged" is the plain threshold). The released code drops the
|W| factor after its first evaluation; here it stays (weight_scale).
"""

from contextlib import closing
from copy import deepcopy
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from vitcompress import surgery
from vitcompress.errors import PlanError, VitcompressError
from vitcompress.families import Family, Space
from vitcompress.methods.base import ARBITRARY, INPUT_MODEL, Choice, Context, Estimate, Method, StepInfo, reject_unused
from vitcompress.methods.calibration import search_options, training_subset
from vitcompress.methods.options import SeroOptions as Options
from vitcompress.methods.sero import layout
from vitcompress.methods.sero.exploration import Exploration
from vitcompress.methods.sero.report import FILE, record, report
from vitcompress.plan import Plan
from vitcompress.training.options import TrainOptions
from vitcompress.training.trainer import TrainingControls


def plan(model: nn.Module, context: Context, options: Options) -> Plan:
    """Explore on a copy, hand its weights over, and keep the channels that are live at the end."""
    structure(model, context.family, context.plan, options)
    copy = deepcopy(model)
    exploration = _explore(copy, context, options)
    delta = _deploy(copy, context.family, context.plan, exploration.live, options)
    context.memo(FILE, lambda: record(exploration, delta))
    context.hand_over(copy.cpu())
    counts = exploration.counts().items()
    shares = (f"{kind} {100 * (1 - live / total):.1f} %" for kind, (live, total) in counts if total)
    for note in (f"removed units: {', '.join(shares)}", *report(context.folder).remarks):
        context.progress.note(note)
    return delta


def structure(model: nn.Module, family: Family, base: Plan, options: Options) -> Plan:
    """A plan of the same size without data: every layer and kind loses the same share, the first channels are kept.

    Raises PlanError for more than the layout can lose, no epoch with masks, or an option without effect.
    """
    if options.warmup_epochs >= options.epochs:
        message = f"warmup_epochs is {options.warmup_epochs} of {options.epochs} epochs, so nothing would be explored"
        raise PlanError(message, hint="raise epochs or lower warmup_epochs")
    gradients = options.criterion.startswith("gradient")
    unused = not gradients and f"criterion is {options.criterion!r}, which uses no gradients"
    reject_unused(options, {"round_to": options.layout == "ragged" and "layout is 'ragged'", "criterion_pass": unused})
    spaces = layout.prunable(family.spaces(model))
    units = layout.unit_spaces(spaces)
    if not units:
        raise PlanError("the model has no q/k, v or FFN channels to remove", hint="run sero before folding everything")
    readers = (model.get_submodule(axis.owner) for space in units for axis in space.axes)
    if options.layout == "ragged" and any(isinstance(reader, nn.LayerNorm) for reader in readers):
        message = "layout is 'ragged', which pads heads with zeros, but a norm would count them as channels"
        raise PlanError(message, hint="use layout = 'uniform' or 'padded'")
    if options.layout == "tied" and len(units) < len(spaces):
        message = "layout is 'tied', but under a rotary embedding q and k lose channels with their heads only, unlike v"
        raise PlanError(message, hint="use layout = 'padded', which keeps the same attention kernels, or 'uniform'")
    # The same in every head and layer: lower, the later the channel.
    widths = {space.name: (space.size // space.heads, space.heads) for space in units}
    scores = {name: np.tile(1 - (np.arange(n) + 0.5) / n, heads) for name, (n, heads) in widths.items()}
    live = layout.project(units, scores, scores, options.sparsity, options)
    return layout.keep_live(base, spaces, live, pad=options.layout == "padded")


def _deploy(copy: nn.Module, family: Family, base: Plan, live: layout.Live, options: Options) -> Plan:
    """The plan that keeps the live channels. Changes the weights of `copy` so that it computes what the masks did."""
    spaces = layout.prunable(family.spaces(copy))
    _zero(copy, spaces, layout.padding(live, layout.keep_live(base, spaces, live).kept))
    # Attentions without a live v channel and FFNs without a live hidden one only add a bias.
    empty = {space.attention or space.name for space in spaces if space.kind != "qk" and not live[space.name].any()}
    removed = dict[str, str]()
    for site in family.sites(copy):
        if site.name in empty and surgery.fold_branch_bias(copy, family, site, removed):
            removed[site.name] = "drop"
    return layout.keep_live(base, spaces, live, pad=options.layout == "padded", removed=removed)


def estimate(model: nn.Module, family: Family, options: Options) -> list[Estimate]:
    return [Estimate("exploration", 1, options.epochs)]


def resize(options: Options, model: nn.Module, family: Family, strength: float) -> Options:
    return replace(options, sparsity=strength)


def describe(options: Options) -> StepInfo:
    """The explored weights are handed over. Only padded and tied layouts keep q, k and v equally wide."""
    explored = f"{INPUT_MODEL} while it trained under masks; the next step starts from these weights"
    chance = options.criterion == "random"
    choice = Choice("chance" if chance else "search", None if chance else explored, ARBITRARY)
    widths = "layout=tied (or padded)" if options.layout in ("ragged", "uniform") else ""
    return StepInfo(choice, lambda finetune: _settings(finetune, options), equal_widths=widths)


def _explore(copy: nn.Module, context: Context, options: Options) -> Exploration:
    """Train `copy` under masks, then remove them. Raises VitcompressError if the last epoch chose no masks."""
    copy.to(context.runtime.device)
    images, train = training_subset(context, 0), _settings(context.train, options)
    with closing(Exploration(copy, context.family, options, context.seed)) as exploration:
        controls = TrainingControls(hooks=exploration)
        context.run_training(copy, images, context.data.heldout, train, "exploration", controls=controls)
    if exploration.sparsity != options.sparsity:
        message = "no refresh of the masks in the last epoch had finite gradients, so the exploration did not end"
        hint = "lower the learning rate or refresh, or use amp bf16 or none, and start over with --fresh"
        raise VitcompressError(message, hint=hint)
    return exploration


def _settings(base: TrainOptions, options: Options) -> TrainOptions:
    """The options of the exploration; the last weights belong to the last masks."""
    return search_options(base, options.epochs, options.lr or base.peak_lr, base.min_lr)


@torch.no_grad()
def _zero(model: nn.Module, spaces: tuple[Space, ...], channels: dict[str, tuple[int, ...]]) -> None:
    """Set all weights that write or read these channels to zero: they contribute nothing and receive no gradient."""
    for space in (space for space in spaces if space.name in channels):
        for axis in (axis for axis in space.axes if not axis.per_head):
            places = [axis.offset + i * space.size + c for i in range(axis.copies) for c in channels[space.name]]
            tensor = model.get_parameter(axis.tensor)
            tensor.index_fill_(axis.dim, torch.tensor(places, device=tensor.device), 0.0)


SUMMARY = "q/k, v and FFN channels: masks explored while training, one threshold over all layers"
SERO = Method("sero", SUMMARY, Options, plan, structure, estimate, describe, report, resize=resize)
