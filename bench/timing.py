"""Samples: how long each run of each target took, taken in turns, none thrown away.

Targets alternate in short blocks (A B A B ...), so that a machine that becomes slower slows all of them. Latency is the
distribution of single runs; throughput is images over the wall-clock time of the blocks: neither is computed from the
other.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from vitcompress.errors import InputError, did_you_mean
from vitcompress.io.progress import Progress

ROUNDS = 20  # blocks per target: what the interval of a ratio is made of
WINDOW = 10  # runs in one look at whether the warm-up has settled
SETTLED = 0.05  # medians of three windows in a row this close together
DRIFT = 0.05  # last third against first third: more than this is said
TAIL = 10  # samples that must lie above a percentile before it is printed
MISSED = 0.05  # of the intervals, at most
COUNTER_SECONDS = 0.1  # how often energy counters are renewed, at the slowest


@dataclass(frozen=True)
class Protocol:
    """How long is warmed up and measured, per target.

    Warm-up ends after `warmup` runs and `warmup_seconds`, and with `settle` also not before the times have settled (or
    `patience_seconds` have passed, which is recorded). Measuring ends after `runs` runs and `min_seconds`.
    """

    name: str
    batch: int = 256
    warmup: int = 10
    runs: int = 100
    warmup_seconds: float = 0.0
    min_seconds: float = 0.0
    settle: bool = False
    patience_seconds: float = 30.0

    @property
    def id(self) -> str:
        return f"{self.name}-{self.warmup}/{self.runs}/{self.batch}"


PROTOCOLS = {
    # 10 warm-up and 100 timed runs at batch 256: the published protocol (HetDPT), synchronised.
    "paper": Protocol("paper"),
    "robust": Protocol("robust", warmup_seconds=2.0, min_seconds=10.0, settle=True),
}


def protocol(name: str, **changes: int | None) -> Protocol:
    """A protocol by name with other `batch`, `warmup` or `runs`. Raises InputError for what cannot be measured."""
    if name not in PROTOCOLS:
        raise InputError(
            f"there is no protocol {name!r}{did_you_mean(name, PROTOCOLS)}", hint=f"use one of {', '.join(PROTOCOLS)}"
        )
    given = {key: value for key, value in changes.items() if value is not None}
    least = {"batch": 1, "warmup": 0, "runs": 1}
    for key, value in given.items():
        if value < least[key]:
            raise InputError(f"{key} must be {least[key]} or more, got {value}")
    return replace(PROTOCOLS[name], **given)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Target:
    """Something to time: `step` starts one run, `synchronize` waits for what was started.

    `timed` runs as often as it is told and times that itself, by CUDA events (work that is queued on a GPU, or done in
    another process): milliseconds of each run, and of the block.
    """

    name: str
    step: Callable[[], object]
    synchronize: Callable[[], None] = lambda: None
    timed: Callable[[int], tuple[list[float], float]] | None = None


@dataclass
class Samples:
    """All times of one target, in milliseconds: every run by block, and the wall-clock time of each block.

    joules: what all blocks used, each with its untimed run; None where no counter was read.
    """

    name: str
    batch: int
    clock: Literal["wall", "cuda events"]
    warmup_runs: int = 0
    warmup_seconds: float = 0.0
    warmup_ms: float = math.inf
    settled: bool | None = None
    blocks_ms: list[list[float]] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)
    joules: float | None = None

    @property
    def runs_ms(self) -> np.ndarray:
        """Every run, in order: (runs,)."""
        return np.concatenate([np.asarray(block) for block in self.blocks_ms])

    @property
    def pace_ms(self) -> float:
        """What a run takes on average, as far as it is known: from the blocks, before them from the warm-up."""
        return sum(self.wall_ms) / len(self.runs_ms) if self.blocks_ms else self.warmup_ms

    @property
    def images_per_second(self) -> float:
        return 1000.0 * self.batch * len(self.runs_ms) / sum(self.wall_ms)

    @property
    def images_per_joule(self) -> float | None:
        """None where the blocks are too short for a counter that is renewed ten times a second."""
        if not self.joules or np.median(self.wall_ms) < 1000 * COUNTER_SECONDS:
            return None
        return self.batch * (len(self.runs_ms) + len(self.blocks_ms)) / self.joules

    @property
    def variation(self) -> float | None:
        """Standard deviation of the runs over their mean (CoV); None for a single run."""
        return float(self.runs_ms.std(ddof=1) / self.runs_ms.mean()) if len(self.runs_ms) > 1 else None

    def latency_ms(self) -> dict[str, float | None]:
        """Mean, extremes, and the percentiles that ten samples or more lie above: p90 from 100 runs, p99 from 1000."""
        runs = self.runs_ms
        found: dict[str, float | None] = {"mean": float(runs.mean()), "min": float(runs.min())}
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            carried = name == "p50" or len(runs) * (1 - share) >= TAIL - 1e-9
            found[name] = float(np.quantile(runs, share)) if carried else None
        return {**found, "max": float(runs.max())}

    @property
    def drift(self) -> float | None:
        """Median of the last third of the runs over that of the first third, minus 1; None below nine runs."""
        runs, third = self.runs_ms, len(self.runs_ms) // 3
        return float(np.median(runs[-third:]) / np.median(runs[:third]) - 1) if third >= 3 else None

    @property
    def drifted(self) -> bool:
        return abs(self.drift or 0.0) > DRIFT


def measure(
    targets: Sequence[Target],
    protocol: Protocol,
    progress: Progress | None = None,
    joules: Callable[[], float] | None = None,
) -> list[Samples]:
    """Time all targets in turns; one Samples per target, with equally many blocks in each.

    Each block begins with one untimed run, as the target before left its own data in the caches. joules: reads a
    counter of the energy used so far.
    """
    progress = progress or Progress()
    found = [Samples(t.name, protocol.batch, "cuda events" if t.timed else "wall") for t in targets]
    for target, samples in zip(targets, found, strict=True):
        progress.update(f"warm-up {target.name}", 0, 1)
        _warm_up(target, samples, protocol)
        progress.update(f"warm-up {target.name}", 1, 1)
    while not _enough(found, protocol):
        for target, samples in zip(targets, found, strict=True):
            before = joules() if joules else 0.0
            times, wall = _block(target, _block_runs(samples, protocol))
            samples.blocks_ms.append(times)
            samples.wall_ms.append(wall)
            if joules:
                samples.joules = (samples.joules or 0.0) + joules() - before
        done = len(found[0].blocks_ms)
        total = done if _enough(found, protocol) else max(_planned(protocol), done + 1)
        progress.update("rounds", done, total, f"{np.median(found[0].runs_ms):.2f} ms")
    return found


def _planned(protocol: Protocol) -> int:
    """How many rounds it takes, where none of them is too short."""
    return ROUNDS if protocol.min_seconds else math.ceil(protocol.runs / math.ceil(protocol.runs / ROUNDS))


def _block_runs(samples: Samples, protocol: Protocol) -> int:
    """Runs in the next block: an equal share of what the protocol asks for, in runs and in seconds still to go."""
    runs = math.ceil(protocol.runs / ROUNDS)
    if protocol.min_seconds:
        seconds = protocol.min_seconds - sum(samples.wall_ms) / 1000
        share = 1000 * seconds / max(1, ROUNDS - len(samples.blocks_ms))
        return max(runs, math.ceil(share / samples.pace_ms))
    left = protocol.runs - sum(map(len, samples.blocks_ms))
    return min(runs, left) if left > 0 else runs


def _enough(found: Sequence[Samples], protocol: Protocol) -> bool:
    """What the protocol asks for; where it asks for seconds, on a machine that stalls few blocks could fill them."""
    rounds = min(ROUNDS, protocol.runs) if protocol.min_seconds else 1
    return len(found[0].blocks_ms) >= rounds and all(
        sum(map(len, s.blocks_ms)) >= protocol.runs and sum(s.wall_ms) >= 1000 * protocol.min_seconds for s in found
    )


def _warm_up(target: Target, samples: Samples, protocol: Protocol) -> None:
    start, runs = time.perf_counter(), list[float]()
    while True:
        seconds = time.perf_counter() - start
        settled = _settled(runs) if protocol.settle else None
        if len(runs) >= protocol.warmup and seconds >= protocol.warmup_seconds and settled is not False:
            break
        if protocol.settle and seconds >= protocol.patience_seconds:
            break
        began = time.perf_counter()
        target.step()
        target.synchronize()
        runs.append(time.perf_counter() - began)
    samples.warmup_runs, samples.warmup_seconds, samples.settled = len(runs), seconds, settled
    samples.warmup_ms = 1000 * float(np.median(runs[-WINDOW:])) if runs else math.inf


def _settled(runs: Sequence[float]) -> bool:
    """Whether the medians of the last three windows lie within 5 %."""
    if len(runs) < 3 * WINDOW:
        return False
    medians = [float(np.median(runs[len(runs) - (k + 1) * WINDOW : len(runs) - k * WINDOW])) for k in range(3)]
    return max(medians) <= (1 + SETTLED) * min(medians)


def _block(target: Target, runs: int) -> tuple[list[float], float]:
    """Times of `runs` runs and of the whole block, in milliseconds."""
    target.step()
    target.synchronize()
    if target.timed is not None:
        return target.timed(runs)
    return _block_by_wall(target, runs)


def _block_by_wall(target: Target, runs: int) -> tuple[list[float], float]:
    step, synchronize, clock = target.step, target.synchronize, time.perf_counter
    marks = [clock()]
    for _ in range(runs):
        step()
        synchronize()
        marks.append(clock())
    return [1000.0 * (b - a) for a, b in pairwise(marks)], 1000.0 * (marks[-1] - marks[0])


# ------------------------------------------------------------------------------------------------------------ comparing


@dataclass(frozen=True)
class Ratio:
    """How many times as fast the second target is as the first, with its 95 % interval.

    `verdict` speaks of the second target; it is `not distinguishable` when the interval holds 1.
    """

    a: str
    b: str
    median: float
    ci95: tuple[float, float]
    verdict: Literal["faster", "slower", "not distinguishable"]


def ratio(a: Samples, b: Samples) -> Ratio:
    """Time of `a` over time of `b`: the median over rounds, a round being a block of `a` and the block of `b` next to
    it, each with the median of its runs.

    The interval lies between two of the sorted rounds. The true median is above each round with probability 1/2, so as
    many as k rounds lie on one side of it with binomial probability, whatever the distribution (the sign test; Conover,
    Practical Nonparametric Statistics, 3rd ed., section 3.2): exact, hence 95.9 % with 20 rounds. Five rounds or fewer
    carry no interval: it is 0 to infinity.
    """
    times = np.array([[np.median(block) for block in s.blocks_ms] for s in (a, b)])  # (2, rounds)
    rounds = np.sort(times[0] / times[1])
    outside = _outside(len(rounds))
    low, high = (rounds[outside - 1], rounds[-outside]) if outside else (0.0, math.inf)
    verdict: Literal["faster", "slower", "not distinguishable"] = "not distinguishable"
    if low > 1:
        verdict = "faster"
    elif high < 1:
        verdict = "slower"
    return Ratio(a.name, b.name, float(np.median(rounds)), (float(low), float(high)), verdict)


def _outside(rounds: int) -> int:
    """The largest k for which the k-th smallest and the k-th largest of `rounds` miss the median in 5 % at most."""
    below, k = 0, 0
    while 2 * (below := below + math.comb(rounds, k)) <= MISSED * 2**rounds:
        k += 1
    return k
