"""The accuracy predictor against the two data sets that the HetDPT paper prints: appendix listing and Table 10."""

import numpy as np
import pytest

from vitcompress.errors import PlanError
from vitcompress.io.text import suggest_range
from vitcompress.methods.hetdpt.allocation import allocate_budget, feasible_splits, validate
from vitcompress.methods.options import AllocationOptions

LAYERS = (12, 12)
LISTING = [
    (1.00, 1.00, 81.8),
    (0.92, 1.00, 81.31),
    (0.83, 1.00, 80.9),
    (0.75, 1.00, 80.2),
    (0.67, 1.00, 78.2),
    (0.58, 1.00, 77.4),
    (1.00, 0.92, 81.26),
    (1.00, 0.83, 80.4),
    (1.00, 0.75, 78.9),
    (1.00, 0.67, 77.8),
    (1.00, 0.58, 76.7),
    (0.92, 0.92, 80.34),
    (0.92, 0.83, 80.03),
    (0.83, 0.83, 78.88),
    (0.83, 0.75, 78.08),
    (0.75, 0.75, 76.52),
]
TABLE_10 = [
    (1.00, 1.00, 81.80),
    (0.92, 1.00, 81.31),
    (0.83, 1.00, 80.90),
    (0.75, 1.00, 80.20),
    (0.67, 1.00, 78.10),
    (0.58, 1.00, 77.40),
    (0.50, 1.00, 72.69),
    (0.42, 1.00, 69.44),
    (0.33, 1.00, 64.84),
    (1.00, 0.92, 81.07),
    (1.00, 0.83, 80.40),
    (1.00, 0.75, 78.90),
    (1.00, 0.67, 77.80),
    (1.00, 0.58, 76.70),
    (1.00, 0.50, 75.20),
    (1.00, 0.42, 74.50),
    (1.00, 0.33, 73.90),
    (0.92, 0.92, 80.34),
    (0.92, 0.83, 80.03),
    (0.83, 0.83, 78.88),
    (0.83, 0.75, 78.08),
    (0.75, 0.75, 76.52),
]


def printed(points):
    return np.array(points)


def exact(points):
    return np.array([(round(a * 12) / 12, round(t * 12) / 12, y) for a, t, y in points])


def macs(attention, activation):
    """Of DeiT-B, relative to the dense model: an activation takes more of them with it than an attention."""
    width, tokens = 768, 198
    return -tokens * (attention * (4 * width**2 + 2 * tokens * width) + activation * 7 * width**2)


def allocate(rows, layers, budget, cost=macs, **options):
    return allocate_budget(rows, layers, AllocationOptions(pruned_layers=budget, **options), cost)


A, B = printed(LISTING), printed(TABLE_10)
DATA = {"A printed": A, "A exact": exact(LISTING), "B printed": B, "B exact": exact(TABLE_10)}


@pytest.mark.parametrize(
    ("name", "errors"),
    [
        ("A printed", [(0.4712, 0.5405), (0.4066, 0.4870), (0.7509, 1.0926), (1.1414, 1.7433)]),
        ("A exact", [(0.4466, 0.5271), (0.3588, 0.4153), (0.6080, 0.8648), (1.0544, 1.5517)]),
        ("B printed", [(1.5452, 2.0061), (0.4454, 0.6079), (0.5021, 0.7152), (0.5464, 0.7768)]),
        ("B exact", [(1.5193, 1.9929), (0.4273, 0.5821), (0.4245, 0.5948), (0.4667, 0.6336)]),
    ],
)
def test_leave_two_out_errors(name, errors):
    for degree, (mae, rmse) in enumerate(errors, start=1):
        validation = validate(DATA[name], degree)
        assert (validation.mae, validation.rmse) == pytest.approx((mae, rmse), abs=1e-4)
    assert allocate(DATA[name], LAYERS, 8).polynomial["degree"] == 2


@pytest.mark.parametrize(
    ("name", "coefficients"),
    [
        ("A printed", [31.684374, 50.653461, 39.298158, -19.795489, -8.338992, -11.704586]),
        ("A exact", [30.844552, 51.703135, 39.929224, -20.171792, -8.661597, -11.829292]),
        ("B printed", [15.746518, 98.334601, 28.415493, -45.421732, -13.040339, -2.398595]),
        ("B exact", [14.487768, 99.941212, 29.494729, -45.806797, -14.036766, -2.444222]),
    ],
)
def test_coefficients_of_degree_two(name, coefficients):
    assert allocate(DATA[name], LAYERS, 8).polynomial["coefficients"] == pytest.approx(coefficients, abs=1e-6)


def test_rank_deficient_degrees_are_not_eligible():
    ranks = {v.degree: v.full_rank for v in allocate(A, LAYERS, 8).degrees}
    assert ranks == {1: True, 2: True, 3: False, 4: False}


@pytest.mark.parametrize(
    ("name", "budget", "split", "prediction"),
    [
        ("A printed", 6, (3, 3), 76.739),
        ("A printed", 8, (4, 4), 73.946),
        ("A printed", 10, (5, 5), 70.600),
        ("A exact", 6, (3, 3), 76.696),
        ("A exact", 8, (4, 4), 73.860),
        ("A exact", 10, (4, 6), 70.468),
        ("B printed", 6, (2, 4), 76.782),
        ("B printed", 8, (2, 6), 74.324),
        ("B printed", 10, (2, 8), 71.732),
        ("B exact", 6, (2, 4), 76.740),
        ("B exact", 8, (2, 6), 74.249),
        ("B exact", 10, (2, 8), 71.623),
    ],
)
@pytest.mark.parametrize("least", [0, 1])
def test_splits_without_tie_break(name, budget, split, prediction, least):
    allocation = allocate(DATA[name], LAYERS, budget, min_pruned_per_type=least, tie_break="none")
    assert allocation.chosen == allocation.best == split
    predicted = {(s.attention, s.activation): s.prediction for s in allocation.splits}
    assert predicted[split] == pytest.approx(prediction, abs=1e-3)


@pytest.mark.parametrize(
    ("rows", "budget", "best", "chosen"),
    [
        (A, 8, (4, 4), (4, 4)),
        (A, 10, (5, 5), (4, 6)),
        (B, 8, (2, 6), (2, 6)),
        (B, 10, (2, 8), (1, 9)),
    ],
)
def test_ties_go_to_the_faster_model(rows, budget, best, chosen):
    allocation = allocate(rows, LAYERS, budget)
    assert (allocation.best, allocation.chosen, allocation.tie) == (best, chosen, best != chosen)


def test_the_measured_cost_decides_a_tie():
    assert allocate(A, LAYERS, 10, cost=lambda attention, activation: -attention).chosen == (5, 5)


def test_predictions_along_the_budget_lines():
    eight = {s.attention: s.prediction for s in allocate(A, LAYERS, 8, min_pruned_per_type=0).splits}
    assert [eight[n] for n in range(9)] == pytest.approx(
        [71.56, 72.64, 73.40, 73.83, 73.95, 73.74, 73.21, 72.36, 71.18], abs=0.006
    )
    ten = {s.attention: s.prediction for s in allocate(A, LAYERS, 10, min_pruned_per_type=0).splits}
    assert [ten[n] for n in range(11)] == pytest.approx(
        [67.38, 68.67, 69.63, 70.28, 70.599, 70.600, 70.28, 69.64, 68.67, 67.39, 65.78], abs=0.006
    )


@pytest.mark.parametrize(
    ("rows", "budget", "counts"),
    [
        (A, 8, {(4, 4): 95, (3, 5): 16, (5, 3): 9}),
        (A, 10, {(5, 5): 59, (4, 6): 41, (3, 7): 11, (6, 4): 9}),
        (B, 8, {(2, 6): 231}),
        (B, 10, {(2, 8): 162, (1, 9): 69}),
    ],
)
def test_jackknife_winners(rows, budget, counts):
    assert sum(counts.values()) == len(rows) * (len(rows) - 1) / 2, "each pair of rows is left out once"
    shares = {(s.attention, s.activation): s.jackknife for s in allocate(rows, LAYERS, budget).splits}
    assert {s: share for s, share in shares.items() if share} == pytest.approx(
        {s: n / sum(counts.values()) for s, n in counts.items()}
    )


def test_near_ties_lie_within_the_cross_validation_error():
    allocation = allocate(A, LAYERS, 8)
    near = {(s.attention, s.activation) for s in allocation.splits if s.near_tie}
    assert near == {(4, 4), (3, 5), (5, 3)}
    assert allocation.margin == pytest.approx(73.95 - 73.83, abs=0.01)


def test_splits_keep_one_layer_of_each_type():
    assert [12 - n for n, _ in feasible_splits(LAYERS, 8, 1)] == list(range(5, 12))
    assert [12 - n for n, _ in feasible_splits(LAYERS, 10, 1)] == list(range(3, 12))
    assert feasible_splits((2, 6), 5, 0) == [(1, 4), (0, 5)]


@pytest.mark.parametrize(
    ("layers", "budget", "least", "hint"),
    [
        ((12, 12), 23, 1, "choose pruned_layers from 2 to 22"),
        ((3, 3), 1, 1, "choose pruned_layers from 2 to 4"),
        ((2, 2), 3, 1, "choose pruned_layers = 2"),
        ((2, 2), 3, 0, "choose pruned_layers from 1 to 2"),
        ((2, 6), 4, 2, "choose min_pruned_per_type from 0 to 1"),
        ((1, 1), 1, 0, "prune widths"),
        ((0, 6), 2, 0, "prune widths"),
    ],
)
def test_impossible_budgets_name_the_possible_ones(layers, budget, least, hint):
    with pytest.raises(PlanError, match=f"no split of {budget}") as caught:
        feasible_splits(layers, budget, least)
    assert str(caught.value.hint).startswith(hint)
    possible = [b for b in range(1, 25) if _splits_exist(layers, b, least)]
    assert hint.startswith("choose pruned") == bool(possible)
    if possible:
        assert hint == suggest_range("pruned_layers", possible[0], possible[-1])
        assert possible == list(range(possible[0], possible[-1] + 1))


def _splits_exist(layers, budget, least):
    try:
        return bool(feasible_splits(layers, budget, least))
    except PlanError:
        return False


def test_few_rows():
    """Too few rows for full rank in every fold still give a split, marked as such."""
    rows = printed([(1, 1, 90), (0.5, 1, 80), (1, 0.5, 70), (0.5, 0.5, 60)])
    allocation = allocate(rows, (4, 4), 2, min_pruned_per_type=0)
    assert allocation.best == (2, 0)
    assert not any(v.full_rank for v in allocation.degrees)
