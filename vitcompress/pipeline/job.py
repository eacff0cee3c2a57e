"""One run of one recipe: its options, and what all stages of the pipeline know about it."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le
from torch import nn

from vitcompress import surgery
from vitcompress.errors import DeviceError, InputError, PlanError, WeightsError
from vitcompress.exporters.doctor import onnx_problem
from vitcompress.exporters.onnx.providers import choose_provider, resolve_precision
from vitcompress.families import Family, family_of
from vitcompress.io.files import user_path
from vitcompress.io.progress import Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.validation import options_of
from vitcompress.methods.base import AT_ONCE, Method, StepInfo, check_result, reject_unused
from vitcompress.methods.latency import check_target
from vitcompress.methods.table import find_method
from vitcompress.models.checkpoint import read_plan
from vitcompress.models.create import InputConfig, check_classifier, input_config
from vitcompress.models.preprocessing import Preprocessing
from vitcompress.models.source import FROM_RECIPE, USER, ResolvedModel, create_blank, load_class_names, resolve_model
from vitcompress.models.weights import HUB, NOT_FILES
from vitcompress.pipeline.folder import dense_folder
from vitcompress.plan import Plan
from vitcompress.recipe.schema import Recipe
from vitcompress.training.data import Splits, class_count
from vitcompress.training.datasets import describe_skipped
from vitcompress.training.distributed import Runtime
from vitcompress.training.losses import FEATURES
from vitcompress.training.options import DataOptions, TrainOptions


@dataclass(frozen=True)
class RunOptions:
    """What the command line changes in a recipe. None keeps the recipe's own setting.

    out: the run folder; None is runs/NAME. classes: a file of class names. structure_only: no training and no scoring.
    control: also train the dense model as long as the compressed one. fresh: start over. expect: the run stops if the
    accuracy (percent) of the dense model is worse.
    """

    out: Path | None = None
    export: tuple[str, ...] | None = None
    data: str | None = None
    classes: Path | None = None
    device: str | None = None
    structure_only: bool = False
    control: bool = False
    fresh: bool = False
    expect: Annotated[float, Ge(1), Le(100)] | None = None
    preprocessing: Preprocessing = Preprocessing()  # noqa: RUF009 (frozen)

    def folder(self, recipe: Recipe) -> Path:
        return user_path(self.out or f"runs/{recipe.name}").resolve()

    def is_done(self, files: RunFolder) -> bool:
        """Whether a run in this folder has nothing left to do."""
        control = not self.control or RunFolder(files.control).plan.is_file()
        return files.report.is_file() and control and not self.fresh


def apply_options(recipe: Recipe, options: RunOptions, data: Splits | None = None) -> Recipe:
    """`recipe` with `options`, as the run folder records it.

    data: images from Python. Raises InputError for a control without training, and for options of another type or out
    of range.
    """
    options_of(RunOptions, vars(options), "this run")
    if options.control and options.structure_only:
        raise InputError("--control trains a model, --structure-only trains nothing", hint="leave one of them out")
    weights = "random" if options.structure_only and recipe.model.weights == "train" else recipe.model.weights
    class_names = options.classes or recipe.model.class_names
    teacher, teacher_weights = recipe.finetune.teacher, recipe.finetune.teacher_weights
    formats = recipe.export.formats if options.export is None else options.export
    if teacher and ("/" in teacher or user_path(teacher).is_dir()):  # no name of timm
        teacher = _absolute(teacher)
    return replace(
        recipe,
        data=_data_table(recipe, options, data),
        model=replace(recipe.model, weights=_absolute(weights), class_names=_absolute(class_names)),
        dense=recipe.dense if weights == "train" else None,
        finetune=replace(recipe.finetune, teacher=teacher, teacher_weights=_absolute(teacher_weights)),
        export=replace(recipe.export, formats=tuple(sorted({*formats}))),  # one recipe, whatever their order
        run=replace(recipe.run, device=options.device) if options.device else recipe.run,
    )


def _data_table(recipe: Recipe, options: RunOptions, data: Splits | None) -> DataOptions:
    """The table [data] of the run."""
    table = recipe.data
    if data is not None:  # recorded by name and counts, so that a folder of other images is not continued
        counts = "/".join(str(len(part)) for part in (data.train, data.heldout, data.test))
        table = replace(DataOptions(f"python:{data.name} ({counts} images)"), **table.changes())
    elif options.data is not None:  # a folder of images, or the root of a data set of timm
        table = table.moved_to(options.data)
    if table.path is not None:
        table = replace(table, path=str(user_path(table.path).resolve()))
    return replace(table, **options.preprocessing.changes())


def _absolute(path: str | Path | None) -> Any:
    """A path from the root, for use in any folder. Names stay, and links: files of hubs have suffixes only as links."""
    is_name = path in (None, "dense", *NOT_FILES) or str(path).startswith(HUB)
    return path if is_name else str(user_path(path or "").absolute())


@dataclass(frozen=True, kw_only=True)
class JobStep:
    """A pruning step.

    info: properties that follow from `options`. files: the step's measurements and its plan. model: its input, on
    torch's meta device; delta: its plan without data or scoring (published layers, or the number that the options
    request).
    """

    number: int
    method: Method
    options: Any
    info: StepInfo
    files: RunFolder
    model: nn.Module = field(repr=False)
    delta: Plan


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of one recipe, which has the `options` applied.

    data: classes are in the order of the classifier; None if no images are needed or available.
    resolved: the arguments of the dense model and their sources.
    weights_problem: why the weights cannot be used; `resolved` is then without them.
    base: the plan of the dense model. blank: the dense model on torch's meta device, without weights.
    pruned, structure: model and plan after all steps, without data or scoring.
    """

    recipe: Recipe
    options: RunOptions
    runtime: Runtime
    progress: Progress
    data: Splits | None
    resolved: ResolvedModel
    weights_problem: WeightsError | None
    base: Plan
    files: RunFolder
    family: Family
    steps: tuple[JobStep, ...]
    structure: Plan
    blank: nn.Module = field(repr=False)
    pruned: nn.Module = field(repr=False)

    @property
    def folder(self) -> Path:
        return self.files.path

    @property
    def dense_folder(self) -> Path:
        return dense_folder(self.recipe, self.folder)

    @cached_property
    def input(self) -> InputConfig:
        return input_config(self.blank)

    @property
    def classes(self) -> int:
        return int(getattr(self.blank, "num_classes", 0))

    @property
    def class_names(self) -> tuple[str, ...]:
        """The user's, else those of the data or of the weights; numbers if all of these are unknown."""
        if self.data is not None and self.recipe.model.class_names is None:
            return self.data.classes
        return self.resolved.class_names or tuple(map(str, range(self.classes)))

    @property
    def trainings(self) -> list[TrainOptions]:
        """The trainings of the compressed model after the dense one: those of the steps, and the fine-tuning."""
        finetune = self.recipe.finetune
        between = [step.info.training(finetune) for step in self.steps if step.info.training]
        last = [self.quantized_training] if self.recipe.quantize.epochs else []
        return [] if self.options.structure_only else [*between, finetune, *last]

    @property
    def quantized_training(self) -> TrainOptions:
        """Of the folded model in int8 or fp8: as [finetune], with the options of [quantize]."""
        finetune, table = self.recipe.finetune, self.recipe.quantize
        own: Any = {"epochs": table.epochs, "lr": table.lr or finetune.peak_lr / 10, "lr_base": None}
        kind = "soft" if finetune.distillation in FEATURES else finetune.distillation  # features of wrappers differ
        return replace(finetune, **own, warmup_epochs=0, distillation=kind, select="last", ema=None)

    @property
    def extra_epochs(self) -> int:
        return sum(options.epochs for options in self.trainings)

    @cached_property
    def onnx_problem(self) -> str | None:
        """Why ONNX Runtime cannot use the run's device, with the fix; None if it can."""
        if self.runtime.device.type == "mps":
            return "recipes use Apple GPUs for torch alone"
        return onnx_problem(str(self.runtime.device))

    @property
    def onnx_device(self) -> str:
        """The run's device if ONNX Runtime can use it, else the CPU."""
        return "cpu" if self.onnx_problem else str(self.runtime.device)

    def notes(self) -> Iterator[str]:
        """Notes on weights without a revision, left-out images, options without effect, and ONNX files elsewhere."""
        if (name := self.resolved.weights).startswith(HUB) and name not in vars(self.recipe.model).values():
            yield f"The weights are {name}; use this name with --weights to get the same again."
        if skipped := () if self.data is None else self.data.skipped:
            yield describe_skipped(skipped)
        names = () if self.data is None or self.resolved.class_names else self.data.classes
        moved = [pair for pair in zip(names, sorted(names), strict=True) if pair[0] != pair[1]]
        if moved and self.recipe.model.weights not in NOT_FILES and not self.recipe.model.new_head:
            order = "The weights name no classes, so that the data has timm's order, with {} where torchvision's has {}"
            yield f"{order.format(*moved[0])}: pass --classes with the order of the weights if it is another."
        if self.trainings and self.recipe.model.args.get("drop_path_rate"):
            yield "model.args.drop_path_rate has no effect: drop_path of [dense] and [finetune] is the rate."
        for table in ("dense", "finetune") if self.trainings else ():
            unused = getattr(getattr(self.recipe, table), "unused", {})
            yield from (f"{table}.{name} has no effect: {reason}." for name, reason in unused.items())
        for own in filter(None, (self.recipe.dense, *self.trainings)):
            if 0 < own.epochs < own.warmup_epochs:
                yield f"warmup_epochs is {own.warmup_epochs} of {own.epochs} epochs: the learning rate never peaks."
            if own.epochs and own.schedule == "cosine" and own.min_lr > own.peak_lr:
                yield f"min_lr is {own.min_lr:g}, the peak {own.peak_lr:g}: the learning rate stays at the peak."
        if "onnx" in self.recipe.export.formats:
            if self.onnx_problem:
                reason = f"ONNX Runtime does not work on {self.runtime.device} here ({self.onnx_problem})"
                yield f"ONNX files are evaluated and measured on the CPU: {reason}."
            try:
                provider, precision = choose_provider(self.onnx_device, None)[0], self.recipe.export.precision
                resolve_precision("a file", precision, None, provider)
            except DeviceError as error:
                yield f"ONNX files are not evaluated and not measured: {error.message}."


def create_job(recipe: Recipe, options: RunOptions, runtime: Runtime, progress: Progress, data: Splits | None) -> Job:
    """The job of `recipe`, which has `options` applied. Builds the models of all steps, without weights.

    Raises InputError if timm cannot build the model, it cannot classify images, or no family supports it, and PlanError
    if a step requests more than the model has.
    """
    resolved, problem = _resolve(recipe, options, data)
    blank = model = create_blank(resolved.arch, resolved.arch_args)
    check_classifier(resolved.arch, resolved.arch_args, blank)
    base = plan = Plan(resolved.arch, resolved.arch_args)
    steps, family, files = list[JobStep](), family_of(blank), RunFolder(options.folder(recipe))
    try:
        for number, step in enumerate(recipe.steps):
            method = find_method(step.method)
            reject_unused(step.options, AT_ONCE if number + 1 < len(recipe.steps) else {})
            check_target(step.options)
            delta = check_result(method, method.structure(model, family, plan, step.options))
            own = JobStep(
                number=number,
                method=method,
                options=step.options,
                info=method.describe(step.options),
                files=RunFolder(files.step(number, step.method)),
                model=model,
                delta=delta,
            )
            steps.append(own)
            model, plan = surgery.apply_to_copy(model, delta), plan.then(delta)
            model.plan = plan  # type: ignore[assignment]
    except InputError as error:  # steps may be impossible only without the weights' arguments
        if problem is None and isinstance(error, PlanError) and len(recipe.steps) > 1:
            raise PlanError(f"step {number + 1}, {step.method}: {error.message}", hint=error.hint) from None
        raise problem or error from None
    return Job(
        recipe=recipe,
        options=options,
        runtime=runtime,
        progress=progress,
        data=data and data.reorder(resolved.class_names),
        resolved=resolved,
        weights_problem=problem,
        base=base,
        files=files,
        family=family,
        steps=tuple(steps),
        structure=plan,
        blank=blank,
        pruned=model,
    )


def _resolve(recipe: Recipe, options: RunOptions, data: Splits | None) -> tuple[ResolvedModel, WeightsError | None]:
    """The dense model with its weights, or without them and why: a run that has its dense model needs no weights."""
    table = recipe.model
    user: Any = {"classes": _count_classes(recipe, data)}
    user["class_names"] = load_class_names(Path(table.class_names)) if table.class_names else ()
    user["preprocessing"] = {FROM_RECIPE: recipe.data, USER: options.preprocessing}
    try:
        resolved = resolve_model(table.name, table.args, table.weights, **user)
    except WeightsError as problem:
        dense = RunFolder(dense_folder(recipe, options.folder(recipe))).plan
        plan = read_plan(dense) if dense.is_file() and not options.fresh else Plan(table.name, table.args)
        return resolve_model(plan.arch, plan.arch_args, **user), problem
    return resolved, None


def _count_classes(recipe: Recipe, data: Splits | None) -> int | None:
    """The number of classes of the data or of the recipe; None: that of the model. Raises InputError if they differ."""
    table = recipe.model
    if data is not None:
        classes: int | None = len(data.classes)
    elif recipe.data.path or (table.weights == "random" and "num_classes" not in table.args and not table.classes):
        classes = class_count(recipe.data) or table.classes
    else:  # the data is not open, and is not counted
        classes = table.classes
    if table.classes not in (None, classes):
        raise InputError(f"model.classes is {table.classes}, the data has {classes}", hint="leave model.classes out")
    return classes
