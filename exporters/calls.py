"""Forward passes on bound images, as calls. It imports no models: the process that runs an engine starts with it."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vitcompress.errors import VitcompressError

Timed = Callable[[int], tuple[list[float], float]]  # number of runs -> milliseconds of each, and of all together


class BoundCall:
    """A forward pass as a call, which returns when the pass is complete.

    step: runs it. values: what must exist as long as the call, as tensors do, although `step` does not reference it.
    timed: runs it several times and times that itself, as `QueuedCall.timed`; None if it cannot.
    """

    timed: Timed | None = None

    def __init__(self, step: Callable[[], object], *values: object) -> None:
        self.step, self._values = step, values

    def __call__(self) -> None:
        self.step()

    def release(self) -> None:
        """Free everything that the call references; later calls raise a VitcompressError."""
        self.step, self._values = _raise_closed, ()


def _raise_closed() -> None:
    raise VitcompressError("the runner of this bound call is closed", hint="bind the images with an open runner")


class QueuedCall(BoundCall):
    """A call whose `step` queues one pass on the CUDA stream `stream` and does not wait for it."""

    def __init__(self, step: Callable[[], object], stream: Any, *values: object) -> None:
        super().__init__(step, *values)
        self.stream = stream

    def __call__(self) -> None:
        with torch.cuda.stream(self.stream):
            self.step()
            self.stream.synchronize()

    def timed(self, runs: int) -> tuple[list[float], float]:
        """Milliseconds of each of `runs` runs, by CUDA events, and of all together by the wall clock.

        The passes are queued without waiting between them. Events are recorded on their stream and its GPU.
        """
        event: Any = torch.cuda.Event
        marks = [event(enable_timing=True) for _ in range(runs + 1)]
        with torch.cuda.stream(self.stream):
            for mark in marks:
                mark.record()  # the first record creates the event, for which the GPU would wait
            self.stream.synchronize()
            start = time.perf_counter()
            marks[0].record()
            for mark in marks[1:]:
                self.step()
                mark.record()
            self.stream.synchronize()
            wall = 1000.0 * (time.perf_counter() - start)
        return [float(a.elapsed_time(b)) for a, b in pairwise(marks)], wall


def add_transfers(run: Callable[[], Tensor], images: Tensor, logits: Tensor) -> Callable[[], None]:
    """`run` between copies of `images` from, and of its logits to, memory of the host, on the same stream.

    logits: of a run, for their shape. No run waits for copies of page-locked memory.
    """
    on_cuda = images.device.type == "cuda"
    source, target = (torch.empty_like(one, device="cpu", pin_memory=on_cuda) for one in (images, logits))
    source.copy_(images)

    @torch.inference_mode()
    def step() -> None:
        images.copy_(source, non_blocking=True)
        target.copy_(run(), non_blocking=True)

    return step


def record_graph(run: Callable[[], Tensor], stream: Any) -> Callable[[], Tensor]:
    """`run` as a CUDA graph, recorded on `stream`. Each replay writes the tensor that `run` returned.

    The caller keeps the tensors that `run` reads.
    """
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        logits = run()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay
