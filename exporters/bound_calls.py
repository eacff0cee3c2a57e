"""Bound calls: one forward pass each, which hold what they need for as long as their runner is open."""

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakSet

from vitcompress.errors import VitcompressError


class Bound:
    """A pass as a call. step: makes it, and holds all that it needs."""

    def __init__(self, step: Callable[[], object]) -> None:
        self.step = step

    def __call__(self) -> None:
        self.step()

    def release(self) -> None:
        """Drop everything that it holds; a later call raises a VitcompressError."""
        self.step = _closed


def _closed() -> None:
    raise VitcompressError("the runner that this call was bound by is closed", hint="bind again, with an open one")


Kind = TypeVar("Kind", bound=Bound)


class Bindings:
    """The bound calls of one runner that are still referenced somewhere."""

    def __init__(self) -> None:
        self._known: WeakSet[Bound] = WeakSet()

    def add(self, call: Kind) -> Kind:
        self._known.add(call)
        return call

    def release(self) -> None:
        for call in list(self._known):
            call.release()
