"""A study as data: TOML (recipes/README.md), checked as a whole, all mistakes reported at once."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, JsonValue

from vitcompress.errors import InputError, RecipeError, did_you_mean
from vitcompress.exporters.options import Positive
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.validation import STRICT, Doc, Matching, validate, validate_options
from vitcompress.methods.options import find_options
from vitcompress.recipe.load import assign, build_recipe, key_path, read_table
from vitcompress.recipe.schema import ProtocolTable, Recipe

Name = Annotated[str, Matching(r"^[a-z][a-z0-9_]*$")]


@dataclass(frozen=True)
class SpeedTable(ProtocolTable):
    """How all models are measured: interleaved, in ONNX Runtime on the CPU."""

    threads: Annotated[Positive, Doc("of ONNX Runtime")] = 1


@dataclass(frozen=True)
class RowTable:
    """One method at one budget."""

    name: Annotated[Name, Doc("of the row's run folders")]
    curve: Annotated[str, Doc("series that this row is a point of; rows of one method at several budgets share it")]
    title: Annotated[str, Doc("of the row in tables")]
    step: Annotated[tuple[dict[str, JsonValue], ...], Doc("the steps of the row's recipe")]
    against: Annotated[tuple[str, ...], Doc("curves to compare with, each at the nearest cost")] = ()
    set: Annotated[tuple[str, ...], Doc("changes of the row's recipe, as in `export.precision=int8`")] = ()


class _Tables(BaseModel):
    model_config = STRICT

    summary: str = ""
    epochs: Positive
    like: str = ""
    speed: SpeedTable = SpeedTable()
    base: dict[str, JsonValue]
    options: dict[str, dict[str, JsonValue]] = {}
    row: tuple[RowTable, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Row(RowTable):
    """A row with its recipe for seed 0."""

    recipe: Recipe = field(repr=False, kw_only=True)


@dataclass(frozen=True)
class Study:
    """A study that passed every check that needs neither the model nor the data."""

    name: str
    summary: str
    epochs: int
    speed: SpeedTable
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Run:
    """One row with one seed. folder: its run folder, absolute."""

    row: Row
    seed: int
    folder: Path
    recipe: Recipe = field(repr=False)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def evaluated(self) -> str:
        """What is compared, as the report names it: the ONNX file if the recipe exports it, else the model."""
        exported = RunFolder(self.folder).exported("model", ".onnx")
        return exported.name if "onnx" in self.recipe.export.formats else "compressed"

    @property
    def is_done(self) -> bool:
        files = RunFolder(self.folder)
        return files.report.is_file() and (self.evaluated == "compressed" or (files.path / self.evaluated).is_file())


def load_study(source: str, sets: Sequence[str] = (), rows: Sequence[str] = ()) -> Study:
    """Read a study by name or from a file, apply `sets` (`table.key=value`), and select `rows`; all if empty.

    Raises RecipeError with every mistake, and InputError, with the nearest names, if there is no such study or row.
    """
    name, data = read_table("study", source)
    other = read_table("study", like)[1] if isinstance(like := data.get("like"), str) else {}
    for key in ("speed", "base", "options"):
        shared, own = other.get(key), data.get(key, {})
        if isinstance(shared, dict) and isinstance(own, dict):
            data[key] = {**shared, **own}
    label = f"of the study {source}"
    problems = [problem for text in sets if (problem := assign(data, text, strict=True))]
    if "like" in other:
        problems.append(f"like   got {like!r}, which itself is like {other['like']!r}: name that study")
    if data.get("like") != like:
        keys = ", ".join(key for key in _Tables.model_fields if key != "like")
        problems.append(f"like   is only read from the file, --set changes {keys}")
    tables = validate(_Tables, data, "", problems)
    if tables is None:
        raise RecipeError(label, problems)
    selected, wrong = _select(tables.row, rows), defaultdict[str, list[str]](list)
    problems += _contradictions(tables, selected, sets)
    built = [row for table in selected if (row := _build_row(name, tables, table, wrong)) is not None]
    if not (problems or wrong):  # as this imports torch
        built = [_divide_epochs(row, tables.epochs, wrong) for row in built]
    for problem, names in wrong.items():  # a mistake in [base] is one of all rows, and reported once
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        place = f"all {len(selected)} rows" if len(names) == len(selected) > 1 else f"row {names[0]}{others}"
        problems.append(f"{place}: {problem}")
    if problems:
        raise RecipeError(label, problems)
    return Study(name, tables.summary, tables.epochs, tables.speed, tuple(built))


def _divide_epochs(row: Row, total: int, wrong: dict[str, list[str]]) -> Row:
    """The row, whose fine-tuning has what other trainings leave of `total`; nothing left is added to `wrong`."""
    left = total - epochs_outside_recovery(row.recipe)
    if left < 1:
        wrong[f"epochs = {total} leaves {left} for the fine-tuning, expected 1 or more"].append(row.name)
    return replace(row, recipe=replace(row.recipe, finetune=replace(row.recipe.finetune, epochs=left)))


def epochs_outside_recovery(recipe: Recipe) -> int:
    """Epochs of the trainings that contribute to the final weights beside the fine-tuning: the dense model, steps that
    train, and the training in eight bits.

    Trainings that only help a method to choose do not count.
    """
    other = recipe.quantize.epochs + (recipe.dense.epochs if recipe.dense is not None else 0)
    from vitcompress.methods.table import find_method  # imports torch

    steps = [find_method(step.method).describe(step.options).training for step in recipe.steps]
    return other + sum(training(recipe.finetune).epochs for training in steps if training)


def _build_row(study: str, tables: _Tables, row: RowTable, wrong: dict[str, list[str]]) -> Row | None:
    """The row with its recipe; adds its problems to `wrong`: problem -> names of rows."""
    steps = [{**tables.options.get(str(step.get("method")), {}), **step} for step in row.step]
    data: dict[str, object] = {"summary": f"{study}: {row.title}", **tables.base, "step": steps}
    try:
        recipe = build_recipe(row.name, data, row.set)
    except RecipeError as error:
        for problem in error.problems:
            wrong[problem].append(row.name)
        return None
    if recipe.run.seed:
        wrong["run.seed   has no effect: runs have the seeds 0, 1, ...; --seeds sets their number"].append(row.name)
    if recipe.export.precision != "fp32" and "onnx" not in recipe.export.formats:
        wrong["export.formats   must contain onnx: the accuracy in this precision is that of the file"].append(row.name)
    return Row(**vars(row), recipe=recipe)


def _contradictions(tables: _Tables, selected: Sequence[RowTable], sets: Sequence[str]) -> Iterator[str]:
    """Mistakes that involve several tables; [options] that no selected row uses, if `sets` or a mistake is in them."""
    curves = {row.curve for row in tables.row}
    for key in ("name", "title"):  # tables and pictures name a row by its title
        counts = Counter(getattr(row, key) for row in tables.row)
        yield from (f"row {value}: there are two of this {key}" for value, count in counts.items() if count > 1)
    yield from (f"row {row.name}.title   is that of the dense model" for row in tables.row if row.title == "dense")
    for own, curve in ((row, curve) for row in tables.row for curve in row.against):
        if curve not in (others := curves - {own.curve}):
            yield f"row {own.name}.against   got {curve!r}, expected another row's curve{did_you_mean(curve, others)}"
    finetune = tables.base.get("finetune")
    places = ["base.finetune.epochs"] if isinstance(finetune, dict) and "epochs" in finetune else []
    for name, keys in ((row.name, key_path(text)) for row in tables.row for text in row.set):
        places += [f"row {name}.set finetune.epochs"] if keys in (["finetune"], ["finetune", "epochs"]) else []
        if keys[:1] in (["model"], ["data"], ["dense"]) or keys in (["run"], ["run", "amp"]):
            yield f"row {name}.set   changes model, data, dense or run.amp, which all rows share: set base"
    yield from (f"{place}   follows from the study's total: set epochs instead" for place in places)
    of_rows = (key for key in ("name", "summary", "step") if key in tables.base)
    yield from (f"base.{key}   has no effect: every row has its own" for key in of_rows)
    for method, options in tables.options.items():
        steps = [step for row in selected for step in row.step if step.get("method") == method]
        problems = list[str]()
        try:
            if not steps:  # otherwise the options are checked in these steps
                validate_options(find_options(method), options, f"options.{method}.", problems)
        except InputError as error:
            problems.append(f"options.{method}   {error.message}")
        for text in () if problems else sets:
            match key_path(text):
                case ["options", name, *keys] if name == method and all({*keys[:1]} & {*step} for step in steps):
                    reason = f"no selected row has a step of the method {method} that takes it"
                    problems.append(f"--set {text}   has no effect: {reason}")
        yield from problems


def _select(rows: Sequence[RowTable], names: Sequence[str]) -> list[RowTable]:
    """The rows with these `names` in the study's order; all if empty."""
    known = [row.name for row in rows]
    if unknown := [name for name in names if name not in known]:
        message = f"the study has no row {unknown[0]!r}{did_you_mean(unknown[0], known)}"
        raise InputError(message, hint=f"its rows: {', '.join(known)}")
    return [row for row in rows if not names or row.name in names]
