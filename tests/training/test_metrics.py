"""Counts, intervals and the exact test, against values that can be worked out by hand or by scipy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from vitcompress.errors import DataError, VitcompressError
from vitcompress.models.create import InputConfig
from vitcompress.training.datasets import ArrayImages
from vitcompress.training.distributed import Runtime
from vitcompress.training.loaders import EvalLoader
from vitcompress.training.metrics import (
    Accuracy,
    evaluate,
    evaluate_images,
    guessed,
    mcnemar,
    paired_interval,
    random_images,
    wilson,
)

Predict = Callable[[Tensor], Tensor]
CPU = Runtime(torch.device("cpu"))
INPUT = InputConfig((1, 4, 4), (0.0,), (1.0,), "bicubic", 1.0, "center")


def numbered(count: int, classes: int) -> ArrayImages:
    """Image i is uniformly gray i, its class is i modulo `classes`."""
    pixels = np.repeat(np.arange(count, dtype=np.uint8), 16).reshape(count, 4, 4)
    return ArrayImages(pixels, np.arange(count) % classes)


def oracle(classes: int, wrong: set[int], second: set[int] | None = None) -> Predict:
    """Knows every image by its gray value; `wrong` ones get the next class first, `second` of those theirs next."""

    def predict(images: Tensor) -> Tensor:
        numbers = (images[:, 0, 0, 0] * 255).round().long()
        logits = torch.zeros(len(images), classes)
        for row, number in enumerate(numbers.tolist()):
            right = number % classes
            logits[row] = -torch.arange(classes, dtype=torch.float32)  # otherwise low classes come first
            logits[row, (right + 1) % classes if number in wrong else right] = 9.0
            logits[row, right] = 8.0 if number in (second or ()) else (-99.0 if number in wrong else 9.0)
        return logits

    return predict


def test_counts_top1_and_top5() -> None:
    loader = EvalLoader(numbered(20, 7), INPUT, 6, CPU)
    accuracy = evaluate(oracle(7, wrong={1, 2, 3}, second={2}), loader, CPU)
    assert (accuracy.correct, accuracy.correct5, accuracy.total) == (17, 18, 20)
    assert accuracy.top1 == 17 / 20 and accuracy.top5 == 18 / 20


def test_top5_of_fewer_classes_is_everything() -> None:
    accuracy = evaluate(oracle(3, wrong={0}), EvalLoader(numbered(6, 3), INPUT, 4, CPU), CPU)
    assert (accuracy.correct, accuracy.correct5) == (5, 6)


def test_loss_is_the_mean_over_images_not_batches() -> None:
    loader = EvalLoader(numbered(5, 2), INPUT, 4, CPU)
    known = {number: torch.tensor([float(number), 0.0]) for number in range(5)}

    def predict(images: Tensor) -> Tensor:
        return torch.stack([known[round(float(image[0, 0, 0]) * 255)] for image in images])

    expected = np.mean([np.log(np.exp(n) + 1) - (n if n % 2 == 0 else 0) for n in range(5)])
    assert evaluate(predict, loader, CPU).loss == pytest.approx(expected, rel=1e-6)


def test_correct_images_are_in_the_order_of_the_data() -> None:
    predict, batch_sizes = oracle(5, wrong={0, 4, 9}, second={4}), list[int]()

    def counted(images: Tensor) -> Tensor:
        batch_sizes.append(len(images))
        return predict(images)

    images = numbered(11, 5)
    accuracy, mask, classes = evaluate_images(counted, EvalLoader(images, INPUT, 3, CPU), CPU)
    assert mask.dtype == bool and np.flatnonzero(~mask).tolist() == [0, 4, 9]
    assert (accuracy.correct, accuracy.total) == (mask.sum(), 11) and sum(batch_sizes) == 11
    assert ((classes == images.labels) == mask).all()


def test_numbers_that_are_not_finite_are_rejected() -> None:
    loader = EvalLoader(numbered(4, 2), INPUT, 4, CPU)
    with pytest.raises(VitcompressError, match="not finite"):
        evaluate(lambda images: torch.full((len(images), 2), float("nan")), loader, CPU)


def test_nothing_to_evaluate_is_an_error() -> None:
    with pytest.raises(DataError, match="no image"):
        evaluate(lambda images: images, EvalLoader(numbered(0, 2), INPUT, 4, CPU), CPU)


def test_what_is_no_better_than_always_answering_the_most_frequent_class() -> None:
    even, uneven = np.repeat(np.arange(4), 25), np.repeat([0, 1], [90, 10])
    assert guessed(25, even) and guessed(0, even) and not guessed(50, even)
    assert guessed(90, uneven) and guessed(50, uneven) and not guessed(99, uneven)


def test_wilson_against_the_published_example() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), table I: 81/263 -> 0.2553 to 0.3662; 0/20 -> 0 to 0.1611
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert Accuracy(20, 20, 20, 0.0).interval[1] == 1.0
    with pytest.raises(ValueError, match="not a share"):
        wilson(3, 2)


@pytest.mark.parametrize(
    ("only_a", "only_b", "total", "ends"),
    [
        # Fagerland, Lydersen and Laake, Statistical Analysis of Contingency Tables (2017), chapter 8, and their R
        # package contingencytables, with the other sign: Bentur et al. (2009), Cavo et al. (2012).
        (7, 1, 21, (-0.517, -0.026)),
        (16, 6, 161, (-0.1240, -0.0054)),
    ],
)
def test_the_paired_interval_against_published_examples(
    only_a: int, only_b: int, total: int, ends: tuple[float, float]
) -> None:
    low, high = paired_interval(only_a, only_b, total)
    assert (low, high) == pytest.approx(ends, abs=5e-4 if total == 21 else 5e-5)
    assert paired_interval(only_b, only_a, total) == pytest.approx((-high, -low), abs=1e-12)


def test_the_paired_interval_at_its_limits() -> None:
    z2 = stats.norm.ppf(0.975) ** 2
    for total in (1, 5, 44, 50_000):  # with no difference the equation has a closed solution
        assert paired_interval(0, 0, total) == pytest.approx((-z2 / (total + z2), z2 / (total + z2)), rel=1e-9)
        assert paired_interval(total, 0, total)[0] == -1 and paired_interval(0, total, total)[1] == 1
    for only_b, inside in ((20, True), (22, False)):  # 0 is inside unless McNemar's statistic is above the limit
        assert (paired_interval(10, only_b, 200)[0] <= 0) == inside == ((only_b - 10) ** 2 / (only_b + 10) <= z2)
    for wrong in ((1, 1, 1), (-1, 0, 3), (0, 0, 0)):
        with pytest.raises(ValueError, match="not parts of a whole"):
            paired_interval(*wrong)


def wald_interval(only_a: int, only_b: int, total: int) -> tuple[float, float]:
    half = 1.96 * np.sqrt(only_a + only_b - (only_a - only_b) ** 2 / total) / total
    return (only_b - only_a) / total - half, (only_b - only_a) / total + half


@pytest.mark.parametrize(("interval", "sound"), [(paired_interval, True), (wald_interval, False)])
def test_the_paired_interval_covers_the_true_difference(interval: Any, sound: bool) -> None:
    """Exact coverage: the sum over all outcomes. The lower end alone, the limit of `--max-drop`, covers 97.5 %.

    A score interval has this coverage on average, not everywhere; 1 % and 0.1 % are allowed below it.
    """
    coverage = []
    for total in (100, 540):
        for lost, won in ((0.02, 0.01), (0.05, 0.05), (0.03, 0.0), (0.10, 0.04)):
            ends = [stats.binom.interval(1 - 1e-9, total, share) for share in (lost, won)]
            counts = [(a, b) for a in np.arange(ends[0][0], ends[0][1] + 1) for b in range(int(ends[1][1]) + 1)]
            low, high = np.array([interval(int(a), b, total) for a, b in counts]).T
            table = [(a, b, total - a - b) for a, b in counts]
            likely = stats.multinomial.pmf(table, total, [lost, won, 1 - lost - won])
            above = low <= won - lost + 1e-12
            coverage.append((likely[above & (won - lost <= high + 1e-12)].sum(), likely[above].sum()))
    both, lower = np.array(coverage).T
    assert (both.min() >= 0.94) == (lower.min() >= 0.974) == sound


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 0), (1, 5), (7, 7), (0, 6), (40, 20)])
def test_mcnemar_is_the_exact_binomial_test(only_a: int, only_b: int) -> None:
    both = 10
    a = np.array([True] * (both + only_a) + [False] * only_b)
    b = np.array([True] * both + [False] * only_a + [True] * only_b)
    difference = mcnemar(a, b)
    expected = stats.binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0
    assert (difference["only_a"], difference["only_b"]) == (only_a, only_b)
    assert difference["p_value"] == pytest.approx(expected, rel=1e-12)


def test_mcnemar_of_many_images() -> None:
    """With a binomial coefficient computed anew for each term, this took more than five minutes."""
    counts, total = (20_000, 19_000), 100_000
    a, b = np.arange(total) < counts[0], np.arange(total) >= total - counts[1]
    assert mcnemar(a, b)["p_value"] == pytest.approx(stats.binomtest(counts[0], sum(counts)).pvalue, rel=1e-9)


def test_mcnemar_wants_the_same_images() -> None:
    with pytest.raises(ValueError, match=r"shapes \(3,\) \(4,\)"):
        mcnemar(np.ones(3, bool), np.ones(4, bool))


def test_random_images_are_drawn_once_each_by_the_seed() -> None:
    data = numbered(30, 3)
    first, again, other = (random_images(data, INPUT, 8, seed) for seed in (0, 0, 1))
    assert first.shape == (8, 1, 4, 4) and torch.equal(first, again) and not torch.equal(first, other)
    assert len(set(first[:, 0, 0, 0].tolist())) == 8
    assert len(random_images(data, INPUT, 31, 0)) == 30
