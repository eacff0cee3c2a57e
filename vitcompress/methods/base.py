"""What every pruning method works with and returns: its context, its choice, its report."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress.errors import ArtifactError, PlanError
from vitcompress.families import Family
from vitcompress.io.files import differing, file_sha256, read_json, write_json
from vitcompress.io.progress import Progress
from vitcompress.io.tensors import save_tensors
from vitcompress.models.create import InputConfig
from vitcompress.plan import Plan
from vitcompress.training.data import Splits
from vitcompress.training.distributed import Runtime
from vitcompress.training.loaders import Images
from vitcompress.training.loop import train
from vitcompress.training.options import TrainOptions, TrainResult
from vitcompress.training.trainer import TrainingContext, TrainingControls


@dataclass(frozen=True)
class Stage:
    """A part of a method's work, for a dry run: `rounds` trainings or measurements of `epochs` passes over images.

    images_per_class: of the training set, 0 for all of it. images: the total instead, where that is what is set.
    """

    title: str
    rounds: int
    epochs: int
    images_per_class: int = 0
    images: int = 0


GIVEN = "{}"  # stands for the model that the step was given
ARBITRARY = "arbitrary, only their number counts"
SPREAD = "arbitrary, spread evenly over the depth; other layers of that number may be somewhat faster or slower"


@dataclass(frozen=True)
class Choice:
    """Where what a step removes comes from, a few words each.

    by: a search, a publication, chance. on: what was looked at for that, with `{}` for the model that the step was
    given; None where nothing was. unscored: where a plan of the same size comes from when nothing is trained or
    scored; None where it is the same plan.
    """

    by: str
    on: str | None = None
    unscored: str | None = None


MEASURED = Choice("search", GIVEN, ARBITRARY)
MEASURED_LAYERS = Choice("search", GIVEN, SPREAD)
TRAINED = Choice("search", f"short trainings of copies of {GIVEN}", SPREAD)
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


def reject_unused(options: Any, unused: Mapping[str, str]) -> None:
    """Raise PlanError if an option without effect differs from its default.

    unused: name of an option -> why it has no effect, such as "target is 'ratios'".
    """
    problems = []
    for option in fields(options):
        default = option.default if option.default_factory is MISSING else option.default_factory()
        if option.name in unused and (value := getattr(options, option.name)) != default:
            problems.append(f"{option.name} = {value!r} has no effect: {unused[option.name]}")
    if problems:
        raise PlanError("; ".join(problems), hint="remove the option, or change the options that it depends on")


LEFT_WEIGHTS, LEFT = "weights.safetensors", "left.json"


@dataclass(frozen=True)
class Clock:
    """Tells milliseconds of one call of a model on `onnxruntime` or `torch`.

    median: of a few calls, as there are dozens of candidates. undisturbed: of a longer measurement that leaves out
    other load on the machine, for decisions on which more depends than a candidate.
    """

    median: Callable[[nn.Module, str], float]
    undisturbed: Callable[[nn.Module, str], float]


def seal(folder: Path) -> None:
    """Record what a step has left in its `folder`, before its plan says that it is done."""
    left = folder / LEFT_WEIGHTS
    write_json(folder / LEFT, {"files": {left.name: file_sha256(left)} if left.is_file() else {}})


def check_sealed(folder: Path) -> None:
    """Raise ArtifactError when what a finished step left was changed or is gone: other weights would be used."""
    wrong = differing(folder / LEFT) if (folder / LEFT).is_file() else [f"{LEFT} is missing"]
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
    """One way to choose what goes.

    name, summary: as the recipe and `vitcompress recipes` write them. options: dataclass of what a recipe may set. plan(model, context, options): the plan to carry out after the
    model's own; may train copies, leaves the model as it is, keeps what it measured in the context's folder.
    structure(model, family, base, options): a plan of the same size without data or scoring; raises PlanError when
    the options ask for more than the model has. stages(options, prunable): the work ahead on a model with so many
    attentions and activations, for a dry run. dilute(options, epochs): gate value of the removed layers at each epoch
    of the recovery, for methods that fade them out; None removes them at once. tables(folder), charts(folder),
    remarks(folder): what the step measured, for the report, and what its reader must know. choice(options): where what
    it removes comes from; None for a step that chooses nothing. apart(options): whether q and k of an attention may end
    with more channels per head than v, or with fewer.

    timed(options): where a latency is aimed at, options with which `plan` needs a clock but no data; else None.
    check_reach(model, family, base, options, clock): raises PlanError when such a latency is out of reach.
    """

    name: str
    summary: str
    options: type[Any]
    plan: Callable[[nn.Module, Context, Any], Plan]
    structure: Callable[[nn.Module, Family, Plan, Any], Plan]
    stages: Callable[[Any, int], list[Stage]] = lambda options, prunable: []
    dilute: Callable[[Any, int], Callable[[int], float]] | None = None
    tables: Callable[[Path], list[dict[str, Any]]] = lambda folder: []
    charts: Callable[[Path], list[Chart]] = lambda folder: []
    remarks: Callable[[Path], list[str]] = lambda folder: []
    choice: Callable[[Any], Choice | None] = lambda options: MEASURED_LAYERS
    apart: Callable[[Any], bool] = lambda options: False
    timed: Callable[[Any], Any | None] = lambda options: None
    check_reach: Callable[[nn.Module, Family, Plan, Any, Clock], None] = lambda *_: None
