"""What every pruning method works with and returns: its context, its choice, its report."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress.errors import ArtifactError, PlanError
from vitcompress.families import Family
from vitcompress.io.files import file_sha256, find_changed_files, read_json, write_json
from vitcompress.io.progress import Progress
from vitcompress.io.tensors import save_tensors
from vitcompress.models.create import InputConfig
from vitcompress.plan import Plan
from vitcompress.training.data import Splits
from vitcompress.training.datasets import Images
from vitcompress.training.distributed import Runtime
from vitcompress.training.loop import train
from vitcompress.training.options import TrainOptions, TrainResult
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

    by: a search, a publication, chance. on: the model that was measured for it, with `{}` for the one that the step
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
    """One curve. gone: whether each point belongs to something that was removed. mark: a short word at the last point.
    group: what curves of one colour have in common; the name where that is empty.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    gone: Sequence[bool] = ()
    mark: str = ""
    group: str = ""


@dataclass(frozen=True)
class Chart:
    """Curves on common axes. log: of the vertical axis. by_depth: one line per block, in forward order. level: a
    threshold, told as `level_name`.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log: bool = False
    by_depth: bool = False
    level: float | None = None
    level_name: str = ""


def ranked(name: str, scores: Sequence[float], kept: Sequence[int]) -> Line:
    """Scores from the highest on, over the share of channels that score higher; what is not in `kept` is gone."""
    order = sorted(range(len(scores)), key=lambda channel: -scores[channel])
    stay = set(kept)
    share = [rank / max(1, len(order) - 1) for rank in range(len(order))]
    return Line(name, share, [scores[c] for c in order], [c not in stay for c in order])


def reject_unused(options: Any, unused: Mapping[str, str | bool]) -> None:
    """Raise PlanError if an option without effect differs from its default.

    unused: name of an option -> why it has no effect, such as "target is 'ratios'"; False if it has one.
    """
    problems = []
    for option in fields(options):
        default = option.default if option.default_factory is MISSING else option.default_factory()
        if unused.get(option.name) and (value := getattr(options, option.name)) != default:
            problems.append(f"{option.name} = {value!r} has no effect: {unused[option.name]}")
    if problems:
        raise PlanError("; ".join(problems), hint="remove the option, or change the options that it depends on")


LEFT_WEIGHTS, LEFT = "weights.safetensors", "left.json"


@dataclass(frozen=True)
class Clock:
    """Measures the milliseconds of one call of a model on `onnxruntime` or `torch`.

    median: of a few calls, for dozens of candidates. undisturbed: of a longer measurement that excludes other load on
    the machine, for decisions on which more depends than on one candidate.
    """

    median: Callable[[nn.Module, str], float]
    undisturbed: Callable[[nn.Module, str], float]


@dataclass(frozen=True)
class LatencyTarget:
    """A latency that a step prunes to: `ms` per call on `runtime`.

    unscored: options with which `plan` needs a clock but no data. check(model, family, base, clock): raises PlanError
    if no structure that the step can choose has this latency.
    """

    ms: float
    runtime: str
    unscored: Any
    check: Callable[[nn.Module, Family, Plan, Clock], None]


@dataclass(frozen=True)
class StepInfo:
    """Properties of a step that follow from its options.

    choice: how it chooses what to remove; None: it chooses nothing (it trains or folds).
    training: from the options of [finetune] to those of the training whose weights the next step starts from; None:
        the next step starts from the weights that this one received.
    uses_heldout: whether it compares accuracies on held-out images.
    equal_widths: how to set the options so that q, k and v of an attention keep equal widths (`layout=tied`); empty if
        they always do.
    latency: the latency that it prunes to, if any.
    """

    choice: Choice | None = MEASURED
    training: Callable[[TrainOptions], TrainOptions] | None = None
    uses_heldout: bool = False
    equal_widths: str = ""
    latency: LatencyTarget | None = None


Table = dict[str, Any]


@dataclass(frozen=True)
class StepReport:
    """Measurements of a step. tables: title, columns and rows of text. remarks: sentences about these measurements that
    a reader must know. charts: the same measurements as curves.
    """

    tables: Sequence[Table] = ()
    remarks: Sequence[str] = ()
    charts: Sequence[Chart] = ()


def table(title: str, columns: str, rows: Iterable[Sequence[Any]]) -> Table:
    """A table of a report. columns: names separated by `, `."""
    return {"title": title, "columns": columns.split(", "), "rows": [list(map(str, row)) for row in rows]}


def seal(folder: Path) -> None:
    """Record what a step has left in its `folder`, before its plan says that it is done."""
    left = folder / LEFT_WEIGHTS
    write_json(folder / LEFT, {"files": {left.name: file_sha256(left)} if left.is_file() else {}})


def check_sealed(folder: Path) -> None:
    """Raise ArtifactError when what a finished step left was changed or is gone: other weights would be used."""
    wrong = find_changed_files(folder / LEFT) if (folder / LEFT).is_file() else [f"{LEFT} is missing"]
    if wrong:
        raise ArtifactError(
            f"{folder} is not as its step left it: {wrong[0]}",
            hint="restore the file, or start over with --fresh",
        )


@dataclass(frozen=True)
class Context:
    """One step's surroundings.

    plan: what was already done to the model that the method is given. folder: the step's own, for resume state.
    train: the recipe's fine-tuning options, the default source of batch size and augmentation. teacher(): who teaches
    during recovery, None where nobody does. latency: the clock, None where nothing can be measured. measured_on(): what
    a latency belongs to, as plain data: hardware, versions, threads.
    """

    arch: str
    arch_args: Mapping[str, Any]
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
    measured_on: Callable[[], Mapping[str, Any]] = dict

    def memo(self, name: str, compute: Callable[[], Any]) -> Any:
        """The JSON data of `compute()`, computed once and kept in the step's folder; every process gets the same."""
        path = self.folder / f"{name}.json"
        if self.runtime.broadcast(path.is_file()):
            return self.runtime.broadcast(read_json(path) if self.runtime.is_main else None)
        value = self.runtime.broadcast(json.loads(json.dumps(compute())))
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
        """`train` in the surroundings of this step.

        name: of the folder below the step's that holds the training's state, and its label where none is given.
        """
        at = TrainingContext(self.input, self.runtime, self.folder / name, label or name, self.seed, self.progress)
        return train(module, images, heldout, options, at, controls)

    def hand_over(self, model: nn.Module) -> None:
        """Continue with the weights of `model`, retrained but of the shapes that the step was given.

        The step's own plan is applied to these weights, and so is what follows. To be called before the step returns
        its plan: a plan on the disk means that the weights are there too.
        """
        if self.runtime.is_main:
            save_tensors(self.folder / LEFT_WEIGHTS, model.state_dict(), {"plan": self.plan.digest})
        self.runtime.barrier()


@dataclass(frozen=True)
class Method:
    """A way to choose what to remove.

    Required:
        name: in recipes, as `method = "name"`.
        summary: one line for `vitcompress recipes`.
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
            them out; None removes them at once.
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
