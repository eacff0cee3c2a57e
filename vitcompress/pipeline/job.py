"""One run of one recipe: its options, and what all stages of the pipeline know about it."""

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, reduce
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress import surgery
from vitcompress.errors import InputError
from vitcompress.exporters.doctor import device_problem
from vitcompress.families import Family, family_of
from vitcompress.io.progress import Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.methods import Method, find_method
from vitcompress.methods.base import StepInfo
from vitcompress.models.create import InputConfig, check_classifier, create_on_meta, input_config
from vitcompress.pipeline.folder import dense_folder
from vitcompress.plan import Plan
from vitcompress.recipe.schema import Recipe
from vitcompress.training.data import DataOptions, Splits, class_count
from vitcompress.training.distributed import Runtime


@dataclass(frozen=True)
class RunOptions:
    """What the command line changes in a recipe. None keeps the recipe's own setting.

    out: the run folder; None is runs/NAME. structure_only: no training and no scoring. fresh: start over.
    """

    out: Path | None = None
    export: tuple[str, ...] = ()
    data: str | None = None
    weights: str | None = None
    device: str | None = None
    structure_only: bool = False
    fresh: bool = False


def apply_options(recipe: Recipe, options: RunOptions, data: Splits | None = None) -> Recipe:
    """`recipe` with `options`, as the run folder records it.

    data: images from Python; recorded by name and counts, so that a folder of other images is not continued.

    Raises:
        InputError: the weights must be trained, and the recipe does not tell how.
    """
    if options.weights == "train" and recipe.dense is None:
        raise InputError(
            "--weights train needs a [dense] table with training options, and the recipe has none",
            hint="use a checkpoint, hub or random",
        )
    weights = options.weights or ("random" if options.structure_only and recipe.model.weights == "train" else None)
    model = recipe.model if weights is None else replace(recipe.model, weights=weights)
    table = recipe.data
    if data is not None:
        counts = "/".join(str(len(part)) for part in (data.train, data.heldout, data.test))
        table = DataOptions(source=f"python:{data.name} ({counts} images)")
    elif options.data is not None:  # a folder of images, or the root of a data set of timm
        source = "imagefolder" if table.source == "digits" else table.source
        table = replace(table, path=str(Path(options.data).resolve()), source=source)
    return replace(
        recipe,
        data=table,
        model=model,
        dense=recipe.dense if model.weights == "train" else None,
        export=replace(recipe.export, formats=options.export) if options.export else recipe.export,
        run=replace(recipe.run, device=options.device) if options.device else recipe.run,
    )


def output_folder(recipe: Recipe, options: RunOptions) -> Path:
    return (options.out or Path("runs") / recipe.name).resolve()


@dataclass(frozen=True)
class Work:
    """One row of a dry run: `rounds` trainings or measurements of `epochs` passes over `images` images.

    None: does not apply, or is not known without the data.
    """

    stage: str
    rounds: int = 1
    epochs: int | None = None
    images: int | None = None


@dataclass(frozen=True)
class JobStep:
    """A pruning step. info: properties that follow from `options`. files: the step's measurements and its plan."""

    number: int
    method: Method
    options: Any
    info: StepInfo
    files: RunFolder


@dataclass(frozen=True)
class Job:
    """One run of one recipe, which has the command line's options applied.

    data: None if no images are needed or available. blank: the dense model on torch's meta device, without weights.
    """

    recipe: Recipe
    folder: Path
    runtime: Runtime
    progress: Progress
    data: Splits | None
    arch_args: dict[str, Any]
    input: InputConfig
    family: Family
    structure_only: bool
    blank: nn.Module = field(repr=False)

    @property
    def files(self) -> RunFolder:
        return RunFolder(self.folder)

    @property
    def dense_folder(self) -> Path:
        return dense_folder(self.recipe, self.folder)

    @cached_property
    def steps(self) -> tuple[JobStep, ...]:
        steps = []
        for number, step in enumerate(self.recipe.steps):
            method, files = find_method(step.method), RunFolder(self.files.step(number, step.method))
            steps.append(JobStep(number, method, step.options, method.describe(step.options), files))
        return tuple(steps)

    @cached_property
    def onnx_problem(self) -> str | None:
        """Why ONNX Runtime cannot use the run's device, with the fix; None if it can."""
        if self.runtime.device.type == "mps":
            return "recipes use Apple GPUs for torch alone"
        return device_problem(str(self.runtime.device))

    @property
    def onnx_device(self) -> str:
        """The run's device if ONNX Runtime can use it, else the CPU."""
        return "cpu" if self.onnx_problem else str(self.runtime.device)

    def onnx_notes(self) -> Iterator[str]:
        """A note if ONNX files are evaluated and measured on another device than the run's."""
        if "onnx" in self.recipe.export.formats and self.onnx_problem:
            reason = f"ONNX Runtime does not work on {self.runtime.device} here ({self.onnx_problem})"
            yield f"ONNX files are evaluated and measured on the CPU: {reason}."

    @property
    def train_images(self) -> int | None:
        return None if self.data is None else len(self.data.train)

    @property
    def classes(self) -> int:
        return int(getattr(self.blank, "num_classes", 0))

    @property
    def base(self) -> Plan:
        """The plan of the dense model."""
        return Plan(self.recipe.model.name, self.arch_args)

    @cached_property
    def _structures(self) -> tuple[list[Plan], list[nn.Module]]:
        deltas, models, plan = list[Plan](), [self.blank], self.base
        for step in self.steps:
            deltas.append(step.method.structure(models[-1], self.family, plan, step.options))
            models.append(surgery.apply_to_copy(models[-1], deltas[-1]))
            plan = plan.then(deltas[-1])
        return deltas, models

    @property
    def deltas(self) -> list[Plan]:
        """The plan of each step without data or scoring: published layers, or the number that the options request.

        Raises:
            PlanError: a step requests more than the model has.
        """
        return self._structures[0]

    @property
    def models(self) -> list[nn.Module]:
        """The model before each step and after the last one, on torch's meta device. Raises PlanError like `deltas`."""
        return self._structures[1]

    @property
    def structure(self) -> Plan:
        """The plan of all steps without data or scoring. Raises PlanError like `deltas`."""
        return reduce(Plan.then, self.deltas, self.base)


def create_job(
    recipe: Recipe, options: RunOptions, runtime: Runtime, progress: Progress, data: Splits | None = None
) -> Job:
    """The job of `recipe`, which has `options` applied. Builds the dense architecture once, without weights.

    Raises:
        InputError: timm cannot build it, it cannot classify images, or no family supports it.
    """
    classes = len(data.classes) if data is not None else recipe.model.classes or _class_count(recipe)
    args = dict(recipe.model.args) | ({"num_classes": classes} if classes else {})
    blank = deepcopy(_create_blank(recipe.model.name, json.dumps(args)))
    return Job(
        recipe=recipe,
        folder=output_folder(recipe, options),
        runtime=runtime,
        progress=progress,
        data=data,
        arch_args=args,
        input=input_config(blank),
        family=family_of(blank),
        structure_only=options.structure_only,
        blank=blank,
    )


@lru_cache(maxsize=8)  # lists of recipes and the rows of a study use few architectures
def _create_blank(arch: str, args: str) -> nn.Module:
    """A classifier without weights. args: JSON."""
    blank = create_on_meta(arch, json.loads(args))
    check_classifier(arch, json.loads(args), blank)
    return blank


def _class_count(recipe: Recipe) -> int | None:
    """The number of classes of data that is not open; None if the arguments or the weights of the model set it."""
    undecided = recipe.model.weights == "random" and "num_classes" not in recipe.model.args
    return class_count(recipe.data) if undecided else None
