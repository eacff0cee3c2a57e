"""Read and validate a recipe. All problems are reported at once."""

import re
import tomllib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, cast

from vitcompress import recipes
from vitcompress.errors import InputError, RecipeError, did_you_mean
from vitcompress.io.files import DEEPEST, json_key, parse_plain, read_text, user_path
from vitcompress.io.text import format_range
from vitcompress.io.validation import UNKNOWN_KEY, keys_hint, validate, validate_options
from vitcompress.methods.options import OPTIONS, find_options
from vitcompress.recipe.schema import QuantizeTable, Recipe, Step, Tables, plain_data
from vitcompress.training.options import BUILT_IN

REMOVED = object()  # the value of `key=` in an assignment: the default applies
KINDS = {"recipe": (recipes.names, recipes.text), "study": (recipes.study_names, recipes.study_text)}
ANY_STEP = {"step": [{"method": "fold"}]}  # for recipes whose steps do not matter


def load_recipe(
    source: str | Path, sets: str | Sequence[str] = (), model: str | None = None, weights: str | None = None
) -> Recipe:
    """Read a recipe by name or from a file, apply `sets` (`table.key=value`) and validate it.

    model, weights: to use instead of the recipe's. Its arguments do not apply to another model, nor its [dense] to
    weights that are not trained. Raises RecipeError with all problems, and InputError, which names the nearest, if
    there is no such recipe.
    """
    _, data = read_table("recipe", source := str(source))
    if isinstance(table := data.setdefault("model", {}) if model else data.get("model"), dict):
        table |= {} if model is None else {"name": model, "args": {}}
        table |= {} if weights is None else {"weights": weights}
    if weights not in (None, "train"):
        data.pop("dense", None)
    return build_recipe(source, data, [sets] if isinstance(sets, str) else sets)


def load_recipe_of_run(path: Path) -> Recipe:
    """The tables of a recipe.toml, with other steps: no package or version with the methods of the run is needed.

    Raises RecipeError with all problems of the tables, InputError or ArtifactError if it cannot be read or was changed.
    """
    from vitcompress.io.manifest import check_unchanged  # imports torch

    check_unchanged(path.parent, path)
    return build_recipe(str(path), {**read_table("recipe", str(path))[1], **ANY_STEP})


def parse_toml(source: str, text: str) -> dict[str, Any]:
    """TOML as plain data. Raises RecipeError, which names `source`, if it is not TOML."""
    try:
        return dict(parse_plain(tomllib.loads, text))
    except ValueError as error:
        hint = "start from a working recipe: `vitcompress recipes show digits_hetdpt > mine.toml`"
        raise RecipeError(source, [f"not valid TOML: {error}"], hint=hint) from None


def build_recipe(source: str, data: dict[str, object], sets: Sequence[str] = ()) -> Recipe:
    """Validate `data`, the content of a recipe's TOML, after applying `sets`. Raises RecipeError with all problems."""
    data = deepcopy(data)
    problems = [problem for text in sets if (problem := assign(data, text))]
    data["name"] = data["name"] if data.get("name", "") != "" else Path(source).stem  # its name or file
    raw_steps, finetune = data.get("step", []), data.get("finetune")
    if isinstance(finetune, dict) and "teacher" in finetune:
        finetune.setdefault("distillation", "soft")
    tables, steps = validate(Tables, data, "", problems), _steps(raw_steps, problems)
    recipe = Recipe(steps=steps, **{name: v for name, v in vars(tables).items() if name != "step"}) if tables else None
    problems += _contradictions(recipe) if recipe else []
    problems += _ineffective(sets, recipe) if recipe and not problems else []
    if problems or recipe is None:
        raise RecipeError(source, problems, hint=keys_hint(problems, raw_steps if isinstance(raw_steps, list) else []))
    return recipe


def dense_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings that identify the trained dense model. Without `workers`: with augmentation they change batches."""
    data = {key: value for key, value in asdict(recipe.data).items() if key != "workers"}
    run = {"seed": recipe.run.seed, "amp": recipe.run.amp}
    return {"model": asdict(recipe.model), "data": data, "dense": recipe.dense and asdict(recipe.dense), "run": run}


def dense_key(recipe: Recipe) -> str:
    """The `json_key` of `dense_settings`: equal keys share the model."""
    return json_key(plain_data(dense_settings(recipe)))


def read_table(what: str, source: str) -> tuple[str, dict[str, Any]]:
    """Name and content of a `recipe` or `study`, not validated. source: its name, or the path of a TOML file.

    Raises InputError if there is none, or it is of the other kind, and RecipeError if it is not TOML.
    """
    path, (list_names, read) = user_path(source), KINDS[what]
    names = list_names()
    if source in names or not (path.suffix == ".toml" or path.exists()):
        name, text = source, read(source)
    else:
        try:
            name, text = path.stem, read_text(path)
        except ValueError:
            raise RecipeError(source, ["not a text file (UTF-8 expected)"]) from None
        except OSError as error:
            hint = f"write the name of a {what}, for example {min(names)}, or the path of a .toml file"
            raise InputError(f"the {what} {source} cannot be read: {error.strerror}", hint=hint) from None
    data = parse_toml(source if what == "recipe" else f"of the study {source}", text)
    recipes.check_kind(what, source, data)
    return name, data


def _steps(raw: Any, problems: list[str]) -> tuple[Step, ...]:
    if not isinstance(raw, list) or not raw:
        problems.append("step   at least one [[step]] with a method is needed")
        return ()
    steps = [_step(step, f"step.{number}.", problems) for number, step in enumerate(raw)]
    return tuple(step for step in steps if step is not None)


def _step(data: Any, prefix: str, problems: list[str]) -> Step | None:
    data = dict(data) if isinstance(data, dict) else {}
    name = data.pop("method", None)
    if name is None:
        problems.append(f"{prefix}method   is missing: one of {', '.join(OPTIONS)}")
        return None
    try:
        kind = find_options(str(name))
    except InputError as error:
        problems.append(f"{prefix}method   {error.sentence(': ')}")
        return None
    options = validate_options(kind, data, prefix, problems)
    return None if options is None else Step(str(name), options)


def _contradictions(recipe: Recipe) -> Iterator[str]:
    """Problems between tables."""
    data, dense, finetune = recipe.data, recipe.dense, recipe.finetune
    if data.source in BUILT_IN and (wrong := [n for n in ("path", "train_split", "test_split") if getattr(data, n)]):
        yield f"data.{wrong[0]}   has no effect on {data.source}: set data.source, as in imagefolder"
    if data.broken == "skip" and data.source != "imagefolder":
        yield f"data.broken   has no effect on {data.source}: set data.source to imagefolder, or omit it"
    if recipe.model.weights == "train" and dense is None:
        yield 'dense   model.weights = "train" needs a [dense] table with the training options'
    if recipe.model.weights != "train" and dense is not None:
        yield f'dense   is only used with model.weights = "train", got {recipe.model.weights!r}'
    if finetune.distillation != "none" and finetune.teacher is None:
        yield 'finetune.teacher   distillation needs a teacher: "dense", a timm name, or a run folder'
    if finetune.teacher_weights is not None and finetune.teacher in (None, "dense"):
        yield "finetune.teacher_weights   has no effect: set finetune.teacher to a timm name"
    if dense is not None and dense.distillation != "none":
        yield f'dense.distillation   got {dense.distillation!r}, the dense model has no teacher: use "none"'
    if recipe.quantize != QuantizeTable() and not (recipe.quantize.epochs and recipe.export.eight_bits):
        yield 'quantize   has no effect: set quantize.epochs, and export.precision to "int8" or "fp8"'
    if recipe.quantize.epochs and recipe.export.smooth:
        yield "export.smooth   would change layers whose ranges are trained: omit it, or quantize.epochs"
    if finetune.alpha > 1 and finetune.label_weight is None:
        problem = f"got {finetune.alpha:g}, which gives the labels a negative weight"
        yield f"finetune.alpha   {problem}; use at most 1, or set label_weight too"


def _ineffective(sets: Sequence[str], recipe: Recipe) -> Iterator[str]:
    """Assignments to options of another choice, such as `collection` beside published layers, and `WRONG_KEY=`."""
    for assignment in sets:
        table, *keys = key_path(assignment)
        place, names, unused = cast(Any, recipe), [table, *keys], getattr(getattr(recipe, table, None), "unused", {})
        if table == "step" and keys and isinstance(keys[0], int):
            from vitcompress.methods.table import find_method  # imports torch

            step, keys = recipe.steps[keys[0]], keys[1:]
            place, names, unused = step.options, keys, find_method(step.method).describe(step.options).unused
        if not assignment.endswith("="):
            yield from (f"--set {assignment}   has no effect: {unused[key]}" for key in keys[:1] if key in unused)
            continue
        for name in map(str, names):
            if is_dataclass(place) and not hasattr(place, name):
                yield f"--set {assignment}   {UNKNOWN_KEY}{did_you_mean(name, vars(place))}"
            place = getattr(place, name, None)


def key_path(assignment: str) -> list[Any]:
    """`step[0].lr=1` and `step.0.lr=1` as ["step", 0, "lr"]."""
    parts = re.findall(r"[^.\[\]\s]+", assignment.partition("=")[0])
    return [int(part) if part.isdecimal() and len(part) < 9 else part for part in parts]


def assign(data: dict[str, object], assignment: str, *, strict: bool = False) -> str | None:
    """Apply one `table.key=value` (TOML) to `data` in place. Returns the problem; `strict`: also of an unset `key=`."""
    _, equals, text = assignment.partition("=")
    path, shown = key_path(assignment), f"{assignment:.80}"
    if not equals or not path or isinstance(path[0], int) or len(path) > DEEPEST:
        return f"--set {shown}   expected table.key=value, as in finetune.epochs=10 or step.0.pruned_layers=4"
    try:
        value = _value(text.strip()) if text.strip() else REMOVED
    except ValueError:
        return f'--set {shown}   {text.strip()!r:.60} is not a TOML value, as in 3, 0.5, true, "text", [1, 2]'
    target: Any = data
    for number, part in enumerate(path):
        last = number == len(path) - 1
        if isinstance(target, list):
            if isinstance(part, int) and part >= len(target):
                return f"--set {shown}   no entry {part}: numbers start at 0 (here: {format_range(0, len(target) - 1)})"
            if isinstance(part, str) or (last and value is REMOVED):
                return f"--set {shown}   a list of {len(target)}: write its number, as in step.0.method"
        elif not isinstance(target, dict) or isinstance(part, int):
            return f"--set {shown}   there is no such place in the recipe"
        elif value is REMOVED and part not in target:
            unset = f"{part} is not set{did_you_mean(part, target)}"
            return f"--set {shown}   has no effect: {unset}" if strict else None
        if last and value is REMOVED:
            del target[part]
        elif last:
            target[part] = value
        else:
            target = target[part] if isinstance(target, list) else target.setdefault(part, {})
    return None


def _value(text: str) -> Any:
    """A TOML value; a single bare word is text, because shells remove quotes."""
    if re.fullmatch(r"[A-Za-z_/~.][\w./:~+-]*", text) and text not in ("true", "false", "inf", "nan"):
        return text
    parsed = parse_plain(tomllib.loads, f"value = {text}")
    if set(parsed) != {"value"}:
        raise ValueError("more than one value")
    return parsed["value"]
