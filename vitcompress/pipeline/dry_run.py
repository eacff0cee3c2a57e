"""What a run would do and cost, and what is missing for it here; and published costs compared with those counted here.

Writes nothing and trains nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from vitcompress.bench import suite
from vitcompress.errors import InputError
from vitcompress.io.hardware import check_device
from vitcompress.io.progress import SILENT, Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.methods.width import deploy
from vitcompress.models.arguments import allowed_arguments
from vitcompress.models.cost import Cost, count_cost
from vitcompress.models.create import OVERLAY
from vitcompress.models.source import DEFAULT, Setting
from vitcompress.models.weights import NOT_FILES
from vitcompress.pipeline.dense import check_finished, examine_dense, has_dense, preview_dense, why_unchecked
from vitcompress.pipeline.folder import check_folder
from vitcompress.pipeline.job import Job, RunOptions, apply_options, create_job
from vitcompress.pipeline.latency import describe_searches
from vitcompress.pipeline.preflight import check_formats, list_checks
from vitcompress.pipeline.report import describe_choice
from vitcompress.pipeline.training import downloads_teacher
from vitcompress.recipe.load import load_recipe
from vitcompress.recipe.schema import Recipe
from vitcompress.training import distributed
from vitcompress.training.data import check_named, open_data

# How to state what accuracy depends on and weights often lack.
PIXELS = {"mean": "--mean V,V,V", "std": "--std V,V,V"}
CROP = {"interpolation": "--interpolation NAME", "crop_pct": "--crop-pct V"}
CLOSE = 0.005  # allowed relative difference of a published figure, if the printed digits differ


@dataclass(frozen=True)
class Work:
    """One row of a dry run: `rounds` trainings or measurements of `epochs` passes over `images` images.

    None: does not apply, or is not known without the data.
    """

    stage: str
    rounds: int = 1
    epochs: int | None = None
    images: int | None = None


@dataclass(frozen=True)
class DryRun:
    """What a run would do and cost. missing: reasons for which it would be rejected.

    settings: of the dense model, with their sources. notes: downloads and measurements that a run starts with, what it
    does differently on this machine, and that no data folder is set, as costs do not need one. cost: empty if the data
    cannot be opened, as it defines the number of classes. dense: accuracy of the dense model, if it was measured;
    failed: why a run would stop after that.
    """

    recipe: str
    folder: str
    stages: list[Work]
    layers: str
    cost: dict[str, Cost]
    missing: list[str]
    notes: list[str]
    settings: tuple[Setting, ...]
    dense: dict[str, object] | None = None
    failed: str | None = None


def dry_run_recipe(recipe: Recipe, options: RunOptions, *, check: bool = False) -> DryRun:
    """Stages with epochs and images, cost before and after, what is missing here, and notes.

    check: load the weights of the dense model and measure its accuracy, if nothing is missing. Raises InputError if the
    recipe itself cannot work: no such model, or a budget larger than the model.
    """
    recipe = apply_options(recipe, options)
    folder, data, done = options.folder(recipe), None, False
    with suppress(OSError):  # reported by `check_folder`
        done = options.is_done(RunFolder(folder)) and options.expect is None  # then it needs no data and no weights
    no_path, unopened = list[str](), list[str]()
    if not options.structure_only and not (no_path := _list_problems([partial(check_named, recipe.data)])):
        try:
            data = open_data(recipe.data, recipe.run.seed)
        except InputError as error:
            unopened = [error.sentence(": ")]
    device = torch.device("cpu")
    with suppress(InputError):  # reported below
        device = check_device(recipe.run.device, recipe.run.amp)
    job = create_job(recipe, options, distributed.Runtime(device, workers=recipe.data.workers), SILENT, data)
    checks: list[Callable[[], object]] = [
        partial(check_formats, recipe),
        partial(check_folder, folder, recipe, structure_only=options.structure_only, fresh=options.fresh),
        partial(check_device, recipe.run.device, recipe.run.amp),
    ]
    checks += [partial(check_finished, recipe, folder)] if done else list_checks(job, dry=True, opened=not unopened)
    problems = _list_problems(checks)
    missing = problems if done and not problems else unopened + problems
    plan = DryRun(
        recipe=recipe.name,
        folder=str(folder),
        stages=list(list_work(job)),
        layers=describe_choice(recipe, searched=False),
        cost={} if unopened else {"dense": count_cost(job.blank, job.input.size), "compressed": count_final_cost(job)},
        missing=missing,
        notes=[f"all is done: {folder}; --fresh starts over"] if done and not missing else [*no_path, *_notes(job)],
        settings=job.resolved.settings,
    )
    return _check_dense(job, plan) if check and not missing else plan


def _check_dense(job: Job, plan: DryRun) -> DryRun:
    """`plan` with the accuracy of the dense model."""
    later = "the dense model is trained first" if job.recipe.model.weights == "train" and not has_dense(job) else ""
    if reason := why_unchecked(job) or later:
        return replace(plan, notes=[*plan.notes, f"there is nothing to check yet: {reason}"])
    accuracy = preview_dense(job)
    notes, problem = examine_dense(job, accuracy)
    failed = problem.sentence(": ") if problem else None
    return replace(plan, notes=[*plan.notes, *notes], dense=accuracy.to_dict(), failed=failed)


def list_work(job: Job) -> Iterator[Work]:
    """What the stages of a run do."""
    recipe, trains = job.recipe, not job.options.structure_only
    images, test = (None, None) if job.data is None else (len(job.data.train), len(job.data.test))
    if recipe.dense is not None:
        yield Work("train the dense model", 1, recipe.dense.epochs, images)
    for step in job.steps if trains else ():
        name = f"{step.number + 1}. {step.method.name}" if len(job.steps) > 1 else step.method.name
        parts = step.method.estimate(step.model, job.family, step.options)
        if not parts:
            yield Work(name)
        for part in parts:
            counts = part.images or part.images_per_class * job.classes or images, images
            least = min((count for count in counts if count is not None), default=None)
            yield Work(f"{name}: {part.title}", part.rounds, part.epochs, least)
    if trains:
        yield Work("fine-tune the pruned model", 1, recipe.finetune.epochs, images)
    yield Work("fold")
    if trains and recipe.quantize.epochs:
        yield Work(f"train the folded model in {recipe.export.precision}", 1, recipe.quantize.epochs, images)
    if job.options.control:
        yield Work("train the control", 1, job.extra_epochs, images)
    yield from map(Work, (*(f"export {name}" for name in recipe.export.formats), "verify"))
    if trains:
        yield Work("evaluate on the test images", images=test)
    (protocol,) = suite.BenchOptions(recipe.bench.protocol, recipe.bench.batch).protocols()
    if recipe.bench.runtimes != ():
        yield Work(f"measure ({protocol.name}, batch {protocol.batch})")
    yield Work("report")


def count_final_cost(job: Job) -> Cost:
    """Cost of the folded model after all steps, counted on shapes."""
    return count_cost(deploy(job.pruned, job.structure, job.structure.delta()), job.input.size)


def _list_problems(checks: Iterable[Callable[[], object]]) -> list[str]:
    problems = []
    for check in checks:
        try:
            check()
        except InputError as error:
            problems.append(error.sentence(": "))
    return list(dict.fromkeys(problems))  # several checks open an exporter


def _notes(job: Job) -> Iterator[str]:
    """Downloads, what is not checked, and differences on this machine."""
    if job.recipe.model.weights == "hub" and not has_dense(job):
        yield f"A run first downloads the weights of {job.recipe.model.name} from timm's hub; --weights PATH avoids it."
    if downloads_teacher(job):
        teacher = f"the teacher {job.recipe.finetune.teacher} from timm's hub"
        yield f"A run first downloads the weights of {teacher}; --set finetune.teacher_weights=FILE avoids it."
    size = "img_size=N" if "img_size" in allowed_arguments(job.resolved.arch) else f"{OVERLAY}.input_size=[3,N,N]"
    defaults = [setting.name for setting in job.resolved.settings if DEFAULT in setting.source]
    crop = CROP if PIXELS.keys() & set(defaults) else {}  # who states mean and std knows the preprocessing
    state = {"img_size": f"--set model.args.{size}", "num_heads": "--set model.args.num_heads=N", **PIXELS, **crop}
    assumed = [name for name in defaults if name in state]
    read = job.recipe.model.weights not in NOT_FILES and not job.weights_problem
    if assumed and read and not job.options.structure_only:
        yield (
            f"The weights do not state {', '.join(assumed)}. If you trained with other values than timm's defaults, "
            f"state them: {', '.join(state[name] for name in assumed)}. `--dry-run --check` measures the dense model."
        )
    yield from describe_searches(job)
    yield from job.notes()


@dataclass(frozen=True)
class Size:
    """A published and a counted size. off: their relative difference; None if nothing was published."""

    published: float | None
    counted: float
    off: float | None


@dataclass(frozen=True)
class SizeComparison:
    """Published and counted sizes of a recipe, in millions of parameters and G MACs.

    macs_linear: published and counted MACs exclude the products inside attention. met: whether all figures agree in
    their printed digits or to 0.5 %; None if neither was published. reason: why they differ.
    """

    recipe: str
    params_m: Size
    macs_g: Size
    macs_linear: bool
    met: bool | None
    reason: str


def compare_sizes(names: Iterable[str], progress: Progress = SILENT) -> list[SizeComparison]:
    """Compare those of these recipes that reproduce published figures."""
    recipes = [(recipe, recipe.published) for recipe in map(load_recipe, names) if recipe.published is not None]
    options, runtime = RunOptions(structure_only=True), distributed.Runtime(torch.device("cpu"))
    comparisons = []
    for recipe, published in recipes:
        cost = count_final_cost(create_job(apply_options(recipe, options), options, runtime, SILENT, None))
        macs = cost.macs_linear if published.macs_linear else cost.macs
        pairs = ((published.params_m, cost.params / 1e6), (published.macs_g, macs / 1e9))
        params, macs_g = (Size(figure, counted, figure and counted / figure - 1) for figure, counted in pairs)
        agree = [
            round(counted, len(str(figure).partition(".")[2])) == figure or abs(counted / figure - 1) <= CLOSE
            for figure, counted in pairs
            if figure is not None
        ]
        met = all(agree) if agree else None
        comparisons.append(SizeComparison(recipe.name, params, macs_g, published.macs_linear, met, published.deviation))
        progress.update("count", len(comparisons), len(recipes), recipe.name)
    return comparisons
