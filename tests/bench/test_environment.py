"""What a reader is told before believing a figure: each sentence where its limit is passed, and not below it."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from vitcompress.bench import environment, machine
from vitcompress.bench.timing import Samples


def samples(runs: Sequence[float], *, settled: bool | None = None) -> Samples:
    return Samples("a", 4, "wall", warmup_seconds=30.0, settled=settled, blocks_ms=[list(runs)])


def told(one: Samples, device: str = "cpu") -> list[str]:
    return list(environment.warnings([one], [{"device": device}]))


def spread(variation: float) -> Samples:
    """Ninety runs that vary by as much, and do not drift: a third of them at each of three values, in turns."""
    step = variation * math.sqrt(89 / 60)  # of the squares of deviations 60 are step^2; divided by n - 1
    return samples([1.0, 1.0 + step, 1.0 - step] * 30)


def test_steady_runs_are_not_warned_of() -> None:
    assert told(samples([5.0] * 9)) == told(samples([5.0] * 9, settled=True)) == []


@pytest.mark.parametrize(("end", "words"), [(1.04, []), (0.96, []), (1.0625, ["+6.2"]), (0.9375, ["-6.2"])])
def test_a_drift_of_more_than_five_percent_is_said_in_both_directions(end: float, words: list[str]) -> None:
    assert told(samples([1.0] * 6 + [end] * 3)) == [
        f"a, batch 4: times drifted by {word} % from the first to the last third" for word in words
    ]


@pytest.mark.parametrize(("device", "limit"), [("cpu", 0.10), ("cuda", 0.025), ("cuda:1", 0.025), ("mps", 0.10)])
def test_runs_are_noisy_beyond_the_limit_of_their_device(device: str, limit: float) -> None:
    below, above = spread(0.98 * limit), spread(1.02 * limit)
    assert below.variation == pytest.approx(0.98 * limit) and not below.drifted
    assert told(below, device) == []
    words = f"noisy, the runs vary by {102 * limit:.1f} % (standard deviation over mean)"
    assert told(above, device) == [f"a, batch 4: {words}"]


def test_a_warm_up_that_did_not_settle_is_said_of_the_artifact_that_it_is_about() -> None:
    both = [samples([5.0], settled=False), Samples("b", 4, "wall", settled=True, blocks_ms=[[1.0]])]
    rows = [{"device": "cpu"}] * 2
    assert list(environment.warnings(both, rows)) == ["a, batch 4: times had not settled after 30 s"]


QUIET = {"other_processes_cores": 0.25, "gpu": {"foreign_processes": [], "throttled_by": []}}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({}, None),
        ({"gpu": None}, None),
        ({"other_processes_cores": None, "held_back_by_quota": 0}, None),
        ({"other_processes_cores": 0.375}, "other processes kept 0.4 of 6 cores busy meanwhile"),
        (
            {"held_back_by_quota": 1},
            "the container was stopped 1 times because its share of the processor was used up",
        ),
        ({"gpu": {"foreign_processes": [7, 9]}}, "other processes used the GPU: 7, 9"),
        ({"gpu": {"throttled_by": ["power", "heat"]}}, "the GPU was slowed down by: power, heat"),
    ],
)
def test_each_disturbance_marks_the_run(
    found: dict[str, Any], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 6)
    assert list(environment.disturbances({**QUIET, **found})) == ([] if words is None else [words])


@pytest.mark.parametrize(
    ("quota", "threads", "words"),
    [
        (None, 6, None),
        (None, 7, "7 threads on 6 cores; give --threads 6"),
        (8.0, 7, "7 threads on 6 cores; give --threads 6"),
        (2.5, 2, None),
        (2.5, 3, "3 threads on 2.5 cores' worth of time that this container may use; give --threads 2"),
        (0.5, 1, "1 threads on 0.5 cores' worth of time that this container may use; give --threads 1"),
        (None, None, None),
    ],
)
def test_more_threads_than_cores_or_than_the_container_has_time_for_are_said(
    quota: float | None, threads: int | None, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 6)
    monkeypatch.setattr(machine, "quota_cores", lambda: quota)
    rows = [{"artifact": "a", "device": "cpu", "threads": threads}, {"artifact": "b", "device": "cuda", "threads": 99}]
    assert list(environment.crowded(rows)) == ([] if words is None else [f"a: {words}"])


def test_what_is_alike_or_not_known_of_artifacts_makes_no_ratio_unfair() -> None:
    alike = {"input_size": [3, 8, 8], "classes": 5, "device": "cpu", "threads": 2}
    rows = [{"artifact": name, **alike} for name in "ab"]
    assert list(environment.unlike(rows)) == []
    assert list(environment.unlike([rows[0], {**rows[1], "classes": None}])) == []
    on_gpu = {**rows[1], "artifact": "b", "device": "cuda", "threads": 1}
    assert list(environment.unlike([*rows, on_gpu])) == ["the ratios compare different devices (cpu: a, b; cuda: b)"]
