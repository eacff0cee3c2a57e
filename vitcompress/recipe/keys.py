"""The keys of a recipe, read from the types that validate it: a list for people and a JSON Schema for editors."""

import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from vitcompress import recipes
from vitcompress.io.plugins import find_by_name, load_all, plugin_names
from vitcompress.io.validation import BOUNDS, parts_of, table_in
from vitcompress.methods.options import OPTIONS, find_options
from vitcompress.recipe.load import load_recipe
from vitcompress.recipe.schema import Recipe, Tables

WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path", dict: "table"}


@dataclass(frozen=True)
class Key:
    """One key of a recipe. value: its value in that recipe; None if it is not set, or for the keys of a method."""

    key: str
    type: str
    default: Any
    about: str
    value: Any = None
    required: bool = False


class TomlSchema(GenerateJsonSchema):
    """JSON Schema without nulls, which TOML lacks, and without defaults that are whole tables."""

    def nullable_schema(self, schema: Any) -> dict[str, Any]:
        return self.generate_inner(schema["schema"])

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        return {"additionalProperties": False, **super().dataclass_schema(schema)}  # pydantic before 2.14 omits it

    def default_schema(self, schema: Any) -> dict[str, Any]:
        data = super().default_schema(schema)
        return {key: part for key, part in data.items() if key != "default" or not isinstance(part, dict | None)}


def recipe_schema() -> dict[str, object]:
    """JSON Schema (draft 2020-12) of a recipe in TOML; `method` selects the keys of a `[[step]]`.

    Methods of other installed packages are included.
    """
    from vitcompress.methods.base import Method  # imports torch
    from vitcompress.methods.table import METHODS

    methods = dict(load_all(METHODS, "methods", Method))
    # One model for all tables and options, so that pydantic gives every type a name of its own.
    options: Any = {f"step_{name}": (method.options, ...) for name, method in methods.items()}
    schema: Any = create_model("Recipe", __base__=Tables, **options).model_json_schema(schema_generator=TomlSchema)
    steps = []
    for name, about in methods.items():
        step = schema["$defs"][schema["properties"].pop(f"step_{name}")["$ref"].rpartition("/")[2]]
        method = {"const": name, "description": f"what to remove: {about.summary}"}
        required = ["method", *step.get("required", [])]
        steps.append({**step, "properties": {"method": method, **step.get("properties", {})}, "required": required})
    schema["properties"]["step"] = {
        "description": "the pruning steps, in order; `vitcompress recipes keys METHOD` describes a method",
        "type": "array",
        "minItems": 1,
        "items": {"oneOf": steps, "discriminator": {"propertyName": "method"}},
    }
    required = ["step", *(key for key in schema["required"] if key not in options)]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "required": required}


def keys_of(source: str, every: bool = True) -> list[Key]:
    """All keys of the recipe `source` (name or file), or of a recipe with one step of the method `source`.

    every: False leaves out the keys that all methods share. Raises InputError with the nearest names for any other.
    """
    tables = {name: table for name, hint in typing.get_type_hints(Recipe).items() if (table := table_in(hint))}
    del tables["published"], tables["steps"]  # quoted figures are no settings; steps have keys of their own
    if options := _options(source):
        return [*_keys("step.0", options), *(key for pair in tables.items() if every for key in _keys(*pair))]
    recipe = load_recipe(source)
    steps = [(f"step.{i}", type(s.options), s.options) for i, s in enumerate(recipe.steps)]
    common = [(name, table, getattr(recipe, name)) for name, table in tables.items()]
    return [key for name, table, values in (*steps, *common) for key in _keys(name, table, values)]


def _options(source: str) -> type[Any] | None:
    """The options of the method `source`, or of the only one whose name starts so (`up`, `UP-ViT`); None for a recipe.

    Raises InputError if it is neither, nor a file.
    """
    names = (*recipes.names(), *recipes.study_names())
    if source not in OPTIONS and (source in names or source.endswith(".toml") or Path(source).exists()):
        return None
    start = source.lower().replace("-", "")
    exact = [name for name in (source, start) if name in (*OPTIONS, *plugin_names("methods"))]
    if len(matches := exact[:1] or [name for name in OPTIONS if name.startswith(start)]) == 1:
        return find_options(matches[0])
    hint = "methods: {names}; `vitcompress recipes` lists the recipes, `recipes keys fold --all` the keys of all tables"
    return find_by_name(source, OPTIONS, "methods", "recipe and no method called", names, hint)


def _keys(prefix: str, table: type[Any], values: Any = None) -> Iterator[Key]:
    """The keys of a table and of the tables inside it. values: an instance of `table` with the recipe's values."""
    hints = typing.get_type_hints(table, include_extras=True)
    for field in fields(table):
        hint, name = hints[field.name], f"{prefix}.{field.name}"
        value = None if values is None else getattr(values, field.name)
        if inner := table_in(hint):
            yield from _keys(name, inner, value)
            continue
        texts = [part.description for part in parts_of(hint) if isinstance(part, FieldInfo) and part.description]
        required = field.default is MISSING and field.default_factory is MISSING
        default = field.default if field.default_factory is MISSING else field.default_factory()
        yield Key(name, describe_type(hint), None if required else default, texts[-1] if texts else "", value, required)


def describe_type(hint: Any) -> str:
    """A type and its limits in words."""
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if kind is Annotated:
        limits = [(words, getattr(part, name, None)) for part in parts[1:] for name, words in BOUNDS.values()]
        texts = (words.format(str(limit).removesuffix(".0")) for words, limit in limits if limit is not None)
        return ", ".join([describe_type(parts[0]), *texts])
    if kind is Literal:
        return "one of " + ", ".join(map(str, parts))
    if kind in (typing.Union, types.UnionType):
        return " or ".join(describe_type(part) for part in parts if part is not types.NoneType)
    if kind is tuple:
        size = "" if parts[-1] is Ellipsis else f"{len(parts)}: "
        items = dict.fromkeys(describe_type(part) for part in parts if part is not Ellipsis)
        return f"list of {size}{', '.join(items)}"
    return WORDS.get(kind or hint, str(hint))
