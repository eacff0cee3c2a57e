"""Resume states: how far a part of the work has come, kept so that a killed run continues there."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vitcompress.io.files import convert_write_errors, read_json, write_json
from vitcompress.io.tensors import load_tensors, save_tensors

# Count of saves, then the epoch: a state of the same epoch saved again gets a folder of its own too, so that a whole
# one is there before the older one is touched.
_STATE = re.compile(r"state-(\d{6})-epoch-(\d{6})")


@dataclass(frozen=True)
class State:
    """What a part of the work had reached: finished `epoch`, tensors by name, and everything else as JSON data."""

    epoch: int
    tensors: dict[str, Tensor]
    data: Any


def save_state(folder: Path, epoch: int, tensors: Mapping[str, Tensor], data: Any) -> None:
    """Write a state as a new folder renamed into place, then drop older ones: killed anywhere, a whole state is left.

    Raises:
        OutputError: the folder cannot be written or the disk is full; the state saved before is still there.
    """
    number = max((number for number, _, _ in _states(folder)), default=0) + 1
    final = folder / f"state-{number:06d}-epoch-{epoch:06d}"
    beside = folder / f".{final.name}.part"
    shutil.rmtree(beside, ignore_errors=True)
    try:
        save_tensors(beside / "tensors.safetensors", tensors)
        write_json(beside / "data.json", data)
        with convert_write_errors(folder):
            beside.rename(final)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    for old in (*folder.glob(".state-*.part"), *folder.glob("state-*")):
        if old != final:
            shutil.rmtree(old, ignore_errors=True)


def load_state(folder: Path) -> State | None:
    """The state saved last in `folder`, None when there is none."""
    found = _states(folder)
    if not found:
        return None
    _, epoch, path = max(found)
    return State(epoch, load_tensors(path / "tensors.safetensors"), read_json(path / "data.json"))


def _states(folder: Path) -> list[tuple[int, int, Path]]:
    matches = [(_STATE.fullmatch(path.name), path) for path in folder.glob("state-*")]
    return [(int(match[1]), int(match[2]), path) for match, path in matches if match]
