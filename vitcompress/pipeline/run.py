"""Run a recipe: check everything that can fail, then the stages from the dense model to a measured compressed model."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from vitcompress.bench import timing
from vitcompress.bench.report.records import CheckRecord, Report
from vitcompress.bench.report.run import read_report
from vitcompress.errors import InputError
from vitcompress.exporters import available_exporter, find_exporter
from vitcompress.exporters.options import AUTO
from vitcompress.exporters.precision import expand_layers
from vitcompress.io.progress import Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.models.create import create_model
from vitcompress.models.weights import check_hub
from vitcompress.pipeline import dense, finalize, prune
from vitcompress.pipeline.dense import check_teacher
from vitcompress.pipeline.export import export_models
from vitcompress.pipeline.folder import check_disk, check_folder, check_writable, open_folder
from vitcompress.pipeline.job import Job, RunOptions, Work, apply_options, create_job
from vitcompress.pipeline.latency import check_latency
from vitcompress.recipe.schema import Recipe
from vitcompress.training import distributed
from vitcompress.training.data import Splits, open_data
from vitcompress.training.distributed import Runtime
from vitcompress.training.loop import check_options


def prepare(
    recipe: Recipe, options: RunOptions, runtime: Runtime, progress: Progress, data: Splits | None = None
) -> Job:
    """Create the job and check everything that can fail. `recipe` has the `options` applied.

    Raises:
        InputError: a subclass that tells what is wrong; nothing was written.
    """
    if data is None and not options.structure_only:
        data = open_data(recipe.data, recipe.run.seed)
    job = create_job(recipe, options, runtime, progress, data)
    for check in local_checks(job):
        check()
    check_weights(job)
    check_teacher(job)
    check_latency(job)
    runtime.barrier()  # after this, no process reads the folder
    return job


def local_checks(job: Job) -> tuple[Callable[[], None], ...]:
    """The checks that download nothing and measure nothing, in order."""
    checks: tuple[Callable[[Job], None], ...] = (check_exports, check_training, check_bench, check_room)
    return (*(partial(check, job) for check in checks), partial(check_writable, job.dense_folder))


def check_formats(recipe: Recipe) -> None:
    """Raise InputError for an unknown export format, one that cannot be built on this machine, or unused options."""
    table, used = recipe.export, set[str]()
    for name in table.formats:
        elsewhere = f"leave it out of --export and run `vitcompress export DIR --format {name}` on the target"
        exporter = available_exporter(name, hint=elsewhere)
        exporter.check(table.only(exporter.uses))
        used |= exporter.uses
    if table.formats and (unused := [option for option in table.changed() if option not in used]):
        raise InputError(
            f"export.{unused[0]} is {getattr(table, unused[0])!r}, which has no effect on {', '.join(table.formats)}",
            hint="leave it out, or export to a format that uses it",
        )


def check_exports(job: Job) -> None:
    """Raise InputError for unknown fp32 layers, and for attentions that an export format does not support."""
    table = job.recipe.export
    expand_layers(job.blank, (name for name in table.islands if name != AUTO))
    for exporter in map(find_exporter, table.formats):
        options = table.only(exporter.uses)
        exporter.check_model(job.pruned, options)
        for step in job.steps if exporter.equal_widths(options) and not job.options.structure_only else ():
            if step.info.equal_widths:
                raise InputError(
                    f"step {step.number + 1}, {step.method.name}, may give q and k another width than v; opset "
                    f"{table.opset} makes one Attention node of them, for which {exporter.name} needs equal widths",
                    hint=f"leave export.opset out, or --set step.{step.number}.{step.info.equal_widths}",
                )


def check_training(job: Job) -> None:
    """Raise InputError for training options that cannot work, including those of later trainings."""
    if job.data is None:
        return
    finetune = job.recipe.finetune
    between = (step.info.training(finetune) for step in job.steps if step.info.training)
    for options in (job.recipe.dense, finetune, *between):
        if options is not None:
            check_options(options, job.data.train, job.data.heldout, job.runtime)
    if not job.data.heldout and any(step.info.uses_heldout for step in job.steps):
        raise InputError(
            "data.heldout is 0, but the layers are chosen by accuracy on held-out images",
            hint="set data.heldout to 0.01 or more",
        )
    if job.steps[-1].method.dilute and finetune.select == "best":
        raise InputError(
            f"finetune.select is 'best', but {job.steps[-1].method.name} fades the layers out during the fine-tuning: "
            "the best epoch may be one that still has them",
            hint="set finetune.select = 'last'",
        )


def check_bench(job: Job) -> None:
    """Raise InputError for an unusable protocol; note if ONNX Runtime cannot measure on the run's device."""
    table = job.recipe.bench
    timing.protocol(table.protocol, **table.changes)
    for line in job.onnx_notes():
        job.progress.note(line)


def check_room(job: Job) -> None:
    """Raise OutputError if the disk is too small for what the run will write."""
    storing = sum(  # steps that slice, fold or train
        bool(step.delta.kept or step.delta.folded) or step.info.choice is None for step in job.steps
    )
    params = sum(parameter.numel() for parameter in job.blank.parameters())
    check_disk(job.folder, params, trains=not job.options.structure_only, storing_steps=storing)


def check_weights(job: Job, *, download: bool = True) -> None:
    """Raise InputError for dense weights that are not available or do not fit.

    download: False checks only that timm has the weights, for the same classes.
    """
    table, args = job.recipe.model, job.base.arch_args
    if table.weights in ("train", "random") or has_dense(job):
        return
    if table.weights == "hub" and not download:
        classes = args.get("num_classes")
        check_hub(table.name, classes if isinstance(classes, int) else None, new_head=table.new_head)
    else:
        create_model(table.name, args, table.weights, new_head=table.new_head)


def has_dense(job: Job) -> bool:
    """Whether an interrupted run has left the dense model, so that its weights are not needed again."""
    return RunFolder(job.dense_folder).plan.is_file() and not job.options.fresh


@dataclass(frozen=True)
class Stage:
    """A part of the work. Stages hand over their results as files, so each of them can be the first of a resumed run.

    output(job): the file that `run` writes last; if it exists, there is nothing to do. None: the stage runs always, and
    skips by itself what exists. estimate(job): its rows of a dry run.
    """

    title: str
    run: Callable[[Job], object]
    output: Callable[[Job], Path] | None
    estimate: Callable[[Job], Iterable[Work]]


# Under torchrun, all processes take part in the first stages; the first process runs the others when they have ended.
SHARED_STAGES = (
    Stage("dense model", dense.create_dense, lambda job: RunFolder(job.dense_folder).plan, dense.estimate_dense),
    Stage("prune", prune.run_steps, lambda job: job.steps[-1].files.plan, prune.estimate_steps),
    Stage("fine-tune", prune.recover, lambda job: job.files.unfolded_plan, prune.estimate_recovery),
)
LATER_STAGES = (
    Stage("fold", finalize.fold_model, lambda job: job.files.plan, lambda job: [Work("fold")]),
    Stage("export", export_models, None, lambda job: [Work(f"export {name}") for name in job.recipe.export.formats]),
    Stage("verify", finalize.verify_run, None, lambda job: [Work("verify")]),
    Stage("evaluate", finalize.evaluate_models, lambda job: job.files.accuracy, finalize.estimate_evaluation),
    Stage("measure", finalize.bench_models, lambda job: job.files.benchmark, finalize.estimate_bench),
    Stage("report", finalize.write_report, lambda job: job.files.report, lambda job: [Work("report")]),
)
STAGES = (*SHARED_STAGES, *LATER_STAGES)


def run_stages(job: Job, stages: Iterable[Stage]) -> None:
    """Run the `stages` whose output does not exist; of several processes the first one decides."""
    for stage in stages:
        output = stage.output and stage.output(job)
        if job.runtime.broadcast(output is not None and output.is_file()):
            job.progress.note(f"{stage.title}: already done, {output}")
        else:
            stage.run(job)


@dataclass(frozen=True)
class RunResult:
    """The run folder and the content of its report.json, which is empty in all processes but the first."""

    folder: Path
    report: Report

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        verify = self.report.get("verify")
        return verify is None or verify["passed"]

    @property
    def pending(self) -> list[CheckRecord]:
        """The checks of exported files that need another machine."""
        checks = (self.report.get("verify") or {"checks": ()})["checks"]
        return [check for check in checks if (check["command"] or "").startswith(f"vitcompress verify {self.folder}")]


def run_recipe(
    recipe: Recipe, options: RunOptions | None = None, progress: Progress | None = None, data: Splits | None = None
) -> RunResult:
    """Run `recipe`, or continue an interrupted run of it.

    Under torchrun, every process calls this function. Training is shared, the first process does the rest, and the
    others return an empty report.

    Args:
        data: images to use instead of those of `recipe.data`.

    Raises:
        InputError: the input is wrong; nothing was written.
        VitcompressError: a stage failed; the same call continues the run.
    """
    options, progress = options or RunOptions(), progress or Progress()
    recipe = apply_options(recipe, options, data)
    folder = options.folder(recipe)
    kind = {"structure_only": options.structure_only, "fresh": options.fresh}
    check_folder(folder, recipe, **kind)
    check_formats(recipe)
    with ExitStack() as stack:
        stack.callback(distributed.stop)
        runtime = distributed.start(recipe.run.device, recipe.run.amp, recipe.data.workers)
        if runtime.broadcast(RunFolder(folder).report.is_file() and not options.fresh):
            progress.note(f"all is done: {folder}; --fresh starts over")
        else:
            job = prepare(recipe, options, runtime, progress, data)
            if runtime.is_main:
                stack.enter_context(open_folder(folder, recipe, **kind))
            runtime.barrier()
            with distributed.cpu_threads(recipe.run.threads):
                run_stages(job, SHARED_STAGES)
            distributed.stop()
            if runtime.is_main:
                run_stages(replace(job, runtime=replace(runtime, rank=0, world_size=1)), LATER_STAGES)
    return RunResult(folder, read_report(folder) if runtime.is_main else cast(Report, {}))
