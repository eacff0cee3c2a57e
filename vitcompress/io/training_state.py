"""Resume states, from which an interrupted run continues."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vitcompress.io.files import convert_write_errors, read_json, write_json
from vitcompress.io.tensors import load_tensors, save_tensors

# Number of the save, then the epoch. Every save has a folder of its own: the previous one is deleted only afterwards.
_STATE = re.compile(r"state-(\d{6})-epoch-(\d{6})")


@dataclass(frozen=True)
class State:
    """Progress of one part of the work: finished `epoch`, tensors by name, everything else as JSON data."""

    epoch: int
    tensors: dict[str, Tensor]
    data: Any

    def part(self, name: str) -> dict[str, Any]:
        """The tensors and numbers whose names start with `name` and a dot, without it."""
        named = {**self.tensors, **self.data["numbers"]}
        return {key.removeprefix(f"{name}."): value for key, value in named.items() if key.startswith(f"{name}.")}


def save_state(folder: Path, epoch: int, tensors: Mapping[str, Tensor], data: Any) -> None:
    """Write a state to a new folder and delete older ones. A complete state exists at any time.

    Raises OutputError if the folder cannot be written or the disk is full; the previous state is kept.
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
    _delete_others(folder, final)


def load_state(folder: Path) -> State | None:
    """The latest state in `folder`, or None. Deletes older ones, which a killed process may have left."""
    if not (states := _states(folder)):
        return None
    _, epoch, path = max(states)
    _delete_others(folder, path)
    return State(epoch, load_tensors(path / "tensors.safetensors"), read_json(path / "data.json"))


def _delete_others(folder: Path, kept: Path) -> None:
    for old in (*folder.glob(".state-*.part"), *(path for _, _, path in _states(folder))):
        if old != kept:
            shutil.rmtree(old, ignore_errors=True)


def _states(folder: Path) -> list[tuple[int, int, Path]]:
    matches = [(_STATE.fullmatch(path.name), path) for path in folder.glob("state-*")]
    return [(int(match[1]), int(match[2]), path) for match, path in matches if match]
