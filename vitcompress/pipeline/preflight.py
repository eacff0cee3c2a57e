"""Everything that can fail is tried here, before the first training step and before anything is written."""

from collections.abc import Callable
from functools import partial

from vitcompress import surgery
from vitcompress.bench import timing
from vitcompress.errors import InputError
from vitcompress.exporters import EXPORTERS, available_exporter
from vitcompress.exporters.options import AUTO
from vitcompress.exporters.precision import expand_layers
from vitcompress.io.progress import Progress
from vitcompress.methods import find_method
from vitcompress.models.checkpoint import PLAN
from vitcompress.models.create import create_model
from vitcompress.pipeline.folder import check_disk, check_writable
from vitcompress.pipeline.job import Job, RunOptions, folder_of, job_for
from vitcompress.pipeline.latency import check_latency
from vitcompress.pipeline.teacher import check_teacher
from vitcompress.recipe.schema import Recipe
from vitcompress.training.data import open_data
from vitcompress.training.distributed import Runtime
from vitcompress.training.loop import check_options


def prepare(recipe: Recipe, options: RunOptions, runtime: Runtime, progress: Progress) -> Job:
    """Try everything that can fail before the first training step; `recipe` is `effective` already.

    Raises:
        InputError: a subclass that says what is wrong; nothing was written.
    """
    folder = folder_of(recipe, options)
    data = None if options.structure_only else open_data(recipe.data, recipe.run.seed)
    job = job_for(recipe, folder, runtime, progress, data, structure_only=options.structure_only)
    _ = job.structure
    for check in local_checks(job):
        check()
    check_weights(job, fresh=options.fresh)
    check_recovery(job)
    check_latency(job, fresh=options.fresh)
    runtime.barrier()  # no process looks at the folder after this
    return job


def local_checks(job: Job) -> tuple[Callable[[], None], ...]:
    """The checks that download nothing and measure nothing, in the order in which `prepare` makes them."""
    return (
        partial(check_islands, job),
        partial(check_widths, job),
        partial(check_training, job),
        partial(check_bench, job),
        partial(check_room, job),
        partial(check_writable, job.dense_folder),
    )


def check_formats(recipe: Recipe) -> None:
    """Raise InputError for an export target that cannot be built on this machine, or options that no target uses."""
    table = recipe.export
    for name in table.formats:
        elsewhere = f"leave it out of --export and run `vitcompress export DIR --format {name}` on the target"
        exporter = available_exporter(name, hint=elsewhere)
        exporter.check(table.only(exporter.uses))
    used = {option for name in table.formats for option in EXPORTERS[name].uses}
    if table.formats and (idle := [option for option in table.given() if option not in used]):
        raise InputError(
            f"export.{idle[0]} is {getattr(table, idle[0])!r}, which means nothing to {', '.join(table.formats)}",
            hint="leave it out, or export to a format that uses it",
        )


def check_islands(job: Job) -> None:
    """Raise InputError for an fp32 island that the model before pruning does not have."""
    expand_layers(job.blank, (name for name in job.recipe.export.islands if name != AUTO))


def check_widths(job: Job) -> None:
    """Raise InputError for steps that leave attentions, or may do so, which an export target does not take."""
    table, pruned = job.recipe.export, surgery.apply_to_copy(job.blank, job.structure)
    for exporter in (EXPORTERS[name] for name in table.formats if name in EXPORTERS):
        options = table.only(exporter.uses)
        exporter.check_model(pruned, options)
        if exporter.equal_widths(options) and not job.structure_only:
            _check_equal(job.recipe, exporter.name)


def _check_equal(recipe: Recipe, target: str) -> None:
    for number, step in enumerate(recipe.steps):
        if change := find_method(step.method).describe(step.options).equal_widths:
            raise InputError(
                f"step {number + 1}, {step.method}, gives q and k another width than v where that is best; as one "
                f"Attention node, which opset {recipe.export.opset} makes of them, {target} takes equal widths only",
                hint=f"leave export.opset out, or --set step.{number}.{change}",
            )


def check_training(job: Job) -> None:
    """Raise InputError for training options that could not be carried out, before the training that comes first."""
    if job.data is None:
        return
    steps = [find_method(step.method).describe(step.options) for step in job.recipe.steps]
    recoveries = (step.training(job.recipe.finetune) for step in steps if step.training)
    for options in (job.recipe.dense, job.recipe.finetune, *recoveries):
        if options is not None:
            check_options(options, job.data.train, job.data.heldout, job.runtime)
    if not job.data.heldout and any(step.uses_heldout for step in steps):
        raise InputError(
            "data.heldout is 0, but the layers are chosen by accuracy on held-out images",
            hint="set data.heldout to 0.01 or more",
        )
    if find_method(job.recipe.steps[-1].method).dilute and job.recipe.finetune.select == "best":
        raise InputError(
            f"finetune.select is 'best', but {job.recipe.steps[-1].method} fades the layers out while it recovers: the "
            "best epoch may be one that still has them",
            hint="set finetune.select = 'last'",
        )


def check_bench(job: Job) -> None:
    """Raise InputError for an unusable protocol; note where ONNX Runtime cannot measure on the run's device."""
    table = job.recipe.bench
    timing.protocol(table.protocol, **table.changes)
    for line in job.onnx_elsewhere():
        job.progress.note(line)


def check_room(job: Job) -> None:
    """Raise OutputError when the disk is too small for what the run will write."""
    keeping = sum(  # steps that slice, and those that choose nothing: they fold or train
        bool(delta.kept or delta.folded) or find_method(step.method).describe(step.options).choice is None
        for step, delta in zip(job.recipe.steps, job.deltas, strict=True)
    )
    params = sum(parameter.numel() for parameter in job.blank.parameters())
    check_disk(job.folder, params, trains=not job.structure_only, keeping=keeping)


def check_weights(job: Job, *, fresh: bool) -> None:
    """Raise InputError for weights that cannot be had or do not fit, before anything is trained."""
    table = job.recipe.model
    if table.weights not in ("train", "random") and not weights_at_hand(job, fresh=fresh):
        create_model(table.name, job.arch_args, table.weights, new_head=table.new_head)


def weights_at_hand(job: Job, *, fresh: bool) -> bool:
    """Whether an earlier start has left the dense model, so that its weights are not needed again."""
    return (job.dense_folder / PLAN).is_file() and not fresh


def check_recovery(job: Job) -> None:
    """Raise InputError for a teacher that cannot be had or cannot teach, before anything is trained."""
    if not job.structure_only:
        pruned = surgery.apply_to_copy(job.blank, job.structure)
        fades = find_method(job.recipe.steps[-1].method).dilute is not None
        check_teacher(job.recipe.finetune, job.blank, pruned, job.input, fades=fades)
