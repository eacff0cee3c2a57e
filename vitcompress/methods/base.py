"""What a method is, receives and returns: Method, Context, and descriptions of a step for dry run and report."""

import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitcompress.errors import ArtifactError, InputError, PlanError, VitcompressError
from vitcompress.families import Family, copy_model, family_of, prepare_model
from vitcompress.io.files import file_sha256, find_changed_files, read_json, read_record, user_path, write_json
from vitcompress.io.hardware import check_device
from vitcompress.io.progress import SILENT, Progress
from vitcompress.io.tensors import save_tensors
from vitcompress.io.text import Table
from vitcompress.models.checkpoint import load_for, load_strictly
from vitcompress.models.create import InputConfig, check_weights, input_config, plan_of
from vitcompress.plan import Plan
from vitcompress.training.data import Splits, split_images
from vitcompress.training.datasets import Images
from vitcompress.training.distributed import Runtime
from vitcompress.training.loop import train
from vitcompress.training.options import DataOptions, TrainOptions, TrainResult
from vitcompress.training.trainer import TrainingContext, TrainingControls


@dataclass(frozen=True)
class Estimate:
    """A part of a method's work, for a dry run: `rounds` trainings or measurements of `epochs` passes over images.

    images_per_class: of the training set; 0: all of it. images: the total number of images instead.
    """

    title: str
    rounds: int
    epochs: int
    images_per_class: int = 0
    images: int = 0


INPUT_MODEL = "{}"  # placeholder for the name of the model that the step receives
ARBITRARY = "arbitrary, only their number counts"
SPREAD = "arbitrary, spread evenly over the depth; other layers of that number may be somewhat faster or slower"


@dataclass(frozen=True)
class Choice:
    """How a step chooses what to remove, a few words each, for the report.

    by: such as search, published, chance. on: the model that was measured for it, with `{}` for the one that the step
    receives; None: nothing was measured. unscored: how a plan of the same size is chosen when nothing is trained or
    scored; None: it is the same plan.
    """

    by: str
    on: str | None = None
    unscored: str | None = None


MEASURED = Choice("search", INPUT_MODEL, ARBITRARY)
MEASURED_LAYERS = Choice("search", INPUT_MODEL, SPREAD)
TRAINED = Choice("search", f"short trainings of copies of {INPUT_MODEL}", SPREAD)
PUBLISHED = Choice("published")


@dataclass(frozen=True)
class Line:
    """One curve. gone: whether each point belongs to something that was removed. mark: a word at the last point. group:
    curves of one group have one color; default: the name.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    gone: Sequence[bool] = ()
    mark: str = ""
    group: str = ""


@dataclass(frozen=True)
class Chart:
    """Curves on common axes. log: logarithmic vertical axis. by_depth: one line per block. level: a threshold."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log: bool = False
    by_depth: bool = False
    level: float | None = None


def ranked(name: str, scores: Sequence[float], kept: Sequence[int] | int) -> Line:
    """Descending scores, over the share of channels with higher ones. kept: the channels that stay, or their number."""
    order = sorted(range(len(scores)), key=lambda channel: -scores[channel])
    stay = set(order[:kept] if isinstance(kept, int) else kept)
    share = [rank / max(1, len(order) - 1) for rank in range(len(order))]
    return Line(name, share, [scores[c] for c in order], [c not in stay for c in order])


def reject_unused(options: Any, unused: Mapping[str, str | bool], error: type[InputError] = PlanError) -> None:
    """Raise `error` if an option without effect differs from its default.

    unused: name of an option -> why it has no effect, such as "target is 'ratios'"; False if it has one.
    """
    problems = []
    for option in fields(options):
        default = option.default if option.default_factory is MISSING else option.default_factory()
        if unused.get(option.name) and (value := getattr(options, option.name)) != default:
            shown = "" if is_dataclass(value) else f" = {value!r}"
            problems.append(f"{option.name}{shown} has no effect: {unused[option.name]}")
    if problems:
        raise error("; ".join(problems), hint="remove the option, or change the options that it depends on")


AT_ONCE = {"dilution": "only the layers of the last step of a recipe fade out"}  # unused in all others
LEFT_WEIGHTS, LEFT = "weights.safetensors", "left.json"


@dataclass(frozen=True)
class Goal:
    """A latency that a step prunes to: `ms` per call on `runtime`. None: the recipe's batch, the runtime's threads."""

    ms: float
    runtime: str
    batch: int | None = None
    threads: int | None = None

    def __str__(self) -> str:
        """`5 ms on onnxruntime, batch 1`"""
        settings = {"batch": self.batch, "threads": self.threads}
        return ", ".join([f"{self.ms:g} ms on {self.runtime}", *(f"{k} {v}" for k, v in settings.items() if v)])


@dataclass(frozen=True)
class Measured:
    """Median milliseconds of one call with the 95 % interval of the benchmark.

    fastest: of the block that other load disturbed least. repeats: number of measurements. disturbed: why the times may
    be too long; empty on a quiet machine.
    """

    ms: float
    low: float
    high: float
    fastest: float
    repeats: int = 1
    disturbed: str = ""

    def __str__(self) -> str:
        return f"{self.ms:.4g} ms (95 %: {self.low:.4g} to {self.high:.4g})"


# Measures a model as a goal requires, until it is clear on which side of the goal it is, or up to a bound.
Clock = Callable[[nn.Module, Goal], Measured]


@dataclass(frozen=True)
class StepInfo:
    """Properties of a step that follow from its options.

    choice: None if it removes nothing (it trains or folds). training: options of [finetune] -> those of the training
    whose weights the next step starts from; None: the step trains nothing. uses_heldout: whether it compares accuracies
    on held-out images. equal_widths: the options for equal widths of q, k and v (`layout=tied`); empty if they are.
    unused: options that a recipe may hold for another choice, as for `layers`, and why they have no effect. unscored:
    for methods whose `plan` meets a latency by itself, the options with which it needs no data.
    """

    choice: Choice | None = MEASURED
    training: Callable[[TrainOptions], TrainOptions] | None = None
    uses_heldout: bool = False
    equal_widths: str = ""
    unscored: Any = None
    unused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StepReport:
    """Measurements of a step, as tables and as curves. remarks: sentences that a reader must know."""

    tables: Sequence[Table] = ()
    remarks: Sequence[str] = ()
    charts: Sequence[Chart] = ()


def read_memo(folder: Path, name: str) -> Any:
    """What `Context.memo` kept in `folder` as `name`; None if there is nothing."""
    return read_record(folder / f"{name}.json")


def seal(folder: Path) -> None:
    """Record the hash of the weights that a step handed over; to be called before its plan is written."""
    left = folder / LEFT_WEIGHTS
    write_json(folder / LEFT, {"files": {left.name: file_sha256(left)} if left.is_file() else {}})


def check_sealed(folder: Path) -> None:
    """Raise ArtifactError if the weights that a finished step handed over were changed or deleted."""
    changes = find_changed_files(folder / LEFT) if (folder / LEFT).is_file() else {LEFT: f"{LEFT} is missing"}
    if changes:
        message = f"{folder} was changed after its step: {next(iter(changes.values()))}"
        raise ArtifactError(message, hint="restore the file, or start over with --fresh")


def load_handed_over(model: nn.Module, folder: Path, plan: Plan, runtime: Runtime) -> None:
    """Load the weights that the step in `folder` handed over, if any, into its input `model`, which has this `plan`."""
    path = folder / LEFT_WEIGHTS
    on_disk = load_for(path, plan) if runtime.is_main and path.is_file() else None
    tensors: dict[str, Tensor] | None = runtime.broadcast(on_disk)
    if tensors is not None:
        prepared = prepare_model(model)
        with torch.inference_mode():  # the weights may have been created in it
            load_strictly(prepared, tensors, path, assign=False)  # on its device


@dataclass(frozen=True)
class Context:
    """Data, settings and folder of one step. A method never edits its input model, and never reads `data.test`.

    plan: what was already done to the model that the method receives. folder: of this step, for measurements and resume
    state. train: options of [finetune], the default for batch size and augmentation. teacher(): the teacher of the
    recovery, None if there is none. latency: None if latencies cannot be measured. measured_on: what latencies depend
    on, as plain data: hardware, versions, threads. fades: the removed layers fade out during the recovery.
    """

    plan: Plan
    family: Family
    data: Splits
    input: InputConfig
    runtime: Runtime
    folder: Path
    seed: int
    progress: Progress
    train: TrainOptions
    teacher: Callable[[], nn.Module | None] = lambda: None
    latency: Clock | None = None
    measured_on: Mapping[str, object] = field(default_factory=dict)
    fades: bool = False
    _names: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def memo(self, name: str, compute: Callable[[], Any]) -> Any:
        """The JSON data of `compute()`, kept in `folder` as `name`.json. All processes call it; the first one counts.

        Raises VitcompressError for a second call with this name, which would return the data of the first.
        """
        if name in self._names:
            raise VitcompressError(f"two values of one step are called {name!r}", hint="use a name for each")
        self._names.add(name)
        path = self.folder / f"{name}.json"
        if self.runtime.broadcast(path.is_file()):
            return self.runtime.broadcast(read_json(path) if self.runtime.is_main else None)
        data = compute()
        try:
            value = self.runtime.broadcast(json.loads(json.dumps(data, allow_nan=False)))
        except ValueError as error:
            message = f"the measured {name} contain a value that is not finite"
            raise VitcompressError(message, hint="check images and weights for NaN and infinite values") from error
        if self.runtime.is_main:
            write_json(path, value)
        self.runtime.barrier()
        return value

    def run_training(
        self,
        module: nn.Module,
        images: Images,
        heldout: Images | None,
        options: TrainOptions,
        name: str,
        *,
        label: str | None = None,
        controls: TrainingControls | None = None,
    ) -> TrainResult:
        """`train` with the input, seed and processes of this step.

        name: of the subfolder for the training's state. label: shown to users, and part of the seed; default: `name`.
        """
        at = TrainingContext(self.input, self.runtime, self.folder / name, label or name, self.seed, self.progress)
        return train(module, images, heldout, options, at, controls)

    def hand_over(self, model: nn.Module) -> None:
        """Make the next step start from `model`: this step's input, trained. Its plan is applied to these weights.

        Call this before the step returns its plan: a plan on disk means that the weights are on disk, too.
        """
        if self.runtime.is_main:
            save_tensors(self.folder / LEFT_WEIGHTS, model.state_dict(), {"plan": self.plan.digest})
        self.runtime.barrier()


def context_for(
    model: nn.Module,
    data: Any = None,
    *,
    plan: Plan | None = None,
    folder: str | Path | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    **settings: Any,
) -> Context:
    """A context to call a method on `model` without a recipe.

    Args:
        data: a map-style data set of (image, label) pairs, an iterable of (images, labels) batches, or None for methods
            that read no images. A tenth of the images is held out for choices.
        plan: what was already done to `model`; default: `plan_of(model)`.
        folder: for measurements and resume state; default: a temporary folder, deleted with the context.
        settings: other fields of Context, such as `train=TrainOptions(...)` or `progress`.

    Raises:
        DataError: data of another form.
        DeviceError: no such device.
        InputError: `model` was not created by timm, or its weights have no values or several types.
        UnsupportedModelError: no family covers the model.
    """
    check_weights(model, one_type=data is not None)
    copy_model(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})  # as methods do
    context = Context(
        family=family_of(model),
        plan=plan or plan_of(model),
        data=Splits() if data is None else split_images(data, DataOptions.heldout, seed, model),
        input=input_config(model),
        runtime=Runtime(check_device(device), dtype=next(model.parameters()).dtype),
        seed=seed,
        folder=user_path(folder or tempfile.mkdtemp(prefix="vitcompress-")),  # last: an error above leaves none
        **{"progress": SILENT, "train": TrainOptions(), **settings},
    )
    if folder is None:
        weakref.finalize(context, shutil.rmtree, context.folder, ignore_errors=True)
    return context


@dataclass(frozen=True)
class Method:
    """A way to choose what to remove.

    Required:
        name: in recipes, as `method = "name"`.
        summary: one line for the progress display and the JSON Schema.
        options: a frozen dataclass of the options that a recipe may set, each described by `Doc`.
        plan(model, context, options): a `context.plan.delta(...)` of what to remove from `model`. May train copies,
            leaves the model as it is, and keeps measurements with `context.memo`, so that a killed run can resume.
        structure(model, family, base, options): a `base.delta(...)` of the same size without data or scores. `model` is
            on torch's meta device: it has shapes, but no weights to rank by. Raises PlanError if the options ask for
            more than the model has, or if one of them has no effect.

    Optional:
        estimate(model, family, options): the trainings and measurements of `plan`, for a dry run (model as above).
        describe(options): properties that the pipeline needs to know.
        report(folder): tables, remarks and charts of the step's folder; empty if nothing was measured.
        dilute(options, epochs): gate value of the removed layers in each epoch of the recovery, for methods that fade
            them out in the last step of a recipe; None removes them at once, as all other steps do.
        resize(options, model, family, strength): the options for other sizes, to reach a latency. strength: above 0, at
            most 1; the larger, the smaller the model. `structure` raises PlanError for impossible sizes.
    """

    name: str
    summary: str
    options: type[Any]
    plan: Callable[[nn.Module, Context, Any], Plan]
    structure: Callable[[nn.Module, Family, Plan, Any], Plan]
    estimate: Callable[[nn.Module, Family, Any], list[Estimate]] = lambda model, family, options: []
    describe: Callable[[Any], StepInfo] = lambda options: StepInfo()
    report: Callable[[Path], StepReport] = lambda folder: StepReport()
    dilute: Callable[[Any, int], Callable[[int], float]] | None = None
    resize: Callable[[Any, nn.Module, Family, float], Any] = lambda options, model, family, strength: options

    def __post_init__(self) -> None:
        if not is_dataclass(self.options):
            message = f"the options of method {self.name} cannot be used: got {self.options!r}, expected a dataclass"
            raise InputError(message, hint="see help(vitcompress.Method)")


def check_result(method: Method, result: Any) -> Plan:
    """`result`, which `plan` or `structure` of a method returned. Raises InputError if it is no plan."""
    if not isinstance(result, Plan):
        message = f"the method {method.name} returned {result!r:.60}, not a plan"
        raise InputError(message, hint="return `context.plan.delta(...)`, see help(vitcompress.Method)")
    return result
