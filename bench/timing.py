"""Interleaved timing: warm up, time single runs in alternating blocks, and compare two targets. No sample is dropped.

Targets alternate in short blocks (A B A B ...), so a machine that becomes slower slows all of them. Latency is the
distribution of single runs, throughput is images over the wall-clock time of the blocks.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np

from vitcompress.bench.report.records import LatencyRecord, RatioRecord, SpeedVerdict
from vitcompress.exporters.calls import BoundCall
from vitcompress.io.progress import SILENT, Progress

ROUNDS = 20  # blocks per target; the interval of a ratio is computed from them
WINDOW = 10  # runs per window of the warm-up
SETTLED = 0.05  # largest relative difference between the medians of the last three windows
TAIL = 10  # samples above a percentile that are needed to report it
MISSED = 0.05  # largest share of intervals that miss the true median
COUNTER_SECONDS = 0.1  # longest update period of an energy counter
Target = tuple[str, BoundCall]  # a name, and a run of what it names


@dataclass(frozen=True)
class Protocol:
    """Length of warm-up and measurement, per target.

    The warm-up takes `warmup` runs and `warmup_seconds` at least; with `settle` it continues until the times have
    settled or `patience_seconds` have passed. The measurement takes `runs` runs and `min_seconds` at least.
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
    # 10 warm-up and 100 timed runs at batch 256: the published protocol (HetDPT), synchronized.
    "paper": Protocol("paper"),
    "robust": Protocol("robust", warmup_seconds=2.0, min_seconds=10.0, settle=True),
}


@dataclass
class Samples:
    """All times of one target, in milliseconds: every run by block, and the wall-clock time of each block.

    joules: energy of all blocks including their untimed runs; None without a counter.
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
        """Every run in order, shape (runs,)."""
        return np.concatenate([np.asarray(block) for block in self.blocks_ms])

    @property
    def images_per_second(self) -> float:
        return 1000.0 * self.batch * len(self.runs_ms) / sum(self.wall_ms)

    @property
    def images_per_joule(self) -> float | None:
        """None without a counter, or if the blocks are shorter than its update period."""
        if not self.joules or np.median(self.wall_ms) < 1000 * COUNTER_SECONDS:
            return None
        return self.batch * (len(self.runs_ms) + len(self.blocks_ms)) / self.joules

    @property
    def variation(self) -> float | None:
        """Coefficient of variation: standard deviation of the runs over their mean; None for a single run."""
        return float(self.runs_ms.std(ddof=1) / self.runs_ms.mean()) if len(self.runs_ms) > 1 else None

    def latency_ms(self) -> LatencyRecord:
        """Mean, extremes and percentiles; a percentile needs ten samples above it: p90 100 runs, p99 1000 runs."""
        runs = self.runs_ms
        p90, p99 = (float(np.quantile(runs, q)) if len(runs) * (1 - q) >= TAIL - 1e-9 else None for q in (0.9, 0.99))
        mean, p50 = float(runs.mean()), float(np.quantile(runs, 0.5))
        return {"mean": mean, "min": float(runs.min()), "p50": p50, "p90": p90, "p99": p99, "max": float(runs.max())}

    @property
    def drift(self) -> float | None:
        """Median of the last third of the runs over that of the first third, minus 1; None for fewer than nine runs."""
        runs, third = self.runs_ms, len(self.runs_ms) // 3
        return float(np.median(runs[-third:]) / np.median(runs[:third]) - 1) if third >= 3 else None


def measure(
    targets: Sequence[Target],
    protocol: Protocol,
    progress: Progress = SILENT,
    joules: Callable[[], float] | None = None,
) -> list[Samples]:
    """Time all targets in alternating blocks; one Samples per target, all with the same number of blocks.

    Each block begins with one untimed run, because the previous target has left its own data in the caches. joules:
    reads an energy counter.
    """
    results = [Samples(name, protocol.batch, "cuda events" if call.timed else "wall") for name, call in targets]
    for (name, call), samples in zip(targets, results, strict=True):
        progress.update(f"warm-up {name}", 0, 1)
        _warm_up(call, samples, protocol)
        progress.update(f"warm-up {name}", 1, 1)
    while not _is_complete(results, protocol):
        for (_, call), samples in zip(targets, results, strict=True):
            before = joules() if joules else 0.0
            times, wall = _time_block(call, _block_runs(samples, protocol))
            samples.blocks_ms.append(times)
            samples.wall_ms.append(wall)
            if joules:
                samples.joules = (samples.joules or 0.0) + joules() - before
        done = len(results[0].blocks_ms)
        planned = ROUNDS if protocol.min_seconds else math.ceil(protocol.runs / math.ceil(protocol.runs / ROUNDS))
        total = done if _is_complete(results, protocol) else max(planned, done + 1)
        progress.update("rounds", done, total, f"{np.median(results[0].runs_ms):.2f} ms")
    return results


def _block_runs(samples: Samples, protocol: Protocol) -> int:
    """Number of runs in the next block: an equal share of the runs, or of the remaining seconds, of the protocol."""
    runs = math.ceil(protocol.runs / ROUNDS)
    if protocol.min_seconds:
        share = (1000 * protocol.min_seconds - sum(samples.wall_ms)) / max(1, ROUNDS - len(samples.blocks_ms))
        run_ms = sum(samples.wall_ms) / len(samples.runs_ms) if samples.blocks_ms else samples.warmup_ms
        return max(runs, math.ceil(share / run_ms))
    return min(runs, protocol.runs - sum(map(len, samples.blocks_ms)))


def _is_complete(results: Sequence[Samples], protocol: Protocol) -> bool:
    """Whether all targets have enough runs, seconds and rounds; a stalled machine could fill the seconds with few."""
    rounds = min(ROUNDS, protocol.runs) if protocol.min_seconds else 1
    return len(results[0].blocks_ms) >= rounds and all(
        sum(map(len, s.blocks_ms)) >= protocol.runs and sum(s.wall_ms) >= 1000 * protocol.min_seconds for s in results
    )


def _warm_up(call: BoundCall, samples: Samples, protocol: Protocol) -> None:
    start, runs = time.perf_counter(), list[float]()
    while True:
        seconds = time.perf_counter() - start
        settled = is_settled(runs) if protocol.settle else None
        ended = settled is not False or seconds >= protocol.patience_seconds
        if len(runs) >= protocol.warmup and seconds >= protocol.warmup_seconds and ended:
            break
        began = time.perf_counter()
        call()
        runs.append(time.perf_counter() - began)
    samples.warmup_runs, samples.warmup_seconds, samples.settled = len(runs), seconds, settled
    samples.warmup_ms = 1000 * float(np.median(runs[-WINDOW:])) if runs else math.inf


def is_settled(runs: Sequence[float]) -> bool:
    """Whether the largest median of the last three windows is at most 5 % above the smallest."""
    if len(runs) < 3 * WINDOW:
        return False
    medians = np.median(np.reshape(runs[-3 * WINDOW :], (3, WINDOW)), axis=1)
    return bool(medians.max() <= (1 + SETTLED) * medians.min())


def _time_block(call: BoundCall, runs: int) -> tuple[list[float], float]:
    """Milliseconds of each of `runs` runs, after an untimed one, and of all of them together."""
    call()
    if call.timed is not None:  # by CUDA events, for work that is queued on a GPU or done in another process
        return call.timed(runs)
    clock = time.perf_counter
    marks = [clock()]
    for _ in range(runs):
        call()
        marks.append(clock())
    return [1000.0 * (b - a) for a, b in pairwise(marks)], 1000.0 * (marks[-1] - marks[0])


def ratio(a: Samples, b: Samples) -> RatioRecord:
    """Speed of `b` over `a`, that is time of `a` over time of `b`: the median over rounds, with a 95 % interval.

    A round is a block of `a` and the following block of `b`; its ratio is that of the medians of their runs.
    """
    times = np.array([[np.median(block) for block in s.blocks_ms] for s in (a, b)])  # (2, rounds)
    median, low, high = median_interval(times[0] / times[1])
    verdict: SpeedVerdict = "faster" if low > 1 else "slower" if high and high < 1 else "not distinguishable"
    return {"a": a.name, "b": b.name, "median": median, "ci95": [low, high], "verdict": verdict, "batch": a.batch}


def median_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float, float | None]:
    """The median of one value per round, and the ends of its 95 % interval.

    The interval is that of the sign test (Conover, Practical Nonparametric Statistics, 3rd ed., section 3.2): from the
    k-th smallest to the k-th largest value. The number of values below the true median is binomial with
    probability 1/2 for any distribution, so the coverage is exact, 95.9 % with 20 rounds. Five rounds or fewer give no
    interval: from 0, without an upper end (None: JSON has no infinity).
    """
    ordered, n, k = np.sort(values), len(values), 0
    cases = 1  # of 2**n equally likely ones, those with at most k values below the median
    while 2 * cases <= MISSED * 2**n:  # the interval from the next value misses it in at most 5 %
        k += 1
        cases += math.comb(n, k)
    return float(np.median(ordered)), *((float(ordered[k - 1]), float(ordered[-k])) if k else (0.0, None))
