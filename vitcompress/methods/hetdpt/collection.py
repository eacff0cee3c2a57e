"""HetDPT, stage 1, step 1: measured points for the accuracy predictor, and orders in which layers are removed.

Algorithm 1 (single type) and Algorithm 2 (interleaved) of the paper. Every chain starts from the dense weights. Each
round removes the layer of one type with the lowest transfer entropy on the current weights, fine-tunes briefly, and
records the accuracy of the last epoch on held-out images (the paper: on test images). The first round of the
interleaved chain is that of a single-type chain and is not trained twice, so 8 + 8 + 5 trainings and the dense point
give the 22 rows of the paper's Table 10 with the default of 3 + 3 layers.

`gradient_disparity` and `recovery_asymmetry` measure the observations that HetDPT starts from; pruning needs neither.
"""

import shutil
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from vitcompress.families import GATED, Family, Site, SiteKind
from vitcompress.methods import transfer_entropy
from vitcompress.methods.base import Context, Estimate, reject_unused
from vitcompress.methods.calibration import accuracy, calibration_images, search_options, training_subset
from vitcompress.methods.depth import all_layers, gate_layers, layers, remove_layers
from vitcompress.methods.hetdpt.allocation import Array
from vitcompress.methods.options import AllocationOptions, CollectionOptions, FastTraining
from vitcompress.methods.transfer_entropy import identify
from vitcompress.training.options import TrainOptions

Record = dict[str, Any]


def fast_options(context: Context, options: FastTraining, epochs: int, images: int) -> TrainOptions:
    """The options of [finetune] for a short training. images: number of training images."""
    # Whole batches for every process, and pairs for mixup; a small batch has fewer parts.
    most, pairs = min(options.batch_size or context.train.batch_size, images), 2 * context.runtime.world_size
    parts = max(1, min(context.train.accumulate, most // pairs))
    batch = max(1, most // (pairs * parts)) * pairs * parts
    lr, views = options.lr or 5e-5 * batch / 512, replace(context.train.augmentation, repeats=0)
    fast = {"batch_size": batch, "accumulate": parts, "augmentation": views, "weight_decay": options.weight_decay}
    adamw = {"optimizer": "adamw", "betas": None, "schedule": "cosine", "decay_all": False}
    return search_options(context.train, epochs, lr, options.min_lr, **fast, **adamw)


def fine_tune(model: nn.Module, context: Context, options: CollectionOptions, name: str, label: str) -> None:
    """Train `model` in place, if there are epochs; of a finished training only load the weights.

    name: of the subfolder for the training's state. label: shown to users, and part of the seed.
    """
    if options.epochs:
        images = training_subset(context, options.images_per_class)
        settings = fast_options(context, options, options.epochs, len(images))
        context.run_training(model, images, None, settings, name, label=label)


def check_options(options: CollectionOptions) -> None:
    """Raise PlanError for an option without effect."""
    fast = [option.name for option in fields(FastTraining)]
    unused = dict.fromkeys(fast, "collection.epochs is 0") if options.epochs == 0 else {}
    if options.interleaved == 0:
        unused["order"] = "collection.interleaved is 0"
    reject_unused(options, unused)


def removal_orders(records: Sequence[Record]) -> dict[SiteKind, list[int]]:
    """Block numbers of each type in the order in which its single-type chain removed them."""
    return {kind: max((r[kind] for r in records if r["chain"] == kind), key=len, default=[]) for kind in GATED}


def estimate(model: nn.Module, family: Family, options: AllocationOptions) -> list[Estimate]:
    """The trainings and measurements of step 1. A round measures the model and each layer of its type that is left."""
    counts, fast = {kind: len(sites) for kind, sites in layers(model, family).items()}, options.collection
    left = [counts[kind] - removed for kind in GATED for removed in range(_rounds(counts[kind], options))]
    mixed = [*enumerate(_interleaved(fast, counts))][1:]  # the first round is that of a single-type chain
    left += [counts[kind] - number // 2 for number, kind in mixed]  # half of the rounds before removed this type
    return [
        Estimate("step 1, transfer entropy", sum(left) + len(left), 1, images=options.te.images),
        Estimate("step 1, fast fine-tuning", len(left), fast.epochs, fast.images_per_class),
    ]


def _rounds(layers: int, options: AllocationOptions) -> int:
    """The length of a single-type chain: one layer of the type stays."""
    return min(options.collection.rounds or options.pruned_layers, layers - 1)


def _interleaved(options: CollectionOptions, counts: dict[SiteKind, int]) -> list[SiteKind]:
    """The types of the interleaved chain in order of removal, of `counts` layers each; one layer of each type stays."""
    order = GATED if options.order == "attention_first" else GATED[::-1]
    length = min(options.interleaved, 2 * counts[order[0]] - 2, 2 * counts[order[1]] - 1)
    return [order[number % 2] for number in range(length)]


def rows(records: Sequence[Record], counts: dict[SiteKind, int]) -> Array:
    """The points of the accuracy predictor, (records, 3). counts: layers of each type in the dense model."""
    return np.array([[*(1 - len(r[kind]) / counts[kind] for kind in GATED), r["accuracy"]] for r in records])


class Collector:
    """The chains. shared: key of the round that two chains start from."""

    def __init__(self, model: nn.Module, context: Context, options: AllocationOptions) -> None:
        self.dense, self.context, self.options = model, context, options
        self.sites = layers(model, context.family)
        self.shared = ""

    def run(self) -> list[Record]:
        """All rows of step 1, the dense point first; a killed run resumes with its last round.

        A row has the chain, per type the dense block numbers in order of removal, and the held-out accuracy in percent
        before and after fine-tuning.
        """
        counts = {kind: len(sites) for kind, sites in self.sites.items()}
        mixed = _interleaved(self.options.collection, counts)
        self.shared, order = f"{mixed[0]}_01" if mixed else "", dict.fromkeys((*mixed, *GATED))
        single = {kind: self._chain(kind, [kind] * _rounds(counts[kind], self.options)) for kind in order}
        start = single[mixed[0]][:1] if mixed else []
        interleaved = self._chain("interleaved", mixed, start)
        self.shared = ""
        self._forget(start)
        dense = self.context.memo("dense", self._dense_record)
        return [dense, *single["attention"], *single["activation"], *interleaved[len(start) :]]

    def _chain(self, name: str, kinds: Sequence[SiteKind], start: Sequence[Record] = ()) -> list[Record]:
        """Continue a chain from `start` until it has removed one layer of each of `kinds`."""
        records = list(start)
        for number in range(len(records), len(kinds)):
            self.context.progress.update(f"step 1, {name}", number, len(kinds))
            key = f"{name}_{number + 1:02d}"
            records.append(self.context.memo(key, partial(self._round, key, name, tuple(records), kinds[number])))
            self._forget(records[-2:-1])
        self.context.progress.update(f"step 1, {name}", len(kinds), len(kinds))
        self._forget(records[-1:])
        return records

    def _round(self, key: str, chain: str, records: Sequence[Record], kind: SiteKind) -> Record:
        """Remove the layer of `kind` with the lowest transfer entropy, fine-tune, measure."""
        before, context = self._model(records), self.context
        removed: Record = {k: list(records[-1][k]) if records else [] for k in GATED}
        candidates = [site for site in self.sites[kind] if site.index not in removed[kind]]

        def measure() -> Record:
            gated = gate_layers(before, context, candidates, self.options)
            return transfer_entropy.measure(gated, candidates, context, self.options.te)

        chosen = context.memo(f"te_{key}", measure)["chosen"]
        removed[kind].append(next(site.index for site in candidates if site.name == chosen))
        record: Record = {"key": key, "chain": chain, "removed": chosen, **removed}
        model = self._remove(before, record)
        untrained = accuracy(model, context)
        fine_tune(model, context, self.options.collection, key, f"step 1, {key}")
        record |= {"accuracy_before": untrained, "accuracy": accuracy(model, context)}
        context.progress.note(f"{key}: removed {chosen}, held-out {untrained:.1f} -> {record['accuracy']:.1f} %")
        return record

    def _dense_record(self) -> Record:
        value = accuracy(deepcopy(self.dense).to(self.context.runtime.device), self.context)
        empty: Record = {"removed": None, "attention": [], "activation": []}
        return {"key": "dense", "chain": "dense", **empty, "accuracy_before": value, "accuracy": value}

    def _model(self, records: Sequence[Record]) -> nn.Module:
        """The fine-tuned model after `records`, from the states of its training."""
        model, fast = self.dense, self.options.collection
        # A training leaves all weights. Without one, gates are constants of the model of each round.
        for record in records[-1:] if fast.epochs else records:
            model = self._remove(model, record)
            fine_tune(model, self.context, fast, record["key"], f"step 1, {record['key']}")
        return model if records else deepcopy(model).to(self.context.runtime.device)

    def _remove(self, source: nn.Module, record: Record) -> nn.Module:
        """A copy of `source` without those layers of `record` that it still has."""
        left = layers(source, self.context.family)
        removed = {kind: [site.index for site in left[kind] if site.index in record[kind]] for kind in GATED}
        return remove_layers(source, self.context, removed, self.options).to(self.context.runtime.device)

    def _forget(self, records: Sequence[Record]) -> None:
        """Delete the training state of rounds that no later round starts from."""
        for key in {record["key"] for record in records} - {self.shared}:
            if self.context.runtime.is_main:
                shutil.rmtree(self.context.folder / key, ignore_errors=True)


def gradient_disparity(model: nn.Module, context: Context, options: AllocationOptions) -> list[Record]:
    """Mean and mean magnitude of d loss / d m over batches of `te.images`, one row per layer.

    Observation 1 (BoundaryDPT, appendix I): with one interpolation scalar m = 1 per layer, |d loss / d m| of
    activations exceeds that of attentions. d loss / d m = sum(delta * (branch - its replacement)). The loss is plain
    cross entropy; nothing is trained.
    """
    gated = gate_layers(model, context, all_layers(model, context.family), options).eval()
    sums = torch.zeros(2, len(gated.sites), dtype=torch.float64)
    batches = torch.zeros((), dtype=torch.float64)
    for inputs, targets in calibration_images(context, options.te.images):
        loss = functional.cross_entropy(gated(inputs), targets)
        gradient = torch.stack(torch.autograd.grad(loss, list(gated.scores))).detach().cpu().double()
        sums += torch.stack([gradient.abs(), gradient])
        batches += 1
    magnitude, mean = (context.runtime.all_sum(sums) / context.runtime.all_sum(batches)).tolist()
    rows = [{**identify(site), "magnitude": magnitude[i], "mean": mean[i]} for i, site in enumerate(gated.sites)]
    return sorted(rows, key=lambda row: GATED.index(row["kind"]))


def recovery_asymmetry(model: nn.Module, context: Context, options: AllocationOptions) -> list[Record]:
    """Held-out accuracy in percent without one layer, before and after fast fine-tuning, one row per layer.

    Observation 2: removing one activation costs far more accuracy at once than removing one attention, and a short
    fine-tuning brings both to a similar accuracy. Each row is recorded, so a killed run resumes with the next one.
    """
    dense = context.memo("recovery_dense", lambda: accuracy(deepcopy(model).to(context.runtime.device), context))

    def recover(key: str, site: Site) -> Record:
        without = remove_layers(model, context, {site.kind: [site.index]}, options).to(context.runtime.device)
        before = accuracy(without, context)
        fine_tune(without, context, options.collection, key, f"recovery of {site.name}")
        return {**identify(site), "dense": dense, "before": before, "after": accuracy(without, context)}

    rows = []
    for site in all_layers(model, context.family):
        key = f"recovery_{site.kind}_{site.index:02d}"
        rows.append(context.memo(key, partial(recover, key, site)))
        if context.runtime.is_main:
            shutil.rmtree(context.folder / key, ignore_errors=True)
    return rows
