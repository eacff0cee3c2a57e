"""What a method is given to work with."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitcompress.checkpoint import read_json, write_json
from vitcompress.data import Splits
from vitcompress.distributed import Runtime
from vitcompress.families import Family
from vitcompress.models import InputConfig
from vitcompress.plan import Plan
from vitcompress.progress import Progress
from vitcompress.train import TrainOptions


@dataclass(frozen=True)
class Context:
    """One step's surroundings.

    plan: what was already done to the model that the method is given. folder: the step's own, for resume state.
    train: the recipe's fine-tuning options, the default source of batch size and augmentation.
    """

    arch: str
    arch_args: Mapping[str, Any]
    plan: Plan
    family: Family
    data: Splits
    input: InputConfig
    runtime: Runtime
    folder: Path
    seed: int
    progress: Progress
    train: TrainOptions

    def memo(self, name: str, compute: Callable[[], Any]) -> Any:
        """The JSON data of `compute()`, computed once and kept in the step's folder; every process gets the same."""
        path = self.folder / f"{name}.json"
        if self.runtime.broadcast(path.is_file()):
            return self.runtime.broadcast(read_json(path) if self.runtime.is_main else None)
        value = self.runtime.broadcast(json.loads(json.dumps(compute())))
        if self.runtime.is_main:
            write_json(path, value)
        self.runtime.barrier()
        return value
