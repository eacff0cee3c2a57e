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
from vitcompress.training.data import check_named, open_data


def dry_run_recipe(recipe: Recipe, options: RunOptions) -> dict[str, Any]:
    """Stages with epochs and images, cost before and after, what is missing here, and notes.

    missing: reasons for which a run would be rejected. notes: downloads and measurements that a run starts with, what
    it does differently on this machine, and that no data folder is set, as costs do not need one.

    Raises:
        InputError: the recipe itself cannot work: no such model, or a budget larger than the model.
    """
    recipe = apply_options(recipe, options)
    folder, data, missing = output_folder(recipe, options), None, list[str]()
    done = _is_done(folder, options)
    no_path = None if options.structure_only else _problem(partial(check_named, recipe.data))
    if not options.structure_only and no_path is None:
        try:
            data = open_data(recipe.data, recipe.run.seed)
        except InputError as error:
            missing = [] if done else [_sentence(error)]
    device_problem = _problem(partial(distributed.check_device, recipe.run.device, recipe.run.amp))
    device = torch.device("cpu") if device_problem else distributed.check_device(recipe.run.device, recipe.run.amp)
    job = create_job(recipe, options, distributed.Runtime(device), Progress(), data)
    missing += [problem for check in _checks(job, options, done) if (problem := _problem(check))]
    notes = (
        [f"all is done: {folder}; --fresh starts over"] if done else [*filter(None, [no_path]), *_notes(job, options)]
    )
    return {
        "recipe": recipe.name,
        "folder": str(folder),
        "stages": [asdict(work) for stage in STAGES for work in stage.estimate(job)],
        "layers": describe_choice(recipe, searched=False),
        "cost": {"dense": count_cost(job.blank, job.input.size).to_dict(), "compressed": final_cost(job).to_dict()},
        "missing": missing,
        "notes": notes,
    }


def final_cost(job: Job) -> Cost:
    """Cost of the folded model after all steps, counted on shapes."""
    model = deepcopy(job.models[-1])
    surgery.fold_linears(model, job.structure)
    return count_cost(model, job.input.size)


def _is_done(folder: Path, options: RunOptions) -> bool:
    """Whether a run has nothing to do, and so needs no data and no weights."""
    with suppress(OSError):  # reported by `check_folder`
        return RunFolder(folder).report.is_file() and not options.fresh
    return False


def _problem(check: Callable[[], object]) -> str | None:
    try:
        check()
    except InputError as error:
        return _sentence(error)
    return None


def _checks(job: Job, options: RunOptions, done: bool) -> Iterator[Callable[[], object]]:
    """The checks of a run, in its order, except those that download or measure."""
    recipe, fresh = job.recipe, options.fresh
    yield partial(check_folder, job.folder, recipe, structure_only=job.structure_only, fresh=fresh)
    yield partial(check_formats, recipe)
    yield partial(distributed.check_device, recipe.run.device, recipe.run.amp)
    if done:
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
    """Downloads, what is not checked, and differences on this machine."""
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
