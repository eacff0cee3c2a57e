"""Transfer entropy: how much of the spread of a model's logits depends on a layer.

NOSE ("MLP Can Be A Good Transformer Learner", https://arxiv.org/abs/2404.05657) and HetDPT. With F the logits of n
images (n, classes) and sigma_j the population standard deviation of channel j, in nats:

    H(F) = sum_j log sigma_j        TE(S) = H(complete model) - H(model without the layers S)

The constants of the Gaussian cancel. A layer with a small TE is unimportant. TE is signed: a layer whose removal raises
the spread has a negative TE and ranks as least important; `sign = "abs"` ranks by magnitude instead.

One pass over the images measures every set of layers, in float64, without storing features. The statistics are those of
all images of all processes together, not a mean over batches.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitcompress.families.base import Site
from vitcompress.methods.base import Context
from vitcompress.methods.calibration import calibration_images
from vitcompress.methods.options import EntropyOptions
from vitcompress.surgery.gates import GatedModel
from vitcompress.training.distributed import Runtime, derived_seed

SMALLEST_DEVIATION = 1e-12


@dataclass(frozen=True)
class Entropy:
    """H of one model on the images, in nats, and of each bootstrap resample.

    clamped: number of channels that do not vary. accuracy: top-1 in percent on the same images.
    """

    value: float
    resampled: tuple[float, ...]
    clamped: int
    images: int
    accuracy: float


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and sum of squared deviations of each channel, for several weightings of the images at once.

    Batches are merged pairwise (Chan, Golub and LeVeque), which is exact even if the mean is large. weight:
    (weightings,), mean and squares: (weightings, channels), all float64.
    """

    weight: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, features: Tensor, weights: Tensor) -> "Moments":
        """The moments of one batch. features: (images, channels), weights: (weightings, images), both float64."""
        centre = features.mean(dim=0)
        deviations = features - centre
        weight = weights.sum(dim=1)
        # A resample may contain no image of a small batch: its sums are zero, whatever the divisor.
        offset = weights @ deviations / weight.clamp(min=1.0)[:, None]
        squares = weights @ deviations**2 - weight[:, None] * offset**2
        return cls(weight, centre + offset, squares)

    def merge(self, other: "Moments") -> "Moments":
        """The moments of both sets of images together."""
        weight = self.weight + other.weight
        share = (other.weight / weight.clamp(min=1.0))[:, None]
        difference = other.mean - self.mean
        squares = self.squares + other.squares + difference**2 * share * self.weight[:, None]
        return Moments(weight, self.mean + difference * share, squares)

    def over_all(self, runtime: Runtime) -> "Moments":
        """The moments of the images of all processes together."""
        weight = runtime.all_sum(self.weight)
        mean = runtime.all_sum(self.mean * self.weight[:, None]) / weight.clamp(min=1.0)[:, None]
        squares = runtime.all_sum(self.squares + self.weight[:, None] * (self.mean - mean) ** 2)
        return Moments(weight, mean, squares)

    def deviation(self) -> Tensor:
        """Population standard deviation, (weightings, channels)."""
        return (self.squares.clamp(min=0.0) / self.weight.clamp(min=1.0)[:, None]).sqrt()


def entropies(
    gated: GatedModel, removed: Sequence[Collection[str]], context: Context, options: EntropyOptions
) -> list[Entropy]:
    """H without each of the sets `removed` of sites, from one pass over the images.

    Gates and mode are restored. All sets share their resamples, so differences between sets are paired.
    """
    moments: dict[int, Moments] = {}
    correct = torch.zeros(len(removed), dtype=torch.float64)
    loader, runtime = calibration_images(context, options.images), context.runtime
    weights = _weights(loader.total, options.resamples, context.seed)[:, runtime.rank :: runtime.world_size]
    seen = 0
    with _measuring(gated), torch.no_grad():
        for images, targets in loader:
            batch = weights[:, seen : seen + len(images)]
            seen += len(images)
            for i, names in enumerate(removed):
                for site in gated.gate_values():
                    gated.set_gate(site, 0.0 if site in names else 1.0)
                logits = gated(images)
                correct[i] += (logits.argmax(dim=1) == targets).sum().item()
                features = logits.cpu() if logits.device.type == "mps" else logits  # MPS has no float64
                part = Moments.of(features.double(), batch.to(features.device))
                moments[i] = moments[i].merge(part) if i in moments else part
    hits = runtime.all_sum(correct).tolist()
    return [_entropy(moments[i].over_all(runtime), hit) for i, hit in enumerate(hits)]


def measure(
    gated: GatedModel,
    candidates: Sequence[Site],
    context: Context,
    options: EntropyOptions,
    removed: Collection[str] = (),
) -> dict[str, Any]:
    """Transfer entropy of each candidate relative to the whole model, as plain data; `chosen` is the lowest, on rank 0.

    removed: sites that are removed together with each candidate. NOSE, which always compares with the dense model,
    passes those chosen before; HetDPT passes the current model instead.
    """
    reference, *without = entropies(gated, [(), *((*removed, site.name) for site in candidates)], context, options)
    rows, resampled = list[dict[str, Any]](), []
    for site, entropy in zip(candidates, without, strict=True):
        difference = reference.value - entropy.value
        drawn = [a - b for a, b in zip(reference.resampled, entropy.resampled, strict=True)]
        resampled.append(list(map(abs, drawn)) if options.sign == "abs" else drawn)
        row = {
            "site": site.name,
            "kind": site.kind,
            "index": site.index,
            "entropy": entropy.value,
            "transfer_entropy": difference,
            "deviation": float(torch.tensor(drawn, dtype=torch.float64).std()) if len(drawn) > 1 else None,
            "score": abs(difference) if options.sign == "abs" else difference,
            "accuracy": entropy.accuracy,
            "clamped": entropy.clamped,
        }
        rows.append(row)
    picks = [scores.index(min(scores)) for scores in zip(*resampled, strict=True)]
    for i, row in enumerate(rows):
        row["lowest_share"] = picks.count(i) / len(picks) if picks else None
    chosen = context.runtime.broadcast(min(rows, key=lambda row: row["score"])["site"])
    return {
        "images": reference.images,
        "entropy": reference.value,
        "accuracy": reference.accuracy,
        "sign": options.sign,
        "rows": rows,
        "chosen": chosen,
    }


def greedy(
    gated: GatedModel, candidates: Sequence[Site], count: int, context: Context, options: EntropyOptions
) -> list[dict[str, Any]]:
    """NOSE's selection, one table per round: each chooses the candidate with the lowest TE of it and all earlier ones.

    Nothing is trained in between. Because the whole set is removed together, layers that compensate for each other are
    noticed.
    """
    removed: list[str] = []
    tables = []
    for _ in range(count):
        left = [site for site in candidates if site.name not in removed]
        tables.append(measure(gated, left, context, options, removed))
        removed.append(tables[-1]["chosen"])
    return tables


def _entropy(moments: Moments, correct: float) -> Entropy:
    deviation = moments.deviation()
    values = deviation.clamp(min=SMALLEST_DEVIATION).log().sum(dim=1).tolist()
    images = round(float(moments.weight[0]))
    clamped = int((deviation[0] < SMALLEST_DEVIATION).sum())
    return Entropy(values[0], tuple(values[1:]), clamped, images, 100 * correct / images)


def _weights(images: int, resamples: int, seed: int) -> Tensor:
    """Ones, then Poisson(1) counts: a bootstrap that needs no second pass. Shape: (1 + resamples, images)."""
    generator = torch.Generator().manual_seed(derived_seed("bootstrap", seed))
    counts = torch.poisson(torch.ones(resamples, images, dtype=torch.float64), generator=generator)
    return torch.cat([torch.ones(1, images, dtype=torch.float64), counts])


@contextmanager
def _measuring(gated: GatedModel) -> Iterator[nn.Module]:
    """Evaluation mode; restores gates and mode."""
    before, training = gated.gate_values(), gated.training
    gated.eval()
    try:
        yield gated
    finally:
        gated.train(training)
        for site, value in before.items():
            gated.set_gate(site, value)
