"""Samples equal the readings of the clock exactly; the clock advances by sums of powers of two, and only with work."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from vitcompress.bench import timing
from vitcompress.bench.timing import Protocol, Samples, Target, is_settled, measure
from vitcompress.exporters.calls import BoundCall

WAIT = 0.125  # seconds that a synchronisation takes


class Clock:
    """Advances only in `work`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds

    def target(self, seconds: Iterable[float]) -> Target:
        """Runs with these durations, each followed by a wait."""
        durations = iter(seconds)
        return "a", BoundCall(lambda: self.work(next(durations) + WAIT))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_a_run_lasts_until_it_is_synchronised_and_the_first_of_a_block_does_not_count(clock: Clock) -> None:
    warm_up = [8.0, 4.0, 2.0]
    target = clock.target(itertools.chain(warm_up, itertools.cycle([16.0, 0.25, 0.5])))
    (samples,) = measure([target], Protocol("p", batch=4, warmup=3, runs=40))
    assert samples.blocks_ms == [[375.0, 625.0]] * 20
    assert samples.wall_ms == [1000.0] * 20
    assert samples.images_per_second == 8.0
    assert (samples.warmup_runs, samples.warmup_ms) == (3, 4125.0)
    assert samples.warmup_seconds == sum(warm_up) + 3 * WAIT


@pytest.mark.parametrize(("least", "seconds", "runs"), [(3, 0.0, 3), (3, 4.5, 4), (5, 4.5, 5), (0, 0.0, 0)])
def test_a_warm_up_ends_when_it_has_both_its_runs_and_its_seconds(
    clock: Clock, least: int, seconds: float, runs: int
) -> None:
    work = Protocol("p", warmup=least, warmup_seconds=seconds, runs=1)
    (samples,) = measure([clock.target(itertools.repeat(1.0))], work)
    assert samples.warmup_runs == runs and samples.warmup_seconds == 1.125 * runs
    assert samples.warmup_ms == (1125.0 if runs else math.inf)


def test_a_warm_up_that_is_to_settle_goes_on_until_it_has_or_patience_ends(clock: Clock) -> None:
    work = Protocol("p", warmup=1, runs=1, settle=True, patience_seconds=45.0)
    (steady,) = measure([clock.target(itertools.repeat(1.0))], work)
    assert (steady.warmup_runs, steady.settled) == (30, True)  # three windows of ten
    (slower,) = measure([clock.target(itertools.count(1.0))], work)
    assert (slower.warmup_runs, slower.settled) == (9, False)  # 1 + ... + 9 and nine waits are the first beyond 45


def test_the_requested_seconds_are_divided_among_the_rounds(clock: Clock) -> None:
    work = Protocol("p", warmup=1, runs=20, min_seconds=80.0)
    (samples,) = measure([clock.target(itertools.repeat(0.875))], work)
    assert [len(block) for block in samples.blocks_ms] == [4] * 20  # 80 s over 20 rounds of runs of a second
    assert sum(samples.wall_ms) == 80_000.0


def test_joules_are_those_of_the_blocks_with_their_untimed_runs(clock: Clock) -> None:
    started = itertools.count(1)
    used = [0.0]

    def step() -> None:
        used[0] += 3.0 if next(started) > 2 else 100.0  # the warm-up's do not count
        clock.work(0.5)

    (samples,) = measure([("a", BoundCall(step))], Protocol("p", batch=7, warmup=2, runs=40), joules=lambda: used[0])
    assert samples.joules == 3.0 * 60
    assert samples.images_per_joule == 7 / 3
    assert replace(samples, joules=None).images_per_joule is None
    assert replace(samples, wall_ms=[99.0] * 20).images_per_joule is None  # shorter than the counter's period


@pytest.mark.parametrize(
    ("runs", "settled"),
    [
        ([10.0] * 30, True),
        ([20.0] * 10 + [10.0] * 30, True),  # a fourth window does not count
        ([10.6] * 10 + [10.0] * 20, False),
        ([1.0] * 20 + [1.05] * 10, True),  # 5 % are allowed
    ],
)
def test_only_the_last_three_windows_decide_whether_it_settled(runs: list[float], settled: bool) -> None:
    assert is_settled(runs) is settled


@pytest.mark.parametrize(("runs", "variation"), [([5.0], None), ([1.0, 3.0], math.sqrt(2) / 2), ([4.0, 4.0], 0.0)])
def test_variation_is_the_samples_deviation_over_its_mean(runs: list[float], variation: float | None) -> None:
    assert Samples("a", 1, "wall", blocks_ms=[runs]).variation == variation
