"""Check everything that can fail in a run before it writes or trains anything."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from vitcompress.bench import suite
from vitcompress.errors import DataError, InputError, OutputError
from vitcompress.exporters.options import AUTO
from vitcompress.exporters.precision import expand_layers
from vitcompress.exporters.runtimes import EXPORTERS, available_exporter, find_exporter, runtime_of
from vitcompress.io.progress import Progress
from vitcompress.models.create import create_model, image_size
from vitcompress.models.source import list_by_source
from vitcompress.models.weights import check_hub
from vitcompress.pipeline.dense import check_source, examine_dense, has_dense, preview_dense, why_unchecked
from vitcompress.pipeline.folder import ELSEWHERE, check_writable, nearest_existing
from vitcompress.pipeline.job import Job, RunOptions, create_job
from vitcompress.pipeline.latency import check_clock, check_latency
from vitcompress.pipeline.training import check_teacher
from vitcompress.plan import is_within
from vitcompress.recipe.schema import QuantizeTable, Recipe
from vitcompress.training.data import Splits, check_classes, open_data
from vitcompress.training.datasets import as_images
from vitcompress.training.distributed import Runtime
from vitcompress.training.loaders import check_channels
from vitcompress.training.loop import check_options

# float32 weights of the dense model and of the compressed one before and after folding, their exports, and one file
# that is being written. Training adds a resume state with optimizer, average and best weights, twice while one replaces
# the other. A step that slices, folds or trains keeps its input model and the weights that it trained.
BYTES_PER_PARAMETER, BYTES_OF_TRAINING, BYTES_PER_STEP = 4 * 6, 4 * 10, 4 * 2


def prepare(recipe: Recipe, options: RunOptions, runtime: Runtime, progress: Progress, data: Splits | None) -> Job:
    """Create the job and check everything that can fail; writes nothing. `recipe` has the `options` applied."""
    if not options.structure_only:
        data = data or open_data(recipe.data, recipe.run.seed)
        check_classes(data.name, data.classes, data.train)
    job = create_job(recipe, options, runtime, progress, data)
    for source, values in list_by_source(job.resolved.settings).items():
        progress.note(f"from {source}: {values}")
    for line in job.notes():
        progress.note(line)
    for check in list_checks(job):
        check()
    early = options.fresh and options.expect is not None and recipe.model.weights != "train"  # before files are removed
    if early and (problem := examine_dense(job, preview_dense(job))[1]):
        raise problem
    runtime.barrier()  # after this, no process reads the folder
    return job


def list_checks(job: Job, *, dry: bool = False, opened: bool = True) -> Iterator[Callable[[], object]]:
    """All checks, in order. dry: measure nothing, download only `hf-hub:`. opened: the number of classes is known."""
    yield from (partial(check, job) for check in (check_exports, check_batch, check_training, check_expect, check_room))
    yield partial(check_writable, job.dense_folder)
    yield partial(check_weights, job, download=not dry)
    if opened:
        yield partial(check_teacher, job, download=not dry)
    yield partial(check_clock if dry else check_latency, job)


def check_formats(recipe: Recipe) -> None:
    """Raise InputError for an unknown format or runtime, a format that this machine cannot write, or unused options."""
    table, used = recipe.export, set[str]()
    for name in table.formats:
        elsewhere = f"leave it out of --export and run `vitcompress export DIR --format {name}` on the target"
        exporter = available_exporter(name, hint=elsewhere)
        exporter.check(table.only(exporter.supported(table)))
        used |= exporter.supported(table)
    if table.formats and (unused := [option for option in table.changed() if option not in used]):
        message = f"export.{unused[0]} is {getattr(table, unused[0])!r}, without effect on {', '.join(table.formats)}"
        raise InputError(message, hint="leave it out, or export to a format that uses it")
    known = ("torch", *map(runtime_of, {**EXPORTERS, **dict.fromkeys(table.formats)}))
    if unknown := [name for name in recipe.bench.runtimes or () if name not in known]:
        raise InputError(f"bench.runtimes names {unknown[0]!r}", hint=f"use {', '.join(known)}, or leave it out")


def check_batch(job: Job) -> None:
    """Raise InputError if engines would be measured on this machine with a batch that they do not take."""
    bench, formats, (low, _, high) = job.recipe.bench, job.recipe.export.formats, job.recipe.export.batch
    (protocol,) = suite.BenchOptions(bench.protocol, bench.batch).protocols()
    for exporter in map(find_exporter, () if low <= protocol.batch <= high else formats):
        measured = bench.runtimes is None or runtime_of(exporter.name) in bench.runtimes
        if measured and "batch" in exporter.uses and exporter.cannot_run() is None:
            message = f"bench.batch is {protocol.batch}, outside export.batch of {exporter.name}, {low} to {high}"
            raise InputError(message, hint="set bench.batch or export.batch, or omit the runtime in bench.runtimes")


def check_exports(job: Job) -> None:
    """Raise InputError for unknown fp32 layers, no images to calibrate int8 or fp8 on, and unsupported attentions."""
    table = job.recipe.export
    if table.eight_bits and job.options.structure_only:
        other = "--set export.precision=fp32" + " --set quantize=" * (job.recipe.quantize != QuantizeTable())
        hint = f"omit --structure-only, or use {other}"
        raise InputError(f"export.precision {table.precision} needs images of the training data", hint=hint)
    islands = [name for name in table.islands if name != AUTO]
    expand_layers(job.blank, islands)
    products = [name for name, module in job.blank.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    products += expand_layers(job.blank, ("softmax",)) if table.precision == "fp8" else ()
    for island in islands if table.eight_bits else ():
        if not any(is_within(product, expand_layers(job.blank, (island,))) for product in products):
            message = f"the island {island} has no effect in {table.precision}"
            raise InputError(message, hint="omit it in export.islands, or name linear layers")
    for exporter in map(find_exporter, table.formats):
        options = table.only(exporter.supported(table))
        exporter.check_model(job.pruned, options)
        for step in job.steps if exporter.equal_widths(options) and not job.options.structure_only else ():
            if step.info.equal_widths:
                widths = f"step {step.number + 1}, {step.method.name}, may give q and k another width than v"
                node = f"opset {table.opset} makes one Attention node of them"
                hint = f"leave export.opset out, or --set step.{step.number}.{step.info.equal_widths}"
                raise InputError(f"{widths}; {node}, for which {exporter.name} needs equal widths", hint=hint)


def check_training(job: Job) -> None:
    """Raise InputError for options of a training that cannot work, images that do not fit, or no test images."""
    if job.data is None:
        return
    if not job.data.test:  # only data from Python may have none
        raise DataError("the data has no test images to evaluate the result on", hint="add them, or use vc.finetune")
    check_channels(job.data.test, job.input)
    for images in (job.data.train, job.data.heldout, job.data.test):
        as_images(images, image_size(job.blank), job.classes)
    for options in (job.recipe.dense, *reversed(job.trainings)):
        if options is not None:
            check_options(options, job.data.train, job.data.heldout, job.input, job.runtime)
    if not job.data.heldout and any(step.info.uses_heldout for step in job.steps):
        message = "data.heldout is 0, but the layers are chosen by accuracy on held-out images"
        raise InputError(message, hint="set data.heldout to 0.01 or more")
    if job.steps[-1].method.dilute and job.recipe.finetune.select == "best":
        reason = f"{job.steps[-1].method.name} fades the layers out during the fine-tuning"
        message = f"finetune.select is 'best', but {reason}: the best epoch may be one that still has them"
        raise InputError(message, hint="set finetune.select = 'last'")


def check_room(job: Job) -> None:
    """Raise OutputError if the disk has too little room for weights, exports and, if the run trains, resume state."""
    # Steps that slice, fold or train.
    storing = len([step for step in job.steps if step.delta.kept or step.delta.folded or step.info.choice is None])
    trains, parent = not job.options.structure_only, nearest_existing(job.folder)
    per_parameter = BYTES_PER_PARAMETER + BYTES_OF_TRAINING * trains + BYTES_PER_STEP * (storing + job.options.control)
    need, free = per_parameter * sum(map(torch.Tensor.numel, job.blank.parameters())), shutil.disk_usage(parent).free
    if free < need:
        sizes = [f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB" for count in (free, need)]
        message = "{} has {} free, this run needs about {}".format(parent, *sizes)
        raise OutputError(message, hint=f"free some space, or {ELSEWHERE}")


def check_weights(job: Job, *, download: bool = True) -> None:
    """Raise InputError for dense weights that are not available or do not fit, or are not those of the run so far.

    download: False checks only that timm has the weights, for the same classes.
    """
    table, arch, args = job.recipe.model, job.base.arch, job.base.arch_args
    if has_dense(job):
        return check_source(job)
    if table.weights in ("train", "random"):
        return
    if job.weights_problem is not None:
        raise job.weights_problem
    if job.resolved.weights == "hub" and not download:
        check_hub(arch, args.get("num_classes"), new_head=table.new_head)
    else:
        create_model(arch, args, job.resolved.weights, new_head=table.new_head)


def check_expect(job: Job) -> None:
    """Raise InputError for an expected accuracy without images to measure it on."""
    if job.options.expect is not None and (reason := why_unchecked(job)):
        raise InputError(f"--expect cannot be checked: {reason}", hint="leave it out, or use test or held-out images")
