"""Streams, events and graphs of the simulated GPU: all work runs immediately, or is recorded in a graph."""

import time
from collections.abc import Callable
from typing import Any

import torch

GPU = torch.device("cuda", 0)


def wait(*args: Any) -> None:
    """All work is done already; waiting for a stream that is being recorded is an error."""
    if Graph.recording is not None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


class Stream:
    """All its work runs immediately."""

    cuda_stream = 0

    def __init__(self, *where: Any, **settings: Any) -> None:
        self.device = GPU

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: Any) -> None:
        """There is no previous stream to restore."""

    def wait_stream(self, other: "Stream") -> None:
        """Its work is done already."""

    def synchronize(self) -> None:
        wait()


class Event:
    def __init__(self, **settings: Any) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: "Event") -> float:
        return 1000.0 * (later.at - self.at)


class Graph:
    """A CUDA graph of the work that was queued while it was recorded."""

    recording: list[Callable[[], None]] | None = None

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def replay(self) -> None:
        for work in self.work:
            work()


class Recording:
    def __init__(self, graph: Graph, stream: Any = None) -> None:
        self.graph = graph

    def __enter__(self) -> None:
        Graph.recording = []

    def __exit__(self, *error: Any) -> None:
        self.graph.work, Graph.recording = Graph.recording or [], None


def queue(work: Callable[[], None]) -> None:
    """Run `work`, or record it if a graph is being recorded."""
    work() if Graph.recording is None else Graph.recording.append(work)
