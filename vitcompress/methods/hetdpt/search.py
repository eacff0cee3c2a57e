"""HetDPT, stage 1, step 2: learnable importance search.

Starting from the dense weights, weights and one score per layer are trained together. The forward pass uses only a gate
per layer, 1 at first; the score receives d loss / d gate (straight-through). A low score means that the loss falls when
the layer is weakened. At scheduled epochs the gate of the candidate of the scheduled type with the lowest score is set
to 0 for good. The result is the removed layers; the weights are discarded.

Differs from the released script: it searches with a GELU after every block without activation, but deploys one only
after blocks that lost both, and its learning rate stays at the minimum from the first epoch on.
"""

import math
import shutil
from collections.abc import Collection, Sequence
from itertools import accumulate, zip_longest
from typing import Any

from torch import nn

from vitcompress.families import GATED, SiteKind
from vitcompress.io.files import read_json, write_json
from vitcompress.methods.base import Context, Estimate
from vitcompress.methods.calibration import training_subset
from vitcompress.methods.depth import gate_layers
from vitcompress.methods.hetdpt.collection import Record, fast_options
from vitcompress.methods.options import DirectOptions
from vitcompress.surgery.gates import GatedModel
from vitcompress.training.options import TrainOptions
from vitcompress.training.trainer import TrainingControls, weight_groups

Event = frozenset[SiteKind]


def estimate(options: DirectOptions) -> Estimate:
    """The training of `search`."""
    epochs = removal_epochs(options.pruned_layers, options.search.factor)[-1]
    return Estimate("importance search", 1, epochs, options.search.images_per_class)


def removal_epochs(count: int, factor: float = 1.0) -> list[int]:
    """After how many epochs a layer is removed: 4, 9, 16, ..., (count + 1)^2, scaled by `factor`."""
    epochs = (round(factor * (i + 1) ** 2) for i in range(1, count + 1))
    return list(accumulate(epochs, lambda last, epoch: max(last + 1, epoch), initial=0))[1:]


def alternating(attentions: int, activations: int) -> list[Event]:
    """The type of each removal: alternating, first the type with more (activation on ties), then the rest of it."""
    types: list[list[Event]] = [[frozenset({"activation"})] * activations, [frozenset({"attention"})] * attentions]
    return [event for pair in zip_longest(*sorted(types, key=len, reverse=True)) for event in pair if event]


def lr_scale(epoch: float, removals: Sequence[int], lowest: float) -> float:
    """Learning rate at a fractional epoch, relative to its peak: cosine from 1 to `lowest` after each removal."""
    done = [0, *[e for e in removals if e <= epoch]]
    if len(done) == 1:
        return lowest
    end = next((e for e in removals if e > epoch), removals[-1])
    share = min(1.0, (epoch - done[-1]) / max(1e-9, end - done[-1]))
    return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * share))


def search(
    model: nn.Module, context: Context, options: DirectOptions, events: Sequence[Event], names: Collection[str]
) -> dict[SiteKind, list[int]]:
    """Train weights and scores; return the dense block numbers of each type in order of removal.

    events: the types that may lose a layer at each scheduled removal. names: of the sites that may be removed. A killed
    search resumes after its last finished epoch. `search_epochs.json` records scores and removals.
    """
    removed: dict[SiteKind, list[int]] = context.memo("search", lambda: _train(model, context, options, events, names))
    if context.runtime.is_main:
        shutil.rmtree(context.folder / "search", ignore_errors=True)  # its weights are no longer needed
    return removed


def _train(
    dense: nn.Module, context: Context, options: DirectOptions, events: Sequence[Event], names: Collection[str]
) -> Record:
    """Train; return the block numbers per type, in the order of the recorded epochs."""
    sites = {site.name: site for site in context.family.sites(dense) if site.kind in GATED}
    model, runtime = gate_layers(dense, context, list(sites.values()), options), context.runtime
    removals, path = removal_epochs(len(events), options.search.factor), context.folder / "search_epochs.json"

    def after_epoch(epoch: int) -> None:
        """Record the finished `epoch` (from 0), and remove a layer if one is scheduled."""
        scores = model.scores_of()
        record: Record = {"epoch": epoch, "scores": scores, "removed": None}
        if epoch + 1 in removals:
            kinds, gates = events[removals.index(epoch + 1)], model.gate_values()
            left = [name for name, site in sites.items() if name in names and site.kind in kinds and gates[name] == 1.0]
            # The same on every rank.
            record["removed"] = runtime.broadcast(min(left, key=scores.__getitem__))
            model.set_gate(record["removed"], 0.0)
            context.progress.note(f"step 2, after epoch {epoch + 1}: removed {record['removed']}")
        if runtime.is_main:
            earlier = read_json(path) if path.is_file() else []
            write_json(path, [*(r for r in earlier if r["epoch"] < epoch), record])

    images = training_subset(context, options.search.images_per_class)
    settings = fast_options(context, options.search, removals[-1], len(images))
    lowest, restarts = settings.min_lr / settings.lr, options.search.schedule == "restarts"
    controls = TrainingControls(
        lr_scale=lambda epoch: lr_scale(epoch, removals, lowest) if restarts else 1.0,
        after_epoch=after_epoch,
        parameter_groups=parameter_groups(model, settings, options.search.score_lr),
    )
    context.run_training(model, images, None, settings, "search", label="step 2, importance search", controls=controls)
    order = runtime.broadcast([r["removed"] for r in read_json(path) if r["removed"]] if runtime.is_main else None)
    return {
        **{kind: [sites[name].index for name in order if sites[name].kind == kind] for kind in GATED},
        "order": order,
        "removal_epochs": removals,
        "sites": {site.name: {"kind": site.kind, "index": site.index} for site in model.sites},
    }


def parameter_groups(model: GatedModel, options: TrainOptions, score_lr: float) -> list[dict[str, Any]]:
    """Three groups: weights with decay, vectors and timm's exceptions without, and scores without at their own rate."""
    scores = {"params": list(model.scores), "weight_decay": 0.0, "lr": options.lr * score_lr}
    return [*reversed(weight_groups(model.model, options.weight_decay)), scores]  # in the order of earlier states
