"""Resume states, from which an interrupted run continues: one file of safetensors, with the plain data as metadata."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vitcompress.io.tensors import read_checkpoint, save_tensors

FILE = "state.safetensors"


@dataclass(frozen=True)
class State:
    """Progress of one part of the work: tensors by name, everything else as JSON data."""

    tensors: dict[str, Tensor]
    data: Any

    def part(self, name: str) -> dict[str, Any]:
        """The tensors and numbers whose names start with `name` and a dot, without it."""
        named = {**self.tensors, **self.data["numbers"]}
        return {key.removeprefix(f"{name}."): value for key, value in named.items() if key.startswith(f"{name}.")}


def save_state(folder: Path, tensors: Mapping[str, Tensor], data: Any) -> None:
    """Replace the state in `folder`. A complete one exists at any time.

    Raises OutputError if the folder cannot be written or the disk is full; the previous state is kept.
    """
    save_tensors(folder / FILE, tensors, {"data": json.dumps(data, allow_nan=False)})


def load_state(folder: Path) -> State | None:
    """The state in `folder`, or None. Deletes unfinished ones, which a killed process may have left."""
    for unfinished in folder.glob(f".{FILE}.*.part"):
        unfinished.unlink()
    if not (folder / FILE).is_file():
        return None
    tensors, _, content = read_checkpoint(folder / FILE, wrapped=False)
    return State(tensors, content["data"])
