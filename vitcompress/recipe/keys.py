"""The keys of a recipe: type, default, limits and description, read from the dataclasses that validate it."""

import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from vitcompress import recipes
from vitcompress.errors import InputError, did_you_mean
from vitcompress.io.plugins import load_plugin
from vitcompress.io.validation import parts_of
from vitcompress.methods import METHODS, Method, find_method
from vitcompress.recipe.load import load_recipe
from vitcompress.recipe.schema import Tables

WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path", dict: "table"}
BOUNDS = {
    Ge: ("ge", "{:g} or more"),
    Gt: ("gt", "more than {:g}"),
    Le: ("le", "{:g} or less"),
    Lt: ("lt", "less than {:g}"),
}
QUOTED = "published"  # figures, not settings


@dataclass(frozen=True)
class Key:
    """One key. value: in the recipe that was asked about; None where a method was, or where it is not set."""

    key: str
    type: str
    default: Any
    about: str
    value: Any = None
    required: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def keys_of(source: str) -> list[Key]:
    """All keys of a recipe (a name or a file), or of a recipe with one step of the method called `source`.

    Raises:
        InputError: neither a method nor a recipe; with the nearest names.
    """
    inner = {name: _table_in(hint) for name, hint in typing.get_type_hints(Tables).items() if name != QUOTED}
    common = {name: table for name, table in inner.items() if table is not None}
    if method := _method(source):
        steps = [("step.0", method.options, None)]
        tables: list[tuple[str, Any, Any]] = [(name, table, None) for name, table in common.items()]
    else:
        recipe = load_recipe(source)
        steps = [(f"step.{i}", find_method(s.method).options, s.options) for i, s in enumerate(recipe.steps)]
        tables = [(name, table, getattr(recipe, name)) for name, table in common.items()]
    return [key for name, table, values in (*steps, *tables) for key in _keys(name, table, values)]


def _method(source: str) -> Method | None:
    """The method called `source`; None for a recipe. Raises InputError if it is neither, nor a file."""
    names = (*recipes.names(), *recipes.study_names())
    if source not in METHODS and (source in names or source.endswith(".toml") or Path(source).exists()):
        return None
    method = METHODS.get(source) or load_plugin("methods", source, Method)
    if method is None:
        raise InputError(
            f"there is no recipe and no method called {source!r}{did_you_mean(source, (*METHODS, *names))}",
            hint=f"methods: {', '.join(METHODS)}; `vitcompress recipes` lists the recipes",
        )
    return method


def _keys(prefix: str, table: type[Any], values: Any) -> Iterator[Key]:
    """The keys of one table, those of the tables in it among them."""
    hints = typing.get_type_hints(table, include_extras=True)
    for field in fields(table):
        name, own = f"{prefix}.{field.name}", None if values is None else getattr(values, field.name)
        if inner := _table_in(hints[field.name]):
            yield from _keys(name, inner, own)
            continue
        default, required = _default(field)
        yield Key(name, words(hints[field.name]), default, _description(hints[field.name]), own, required)


def _table_in(hint: Any) -> type[Any] | None:
    """The dataclass that a field holds, if it holds one."""
    return next((kind for kind in parts_of(hint) if isinstance(kind, type) and is_dataclass(kind)), None)


def _description(hint: Any) -> str:
    """The text of the outermost `Doc` of a type hint."""
    texts = [part.description for part in parts_of(hint) if isinstance(part, FieldInfo) and part.description]
    return texts[-1] if texts else ""


def _default(field: "Field[Any]") -> tuple[Any, bool]:
    """A field's default, and whether it has none."""
    if field.default_factory is not MISSING:
        return field.default_factory(), False
    return (None, True) if field.default is MISSING else (field.default, False)


def words(hint: Any) -> str:
    """A type and what it allows, in words."""
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if kind is Annotated:
        bounds = [BOUNDS[type(b)][1].format(getattr(b, BOUNDS[type(b)][0])) for b in parts[1:] if type(b) in BOUNDS]
        return ", ".join([words(parts[0]), *bounds])
    if kind is Literal:
        return "one of " + ", ".join(map(str, parts))
    if kind in (typing.Union, types.UnionType):
        return " or ".join(words(part) for part in parts if part is not types.NoneType)
    if kind is tuple:
        many = parts[-1] is Ellipsis
        inner = list(dict.fromkeys(words(part) for part in parts if part is not Ellipsis))
        return f"list of {'' if many else f'{len(parts)}: '}{', '.join(inner)}"
    return WORDS.get(kind or hint, str(hint))
