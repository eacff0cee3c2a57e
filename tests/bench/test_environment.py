"""Warnings about measurements: each appears above its limit, and not below."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from vitcompress.bench import environment, machine
from vitcompress.bench.timing import Samples


def samples(runs: Sequence[float], *, settled: bool | None = None) -> Samples:
    return Samples("a", 4, "wall", warmup_seconds=30.0, settled=settled, blocks_ms=[list(runs)])


def warnings(one: Samples, device: str = "cpu") -> list[str]:
    return list(environment.sample_warnings([one], [{"device": device}]))


def spread(variation: float) -> Samples:
    """Ninety runs with this variation and no drift: three values that alternate."""
    step = variation * math.sqrt(89 / 60)  # of the squares of deviations 60 are step^2; divided by n - 1
    return samples([1.0, 1.0 + step, 1.0 - step] * 30)


def test_steady_runs_cause_no_warning() -> None:
    assert warnings(samples([5.0] * 9)) == warnings(samples([5.0] * 9, settled=True)) == []


@pytest.mark.parametrize(("end", "words"), [(1.04, []), (0.96, []), (1.0625, ["+6.2"]), (0.9375, ["-6.2"])])
def test_a_drift_above_five_percent_is_reported_in_both_directions(end: float, words: list[str]) -> None:
    assert warnings(samples([1.0] * 6 + [end] * 3)) == [
        f"a, batch 4: times drifted by {word} % from the first to the last third" for word in words
    ]


@pytest.mark.parametrize(("device", "limit"), [("cpu", 0.10), ("cuda", 0.025), ("cuda:1", 0.025), ("mps", 0.10)])
def test_runs_are_noisy_beyond_the_limit_of_their_device(device: str, limit: float) -> None:
    below, above = spread(0.98 * limit), spread(1.02 * limit)
    assert below.variation == pytest.approx(0.98 * limit) and below.drift == 0
    assert warnings(below, device) == []
    words = f"noisy, the runs vary by {102 * limit:.1f} % (standard deviation over mean)"
    assert warnings(above, device) == [f"a, batch 4: {words}"]


def test_a_warm_up_that_did_not_settle_is_reported_with_its_artifact() -> None:
    both = [samples([5.0], settled=False), Samples("b", 4, "wall", settled=True, blocks_ms=[[1.0]])]
    rows = [{"device": "cpu"}] * 2
    assert list(environment.sample_warnings(both, rows)) == ["a, batch 4: times had not settled after 30 s"]


QUIET = {
    "other_processes_cores": 0.25,
    "held_back_by_quota": None,
    "gpu": {"foreign_processes": [], "throttled_by": []},
}


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        ({}, None),
        ({"gpu": None}, None),
        ({"other_processes_cores": None, "held_back_by_quota": 0}, None),
        ({"other_processes_cores": 0.375}, "other processes used 0.4 of 6 cores during the measurement"),
        (
            {"held_back_by_quota": 1},
            "the container was paused 1 time because its CPU quota was used up",
        ),
        ({"gpu": {"foreign_processes": [7, 9], "throttled_by": None}}, "other processes used the GPU: 7, 9"),
        (
            {"gpu": {"foreign_processes": None, "throttled_by": ["power", "heat"]}},
            "the GPU was throttled by: power, heat",
        ),
    ],
)
def test_each_disturbance_marks_the_run(
    conditions: dict[str, Any], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 6)
    assert list(environment.disturbances({**QUIET, **conditions})) == ([] if words is None else [words])


@pytest.mark.parametrize(
    ("quota", "threads", "words"),
    [
        (None, 6, None),
        (None, 7, "7 threads on 6 cores; use --threads 6"),
        (8.0, 7, "7 threads on 6 cores; use --threads 6"),
        (2.5, 2, None),
        (2.5, 3, "3 threads on 2.5 cores of CPU time that this container may use; use --threads 2"),
        (0.5, 1, "1 threads on 0.5 cores of CPU time that this container may use; use --threads 1"),
        (None, None, None),
    ],
)
def test_more_threads_than_usable_cores_are_reported(
    quota: float | None, threads: int | None, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 6)
    monkeypatch.setattr(machine, "quota_cores", lambda: quota)
    rows = [{"artifact": "a", "device": "cpu", "threads": threads}, {"artifact": "b", "device": "cuda", "threads": 99}]
    assert list(environment.thread_warnings(rows)) == ([] if words is None else [f"a: {words}"])


def test_equal_and_unknown_properties_make_no_ratio_unfair() -> None:
    alike = {"input_size": [3, 8, 8], "classes": 5, "device": "cpu", "threads": 2}
    rows = [{"artifact": name, **alike} for name in "ab"]
    assert list(environment.comparison_warnings(rows)) == []
    assert list(environment.comparison_warnings([rows[0], {**rows[1], "classes": None}])) == []
    on_gpu = {**rows[1], "artifact": "b", "device": "cuda", "threads": 1}
    assert list(environment.comparison_warnings([*rows, on_gpu])) == [
        "the ratios compare different devices (cpu: a, b; cuda: b)"
    ]
    on_bytes = [{**row, "input_type": kind} for row, kind in zip(rows, ("float32", "uint8"), strict=True)]
    assert list(environment.comparison_warnings([*on_bytes, rows[0]])) == [
        "the ratios compare different input types (float32: a; uint8: b)"
    ]
