"""Thresholds within scopes, aligned widths, and budgets that are met or refused with what is possible."""

from dataclasses import replace

import pytest
import torch

from vitcompress.errors import PlanError
from vitcompress.methods import budget
from vitcompress.methods.budget import Counts, Group, Target, Units


def drawn(name: str, size: int, scope: str, kind: budget.Kind = "ffn", *, seed: int = 0) -> Group:
    generator = torch.Generator().manual_seed(hash((len(name), size, seed)) % 2**31)
    return Group(name, kind, budget.normalised(torch.rand(size, generator=generator) ** 2), scope)


def world() -> list[Group]:
    """Four FFNs that compete, one residual stream on its own."""
    blocks = [drawn(f"b{number}", 256, "ffn", seed=number) for number in range(4)]
    return [*blocks, drawn("residual", 256, "residual", "residual")]


def spent(counts: Counts) -> float:
    """Each FFN as wide as the stream: the cost of two linear layers."""
    return float(counts["residual"] * sum(count for name, count in counts.items() if name != "residual"))


def target(amount: float) -> Target:
    return Target(amount, spent, "{:.0f} units")


def test_the_share_of_a_scope_is_exact_and_what_goes_is_the_lowest_of_all() -> None:
    groups = world()
    counts = budget.thresholded(groups, {"ffn": 0.37, "residual": 0.5})
    assert sum(counts[f"b{number}"] for number in range(4)) == int(4 * 256 * 0.37)
    assert counts["residual"] == 128
    gone = max(group.scores.sort().values[group.size - counts[group.name] - 1] for group in groups[:4])
    left = min(group.scores[list(group.best(counts[group.name]))].min() for group in groups[:4])
    assert gone < left
    assert len({counts[f"b{number}"] for number in range(4)}) > 1


def test_scopes_do_not_see_each_other() -> None:
    groups = world()
    louder = [*groups[:4], Group("residual", "residual", groups[4].scores * 1000, "residual")]
    keep = {"ffn": 0.3, "residual": 0.6}
    assert budget.thresholded(groups, keep) == budget.thresholded(louder, keep)


def test_equal_scores_do_not_break_the_budget_and_no_group_goes_empty() -> None:
    groups = [Group("a", "ffn", torch.ones(10), "s"), Group("b", "ffn", torch.ones(10) * 0.1, "s")]
    assert budget.thresholded(groups, {"s": 0.5}) == {"a": 10, "b": 1}
    assert budget.thresholded(groups, {"s": 0.35}) == {"a": 7, "b": 1}
    assert groups[0].best(3) == (0, 1, 2)


@pytest.mark.parametrize(
    ("count", "size", "unit", "down", "expected"),
    [
        (46, 64, 8, True, 40),
        (46, 64, 8, False, 48),
        (1, 64, 16, False, 16),
        (64, 64, 48, False, 64),
        (60, 64, 48, False, 48),
        (63, 64, 16, False, 64),
        (7, 100, 1, True, 7),
        (99, 100, 8, False, 96),
    ],
)
def test_alignment(count: int, size: int, unit: int, down: bool, expected: int) -> None:
    assert budget.aligned(count, size, unit, down=down) == expected


def test_strength_moves_all_shares_in_proportion() -> None:
    keep = {"a": 0.5, "b": 0.25, "c": 1.0}
    assert budget.shares(keep, 0.0) == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert budget.shares(keep, 0.5) == keep
    assert budget.shares(keep, 2 / 3) == pytest.approx({"a": 0.25, "b": 0.0625, "c": 1.0})
    assert budget.shares(keep, 1.0) == {"a": 0.0, "b": 0.0, "c": 1.0}


@pytest.mark.parametrize("share", [0.07, 0.3, 0.55, 0.93])
def test_a_budget_is_met_to_the_channel_without_alignment(share: float) -> None:
    groups = world()
    wanted = share * 4 * 256 * 256
    met = budget.solved(groups, {"ffn": 0.5, "residual": 0.5}, Units(), target(wanted))
    counts = met.counts
    assert met.cost == spent(counts) and (met.least, met.most) == (4.0, 4 * 256 * 256)
    # One channel of the stream, the largest step there is, costs as many units as there are FFN channels.
    assert abs(spent(counts) - wanted) <= sum(counts[f"b{number}"] for number in range(4)) + counts["residual"]


@pytest.mark.parametrize("share", [0.2, 0.55, 0.8])
def test_an_aligned_budget_is_met_by_what_can_be_aligned_finely(share: float) -> None:
    """The stream moves in steps of a quarter; the FFNs make up for it."""
    units, wanted = Units(residual=64, ffn=8), share * 4 * 256 * 256
    counts = budget.solved(world(), {"ffn": 0.5, "residual": 0.5}, units, target(wanted)).counts
    assert counts["residual"] % 64 == 0
    assert all(counts[f"b{number}"] % 8 == 0 for number in range(4))
    assert abs(spent(counts) / wanted - 1) <= 0.02


@pytest.mark.parametrize("share", [0.2, 0.35, 0.5, 0.65, 0.8])
def test_the_stream_is_as_wide_as_the_target_asks_for_where_the_rest_can_make_up_for_it(share: float) -> None:
    keep, wanted = {"ffn": 0.5, "residual": 0.5}, target(share * 4 * 256 * 256)
    free = budget.solved(world(), keep, Units(), wanted).counts["residual"]
    met = budget.solved(world(), keep, Units(residual=64, ffn=8), wanted)
    assert met.counts["residual"] == budget.aligned(free, 256, 64)


@pytest.mark.parametrize(("share", "nearest", "width"), [(0.325, 128, 192), (0.5, 192, 128)])
def test_a_stream_one_step_wider_or_narrower_is_taken_where_the_rest_cannot(
    share: float, nearest: int, width: int
) -> None:
    keep, wanted = {"ffn": 0.5, "residual": 0.5}, target(share * 4 * 256 * 256)
    free = budget.solved(world(), keep, Units(), wanted).counts["residual"]
    met = budget.solved(world(), keep, Units(residual=64, ffn=64), wanted)
    assert budget.aligned(free, 256, 64) == nearest
    assert met.counts["residual"] == width and abs(met.cost / wanted.amount - 1) <= 0.01


def test_of_streams_that_all_miss_the_target_the_nearest_is_taken() -> None:
    wanted = target(0.4 * 4 * 256 * 256)
    met = budget.solved(world(), {"ffn": 0.5, "residual": 0.5}, Units(residual=64, ffn=64), wanted)
    costs = []
    for width in (128, 192, 256):
        alone = replace(wanted, cost=lambda counts, width=width: float(width * sum(counts.values())))
        costs.append(budget.solved(world()[:4], {"ffn": 0.5}, Units(ffn=64), alone).cost)
    assert met.cost == min(costs, key=lambda cost: abs(cost - wanted.amount)) > min(costs)
    assert abs(met.cost / wanted.amount - 1) > 0.01


def test_nothing_is_asked_for_once_the_target_is_met() -> None:
    """A cost may be an export and a measurement."""
    asked: list[float] = []
    wanted = 0.3 * 4 * 256 * 256

    def measured(counts: Counts) -> float:
        asked.append(spent(counts))
        return asked[-1]

    counting = replace(target(wanted), cost=measured, exact=0.05)
    met = budget.solved(world(), {"ffn": 0.5, "residual": 1.0}, Units(), counting)
    assert len(asked) > 2 and abs(asked[-1] / wanted - 1) <= 0.05 and met.cost == asked[-1]


@pytest.mark.parametrize("amount", [1.0, 4 * 256 * 256 + 1.0])
def test_what_is_out_of_reach_is_refused_with_the_range(amount: float) -> None:
    with pytest.raises(PlanError, match="this structure allows 2048 units to 262144 units"):
        budget.solved(world(), {"ffn": 0.5, "residual": 0.5}, Units(residual=64, ffn=8), target(amount))


def test_what_may_not_shrink_bounds_the_range() -> None:
    with pytest.raises(PlanError, match=r"allows 1024 units"):
        budget.solved(world(), {"ffn": 0.5, "residual": 1.0}, Units(), target(1000))


def test_an_alignment_larger_than_the_width_is_refused() -> None:
    with pytest.raises(PlanError, match="multiples of 512, but b0 has only 256"):
        budget.check_units(world(), Units(ffn=512))


@pytest.mark.parametrize("scores", [torch.tensor([1.0, torch.nan]), torch.zeros(3)])
def test_scores_that_rank_nothing_are_refused(scores: torch.Tensor) -> None:
    with pytest.raises(PlanError, match="cannot be ranked"):
        budget.normalised(scores)
