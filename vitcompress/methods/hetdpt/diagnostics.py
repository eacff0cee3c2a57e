"""The two observations that HetDPT starts from, as measurements: gradient disparity and recovery asymmetry.

Gradient disparity (Observation 1; BoundaryDPT, appendix I): with one interpolation scalar m per layer at 1, |d loss /
d m| of activations exceeds that of attentions. d loss / d m = sum(delta * (branch - what stands in its place)).
Recovery asymmetry (Observation 2): removing one activation costs far more accuracy at once than removing one
attention, and a short fine-tuning brings both back to much the same. Neither is needed to prune.
"""

import shutil
from collections.abc import Iterable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vitcompress.families import Site
from vitcompress.methods.base import Context
from vitcompress.methods.calibration import accuracy, training_views
from vitcompress.methods.depth import KINDS, DepthOptions, all_layers, gated, pruned
from vitcompress.methods.hetdpt.collection import CollectionOptions
from vitcompress.methods.hetdpt.finetune import fine_tune

Record = dict[str, Any]


def gradient_disparity(model: nn.Module, context: Context, budget: DepthOptions, images: int = 10_240) -> list[Record]:
    """Mean and root mean square of d loss / d m over batches, one row per layer; plain cross entropy, nothing
    trained.
    """
    sites = all_layers(model, context.family)
    probe = gated(model, context, sites, budget).eval()
    sums = torch.zeros(3, len(sites), dtype=torch.float64)
    batches = torch.zeros((), dtype=torch.float64)
    for inputs, targets in training_views(context, images):
        loss = functional.cross_entropy(probe(inputs), targets)
        now = torch.stack(torch.autograd.grad(loss, probe.score_parameters())).detach().cpu().double()
        sums += torch.stack([now.abs(), now, now**2])
        batches += 1
    magnitude, mean, square = (context.runtime.all_sum(sums) / context.runtime.all_sum(batches)).tolist()
    return [
        {
            "site": site.name,
            "kind": site.kind,
            "index": site.index,
            "magnitude": magnitude[i],
            "mean": mean[i],
            "rms": square[i] ** 0.5,
        }
        for i, site in enumerate(sites)
    ]


def recovery_asymmetry(
    model: nn.Module,
    context: Context,
    budget: DepthOptions,
    options: CollectionOptions,
    blocks: Iterable[int] | None = None,
) -> list[Record]:
    """Held-out accuracy in percent with one layer gone, before and after fast fine-tuning, one row per layer.

    blocks: dense block numbers to look at, all by default. Each row is kept, so a killed run goes on.
    """
    wanted = None if blocks is None else set(blocks)
    sites = all_layers(model, context.family)
    dense = context.memo("recovery_dense", lambda: accuracy(deepcopy(model).to(context.runtime.device), context))
    rows = []
    for site in sites:
        if wanted is None or site.index in wanted:
            rows.append(context.memo(_key(site), partial(_recovery, model, context, budget, options, site, dense)))
            if context.runtime.is_main:
                shutil.rmtree(context.folder / _key(site), ignore_errors=True)
    return rows


def _recovery(
    model: nn.Module, context: Context, budget: DepthOptions, options: CollectionOptions, site: Site, dense: float
) -> Record:
    removed = {kind: [site.index] if site.kind == kind else [] for kind in KINDS}
    without = pruned(model, context, removed, budget).to(context.runtime.device)
    before = accuracy(without, context)
    fine_tune(without, context, options, options.epochs, _key(site), f"recovery of {site.name}")
    return {
        "site": site.name,
        "kind": site.kind,
        "index": site.index,
        "dense": dense,
        "before": before,
        "after": accuracy(without, context),
    }


def _key(site: Site) -> str:
    return f"recovery_{site.kind}_{site.index:02d}"
