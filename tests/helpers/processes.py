"""Processes that work together, forked from one that has imported everything; they meet as torchrun's do."""

import os
import signal
import socket
import traceback
from collections.abc import Callable
from pathlib import Path


def together(work: Callable[[int], None], count: int = 2) -> list[int]:
    """The exit codes, or minus the signals, of `count` processes that run `work(rank)`.

    When one has failed or died, what is left is killed. A single process has no variables of a world.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children: dict[int, int] = {}
    for rank in range(count):
        child = os.fork()
        if child == 0:
            if count > 1:
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            try:
                work(rank)
            except BaseException:  # noqa: BLE001 - it would go on with the program of its parent
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children[child] = rank
    codes = [0] * count
    while children:
        child, status = os.wait()
        codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
    return codes


def in_both_worlds(work: Callable[[Path], None], folder: Path) -> None:
    """Run `work(folder / "1")` in one process, and `work(folder / "2")` in two."""
    for count in (1, 2):
        place = folder / str(count)
        place.mkdir()
        assert together(lambda rank, place=place: work(place), count) == [0] * count
