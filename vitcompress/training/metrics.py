"""Accuracy with its counts, its confidence interval, and a test of differences; the divergence of outputs.

Sums are taken over all processes in float64; every image is counted exactly once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import NotRequired

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import TypedDict

from vitcompress.errors import DataError, VitcompressError
from vitcompress.io.text import format_percent
from vitcompress.models.create import InputConfig
from vitcompress.training.datasets import Images, check_labels
from vitcompress.training.distributed import Runtime
from vitcompress.training.loaders import BatchLoader, EvalLoader, Views

PAIRED_TESTS = {"mcnemar": "dense", "control_mcnemar": "control"}  # which the compressed model is compared with
_Z95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution


@dataclass(frozen=True)
class Accuracy:
    """How many of `total` images have the right class first (`correct`) or among the first five; mean cross entropy."""

    correct: int
    correct5: int
    total: int
    loss: float

    @property
    def top1(self) -> float:
        """Share of images whose class has the largest logit, 0 to 1."""
        return self.correct / self.total

    @property
    def top5(self) -> float:
        """Share of images whose class is among the five largest logits, 0 to 1."""
        return self.correct5 / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of `top1`."""
        return wilson(self.correct, self.total)

    def __str__(self) -> str:
        """`97.5 % (39 of 40)`"""
        return f"{format_percent(self.top1)} ({self.correct} of {self.total})"

    def to_dict(self) -> dict[str, object]:
        """Counts, shares and the interval as plain data."""
        return {**asdict(self), "top1": self.top1, "top5": self.top5, "top1_ci95": list(self.interval)}


class McNemarRecord(TypedDict):
    """Images that only one of two models classifies correctly, and the exact p-value.

    difference: share of correct images of the second model minus that of the first, with its 95 % interval.
    """

    only_a: int
    only_b: int
    p_value: float
    difference: NotRequired[float]
    difference_ci95: NotRequired[Sequence[float]]


def evaluate(predict: Callable[[Tensor], Tensor], loader: EvalLoader | BatchLoader, runtime: Runtime) -> Accuracy:
    """Accuracy of `predict` (images (batch, C, H, W) -> logits (batch, classes)) over all ranks' shares of `loader`.

    Raises DataError without any image and for labels that are no classes, VitcompressError if a logit is not finite.
    """
    return evaluate_images(predict, loader, runtime)[0]


@torch.inference_mode()
def evaluate_images(
    predict: Callable[[Tensor], Tensor], loader: EvalLoader | BatchLoader, runtime: Runtime
) -> tuple[Accuracy, np.ndarray, np.ndarray]:
    """`evaluate`, whether each image is classified correctly, and its top-1 class, in the order of the data."""
    loss, parts = torch.zeros((), dtype=torch.float64), [torch.zeros(0, 3)]
    for images, targets in loader:
        logits, targets = predict(images).float().cpu(), targets.cpu()
        if logits.ndim != 2:
            message = f"the model outputs {tuple(logits.shape[1:])} for an image, not one logit per class"
            raise DataError(message, hint="export one with a classifier and global pooling")
        check_labels(targets, logits.shape[1])
        if not torch.isfinite(logits).all():
            hint = "check the images for such values, and whether it was trained with amp fp16"
            raise VitcompressError("the logits of the model are not finite", hint=hint)
        hits = (best := logits.topk(min(5, logits.shape[1]), dim=1).indices) == targets[:, None]
        parts.append(torch.stack([hits[:, 0], hits.any(dim=1), best[:, 0]], dim=1))
        loss += functional.cross_entropy(logits, targets, reduction="none").double().sum()
    own = torch.cat(parts)
    total = len(own) if loader.total is None else loader.total
    if not total:
        raise DataError("there is no image to evaluate", hint="use a data set with test images")
    right = torch.zeros(total, 3)
    right[runtime.rank :: runtime.world_size] = own
    right, loss_sum = runtime.all_sum(right), float(runtime.all_sum(loss))
    correct, correct5 = right[:, :2].sum(dim=0).round().int().tolist()
    first, _, top1 = right.numpy().round().astype(int).T
    return Accuracy(correct, correct5, total, loss_sum / total), first > 0, top1


def mcnemar(a_correct: np.ndarray, b_correct: np.ndarray) -> McNemarRecord:
    """McNemar's exact test (1947; binomial form) of two models on the same images.

    If both are equally good, each image that only one of them gets right is a fair coin: the p-value is the binomial
    probability of a split at least this uneven.
    """
    a, b = np.asarray(a_correct, bool), np.asarray(b_correct, bool)
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    coins, steps = only_a + only_b, range(min(only_a, only_b))  # each binomial coefficient from the one before
    tail = sum(accumulate(steps, lambda ways, k: ways * (coins - k) // (k + 1), initial=1))
    difference = (only_b - only_a) / len(a)
    counts: McNemarRecord = {"only_a": only_a, "only_b": only_b, "p_value": min(1.0, 2 * tail / 2**coins)}
    return {**counts, "difference": difference, "difference_ci95": paired_interval(only_a, only_b, len(a))}


def paired_interval(only_a: int, only_b: int, total: int) -> tuple[float, float]:
    """95 % score interval (Tango 1998, Statistics in Medicine 17, 891-908) of the difference of two shares, `b` - `a`.

    Both are shares of the same `total` items, of which `only_a` and `only_b` count for one of them alone. The interval
    has every difference that the score test does not reject at 5 %. At 0 this test is McNemar's without continuity
    correction, and without any such item the interval still has a width.
    """
    if total < 1 or min(only_a, only_b) < 0 or only_a + only_b > total:
        raise ValueError(f"{only_a} and {only_b} of {total} are not parts of a whole")

    def score(difference: float) -> float:
        """Standardized distance of the observed difference from this one; decreases with it (Tango, equation 6)."""
        linear = (2 * total - only_b + only_a) * difference - only_a - only_b
        constant = -only_a * difference * (1 - difference)
        share = (math.sqrt(max(0.0, linear**2 - 8 * total * constant)) - linear) / (4 * total)  # likeliest only_a/total
        variance = total * (2 * share + difference * (1 - difference))
        distance = only_b - only_a - total * difference
        return distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance)

    def end(inside: float, outside: float) -> float:
        for _ in range(60):  # bisection to float64
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if abs(score(middle)) <= _Z95 else (inside, middle)
        return inside

    observed = (only_b - only_a) / total
    return end(observed, -1.0), end(observed, 1.0)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % score interval (1927, JASA 22) of a share; it stays within 0 and 1 also at the ends."""
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} of {trials} is not a share")
    share, weight = successes / trials, _Z95**2 / trials
    center = (share + weight / 2) / (1 + weight)
    half = _Z95 / (1 + weight) * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    low, high = max(0.0, center - half), min(1.0, center + half)
    return low if successes else 0.0, high if successes < trials else 1.0  # exact at the ends, where rounding is not


def guessed(correct: int, labels: np.ndarray) -> bool:
    """Whether `correct` of these images is no better than always predicting the most frequent class.

    That share must be below the lower end of Wilson's 95 % interval to count as better.
    """
    return wilson(correct, len(labels))[0] <= int(np.max(np.bincount(labels))) / len(labels)


def kl_divergence(expected: Tensor, outputs: Tensor) -> Tensor:
    """KL(expected || outputs) of the probabilities of logits, (..., classes) -> (...), in nats, computed in float64.

    `losses.soft_loss` has gradients in the type of a training, and a temperature.
    """
    log_p, log_q = expected.double().log_softmax(-1), outputs.double().log_softmax(-1)
    return functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).clamp(min=0)


def random_images(dataset: Images, input: InputConfig, count: int, seed: int) -> Tensor:
    """`count` random images of `dataset` (all if there are fewer), with evaluation transforms: (count, C, H, W)."""
    chosen = np.random.default_rng(seed).permutation(len(dataset))[:count]
    loader = EvalLoader(Views(dataset, sorted(chosen.tolist())), input, len(chosen), Runtime(torch.device("cpu")))
    return next(iter(loader))[0]
