"""Samples are kept whole, turns are taken, and an interval says what it should. No time is asserted."""

import json
import math

import numpy as np
import pytest

from vitcompress.bench.timing import PROTOCOLS, Protocol, Samples, Target, measure, protocol, ratio
from vitcompress.errors import InputError


def drawn(
    name: str, speed: float, rng: np.random.Generator, *, rounds: int = 20, drift: np.ndarray | None = None
) -> Samples:
    """Times of a target, in ms: 10/speed with 5 % noise per run, times a drift per round that all targets share."""
    shared = np.ones(rounds) if drift is None else drift
    blocks = [list(10 / speed * shared[i] * rng.lognormal(0, 0.05, 5)) for i in range(rounds)]
    return Samples(name, 8, "wall", blocks_ms=blocks, wall_ms=[sum(block) for block in blocks])


def test_targets_take_turns_and_all_runs_are_kept() -> None:
    calls: list[str] = []
    targets = [Target(name, lambda name=name: calls.append(name)) for name in "ab"]
    found = measure(targets, Protocol("p", batch=4, warmup=3, runs=50))
    assert [len(samples.runs_ms) for samples in found] == [50, 50]
    assert [samples.warmup_runs for samples in found] == [3, 3]
    after = "".join(calls[6:])
    blocks = [len(samples.blocks_ms) for samples in found]
    assert blocks == [17, 17]  # 16 of three runs, one of two
    assert after == ("aaaa" + "bbbb") * 16 + "aaabbb"  # each block begins with one untimed run


@pytest.mark.parametrize("runs", [1, 7, 20, 100, 101])
def test_as_many_runs_as_asked_for(runs: int) -> None:
    (samples,) = measure([Target("a", lambda: None)], Protocol("p", warmup=0, runs=runs))
    assert len(samples.runs_ms) == runs


def test_a_minimum_duration_is_kept() -> None:
    (samples,) = measure([Target("a", lambda: sum(range(1000)))], Protocol("p", warmup=5, runs=1, min_seconds=0.05))
    assert sum(samples.wall_ms) >= 50


def test_synchronisation_follows_every_run_and_ends_the_warm_up() -> None:
    calls: list[str] = []
    measure([Target("a", lambda: calls.append("s"), lambda: calls.append("w"))], Protocol("p", warmup=2, runs=3))
    assert "".join(calls).replace("sw", "") == ""


def test_a_settled_warm_up_is_told_from_one_that_is_not() -> None:
    steady = Protocol("p", warmup=1, runs=1, settle=True, patience_seconds=5)
    (impatient,) = measure([Target("a", lambda: None)], Protocol("p", runs=1, settle=True, patience_seconds=0))
    assert impatient.settled is False
    assert steady.settle
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
    assert (steady.drift, steady.drifted) == (0.0, False)
    assert (slower.drift, slower.drifted) == (pytest.approx(0.1), True)
    assert Samples("a", 1, "wall", blocks_ms=[[1.0] * 8]).drift is None


def test_equal_targets_are_rarely_told_apart_and_unequal_ones_always() -> None:
    """200 repetitions: at a true error rate of 5 %, more than 24 false alarms have a probability below 0.1 %.

    The percentile bootstrap of medians is a little too narrow at 20 rounds, so twice the nominal rate is allowed.
    """
    rng = np.random.default_rng(0)
    alarms = sum(ratio(drawn("a", 1, rng), drawn("b", 1, rng)).verdict != "not distinguishable" for _ in range(200))
    assert alarms <= 32  # binomial(200, 0.10): P(more) < 0.2 %
    faster = [ratio(drawn("a", 1, rng), drawn("b", 1.2, rng)) for _ in range(20)]
    assert {r.verdict for r in faster} == {"faster"}
    assert ratio(drawn("a", 1.2, rng), drawn("b", 1, rng)).verdict == "slower"


def test_a_machine_that_becomes_slower_does_not_move_the_ratio() -> None:
    rng = np.random.default_rng(1)
    drift = np.linspace(1, 2, 20)
    found = ratio(drawn("a", 1, rng, drift=drift), drawn("b", 1.1, rng, drift=drift))
    assert found.ci95[0] < 1.1 < found.ci95[1]
    assert found.verdict == "faster"


def test_one_round_carries_no_interval() -> None:
    rng = np.random.default_rng(2)
    found = ratio(drawn("a", 1, rng, rounds=1), drawn("b", 9, rng, rounds=1))
    assert (found.ci95, found.verdict) == ((0.0, math.inf), "not distinguishable")


def test_the_interval_depends_on_the_seed_alone() -> None:
    a, b = drawn("a", 1, np.random.default_rng(3)), drawn("b", 1, np.random.default_rng(4))
    assert ratio(a, b, seed=5) == ratio(a, b, seed=5)
    json.dumps(ratio(a, b).ci95)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"warmup": -1}, {"runs": 0}])
def test_what_cannot_be_measured_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match="or more"):
        protocol("paper", **wrong)
    with pytest.raises(InputError, match="no protocol"):
        protocol("papr")
