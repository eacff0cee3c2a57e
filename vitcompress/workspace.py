"""What a pruning step works with: its context, and the weights that it leaves for the next one."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress.errors import ArtifactError
from vitcompress.families import Family
from vitcompress.io.files import differing, file_sha256, read_json, write_json
from vitcompress.io.progress import Progress
from vitcompress.io.tensors import save_tensors
from vitcompress.models.create import InputConfig
from vitcompress.plan import Plan
from vitcompress.training.data import Splits
from vitcompress.training.distributed import Runtime
from vitcompress.training.loaders import Images
from vitcompress.training.loop import train
from vitcompress.training.options import TrainOptions, TrainResult
from vitcompress.training.trainer import TrainingContext, TrainingControls

LEFT_WEIGHTS, LEFT = "weights.safetensors", "left.json"


@dataclass(frozen=True)
class Clock:
    """Tells milliseconds of one call of a model on `onnxruntime` or `torch`.

    median: of a few calls, as there are dozens of candidates. undisturbed: of a longer measurement that leaves out
    other load on the machine, for decisions on which more depends than a candidate.
    """

    median: Callable[[nn.Module, str], float]
    undisturbed: Callable[[nn.Module, str], float]


def seal(folder: Path) -> None:
    """Record what a step has left in its `folder`, before its plan says that it is done."""
    left = folder / LEFT_WEIGHTS
    write_json(folder / LEFT, {"files": {left.name: file_sha256(left)} if left.is_file() else {}})


def check_sealed(folder: Path) -> None:
    """Raise ArtifactError when what a finished step left was changed or is gone: other weights would be used."""
    wrong = differing(folder / LEFT) if (folder / LEFT).is_file() else [f"{LEFT} is missing"]
    if wrong:
        raise ArtifactError(
            f"{folder} is not as its step left it: {wrong[0]}",
            hint="restore the file, or start over with --fresh",
        )


@dataclass(frozen=True)
class Context:
    """One step's surroundings.

    plan: what was already done to the model that the method is given. folder: the step's own, for resume state.
    train: the recipe's fine-tuning options, the default source of batch size and augmentation. teacher(): who teaches
    during recovery, None where nobody does. latency: the clock, None where nothing can be measured. measured_on(): what
    a latency belongs to, as plain data: hardware, versions, threads.
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
    teacher: Callable[[], nn.Module | None] = lambda: None
    latency: Clock | None = None
    measured_on: Callable[[], Mapping[str, Any]] = dict

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

    def run_training(
        self,
        module: nn.Module,
        images: Images,
        heldout: Images | None,
        options: TrainOptions,
        name: str,
        *,
        label: str | None = None,
        controls: TrainingControls | None = None,
    ) -> TrainResult:
        """`train` in the surroundings of this step.

        name: of the folder below the step's that holds the training's state, and its label where none is given.
        """
        at = TrainingContext(self.input, self.runtime, self.folder / name, label or name, self.seed, self.progress)
        return train(module, images, heldout, options, at, controls)

    def hand_over(self, model: nn.Module) -> None:
        """Continue with the weights of `model`, retrained but of the shapes that the step was given.

        The step's own plan is applied to these weights, and so is what follows. To be called before the step returns
        its plan: a plan on the disk means that the weights are there too.
        """
        if self.runtime.is_main:
            save_tensors(self.folder / LEFT_WEIGHTS, model.state_dict(), {"plan": self.plan.digest})
        self.runtime.barrier()
