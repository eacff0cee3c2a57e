"""Calls that are queued on a CUDA stream, and how long each of them takes there."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from vitcompress.exporters.bound_calls import Bound


class Queued(Bound):
    """One pass as a call: `step` puts it on `stream` and does not wait for it. A `TimedCall` of runner.py.

    tensors: what it reads and what it writes, which must live as long as it does.
    """

    def __init__(self, step: Callable[[], object], stream: Any, tensors: tuple[torch.Tensor, ...] = ()) -> None:
        super().__init__(step)
        self.stream, self._tensors = stream, tensors

    def release(self) -> None:
        super().release()
        self._tensors = ()

    def __call__(self) -> None:
        with torch.cuda.stream(self.stream):
            self.step()

    def timed(self, runs: int) -> tuple[list[float], float]:
        """Milliseconds of each of `runs` passes, by CUDA events around it, and of all of them by the wall clock.

        The passes are queued without waiting between them, and waited for once, at the end. Events are recorded on the
        stream that the passes are on, and on its GPU, whichever is the current one.
        """
        event: Any = torch.cuda.Event
        marks = [event(enable_timing=True) for _ in range(runs + 1)]
        with torch.cuda.stream(self.stream):
            for mark in marks:
                mark.record()  # the first time an event is made, for which the GPU would wait
            self.stream.synchronize()
            began = time.perf_counter()
            marks[0].record()
            for mark in marks[1:]:
                self.step()
                mark.record()
            self.stream.synchronize()
            wall = 1000.0 * (time.perf_counter() - began)
        return [float(a.elapsed_time(b)) for a, b in pairwise(marks)], wall
