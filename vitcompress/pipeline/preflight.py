"""Everything that can fail is tried here, before the first training step and before anything is written."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitcompress import checkpoint, models, surgery
from vitcompress.bench import timing
from vitcompress.data import Splits, class_count, open_data
from vitcompress.distributed import Runtime
from vitcompress.errors import InputError, did_you_mean
from vitcompress.export_options import AUTO
from vitcompress.exporters import EXPORTERS
from vitcompress.families import family_of
from vitcompress.methods import METHODS
from vitcompress.methods.steps import RecoverOptions, recovery_settings
from vitcompress.pipeline.folder import check_disk, check_writable
from vitcompress.pipeline.job import Job
from vitcompress.pipeline.latency import check_latency
from vitcompress.pipeline.teachers import check_teacher
from vitcompress.precision import expanded
from vitcompress.progress import Progress
from vitcompress.recipe import Recipe
from vitcompress.train import check_options


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
    if options.weights == "train" and recipe.dense is None:
        raise InputError(
            "--weights train needs a [dense] table that says how to train, and the recipe has none",
            hint="give a checkpoint, hub or random",
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


def folder_of(recipe: Recipe, options: RunOptions) -> Path:
    return (options.out or Path("runs") / recipe.name).resolve()


def prepare(recipe: Recipe, options: RunOptions, runtime: Runtime, progress: Progress) -> Job:
    """Check a run, `effective` already.

    Raises:
        InputError: a subclass that says what is wrong; nothing was written.
    """
    folder = folder_of(recipe, options)
    data = None if options.structure_only else open_data(recipe.data, recipe.run.seed)
    job = described(recipe, folder, runtime, progress, data, structure_only=options.structure_only)
    _ = job.structure
    check_islands(job)
    check_training(job)
    check_bench(job)
    check_room(job)
    check_writable(job.dense_folder)
    check_weights(job, fresh=options.fresh)
    check_recovery(job)
    check_latency(job, fresh=options.fresh)
    runtime.barrier()  # nobody looks at the folder any more
    return job


def described(
    recipe: Recipe, folder: Path, runtime: Runtime, progress: Progress, data: Splits | None, *, structure_only: bool
) -> Job:
    """The job, with the dense architecture built once, without weights, to see that it is one that can be pruned."""
    classes = len(data.classes) if data is not None else recipe.model.classes or _told_classes(recipe)
    args = dict(recipe.model.args) | ({"num_classes": classes} if classes else {})
    blank = models.outline(recipe.model.name, args)
    models.check_answers(recipe.model.name, args, blank)
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


def _told_classes(recipe: Recipe) -> int | None:
    """The classes of data that is not opened, so that what is counted without it is what a whole run comes to; None
    where the model's arguments or its weights say how many there are.
    """
    free = recipe.model.weights == "random" and "num_classes" not in recipe.model.args
    return class_count(recipe.data) if free else None


def check_formats(recipe: Recipe) -> None:
    """Raise InputError for an export target that cannot be built on this machine, or options that no target uses."""
    table = recipe.export
    for name in table.formats:
        if name not in EXPORTERS:
            raise InputError(
                f"no export format {name!r}{did_you_mean(name, EXPORTERS)}", hint=f"there are: {', '.join(EXPORTERS)}"
            )
        if reason := EXPORTERS[name].unavailable():
            raise InputError(
                f"{name} cannot be exported here: {reason}",
                hint=f"leave it out of --export and run `vitcompress export DIR --format {name}` on the target",
            )
        EXPORTERS[name].check(table.only(EXPORTERS[name].uses))
    used = {option for name in table.formats for option in EXPORTERS[name].uses}
    if table.formats and (idle := [option for option in table.given() if option not in used]):
        raise InputError(
            f"export.{idle[0]} is {getattr(table, idle[0])!r}, which means nothing to {', '.join(table.formats)}",
            hint="leave it out, or export to a format that uses it",
        )


def check_islands(job: Job) -> None:
    """Raise InputError for an fp32 island that the model before pruning does not have."""
    expanded(job.blank, (name for name in job.recipe.export.islands if name != AUTO))


def check_training(job: Job) -> None:
    """Raise InputError for training options that could not be carried out, before the training that comes first."""
    if job.data is None:
        return
    between = (step.options for step in job.recipe.steps if isinstance(step.options, RecoverOptions))
    recoveries = (recovery_settings(job.recipe.finetune, options) for options in between)
    for options in (job.recipe.dense, job.recipe.finetune, *recoveries):
        if options is not None:
            check_options(options, job.data.train, job.data.heldout, job.runtime)
    if not job.data.heldout and any(_chooses_by_accuracy(step.options) for step in job.recipe.steps):
        raise InputError(
            "data.heldout is 0, but the layers are chosen by accuracy on held-out images",
            hint="set data.heldout to 0.01 or more",
        )
    if METHODS[job.recipe.steps[-1].method].dilute and job.recipe.finetune.select == "best":
        raise InputError(
            f"finetune.select is 'best', but {job.recipe.steps[-1].method} fades the layers out while it recovers: the "
            "best epoch may be one that still has them",
            hint="set finetune.select = 'last'",
        )


def _chooses_by_accuracy(options: Any) -> bool:
    return hasattr(options, "collection") and getattr(options, "layers", "search") == "search"


def check_bench(job: Job) -> None:
    """Raise InputError for what is no protocol; say where ONNX Runtime cannot measure on the run's device."""
    table = job.recipe.bench
    timing.protocol(table.protocol, batch=table.batch, warmup=table.warmup, runs=table.runs)
    for line in job.onnx_elsewhere():
        job.progress.note(line)


def check_room(job: Job) -> None:
    """Raise OutputError when the disk is too small for what the run will write."""
    keeping = sum(  # steps that slice, and those that choose nothing: they fold or train
        bool(delta.kept or delta.folded) or METHODS[step.method].choice(step.options) is None
        for step, delta in zip(job.recipe.steps, job.deltas, strict=True)
    )
    params = sum(parameter.numel() for parameter in job.blank.parameters())
    check_disk(job.folder, params, trains=not job.structure_only, keeping=keeping)


def check_weights(job: Job, *, fresh: bool) -> None:
    """Raise InputError for weights that cannot be had or do not fit, before anything is trained."""
    table = job.recipe.model
    at_hand = (job.dense_folder / checkpoint.PLAN).is_file() and not fresh
    if table.weights not in ("train", "random") and not at_hand:
        models.create(table.name, job.arch_args, table.weights, new_head=table.new_head)


def check_recovery(job: Job) -> None:
    """Raise InputError for a teacher that cannot be had or cannot teach, before anything is trained."""
    if not job.structure_only:
        pruned = surgery.applied(job.blank, job.structure)
        fades = METHODS[job.recipe.steps[-1].method].dilute is not None
        check_teacher(job.recipe.finetune, job.blank, pruned, job.input, fades=fades)
