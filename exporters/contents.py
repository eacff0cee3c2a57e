"""What an exported file holds: its tensors, read without running anything, one at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Stored:
    """One tensor in a file.

    size: bytes of its values. shared: whether an earlier tensor of the file is stored at the same place.
    read(): the values as bytes, in C order; raises ArtifactError if the file is damaged.
    index: whether its type is one that graphs index and select with (int32, int64, bool). Integers of other types may
        be quantised weights.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    shared: bool
    read: Callable[[], bytes]
    index: bool

    @property
    def own(self) -> int:
        """Bytes of the file that no earlier tensor uses."""
        return 0 if self.shared else self.size


@dataclass(frozen=True)
class Contents:
    """The tensors of a file.

    size: bytes of the file and of its data files.
    metadata: what the file states about its model, each value as JSON text; `precision` is that of the tensors.
    lists: names of node attributes with more numbers than any setting needs, in which weights could be hidden.
    """

    tensors: tuple[Stored, ...]
    size: int
    metadata: Mapping[str, str]
    lists: tuple[str, ...] = ()
