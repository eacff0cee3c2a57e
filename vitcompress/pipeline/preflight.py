"""Everything that can fail is tried here, before the first training step and before anything is written."""

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress import checkpoint, cost, distributed, models, surgery
from vitcompress.data import Splits, open_data
from vitcompress.distributed import Runtime
from vitcompress.errors import InputError, OutputError
from vitcompress.exporters import EXPORTERS
from vitcompress.families import Family, family_of
from vitcompress.methods import METHODS
from vitcompress.models import InputConfig
from vitcompress.plan import Plan
from vitcompress.progress import Progress
from vitcompress.recipe import Recipe, dense_key
from vitcompress.train import check_options

RECIPE, PLAN = "recipe.toml", checkpoint.PLAN
# Weights of the dense and the compressed model, their exports, and a resume state with optimiser and average, twice
# while one replaces the other.
BYTES_PER_PARAMETER = 4 * 16


@dataclass(frozen=True)
class RunOptions:
    """What the command line adds to a recipe. None leaves the recipe's own setting."""

    out: Path | None = None
    export: tuple[str, ...] = ()
    data: str | None = None
    weights: str | None = None
    device: str | None = None
    dry_run: bool = False
    structure_only: bool = False
    fresh: bool = False


@dataclass(frozen=True)
class Job:
    """One run of one recipe: the recipe with all wishes applied, its folder, and what was found before starting."""

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
        return self.folder / "state"

    @property
    def dense_folder(self) -> Path:
        """Where the dense model lives: shared by recipes that train it alike, else inside this run."""
        trained = self.recipe.model.weights == "train"
        return self.folder.parent / f"dense-{dense_key(self.recipe)}" if trained else self.state / "dense"

    @property
    def base(self) -> Plan:
        """The plan of the dense model."""
        return Plan(self.recipe.model.name, self.arch_args)


def effective(recipe: Recipe, options: RunOptions) -> Recipe:
    """The recipe with the command line's wishes in it, as the run folder records it."""
    data = (
        recipe.data
        if options.data is None
        else replace(
            recipe.data,
            path=str(Path(options.data).resolve()),
            source="imagefolder" if recipe.data.source == "digits" else recipe.data.source,
        )
    )
    weights = options.weights or ("random" if options.structure_only and recipe.model.weights == "train" else None)
    model = recipe.model if weights is None else replace(recipe.model, weights=weights)
    return replace(
        recipe,
        data=data,
        model=model,
        dense=recipe.dense if model.weights == "train" else None,
        export=replace(recipe.export, formats=options.export) if options.export else recipe.export,
        run=replace(recipe.run, device=options.device) if options.device else recipe.run,
    )


def prepare(recipe: Recipe, options: RunOptions, progress: Progress) -> Job:
    """Check a run and open its folder.

    Raises:
        InputError: a subclass that says what is wrong; nothing was written.
    """
    recipe = effective(recipe, options)
    folder = (options.out or Path("runs") / recipe.name).resolve()
    check_folder(folder, recipe, fresh=options.fresh)
    check_formats(recipe)
    runtime = distributed.start(recipe.run.device, recipe.run.amp, recipe.data.workers)
    data = None if options.structure_only else open_data(recipe.data, recipe.run.seed)
    job = described(recipe, folder, runtime, progress, data, structure_only=options.structure_only)
    structure(job)
    check_training(job)
    check_disk(folder, cost.measure(job.blank, job.input.size).params)
    check_weights(job)
    if runtime.is_main:
        _open_folder(folder, recipe, fresh=options.fresh)
    runtime.barrier()
    return job


def described(
    recipe: Recipe, folder: Path, runtime: Runtime, progress: Progress, data: Splits | None, *, structure_only: bool
) -> Job:
    """The job, with the dense architecture built once on random weights to see that it is one that can be pruned."""
    classes = len(data.classes) if data is not None else recipe.model.classes
    args = dict(recipe.model.args) | ({"num_classes": classes} if classes else {})
    blank = models.create(recipe.model.name, args)
    return Job(
        recipe,
        folder,
        runtime,
        progress,
        data,
        args,
        models.input_config(blank),
        family_of(blank),
        structure_only,
        blank,
    )


def check_folder(folder: Path, recipe: Recipe, *, fresh: bool) -> None:
    """Raise OutputError when `folder` is taken by something else or cannot be written."""
    written = folder / RECIPE
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file", hint="choose a folder with --out")
    if folder.is_dir() and any(folder.iterdir()) and not written.is_file():
        raise OutputError(f"{folder} is not empty and not a run folder", hint="choose another folder with --out")
    if written.is_file() and not fresh and written.read_text() != recipe.to_toml():
        differing = _first_difference(written.read_text(), recipe.to_toml())
        raise OutputError(
            f"{folder} holds a run of another recipe ({differing})",
            hint="choose another folder with --out, or --fresh to start over in this one",
        )
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if not parent.is_dir():
        raise OutputError(f"{parent} is a file, so {folder} cannot be made", hint="choose another folder with --out")
    _check_writable(parent)


def _check_writable(folder: Path) -> None:
    probe = folder / ".vitcompress-probe"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OutputError(
            f"{folder} cannot be written: {error.strerror}", hint="choose another folder with --out"
        ) from None


def _first_difference(before: str, now: str) -> str:
    old, new = before.splitlines(), now.splitlines()
    gone = [line for line in old if line not in new]
    come = [line for line in new if line not in old]
    return f"{gone[0] if gone else 'nothing'} there, {come[0] if come else 'nothing'} here"


def check_formats(recipe: Recipe) -> None:
    """Raise InputError for an export target that cannot be built on this machine."""
    for name in recipe.export.formats:
        if name not in EXPORTERS:
            raise InputError(f"no export format {name!r}", hint=f"there are: {', '.join(EXPORTERS)}")
        if reason := EXPORTERS[name].unavailable():
            raise InputError(
                f"{name} cannot be exported here: {reason}",
                hint=f"leave it out of --export and run `vitcompress export DIR --format {name}` on the target",
            )
        EXPORTERS[name].check(recipe.export.precision, recipe.export.opset)


def check_training(job: Job) -> None:
    """Raise InputError for training options that could not be carried out, before the training that comes first."""
    if job.data is None:
        return
    for options in (job.recipe.dense, job.recipe.finetune):
        if options is not None:
            check_options(options, job.data.train, job.data.heldout, job.runtime)


def structure(job: Job) -> Plan:
    """The plan of all steps without data or scoring: published layers, or as many as the options ask for.

    Raises:
        PlanError: a step asks for more than the model has.
    """
    model, plan = job.blank, job.base
    for step in job.recipe.steps:
        delta = METHODS[step.method].structure(model, job.family, plan, step.options)
        model, plan = surgery.applied(model, delta), plan.then(delta)
    return plan


def check_weights(job: Job) -> None:
    """Raise InputError for weights or a teacher that cannot be had or do not fit, before anything is trained."""
    table = job.recipe.model
    if table.weights not in ("train", "random") and not (job.dense_folder / PLAN).is_file():
        models.create(table.name, job.arch_args, table.weights, new_head=table.new_head)
    if not job.structure_only and job.recipe.finetune.distillation != "none":
        teacher(job)


def teacher(job: Job) -> nn.Module | None:
    """Who teaches during recovery; None is the dense model, which is at hand then. A run folder, or a timm name."""
    name = job.recipe.finetune.teacher
    if name in (None, "dense"):
        return None
    if Path(name).is_dir():
        return checkpoint.load(name)
    return models.create(name, {"num_classes": job.arch_args["num_classes"]}, "hub")


def check_disk(folder: Path, params: int) -> None:
    """Raise OutputError when the disk has too little room for weights, exports and resume state."""
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    need, free = params * BYTES_PER_PARAMETER, shutil.disk_usage(parent).free
    if free < need:
        raise OutputError(
            f"{parent} has {free / 1e9:.1f} GB free, this run needs about {need / 1e9:.1f} GB",
            hint="free some space, or choose another folder with --out",
        )


def _open_folder(folder: Path, recipe: Recipe, *, fresh: bool) -> None:
    from vitcompress.checkpoint import write_text

    if fresh and (folder / RECIPE).is_file():
        shutil.rmtree(folder)
    if not (folder / RECIPE).is_file():
        write_text(folder / RECIPE, recipe.to_toml())
