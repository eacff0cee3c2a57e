"""Read and validate a recipe. All problems are reported at once."""

import hashlib
import json
import tomllib
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from vitcompress import recipes
from vitcompress.errors import InputError, RecipeError, did_you_mean
from vitcompress.io.validation import keys_hint, validate, validate_options
from vitcompress.methods import METHODS, find_method
from vitcompress.recipe.overrides import assign
from vitcompress.recipe.schema import Recipe, Step, Tables, plain_data


def load_recipe(source: str, sets: Sequence[str] = (), *, formats: Collection[str] = ()) -> Recipe:
    """Read a recipe by name or from a file, apply `sets` (`table.key=value`) and validate it.

    formats: the known export formats; empty: formats are not checked.

    Raises:
        RecipeError: with all problems.
        InputError: no such recipe; names the nearest.
    """
    name, text = read_text(source, "recipe", recipes.names(), recipes.text)
    data = parse_toml(source, text)
    recipes.check_kind("recipe", source, data)
    return build_recipe(source, {"name": name, **data}, sets, formats=formats)


def parse_toml(source: str, text: str) -> dict[str, Any]:
    """TOML as plain data. Raises RecipeError, which names `source`, if it is not TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        hint = "start from a working recipe: `vitcompress recipes show digits_hetdpt > mine.toml`"
        raise RecipeError(source, [f"not valid TOML: {error}"], hint=hint) from None


def build_recipe(
    source: str, data: dict[str, Any], sets: Sequence[str] = (), *, formats: Collection[str] = ()
) -> Recipe:
    """Validate `data`, the content of a recipe's TOML, after applying `sets`.

    Raises:
        RecipeError: with all problems of all tables.
    """
    data = deepcopy(data)
    problems = [problem for text in sets if (problem := assign(data, text))]
    raw_steps = data.pop("step", [])
    tables = validate(Tables, data, "", problems)
    steps = _steps(raw_steps, problems)
    if tables is not None:
        problems += _contradictions(tables, formats)
    if problems or tables is None:
        raise RecipeError(source, problems, hint=keys_hint(problems, raw_steps))
    return Recipe(steps=steps, **{name: getattr(tables, name) for name in type(tables).model_fields})


def dense_key(recipe: Recipe) -> str:
    """Hash (12 hex digits) of every setting that the trained dense model depends on: equal keys share the model."""
    data = {key: value for key, value in plain_data(recipe.data).items() if key != "workers"}
    parts = {"model": recipe.model, "data": data, "dense": recipe.dense, "seed": recipe.run.seed, "amp": recipe.run.amp}
    return hashlib.sha256(json.dumps(plain_data(parts), sort_keys=True).encode()).hexdigest()[:12]


def read_text(source: str, what: str, names: Collection[str], text: Callable[[str], str]) -> tuple[str, str]:
    """Name and text of a recipe or study (`what`); source: one of `names`, or the path of a TOML file."""
    path = Path(source)
    if source in names or not (path.suffix == ".toml" or path.exists()):
        return source, text(source)
    try:
        return path.stem, path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RecipeError(source, ["not a text file (UTF-8 expected)"]) from None
    except OSError as error:
        hint = f"write the name of a {what}, for example {min(names)}, or the path of a .toml file"
        raise InputError(f"the {what} {source} cannot be read: {error.strerror}", hint=hint) from None


def _steps(raw: Any, problems: list[str]) -> tuple[Step, ...]:
    if not isinstance(raw, list) or not raw or not all(isinstance(step, dict) for step in raw):
        problems.append("step   at least one [[step]] with a method is needed")
        return ()
    steps = [_step(dict(step), f"step[{number}].", problems) for number, step in enumerate(raw)]
    return tuple(step for step in steps if step is not None)


def _step(data: dict[str, Any], prefix: str, problems: list[str]) -> Step | None:
    name = data.pop("method", None)
    if name is None:
        problems.append(f"{prefix}method   is missing: one of {', '.join(METHODS)}")
        return None
    try:
        method = find_method(str(name))
    except InputError as error:
        problems.append(f"{prefix}method   {error.message}: {error.hint}")
        return None
    options = validate_options(method.options, data, prefix, problems)
    return None if options is None else Step(str(name), options)


def _contradictions(tables: Tables, formats: Collection[str]) -> list[str]:
    """Problems between tables."""
    problems = []
    if tables.model.weights == "train" and tables.dense is None:
        problems.append('dense   model.weights = "train" needs a [dense] table with the training options')
    if tables.model.weights != "train" and tables.dense is not None:
        problems.append(f'dense   is only used with model.weights = "train", got {tables.model.weights!r}')
    if tables.finetune.distillation != "none" and tables.finetune.teacher is None:
        problems.append('finetune.teacher   distillation needs a teacher: "dense", a timm name, or a run folder')
    if tables.dense is not None and tables.dense.distillation != "none":
        problems.append(
            f'dense.distillation   got {tables.dense.distillation!r}, the dense model has no teacher: use "none"'
        )
    problems += [
        f"{name}.alpha   got {options.alpha:g}, which gives the labels a negative weight; "
        "use at most 1, or set label_weight too"
        for name, options in (("dense", tables.dense), ("finetune", tables.finetune))
        if options is not None and options.alpha > 1 and options.label_weight is None
    ]
    problems += [
        f"export.formats   got {name!r}, expected one of {', '.join(formats)}{did_you_mean(name, formats)}"
        for name in tables.export.formats
        if formats and name not in formats
    ]
    return problems
