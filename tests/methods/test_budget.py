"""Thresholds within scopes, aligned widths, and budgets that are met or rejected with the possible range."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from vitcompress.errors import PlanError
from vitcompress.methods import budget
from vitcompress.methods.budget import Counts, Group, Ranking, Target

HALF = {"ffn": 0.5, "residual": 0.5}
DENSE = 4 * 256 * 256


def random_group(name: str, size: int, scope: str, kind: budget.Kind = "ffn", *, seed: int = 0) -> Group:
    generator = torch.Generator().manual_seed(hash((len(name), size, seed)) % 2**31)
    return Group(name, kind, budget.normalize(torch.rand(size, generator=generator) ** 2), scope)


def groups() -> tuple[Group, ...]:
    """Four FFNs of one scope and a residual stream."""
    blocks = (random_group(f"b{number}", 256, "ffn", seed=number) for number in range(4))
    return (*blocks, random_group("residual", 256, "residual", "residual"))


def ranking(keep: Mapping[str, float] = HALF, units: Mapping[str, int] = {}) -> Ranking:
    return Ranking(groups(), keep, units)


def cost(counts: Counts) -> float:
    """Each FFN reads and writes the stream: the cost of its linear layers."""
    return float(counts["residual"] * sum(count for name, count in counts.items() if name != "residual"))


def target(amount: float) -> Target:
    return Target(amount, cost, "units")


def test_the_share_of_a_scope_is_exact_and_the_lowest_scores_are_removed() -> None:
    counts = ranking({"ffn": 0.37, "residual": 0.5}).counts()
    assert sum(counts[f"b{number}"] for number in range(4)) == int(4 * 256 * 0.37)
    assert counts["residual"] == 128
    ffns = groups()[:4]
    removed = max(group.scores.sort().values[group.size - counts[group.name] - 1] for group in ffns)
    kept = min(group.scores[list(group.best(counts[group.name]))].min() for group in ffns)
    assert removed < kept
    assert len({counts[f"b{number}"] for number in range(4)}) > 1


def test_scopes_are_independent() -> None:
    *ffns, stream = groups()
    louder = (*ffns, Group("residual", "residual", stream.scores * 1000, "residual"))
    keep = {"ffn": 0.3, "residual": 0.6}
    assert ranking(keep).counts() == Ranking(louder, keep).counts()


def test_equal_scores_meet_the_budget_and_no_group_is_empty() -> None:
    pair = (Group("a", "ffn", torch.ones(10), "s"), Group("b", "ffn", torch.ones(10) * 0.1, "s"))
    assert Ranking(pair, {"s": 0.5}).counts() == {"a": 10, "b": 1}
    assert Ranking(pair, {"s": 0.35}).counts() == {"a": 7, "b": 1}
    assert pair[0].best(3) == (0, 1, 2)


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
    assert budget.align(count, size, unit, down=down) == expected


@pytest.mark.parametrize(
    ("strength", "scaled"),
    [(0.0, (1.0, 1.0, 1.0)), (0.5, (0.5, 0.25, 1.0)), (2 / 3, (0.25, 0.0625, 1.0)), (1.0, (0.0, 0.0, 1.0))],
)
def test_strength_scales_all_shares_in_proportion(strength: float, scaled: tuple[float, ...]) -> None:
    assert [budget.scale_share(share, strength) for share in (0.5, 0.25, 1.0)] == pytest.approx(scaled)


@pytest.mark.parametrize("share", [0.07, 0.3, 0.55, 0.93])
def test_a_budget_is_met_to_the_channel_without_alignment(share: float) -> None:
    amount = share * DENSE
    counts, costs = budget.solve(ranking(), target(amount))
    assert costs["reached"] == cost(counts) and (costs["least"], costs["most"]) == (4.0, DENSE)
    # One channel of the stream, the largest step there is, costs as many units as there are FFN channels.
    assert abs(cost(counts) - amount) <= sum(counts[f"b{number}"] for number in range(4)) + counts["residual"]


@pytest.mark.parametrize("share", [0.2, 0.55, 0.8])
def test_an_aligned_budget_is_met_by_the_finely_aligned_widths(share: float) -> None:
    """The stream moves in steps of a quarter; the FFNs compensate."""
    counts = budget.solve(ranking(HALF, {"residual": 64, "ffn": 8}), target(share * DENSE))[0]
    assert counts["residual"] % 64 == 0
    assert all(counts[f"b{number}"] % 8 == 0 for number in range(4))
    assert abs(cost(counts) / (share * DENSE) - 1) <= 0.02


@pytest.mark.parametrize("share", [0.2, 0.35, 0.5, 0.65, 0.8])
def test_the_stream_has_its_unaligned_width_where_the_rest_can_compensate(share: float) -> None:
    free = budget.solve(ranking(), target(share * DENSE))[0]["residual"]
    counts, _ = budget.solve(ranking(HALF, {"residual": 64, "ffn": 8}), target(share * DENSE))
    assert counts["residual"] == budget.align(free, 256, 64)


@pytest.mark.parametrize(("share", "nearest", "width"), [(0.325, 128, 192), (0.5, 192, 128)])
def test_the_next_stream_width_is_used_where_the_rest_cannot_compensate(share: float, nearest: int, width: int) -> None:
    free = budget.solve(ranking(), target(share * DENSE))[0]["residual"]
    counts, costs = budget.solve(ranking(HALF, {"residual": 64, "ffn": 64}), target(share * DENSE))
    assert budget.align(free, 256, 64) == nearest
    assert counts["residual"] == width and abs(costs["reached"] / (share * DENSE) - 1) <= 0.01


def test_the_nearest_stream_width_is_used_where_all_miss_the_target() -> None:
    wanted = target(0.4 * DENSE)
    _, solution = budget.solve(ranking(HALF, {"residual": 64, "ffn": 64}), wanted)
    costs = []
    for width in (128, 192, 256):
        alone = replace(wanted, cost=lambda counts, width=width: float(width * sum(counts.values())))
        costs.append(budget.solve(Ranking(groups()[:4], {"ffn": 0.5}, {"ffn": 64}), alone)[1]["reached"])
    assert solution["reached"] == min(costs, key=lambda cost: abs(cost - wanted.amount)) > min(costs)
    assert abs(solution["reached"] / wanted.amount - 1) > 0.01


def test_the_search_ends_once_the_target_is_met() -> None:
    """A cost may be an export and a measurement."""
    costs: list[float] = []
    amount = 0.3 * DENSE

    def measure(counts: Counts) -> float:
        costs.append(cost(counts))
        return costs[-1]

    counting = replace(target(amount), cost=measure, exact=0.05)
    _, solution = budget.solve(ranking({"ffn": 0.5, "residual": 1.0}), counting)
    assert len(costs) > 2 and abs(costs[-1] / amount - 1) <= 0.05 and solution["reached"] == costs[-1]


@pytest.mark.parametrize("amount", [1.0, DENSE + 1.0])
def test_a_target_out_of_reach_is_rejected_with_the_range(amount: float) -> None:
    with pytest.raises(PlanError, match=r"this structure allows 2048 units to 2\.621e\+05 units"):
        budget.solve(ranking(HALF, {"residual": 64, "ffn": 8}), target(amount))


def test_widths_that_may_not_shrink_bound_the_range() -> None:
    with pytest.raises(PlanError, match=r"allows 1024 units"):
        budget.solve(ranking({"ffn": 0.5, "residual": 1.0}), target(1000))


def test_an_alignment_larger_than_the_width_is_rejected() -> None:
    with pytest.raises(PlanError, match="multiples of 512, but b0 has only 256"):
        ranking(HALF, {"ffn": 512})
    whole = ranking({"ffn": 1.0, "residual": 0.5}, {"ffn": 512}).counts()  # what is not pruned keeps its width
    assert whole["b0"] == 256 and whole["residual"] == 128


def test_scores_that_are_not_finite_are_rejected() -> None:
    with pytest.raises(PlanError, match="cannot be ranked"):
        budget.normalize(torch.tensor([1.0, torch.nan]))
    assert budget.normalize(torch.zeros(3)).equal(torch.zeros(3, dtype=torch.float64))


def test_a_residual_width_whose_share_is_1_stays() -> None:
    """The widths next to it were tried, too, where the other widths missed the target."""
    whole = ranking({"ffn": 0.5, "residual": 1.0}, {"ffn": 128, "residual": 8})
    assert budget.solve(whole, target(0.82 * DENSE))[0]["residual"] == 256
