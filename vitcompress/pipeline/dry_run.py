"""What a run would do and cost, and what this machine lacks for it. Nothing is written and nothing is trained."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vitcompress import surgery
from vitcompress.bench import timing
from vitcompress.errors import InputError
from vitcompress.io.progress import Progress
from vitcompress.methods import find_method
from vitcompress.models.cost import Cost, count_cost
from vitcompress.models.weights import check_hub
from vitcompress.pipeline.folder import check_folder, is_done
from vitcompress.pipeline.job import Job, RunOptions, effective, folder_of, job_for
from vitcompress.pipeline.latency import check_clock
from vitcompress.pipeline.preflight import check_formats, check_recovery, check_weights, local_checks, weights_at_hand
from vitcompress.pipeline.report import chosen_by
from vitcompress.pipeline.teacher import check_hub_classes, comes_from_hub
from vitcompress.recipe.schema import Recipe
from vitcompress.training import distributed
from vitcompress.training.data import Splits, check_named, open_data


def dry_run_recipe(recipe: Recipe, options: RunOptions) -> dict[str, Any]:
    """Stages with epochs and images, cost before and after, what is missing here, and notes.

    missing: what a run would be refused for. notes: what it would fetch or measure first, or do otherwise here, and
    that no images were named yet, as costs can be asked for without any.

    Raises:
        InputError: the recipe itself cannot work: no such model, or a budget larger than the model.
    """
    recipe = effective(recipe, options)
    data, missing = _data(recipe, options)
    folder = folder_of(recipe, options)
    runtime = distributed.Runtime(_device(recipe))
    job = job_for(recipe, folder, runtime, Progress(), data, structure_only=options.structure_only)
    return {
        "recipe": recipe.name,
        "folder": str(folder),
        "stages": list(_stages(job)),
        "layers": chosen_by(recipe, searched=False),
        "cost": {"dense": count_cost(job.blank, job.input.size).to_dict(), "compressed": compressed(job).to_dict()},
        "missing": [*missing, *_missing(job, options)],
        "notes": list(_notes(job, options)),
    }


def compressed(job: Job) -> Cost:
    """Cost of a folded model of the size that the steps lead to."""
    model = surgery.apply_to_copy(job.blank, job.structure)
    surgery.fold_linears(model, job.structure)
    return count_cost(model, job.input.size)


def _device(recipe: Recipe) -> torch.device:
    """The recipe's device; the CPU where it is missing, which `_missing` reports."""
    try:
        return distributed.check_device(recipe.run.device, recipe.run.amp)
    except InputError:
        return torch.device("cpu")


def _data(recipe: Recipe, options: RunOptions) -> tuple[Splits | None, list[str]]:
    if options.structure_only or _unnamed(recipe):
        return None, []
    try:
        return open_data(recipe.data, recipe.run.seed), []
    except InputError as error:
        return None, [] if _is_done(folder_of(recipe, options), options) else [_sentence(error)]


def _unnamed(recipe: Recipe) -> str | None:
    """What there is to say of a recipe that needs a folder of images and has none yet."""
    try:
        check_named(recipe.data)
    except InputError as error:
        return _sentence(error)
    return None


def _is_done(folder: Path, options: RunOptions) -> bool:
    """Whether a run would find nothing left to do, and so need no data and no weights."""
    with suppress(OSError):  # told by `check_folder`
        return is_done(folder) and not options.fresh
    return False


def _missing(job: Job, options: RunOptions) -> Iterator[str]:
    """What a run would refuse. Nothing is fetched and no latency is measured to find out."""
    for check in _checks(job, options):
        try:
            check()
        except InputError as error:
            yield _sentence(error)


def _checks(job: Job, options: RunOptions) -> Iterator[Callable[[], object]]:
    """Those of a run, in its order, except for what fetches weights or measures."""
    recipe, fresh = job.recipe, options.fresh
    yield partial(check_folder, job.folder, recipe, structure_only=job.structure_only, fresh=fresh)
    yield partial(check_formats, recipe)
    yield partial(distributed.check_device, recipe.run.device, recipe.run.amp)
    if _is_done(job.folder, options):
        return
    yield from local_checks(job)
    if _fetches_weights(job, options):
        yield partial(check_hub, recipe.model.name, job.arch_args.get("num_classes"), new_head=recipe.model.new_head)
    else:
        yield partial(check_weights, job, fresh=fresh)
    if _fetches_teacher(job):
        yield partial(check_hub_classes, recipe.finetune, job.classes)
    else:
        yield partial(check_recovery, job)
    yield partial(check_clock, job)


def _notes(job: Job, options: RunOptions) -> Iterator[str]:
    """What a run would fetch or measure before it trains, or do otherwise than one may expect."""
    if _is_done(job.folder, options):
        yield f"all is done: {job.folder}; --fresh starts over"
        return
    model, recovery = job.recipe.model, job.recipe.finetune
    if not job.structure_only and (unnamed := _unnamed(job.recipe)):
        yield unnamed
    if _fetches_weights(job, options):
        yield f"weights of {model.name}: fetched from timm's hub at the start, or given with --weights PATH"
    if _fetches_teacher(job):
        yield (
            f"weights of the teacher {recovery.teacher}: fetched from timm's hub at the start, or given with "
            "--set finetune.teacher_weights=FILE"
        )
    yield from _latencies(job)
    yield from job.onnx_elsewhere()


def _fetches_weights(job: Job, options: RunOptions) -> bool:
    return job.recipe.model.weights == "hub" and not weights_at_hand(job, fresh=options.fresh)


def _fetches_teacher(job: Job) -> bool:
    return not job.structure_only and comes_from_hub(job.recipe.finetune)


def _latencies(job: Job) -> Iterator[str]:
    """The latencies that steps aim at, of which a dry run knows nothing."""
    for number, step in enumerate(job.recipe.steps):
        target = find_method(step.method).describe(step.options).latency
        if target is not None:
            yield (
                f"step {number + 1} aims at {target.ms:g} ms on {target.runtime}, which is not checked: a dry run "
                "measures nothing, and the cost above is that of the recipe's shares; a run measures first whether "
                "the latency can be reached, and is refused if not"
            )


def _sentence(error: InputError) -> str:
    return f"{error.message}: {error.hint}" if error.hint else error.message


def _stages(job: Job) -> Iterator[dict[str, Any]]:
    """One row per part of the work; `images` is per epoch, None where the data is not there to count."""
    train = None if job.data is None else len(job.data.train)
    if job.recipe.dense is not None:
        yield _row("train the dense model", 1, job.recipe.dense.epochs, train)
    if not job.structure_only:
        model = job.blank
        for number, step in enumerate(job.recipe.steps):
            several = f"{number + 1}. " if len(job.recipe.steps) > 1 else ""
            model = surgery.apply_to_copy(model, job.deltas[number - 1]) if number else model
            for stage in find_method(step.method).estimate(model, job.family, step.options):
                yield _row(
                    f"{several}{step.method}: {stage.title}",
                    stage.rounds,
                    stage.epochs,
                    _images(job, stage.images, stage.images_per_class, train),
                )
        yield _row("recover", 1, job.recipe.finetune.epochs, train)
    for title in ("fold", *(f"export {name}" for name in job.recipe.export.formats), "verify"):
        yield _row(title, 1, None, None)
    if not job.structure_only:
        yield _row("judge on the test images", 1, None, None if job.data is None else len(job.data.test))
    table = job.recipe.bench
    protocol = timing.protocol(table.protocol, **table.changes)
    yield _row(f"measure ({protocol.name}, batch {protocol.batch})", 1, None, None)


def _row(stage: str, rounds: int, epochs: int | None, images: int | None) -> dict[str, Any]:
    return {"stage": stage, "rounds": rounds, "epochs": epochs, "images": images}


def _images(job: Job, total: int, per_class: int, train: int | None) -> int | None:
    """The size of the part of the training set that a stage looks at."""
    wanted = total or per_class * job.classes
    if not wanted:
        return train
    return wanted if train is None else min(wanted, train)
