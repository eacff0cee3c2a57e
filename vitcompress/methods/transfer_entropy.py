"""Transfer entropy: how much of the spread of a model's logits depends on a layer.

NOSE ("MLP Can Be A Good Transformer Learner", https://arxiv.org/abs/2404.05657) and HetDPT. With F the logits of n
images (n, classes) and sigma_j the population standard deviation of channel j, in nats:

    H(F) = sum_j log sigma_j        TE(S) = H(complete model) - H(model without the layers S)

The constants of the Gaussian cancel. A layer with a small TE is unimportant. TE is signed: a layer whose removal raises
the spread has a negative TE and ranks as least important; `sign = "abs"` ranks by magnitude instead.

One pass over the images measures every set of layers, in float64, without storing features. The statistics are those of
all images of all processes together, not a mean over batches.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from vitcompress.errors import InputError
from vitcompress.families import Site
from vitcompress.methods.base import Context
from vitcompress.methods.calibration import calibration_images
from vitcompress.methods.options import EntropyOptions
from vitcompress.methods.scores import check_scores
from vitcompress.surgery.gates import GatedModel
from vitcompress.training.distributed import derived_seed

SMALLEST = 1e-12  # standard deviation; that of outputs which are equal for all images


def weighted_sums(features: Tensor, weights: Tensor, center: Tensor) -> Tensor:
    """The sums over images of 1, d and d^2, d being features - center: (weightings, 1 + 2 * channels).

    features: (images, channels), weights: (weightings, images), center: (channels,), all float64. With a center near
    the mean, such as the mean of the first batch, `deviation` is exact even if the mean is large.
    """
    d = features - center
    return weights @ torch.cat([torch.ones_like(d[:, :1]), d, d**2], dim=1)


def deviation(sums: Tensor) -> Tensor:
    """Population standard deviation of each channel from its `weighted_sums`: (weightings, channels)."""
    first, second = (sums[:, 1:] / sums[:, :1].clamp(min=1.0)).chunk(2, dim=1)
    return (second - first**2).clamp(min=0.0).sqrt()


@torch.no_grad()
def entropies(
    gated: GatedModel, removed: Sequence[Collection[str]], context: Context, options: EntropyOptions
) -> tuple[Tensor, Tensor, int]:
    """H without each of the sets `removed` of sites, from one pass over the images; changes gates and mode of `gated`.

    Returns H in nats, (sets, 1 + resamples), of the images and of each bootstrap resample, top-1 in percent, (sets,),
    and the number of images. All sets share their resamples, so differences between sets are paired.
    """
    sums = [torch.zeros((), dtype=torch.float64)] * len(removed)
    centers: dict[int, Tensor] = {}
    correct = torch.zeros(len(removed), dtype=torch.float64)
    loader, runtime = calibration_images(context, options.images), context.runtime
    # Ones, then Poisson(1) counts: a bootstrap that needs no second pass. Shape: (1 + resamples, images)
    generator = torch.Generator().manual_seed(derived_seed("bootstrap", context.seed))
    weights = torch.ones(1 + options.resamples, loader.total, dtype=torch.float64)
    weights[1:] = torch.poisson(weights[1:], generator=generator)
    weights = weights[:, runtime.rank :: runtime.world_size]
    gated.eval()
    seen = 0
    for images, targets in loader:
        batch = weights[:, seen : seen + len(images)]
        seen += len(images)
        for i, names in enumerate(removed):
            for site in gated.sites:
                gated.set_gate(site.name, 0.0 if site.name in names else 1.0)
            if (logits := gated(images)).ndim != 2:
                message = f"the model outputs {tuple(logits.shape[1:])} for an image, not one logit per class"
                raise InputError(message, hint='create it with another global_pool, such as "avg"')
            correct[i] += (logits.argmax(dim=1) == targets).sum().item()
            features = (logits.cpu() if logits.device.type == "mps" else logits).double()  # MPS has no float64
            if i not in centers:  # the same one in all processes
                centers[i] = runtime.all_sum(features.mean(dim=0)) / runtime.world_size
            sums[i] = sums[i] + weighted_sums(features, batch.to(features.device), centers[i])
    spreads = [deviation(runtime.all_sum(own)).clamp(min=SMALLEST) for own in sums]
    check_scores("layers", spreads[0][0] > SMALLEST)  # else the outputs are the same for all images
    values = [spread.log().sum(dim=1).cpu() for spread in spreads]
    return torch.stack(values), 100 * runtime.all_sum(correct) / loader.total, loader.total


def identify(site: Site) -> dict[str, Any]:
    """Name, kind and block of `site`, as in all tables of layers."""
    return {"site": site.name, "kind": site.kind, "index": site.index}


def measure(
    gated: GatedModel, sites: Sequence[Site], context: Context, options: EntropyOptions, removed: Collection[str] = ()
) -> dict[str, Any]:
    """Transfer entropy of each site relative to the whole model, as plain data; `chosen` is the lowest, on rank 0.

    removed: sites that are removed together with each of `sites`. NOSE, which always compares with the dense model,
    passes those chosen before; HetDPT passes the current model instead.
    """
    values, accuracies, images = entropies(gated, [(), *((*removed, site.name) for site in sites)], context, options)
    rows: list[dict[str, Any]] = []
    for number, site in enumerate(sites, start=1):
        difference, *drawn = (values[0] - values[number]).tolist()
        row = {
            **identify(site),
            "entropy": float(values[number, 0]),
            "transfer_entropy": difference,
            "deviation": float(torch.tensor(drawn, dtype=torch.float64).std()) if len(drawn) > 1 else None,
            "score": abs(difference) if options.sign == "abs" else difference,
            "accuracy": float(accuracies[number]),
        }
        rows.append(row)
    chosen = context.runtime.broadcast(min(rows, key=lambda row: row["score"])["site"])
    about = {"images": images, "entropy": float(values[0, 0]), "accuracy": float(accuracies[0]), "sign": options.sign}
    return {**about, "rows": rows, "chosen": chosen}


def greedy(
    gated: GatedModel, candidates: Sequence[Site], count: int, context: Context, options: EntropyOptions
) -> list[dict[str, Any]]:
    """NOSE's selection, one table per round: each chooses the candidate with the lowest TE of it and all earlier ones.

    Nothing is trained in between. The whole set is removed together: layers that compensate for each other are noticed.
    """
    tables: list[dict[str, Any]] = []
    for _ in range(count):
        removed = [table["chosen"] for table in tables]
        left = [site for site in candidates if site.name not in removed]
        tables.append(measure(gated, left, context, options, removed))
    return tables
