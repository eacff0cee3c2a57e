"""A recipe is what the user asked for: TOML, checked as a whole, all mistakes reported at once.

The tables of a recipe are the options of the modules that do the work, so that a field is described in one place:
`[data]` is `data.DataOptions`, `[dense]` and `[finetune]` are `train_options.TrainOptions`, each `[[step]]` the options
of its method.
"""

import hashlib
import json
import tomllib
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from annotated_types import Ge, Le
from pydantic import BaseModel, BeforeValidator, JsonValue, create_model
from pydantic_core import to_jsonable_python

from vitcompress import recipes
from vitcompress.assignments import assign
from vitcompress.errors import InputError, RecipeError, did_you_mean
from vitcompress.exporters.options import ExportOptions, Positive
from vitcompress.io.validation import STRICT, validated, where_keys_are
from vitcompress.methods import METHODS
from vitcompress.training.data import DataOptions
from vitcompress.training.options import TrainOptions


@dataclass(frozen=True)
class ModelTable:
    """The dense model, as `timm.create_model(name, **args)` builds it.

    weights: `hub` (timm's own), `random`, `train` (trained first, as `[dense]` says), or the path of a checkpoint.
    classes: number of classes where no data says it. new_head: take weights of another class count, with a fresh head.
    """

    name: str  # of the architecture in timm
    args: dict[str, JsonValue] = field(default_factory=dict)  # beside the name, as in { img_size = 384 }
    weights: str = "hub"
    classes: Annotated[int, Ge(2)] | None = None
    new_head: bool = False


@dataclass(frozen=True)
class Finetune(TrainOptions):
    """The recovery training after all steps.

    teacher: `dense` (the model before pruning), a run folder, or a timm name. teacher_weights: a checkpoint for a timm
    name; None takes timm's own from its hub.
    """

    teacher: str | None = None
    teacher_weights: str | None = None


def _listed(value: Any) -> Any:
    """One word for a list of one."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class ExportTable(ExportOptions):
    """What is exported, and how; formats: onnx, openvino, trt, trt-rtx, of which each takes what concerns it."""

    formats: tuple[str, ...] = ("onnx",)
    islands: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()


@dataclass(frozen=True)
class ProtocolTable:
    """How artifacts are measured. batch, warmup, runs: None takes the protocol's own."""

    protocol: Literal["paper", "robust"] = "robust"  # `vitcompress bench --help` tells them apart
    batch: Positive | None = None
    warmup: Annotated[int, Ge(0)] | None = None
    runs: Positive | None = None

    @property
    def changes(self) -> dict[str, int | None]:
        """What of the protocol is set otherwise."""
        return {"batch": self.batch, "warmup": self.warmup, "runs": self.runs}


@dataclass(frozen=True)
class BenchTable(ProtocolTable):
    """How dense and compressed are measured. runtimes: those that both are run in."""

    runtimes: tuple[Literal["onnxruntime", "torch"], ...] = ("onnxruntime", "torch")


@dataclass(frozen=True)
class RunTable:
    """Where and how everything runs. device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`.

    threads: of torch on the CPU while it trains, None leaves torch's choice. Models as small as the digits' gain
    nothing from a second thread, and lose much when something else wants that core.
    """

    seed: Annotated[int, Ge(0)] = 0  # of every draw
    device: str = "auto"
    amp: Literal["none", "fp16", "bf16"] = "none"  # half precision while training
    threads: Positive | None = None


@dataclass(frozen=True)
class Published:
    """Figures that somebody else published, quoted in the report beside our own and never mixed with them.

    macs_linear: the published MACs leave out the products inside attention. deviation: why what this recipe comes to,
    as counted without training, is not what was published.
    """

    source: str
    hardware: str
    top1: Annotated[float, Ge(0), Le(100)] | None = None
    params_m: Annotated[float, Ge(0)] | None = None
    macs_g: Annotated[float, Ge(0)] | None = None
    images_per_second: Annotated[float, Ge(0)] | None = None
    speedup: Annotated[float, Ge(0)] | None = None
    macs_linear: bool = False
    deviation: str = ""
    note: str = ""


@dataclass(frozen=True)
class Step:
    """One pruning step: a method of `METHODS` and its options."""

    method: str
    options: Any


class Tables(BaseModel):
    """All of a recipe but its steps, whose form depends on their method."""

    model_config = STRICT

    model: ModelTable
    name: str = ""
    summary: str = ""
    data: DataOptions = DataOptions()
    dense: TrainOptions | None = None
    finetune: Finetune = Finetune()
    export: ExportTable = ExportTable()
    bench: BenchTable = BenchTable()
    run: RunTable = RunTable()
    published: Published | None = None


@dataclass(frozen=True)
class Recipe:
    """A recipe that passed every check that needs neither the model nor the data."""

    name: str
    summary: str
    model: ModelTable
    data: DataOptions
    dense: TrainOptions | None
    steps: tuple[Step, ...]
    finetune: Finetune
    export: ExportTable
    bench: BenchTable
    run: RunTable
    published: Published | None

    def to_toml(self) -> str:
        """Every setting, defaults included; equal recipes give equal text, which loads back to an equal recipe."""
        tables = {name: value for name, value in vars(self).items() if name != "steps"}
        steps = [{"method": step.method, **_plain(step.options)} for step in self.steps]
        return tomli_w.dumps({**_plain(tables), "step": steps})


def load_recipe(source: str, sets: Sequence[str] = (), *, formats: Collection[str] = ()) -> Recipe:
    """Read a recipe by name or from a file, change what `sets` (`table.key=value`) say, and check it.

    formats: the export formats there are; empty leaves them unchecked.

    Raises:
        RecipeError: with every mistake.
        InputError: no such recipe; with the nearest names.
    """
    name, text = read_text(source, "recipe", recipes.names(), recipes.text)
    data = parsed(source, text)
    recipes.check_kind("recipe", source, data)
    return recipe_of(source, {"name": name, **data}, sets, formats=formats)


def parsed(source: str, text: str) -> dict[str, Any]:
    """TOML as plain data. Raises RecipeError for what is none; `source` tells which."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        hint = "`vitcompress recipes show digits_hetdpt > mine.toml` gives one to start from"
        raise RecipeError(source, [f"not valid TOML: {error}"], hint=hint) from None


def recipe_of(source: str, data: dict[str, Any], sets: Sequence[str] = (), *, formats: Collection[str] = ()) -> Recipe:
    """The recipe that `data`, the content of its TOML, is after `sets`.

    Raises:
        RecipeError: with all mistakes of all its tables.
    """
    data = deepcopy(data)
    problems = [problem for text in sets if (problem := assign(data, text))]
    raw_steps = data.pop("step", [])
    tables = validated(Tables, data, "", problems)
    steps = _steps(raw_steps, problems)
    if tables is not None:
        problems += _contradictions(tables, formats)
    if problems or tables is None:
        raise RecipeError(source, problems, hint=where_keys_are(problems, raw_steps))
    return Recipe(steps=steps, **{name: getattr(tables, name) for name in type(tables).model_fields})


def dense_key(recipe: Recipe) -> str:
    """Twelve hex digits of all that the dense model's training depends on: recipes that agree share the model."""
    data = {key: value for key, value in _plain(recipe.data).items() if key != "workers"}
    parts = {"model": recipe.model, "data": data, "dense": recipe.dense, "seed": recipe.run.seed, "amp": recipe.run.amp}
    return hashlib.sha256(json.dumps(_plain(parts), sort_keys=True).encode()).hexdigest()[:12]


def _plain(value: Any) -> dict[str, Any]:
    """Dataclasses as tables; what is None is left out, as TOML has no word for it."""
    return dict(_without_none(to_jsonable_python(value)))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def read_text(source: str, what: str, names: Collection[str], text: Callable[[str], str]) -> tuple[str, str]:
    """The name and the text of a recipe or study (`what`) given by name, as one of `names`, or by path."""
    path = Path(source)
    if source in names or not (path.suffix == ".toml" or path.exists()):
        return source, text(source)
    try:
        return path.stem, path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RecipeError(source, ["not a text file (UTF-8 expected)"]) from None
    except OSError as error:
        hint = f"give the name of one, as in {min(names)}, or the path of a .toml file"
        raise InputError(f"the {what} {source} cannot be read: {error.strerror}", hint=hint) from None


def _steps(raw: Any, problems: list[str]) -> tuple[Step, ...]:
    if not isinstance(raw, list) or not raw or not all(isinstance(step, dict) for step in raw):
        problems.append("step   at least one [[step]] with a method is needed")
        return ()
    found = [_step(dict(step), f"step[{number}].", problems) for number, step in enumerate(raw)]
    return tuple(step for step in found if step is not None)


def _step(data: dict[str, Any], prefix: str, problems: list[str]) -> Step | None:
    method = data.pop("method", None)
    if method not in METHODS:
        choices = f"one of {', '.join(METHODS)}{did_you_mean(str(method), METHODS)}"
        problems.append(
            f"{prefix}method   "
            + (f"is missing: {choices}" if method is None else f"got {method!r}, expected {choices}")
        )
        return None
    table = create_model("StepTable", __config__=STRICT, step=(METHODS[method].options, ...))
    checked = validated(table, {"step": data}, prefix, problems)
    return None if checked is None else Step(method, vars(checked)["step"])


def _contradictions(tables: Tables, formats: Collection[str]) -> list[str]:
    """Mistakes that no table shows alone."""
    found = []
    if tables.model.weights == "train" and tables.dense is None:
        found.append('dense   model.weights = "train" needs a [dense] table that says how to train')
    if tables.model.weights != "train" and tables.dense is not None:
        found.append(f'dense   is only used with model.weights = "train", got {tables.model.weights!r}')
    if tables.finetune.distillation != "none" and tables.finetune.teacher is None:
        found.append('finetune.teacher   distillation needs a teacher: "dense", a timm name, or a run folder')
    if tables.dense is not None and tables.dense.distillation != "none":
        found.append(
            f'dense.distillation   got {tables.dense.distillation!r}, the dense model has no teacher: use "none"'
        )
    found += [
        f"{name}.alpha   got {options.alpha:g}, which gives the labels a negative weight; "
        "up to 1, or set label_weight too"
        for name, options in (("dense", tables.dense), ("finetune", tables.finetune))
        if options is not None and options.alpha > 1 and options.label_weight is None
    ]
    found += [
        f"export.formats   got {name!r}, expected one of {', '.join(formats)}{did_you_mean(name, formats)}"
        for name in tables.export.formats
        if formats and name not in formats
    ]
    return found
