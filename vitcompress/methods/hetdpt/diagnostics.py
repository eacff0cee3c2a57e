"""The two observations that HetDPT starts from, as measurements. Pruning needs neither.

Gradient disparity (Observation 1; BoundaryDPT, appendix I): with one interpolation scalar m = 1 per layer, |d loss /
d m| of activations exceeds that of attentions. d loss / d m = sum(delta * (branch - its replacement)).
Recovery asymmetry (Observation 2): removing one activation costs far more accuracy at once than removing one
attention, and a short fine-tuning brings both to a similar accuracy.
"""

import shutil
from copy import deepcopy
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from vitcompress.families import Site
from vitcompress.methods.base import Context
from vitcompress.methods.calibration import accuracy, calibration_images
from vitcompress.methods.depth import KINDS, all_layers, gate_layers, remove_layers
from vitcompress.methods.hetdpt.collection import Record, fine_tune
from vitcompress.methods.options import AllocationOptions


def measure(model: nn.Module, context: Context, options: AllocationOptions) -> None:
    """Record both observations of every layer: `gradient_disparity.json`, `recovery_asymmetry.json`."""
    context.progress.stage("HetDPT diagnostics")
    context.memo("gradient_disparity", lambda: gradient_disparity(model, context, options))
    context.memo("recovery_asymmetry", lambda: recovery_asymmetry(model, context, options))


def gradient_disparity(model: nn.Module, context: Context, options: AllocationOptions) -> list[Record]:
    """Mean, mean magnitude and root mean square of d loss / d m over batches of `te.images`, one row per layer.

    The loss is plain cross entropy; nothing is trained.
    """
    gated = gate_layers(model, context, all_layers(model, context.family), options).eval()
    sums = torch.zeros(3, len(gated.sites), dtype=torch.float64)
    batches = torch.zeros((), dtype=torch.float64)
    for inputs, targets in calibration_images(context, options.te.images):
        loss = functional.cross_entropy(gated(inputs), targets)
        gradient = torch.stack(torch.autograd.grad(loss, gated.score_parameters())).detach().cpu().double()
        sums += torch.stack([gradient.abs(), gradient, gradient**2])
        batches += 1
    magnitude, mean, square = (context.runtime.all_sum(sums) / context.runtime.all_sum(batches)).tolist()
    rows = [
        {**_identify(site), "magnitude": magnitude[i], "mean": mean[i], "rms": square[i] ** 0.5}
        for i, site in enumerate(gated.sites)
    ]
    return sorted(rows, key=lambda row: KINDS.index(row["kind"]))


def recovery_asymmetry(model: nn.Module, context: Context, options: AllocationOptions) -> list[Record]:
    """Held-out accuracy in percent without one layer, before and after fast fine-tuning, one row per layer.

    Each row is recorded, so a killed run resumes with the next one.
    """
    dense = context.memo("recovery_dense", lambda: accuracy(deepcopy(model).to(context.runtime.device), context))

    def recover(key: str, site: Site) -> Record:
        without = remove_layers(model, context, {site.kind: [site.index]}, options).to(context.runtime.device)
        before = accuracy(without, context)
        fine_tune(without, context, options.collection, key, f"recovery of {site.name}")
        return {**_identify(site), "dense": dense, "before": before, "after": accuracy(without, context)}

    rows = []
    for site in all_layers(model, context.family):
        key = f"recovery_{site.kind}_{site.index:02d}"
        rows.append(context.memo(key, partial(recover, key, site)))
        if context.runtime.is_main:
            shutil.rmtree(context.folder / key, ignore_errors=True)
    return rows


def _identify(site: Site) -> Record:
    return {"site": site.name, "kind": site.kind, "index": site.index}
