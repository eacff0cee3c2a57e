"""Streams, events and graphs of the simulated GPU: all work is done at once, or recorded where a graph is."""

import time
from collections.abc import Callable
from typing import Any

import torch

GPU = torch.device("cuda", 0)


def wait(*args: Any) -> None:
    """All is done already; a stream that is being recorded cannot be waited for."""
    if Graph.recording is not None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


class Stream:
    """Everything on it is done at once."""

    cuda_stream = 0

    def __init__(self, *where: Any, **settings: Any) -> None:
        self.device = GPU

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: Any) -> None:
        """Nothing to go back to."""

    def wait_stream(self, other: "Stream") -> None:
        """It is done already."""

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
    """A CUDA graph of what was given to `work_of_a_graph` while it was recorded."""

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
    """Do it, or record it where a graph is being recorded."""
    work() if Graph.recording is None else Graph.recording.append(work)
