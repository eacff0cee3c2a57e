"""What a run would do and cost, and what is missing for it here. Writes nothing and trains nothing."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vitcompress import surgery
from vitcompress.errors import InputError
from vitcompress.io.progress import Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.models.cost import Cost, count_cost
from vitcompress.models.weights import check_hub
from vitcompress.pipeline.folder import check_folder
from vitcompress.pipeline.job import Job, RunOptions, apply_options, create_job, output_folder
from vitcompress.pipeline.latency import check_clock
from vitcompress.pipeline.preflight import check_formats, check_weights, has_dense, local_checks
from vitcompress.pipeline.report import describe_choice
from vitcompress.pipeline.stages import STAGES
from vitcompress.pipeline.teacher import check_hub_classes, check_teacher, comes_from_hub
from vitcompress.recipe.schema import Recipe
from vitcompress.training import distributed
from vitcompress.training.data import Splits, check_named, open_data


def dry_run_recipe(recipe: Recipe, options: RunOptions) -> dict[str, Any]:
    """Stages with epochs and images, cost before and after, what is missing here, and notes.

    missing: reasons for which a run would be rejected. notes: downloads and measurements that a run starts with, what
    it does differently on this machine, and that no data folder is set, as costs do not need one.

    Raises:
        InputError: the recipe itself cannot work: no such model, or a budget larger than the model.
    """
    recipe = apply_options(recipe, options)
    data, missing = _open_data(recipe, options)
    runtime = distributed.Runtime(_device(recipe))
    job = create_job(recipe, options, runtime, Progress(), data)
    return {
        "recipe": recipe.name,
        "folder": str(job.folder),
        "stages": [asdict(work) for stage in STAGES for work in stage.estimate(job)],
        "layers": describe_choice(recipe, searched=False),
        "cost": {"dense": count_cost(job.blank, job.input.size).to_dict(), "compressed": final_cost(job).to_dict()},
        "missing": [*missing, *_problems(job, options)],
        "notes": list(_notes(job, options)),
    }


def final_cost(job: Job) -> Cost:
    """Cost of the folded model after all steps, counted on shapes."""
    model = deepcopy(job.models[-1])
    surgery.fold_linears(model, job.structure)
    return count_cost(model, job.input.size)


def _device(recipe: Recipe) -> torch.device:
    """The recipe's device, or the CPU if it is missing, which `_problems` reports."""
    try:
        return distributed.check_device(recipe.run.device, recipe.run.amp)
    except InputError:
        return torch.device("cpu")


def _open_data(recipe: Recipe, options: RunOptions) -> tuple[Splits | None, list[str]]:
    """The data, or why it cannot be opened."""
    if options.structure_only or _missing_path(recipe):
        return None, []
    try:
        return open_data(recipe.data, recipe.run.seed), []
    except InputError as error:
        return None, [] if _is_done(output_folder(recipe, options), options) else [_sentence(error)]


def _missing_path(recipe: Recipe) -> str | None:
    """The note for a recipe that needs a folder of images and names none."""
    try:
        check_named(recipe.data)
    except InputError as error:
        return _sentence(error)
    return None


def _is_done(folder: Path, options: RunOptions) -> bool:
    """Whether a run has nothing to do, and so needs no data and no weights."""
    with suppress(OSError):  # reported by `check_folder`
        return RunFolder(folder).report.is_file() and not options.fresh
    return False


def _problems(job: Job, options: RunOptions) -> Iterator[str]:
    for check in _checks(job, options):
        try:
            check()
        except InputError as error:
            yield _sentence(error)


def _checks(job: Job, options: RunOptions) -> Iterator[Callable[[], object]]:
    """The checks of a run, in its order, except those that download or measure."""
    recipe, fresh = job.recipe, options.fresh
    yield partial(check_folder, job.folder, recipe, structure_only=job.structure_only, fresh=fresh)
    yield partial(check_formats, recipe)
    yield partial(distributed.check_device, recipe.run.device, recipe.run.amp)
    if _is_done(job.folder, options):
        return
    yield from local_checks(job)
    if _downloads_weights(job, options):
        yield partial(check_hub, recipe.model.name, job.arch_args.get("num_classes"), new_head=recipe.model.new_head)
    else:
        yield partial(check_weights, job, fresh=fresh)
    if _downloads_teacher(job):
        yield partial(check_hub_classes, recipe.finetune, job.classes)
    else:
        yield partial(check_teacher, job)
    yield partial(check_clock, job)


def _notes(job: Job, options: RunOptions) -> Iterator[str]:
    if _is_done(job.folder, options):
        yield f"all is done: {job.folder}; --fresh starts over"
        return
    if not job.structure_only and (note := _missing_path(job.recipe)):
        yield note
    if _downloads_weights(job, options):
        yield f"A run first downloads the weights of {job.recipe.model.name} from timm's hub; --weights PATH avoids it."
    if _downloads_teacher(job):
        yield (
            f"A run first downloads the weights of the teacher {job.recipe.finetune.teacher} from timm's hub; "
            "--set finetune.teacher_weights=FILE avoids it."
        )
    for step in job.steps:
        if (target := step.info.latency) is not None:
            yield (
                f"Step {step.number + 1} prunes to {target.ms:g} ms on {target.runtime}, which a dry run does not "
                "check, as it measures nothing; the cost above is that of the recipe's ratios. A run first measures "
                "whether the latency can be reached, and is rejected if not."
            )
    yield from job.onnx_notes()


def _downloads_weights(job: Job, options: RunOptions) -> bool:
    return job.recipe.model.weights == "hub" and not has_dense(job, fresh=options.fresh)


def _downloads_teacher(job: Job) -> bool:
    return not job.structure_only and comes_from_hub(job.recipe.finetune)


def _sentence(error: InputError) -> str:
    return f"{error.message}: {error.hint}" if error.hint else error.message
