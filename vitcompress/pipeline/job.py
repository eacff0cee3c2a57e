"""One run of one recipe: its options, and what all stages of the pipeline know of it."""

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, reduce
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress.errors import InputError
from vitcompress.exporters.doctor import device_problem
from vitcompress.families import Family, family_of
from vitcompress.io.progress import Progress
from vitcompress.methods.structure import deltas_of_steps
from vitcompress.models.create import InputConfig, check_classifier, create_on_meta, input_config
from vitcompress.pipeline.dense_folder import dense_folder
from vitcompress.pipeline.folder import STATE
from vitcompress.plan import Plan
from vitcompress.recipe.schema import Recipe
from vitcompress.training.data import DataOptions, Splits, class_count
from vitcompress.training.distributed import Runtime


@dataclass(frozen=True)
class RunOptions:
    """What the command line adds to a recipe. None leaves the recipe's own setting."""

    out: Path | None = None
    export: tuple[str, ...] = ()
    data: str | None = None
    weights: str | None = None
    device: str | None = None
    structure_only: bool = False
    fresh: bool = False


def effective(recipe: Recipe, options: RunOptions) -> Recipe:
    """The recipe with the command line's options in it, as the run folder records it."""
    if options.weights == "train" and recipe.dense is None:
        raise InputError(
            "--weights train needs a [dense] table that says how to train, and the recipe has none",
            hint="give a checkpoint, hub or random",
        )
    weights = options.weights or ("random" if options.structure_only and recipe.model.weights == "train" else None)
    model = recipe.model if weights is None else replace(recipe.model, weights=weights)
    return replace(
        recipe,
        data=recipe.data if options.data is None else _data_at(recipe.data, options.data),
        model=model,
        dense=recipe.dense if model.weights == "train" else None,
        export=replace(recipe.export, formats=options.export) if options.export else recipe.export,
        run=replace(recipe.run, device=options.device) if options.device else recipe.run,
    )


def _data_at(table: DataOptions, path: str) -> DataOptions:
    """The images at `path`: those of a folder, unless the recipe names a data set of timm's, which is rooted there."""
    source = "imagefolder" if table.source == "digits" else table.source
    return replace(table, path=str(Path(path).resolve()), source=source)


def folder_of(recipe: Recipe, options: RunOptions) -> Path:
    return (options.out or Path("runs") / recipe.name).resolve()


@dataclass(frozen=True)
class Job:
    """One run of one recipe: the recipe with the command line's options in it, its folder, and what was found before
    starting.

    data: None where none is opened. blank: the dense model on torch's meta device, without weights.
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
    def state(self) -> Path:
        return self.folder / STATE

    def step_folder(self, number: int) -> Path:
        """Where step `number` keeps what it measured."""
        return self.state / f"step-{number}-{self.recipe.steps[number].method}"

    @property
    def dense_folder(self) -> Path:
        return dense_folder(self.recipe, self.folder)

    @cached_property
    def onnx_problem(self) -> str | None:
        """Why ONNX Runtime does not work on the run's device, and what to do; None where it does."""
        if self.runtime.device.type == "mps":
            return "recipes use Apple GPUs for torch alone"
        return device_problem(str(self.runtime.device))

    @property
    def onnx_device(self) -> str:
        """Where ONNX Runtime works: on the run's device where it can, else on the CPU."""
        return "cpu" if self.onnx_problem else str(self.runtime.device)

    def onnx_elsewhere(self) -> Iterator[str]:
        """A note where ONNX files are not judged and measured on the run's device."""
        if "onnx" in self.recipe.export.formats and self.onnx_problem:
            why = f"ONNX Runtime does not work on {self.runtime.device} here ({self.onnx_problem})"
            yield f"ONNX files are judged and measured on the CPU: {why}."

    @property
    def classes(self) -> int:
        return int(getattr(self.blank, "num_classes", 0))

    @property
    def base(self) -> Plan:
        """The plan of the dense model."""
        return Plan(self.recipe.model.name, self.arch_args)

    @cached_property
    def deltas(self) -> tuple[Plan, ...]:
        """What each step adds, without data or scoring: published layers, or as many as the options ask for.

        Raises:
            PlanError: a step asks for more than the model has.
        """
        steps = ((step.method, step.options) for step in self.recipe.steps)
        return tuple(deltas_of_steps(self.blank, self.family, self.base, steps))

    @property
    def structure(self) -> Plan:
        """The plan of all steps without data or scoring. Raises PlanError like `deltas`."""
        return reduce(Plan.then, self.deltas, self.base)


def job_for(
    recipe: Recipe, folder: Path, runtime: Runtime, progress: Progress, data: Splits | None, *, structure_only: bool
) -> Job:
    """The job. The dense architecture is built once, without weights, to see whether it can be pruned.

    Raises:
        InputError: timm cannot build it, it cannot classify images, or no family covers it.
    """
    classes = len(data.classes) if data is not None else recipe.model.classes or _classes_without_data(recipe)
    args = dict(recipe.model.args) | ({"num_classes": classes} if classes else {})
    blank = deepcopy(_outline(recipe.model.name, json.dumps(args)))
    return Job(
        recipe=recipe,
        folder=folder,
        runtime=runtime,
        progress=progress,
        data=data,
        arch_args=args,
        input=input_config(blank),
        family=family_of(blank),
        structure_only=structure_only,
        blank=blank,
    )


@lru_cache(maxsize=8)
def _outline(arch: str, args: str) -> nn.Module:
    """A model that can classify images, without weights. args: JSON. Kept: lists of recipes and the rows of a study ask
    for the same ones again and again.

    Raises:
        InputError: timm cannot build it, or it cannot classify images.
    """
    blank = create_on_meta(arch, json.loads(args))
    check_classifier(arch, json.loads(args), blank)
    return blank


def _classes_without_data(recipe: Recipe) -> int | None:
    """How many classes the unopened data has, so that the sizes counted are those of a whole run.

    None where the model's arguments or its weights say how many there are.
    """
    free = recipe.model.weights == "random" and "num_classes" not in recipe.model.args
    return class_count(recipe.data) if free else None


def alone(job: Job) -> Job:
    """The job for the first process without the others."""
    return replace(job, runtime=replace(job.runtime, rank=0, world_size=1))
