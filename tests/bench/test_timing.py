"""Samples are complete, blocks alternate, and an interval has its coverage. No time is asserted."""

import itertools
import json
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vitcompress.bench.suite import BenchOptions
from vitcompress.bench.timing import PROTOCOLS, Protocol, Samples, is_settled, measure, ratio
from vitcompress.errors import InputError
from vitcompress.exporters.calls import BoundCall
from vitcompress.io.progress import Progress
from vitcompress.io.validation import options_of


def drawn(
    name: str, speed: float, rng: np.random.Generator, *, rounds: int = 20, drift: np.ndarray | None = None
) -> Samples:
    """Times of a target, in ms: 10/speed with 5 % noise per run, times a drift per round that all targets share."""
    shared = np.ones(rounds) if drift is None else drift
    blocks = [list(10 / speed * shared[i] * rng.lognormal(0, 0.05, 5)) for i in range(rounds)]
    return Samples(name, 8, "wall", blocks_ms=blocks, wall_ms=[sum(block) for block in blocks])


def test_targets_alternate_and_all_runs_are_kept() -> None:
    calls: list[str] = []
    targets = [(name, BoundCall(lambda name=name: calls.append(name))) for name in "ab"]
    results = measure(targets, Protocol("p", batch=4, warmup=3, runs=50))
    assert [len(samples.runs_ms) for samples in results] == [50, 50]
    assert [samples.warmup_runs for samples in results] == [3, 3]
    after = "".join(calls[6:])
    blocks = [len(samples.blocks_ms) for samples in results]
    assert blocks == [17, 17]  # 16 of three runs, one of two
    assert after == ("aaaa" + "bbbb") * 16 + "aaabbb"  # each block begins with one untimed run


@pytest.mark.parametrize("runs", [1, 7, 20, 100, 101])
def test_the_requested_number_of_runs(runs: int) -> None:
    updates = list[tuple[int, int]]()
    progress = Progress()
    progress.update = lambda label, done, total, text="": updates.append((done, total))  # type: ignore[method-assign]
    (samples,) = measure([("a", BoundCall(lambda: None))], Protocol("p", warmup=0, runs=runs), progress=progress)
    assert len(samples.runs_ms) == runs
    rounds = updates[2:]  # after those of the warm-up
    assert rounds == [(done + 1, len(rounds)) for done in range(len(rounds))]


def test_a_minimum_duration_is_kept() -> None:
    call = BoundCall(lambda: sum(range(1000)))
    (samples,) = measure([("a", call)], Protocol("p", warmup=5, runs=1, min_seconds=0.05))
    assert sum(samples.wall_ms) >= 50


def test_runs_that_become_slower_than_the_warm_up_promised_leave_room_for_an_interval() -> None:
    calls = itertools.count()
    slower = BoundCall(lambda: time.sleep(0.002 if next(calls) >= 20 else 0))
    results = measure([("a", slower), ("b", slower)], Protocol("p", warmup=10, runs=40, min_seconds=0.05))
    assert [len(samples.blocks_ms) for samples in results] == [20, 20]
    blocks = results[0].blocks_ms
    assert len(blocks[0]) > 2 == len(blocks[-1])  # an equal share of the remaining seconds, at least 2
    assert ratio(*results)["ci95"][1] is not None


@pytest.mark.parametrize(
    ("runs", "settled"),
    [([20.0] * 5 + [10.0] * 20 + [10.4] * 10, True), ([10.0] * 20 + [10.6] * 10, False), ([10.0] * 29, False)],
)
def test_a_settled_warm_up_is_recognized(runs: list[float], settled: bool) -> None:
    """The last three windows of ten runs, their medians within 5 %."""
    assert is_settled(runs) is settled


def test_patience_ends_a_warm_up_that_does_not_settle() -> None:
    impatient = Protocol("p", warmup=7, runs=1, settle=True, patience_seconds=0)
    (samples,) = measure([("a", BoundCall(lambda: None))], impatient)
    assert samples.settled is False and len(samples.runs_ms) == 1 and samples.warmup_runs == 7
    (samples,) = measure([("a", BoundCall(lambda: None))], replace(impatient, warmup_seconds=0.01))
    assert samples.warmup_seconds >= 0.01
    assert PROTOCOLS["paper"].id == "paper-10/100/256"


def test_throughput_is_images_over_wall_clock_and_latency_is_per_run() -> None:
    samples = Samples("a", 8, "wall", blocks_ms=[[1.0, 3.0], [2.0]], wall_ms=[5.0, 3.0])
    assert samples.images_per_second == 1000 * 8 * 3 / 8
    assert samples.latency_ms()["p50"] == 2.0
    assert samples.latency_ms()["max"] == 3.0


@pytest.mark.parametrize(("runs", "carried"), [(99, set()), (100, {"p90"}), (999, {"p90"}), (1000, {"p90", "p99"})])
def test_percentiles_only_where_the_sample_carries_them(runs: int, carried: set[str]) -> None:
    latency = Samples("a", 1, "wall", blocks_ms=[[1.0] * runs]).latency_ms()
    assert {key for key in ("p90", "p99") if latency[key] is not None} == carried


def test_drift_is_seen() -> None:
    steady = Samples("a", 1, "wall", blocks_ms=[[10.0] * 9])
    slower = Samples("a", 1, "wall", blocks_ms=[[10.0] * 6, [11.0] * 3])
    assert steady.drift == 0.0
    assert slower.drift == pytest.approx(0.1)
    assert Samples("a", 1, "wall", blocks_ms=[[1.0] * 8]).drift is None


def allowed(count: int, rate: float, risk: float = 1e-4) -> int:
    """The number that a binomial count exceeds with a probability of at most `risk`."""
    cumulated = np.cumsum([math.comb(count, k) * rate**k * (1 - rate) ** (count - k) for k in range(count + 1)])
    return int(np.searchsorted(cumulated, 1 - risk))


@pytest.mark.parametrize(("rounds", "missed"), [(6, 0.03125), (11, 0.01171875), (20, 0.041389)])
def test_the_interval_has_its_coverage(rounds: int, missed: float) -> None:
    """Sign test: 2 P(Bin(n, 1/2) < k) of 1000 intervals miss, up to chance."""
    rng = np.random.default_rng(0)
    ratios = [ratio(drawn("a", 1, rng, rounds=rounds), drawn("b", 1.1, rng, rounds=rounds)) for _ in range(1000)]
    count = sum(not one["ci95"][0] < 1.1 < one["ci95"][1] for one in ratios)
    assert 1000 - allowed(1000, 1 - missed) <= count <= allowed(1000, missed)


def test_equal_targets_are_rarely_distinguished_and_unequal_ones_always() -> None:
    rng = np.random.default_rng(0)
    alarms = sum(ratio(drawn("a", 1, rng), drawn("b", 1, rng))["verdict"] != "not distinguishable" for _ in range(200))
    assert alarms <= allowed(200, 0.041389)
    faster = [ratio(drawn("a", 1, rng), drawn("b", 1.2, rng)) for _ in range(20)]
    assert {r["verdict"] for r in faster} == {"faster"}
    assert ratio(drawn("a", 1.2, rng), drawn("b", 1, rng))["verdict"] == "slower"


def test_a_machine_that_becomes_slower_does_not_move_the_ratio() -> None:
    rng = np.random.default_rng(1)
    drift = np.linspace(1, 2, 20)
    result = ratio(drawn("a", 1, rng, drift=drift), drawn("b", 1.1, rng, drift=drift))
    assert result["ci95"][0] < 1.1 < result["ci95"][1]
    assert result["verdict"] == "faster"


@pytest.mark.parametrize("rounds", [1, 5])
def test_few_rounds_give_no_interval(rounds: int) -> None:
    rng = np.random.default_rng(2)
    result = ratio(drawn("a", 1, rng, rounds=rounds), drawn("b", 9, rng, rounds=rounds))
    assert (result["ci95"], result["verdict"]) == ([0.0, None], "not distinguishable")


def test_the_interval_consists_of_rounds_and_contains_the_median() -> None:
    rng = np.random.default_rng(3)
    a, b = drawn("a", 1, rng), drawn("b", 1, rng)
    result = ratio(a, b)
    paired = sorted(np.median(x) / np.median(y) for x, y in zip(a.blocks_ms, b.blocks_ms, strict=True))
    assert result["ci95"] == [paired[5], paired[14]] and result["median"] == (paired[9] + paired[10]) / 2
    json.dumps(result["ci95"])


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"batch": 0}, "1 or more"),
        ({"batch": (8, 0)}, "batch.1   got 0, expected 1 or more"),
        ({"batch": ()}, "a list of 1 or more"),
        ({"warmup": -1}, "0 or more"),
        ({"runs": 0}, "1 or more"),
        ({"protocol": "papr"}, "did you mean paper"),
    ],
)
def test_invalid_protocols_are_rejected(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        options_of(BenchOptions, wrong, "bench")
