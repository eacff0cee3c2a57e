"""MAP, HetDPT's model accuracy predictor: the split of the budget between both types with the best predicted accuracy.

"Rethinking Depth Pruning for Vision Transformers" (HetDPT), section on the budget allocation, Algorithm 3 and the
listing of its appendix. A polynomial of the retained ratios a (attention) and t (activation), of total degree at most
kappa, is fitted by least squares to the rows of step 1; leave-two-out cross-validation chooses kappa; the best of all
splits of the budget wins. Ratios are exact counts over layers; the paper's listing used ratios rounded to two decimals.

Differs from the listing: degrees whose design matrix loses rank in a fold are not eligible, near-ties are reported, and
a tie (closer than a tenth of the cross-validation error) goes to the faster model.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitcompress.errors import PlanError
from vitcompress.io.text import suggest_range
from vitcompress.methods.options import AllocationOptions

DEGREES = (1, 2, 3, 4)
FEWEST_ROWS = 4  # for cross-validation
TIE_SHARE = 0.1
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Validation:
    """Leave-two-out errors of a degree, in percent of accuracy. full_rank: whether every fold determines all terms."""

    degree: int
    mae: float
    rmse: float
    full_rank: bool


@dataclass(frozen=True)
class Split:
    """Numbers of removed layers, their predicted accuracy in percent, and how far that is below the best.

    near_tie: within the cross-validation RMSE of the best. jackknife: share of the leave-two-out refits it wins.
    """

    attention: int
    activation: int
    prediction: float
    gap: float
    near_tie: bool
    jackknife: float


@dataclass(frozen=True)
class Allocation:
    """The chosen split (pruned attention, pruned activation), and how certain the choice is.

    best: the split predicted best. margin: its lead over the runner-up (None with a single split). tie: the lead is
    below a tenth of the RMSE. chosen differs from best only where `tie_break` decided. polynomial: total degree, and
    coefficients in the order 1, a, t, a^2, a*t, t^2, ...
    """

    chosen: tuple[int, int]
    best: tuple[int, int]
    margin: float | None
    tie: bool
    tie_break: str
    polynomial: dict[str, Any]
    rmse: float
    degrees: tuple[Validation, ...]
    splits: tuple[Split, ...]


def validate(rows: Array, degree: int) -> Validation:
    """Leave-two-out error: each point's predictions are averaged over its folds before the error is taken."""
    total, full_rank = np.zeros(len(rows)), True
    for left_out, coefficients, rank in _folds(rows, degree):
        total[left_out] += _features(rows[left_out, :2], degree) @ coefficients
        full_rank &= rank == coefficients.size
    errors = total / (len(rows) - 1) - rows[:, 2]
    return Validation(degree, float(np.abs(errors).mean()), float(np.sqrt((errors**2).mean())), full_rank)


def feasible_splits(layers: tuple[int, int], budget: int, min_pruned_per_type: int) -> list[tuple[int, int]]:
    """All (pruned attention, pruned activation) that spend `budget` and leave at least one layer of each type.

    Most pruned attention first, the order of the paper's listing. Raises PlanError when there is none.
    """
    least, (attentions, activations) = min_pruned_per_type, layers
    splits = [(n, budget - n) for n in range(attentions - 1, least - 1, -1) if least <= budget - n < activations]
    if not splits:
        fewest, most = min(layers), sum(layers) - 2
        hint = suggest_range("pruned_layers", max(1, 2 * least), most)
        if fewest < 1 or most < 1:
            hint = "prune widths: with one layer of each type to stay, none may go"
        elif fewest <= least:
            hint = suggest_range("min_pruned_per_type", 0, fewest - 1)
        split = f"no split of {budget} pruned layers over {attentions} attentions and {activations} activations"
        raise PlanError(f"{split} prunes at least {least} and keeps at least 1 of each type", hint=hint)
    return splits


def allocate_budget(
    rows: Array, layers: tuple[int, int], options: AllocationOptions, cost: Callable[[int, int], float]
) -> Allocation:
    """Fit, choose the degree, search the budget line, break ties.

    rows: measured points, (points, 3): retained ratios of attentions and of activations in 0..1, accuracy in percent.
    layers: number of attention and activation layers that the ratios count in. cost: of the model with (pruned
    attention, pruned activation), in any unit (MACs, milliseconds).
    """
    degrees = tuple(validate(rows, degree) for degree in DEGREES)
    # The lowest RMSE among the degrees with full rank in every fold; the first degree if there is none.
    validation = min((v for v in degrees if v.full_rank), key=lambda v: v.rmse, default=degrees[0])
    coefficients, _ = _solve(rows, validation.degree)
    curve = {"degree": validation.degree, "coefficients": coefficients.tolist()}
    candidates = feasible_splits(layers, options.pruned_layers, options.min_pruned_per_type)
    predicted = _predict(coefficients, candidates, layers, validation.degree)
    best = int(np.argmax(predicted))
    gaps = predicted[best] - predicted
    tied = [s for s, gap in zip(candidates, gaps, strict=True) if gap < TIE_SHARE * validation.rmse]
    tie = len(tied) > 1
    chosen = min(tied, key=lambda s: cost(*s)) if tie and options.tie_break == "faster" else candidates[best]
    fits = (fit for _, fit, _ in _folds(rows, validation.degree))
    wins = Counter(int(np.argmax(_predict(fit, candidates, layers, validation.degree))) for fit in fits)
    splits = tuple(
        Split(*s, float(p), float(gap), bool(gap <= validation.rmse), wins[i] / max(1, wins.total()))
        for i, (s, p, gap) in enumerate(zip(candidates, predicted, gaps, strict=True))
    )
    margin = float(np.sort(gaps)[1]) if len(gaps) > 1 else None
    return Allocation(chosen, candidates[best], margin, tie, options.tie_break, curve, validation.rmse, degrees, splits)


def _predict(coefficients: Array, splits: Sequence[tuple[int, int]], layers: tuple[int, int], degree: int) -> Array:
    """The accuracy of each split in percent."""
    points = [np.array([[1 - attention / layers[0], 1 - activation / layers[1]]]) for attention, activation in splits]
    return np.array([_features(point, degree)[0] @ coefficients for point in points])


def _features(points: Array, degree: int) -> Array:
    """Monomials a^i t^j with i + j <= degree, (rows, monomials): the paper's appendix and listing, not a full grid."""
    a, t = points.T
    return np.stack([a ** (total - j) * t**j for total in range(degree + 1) for j in range(total + 1)], axis=1)


def _solve(rows: Array, degree: int) -> tuple[Array, int]:
    """Coefficients and rank of the ordinary least-squares fit in percent; minimum norm where the rows leave it open."""
    coefficients, _, rank, _ = np.linalg.lstsq(_features(rows[:, :2], degree), rows[:, 2], rcond=None)
    return np.asarray(coefficients, np.float64), int(rank)


def _folds(rows: Array, degree: int) -> Iterator[tuple[list[int], Array, int]]:
    """Every pair of rows left out, with the coefficients and the rank of the fit to all others."""
    for pair in combinations(range(len(rows)), 2):
        left_out = list(pair)
        yield left_out, *_solve(np.delete(rows, left_out, axis=0), degree)
