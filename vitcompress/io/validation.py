"""Plain data checked by pydantic, with every mistake as a line to act on: where, what was seen, what is allowed."""

import json
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vitcompress.errors import did_you_mean

Table = TypeVar("Table", bound=BaseModel)

# Strict: "30" is not 30. Unknown keys are mistakes, also in the nested options (pydantic hands this on to dataclasses).
STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "dataclass_type": "a table",
    "model_type": "a table",
    "finite_number": "a finite number",
}
BOUNDS = {
    "greater_than_equal": ("ge", "{} or more"),
    "greater_than": ("gt", "more than {}"),
    "less_than_equal": ("le", "{} or less"),
    "less_than": ("lt", "less than {}"),
}
UNKNOWN_KEY = "unknown key"
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def Doc(text: str) -> Any:
    """The description of an option: `round_to: Annotated[int, Ge(1), Doc("widths are multiples of this")] = 8`."""
    return Field(description=text)


def validate(kind: type[Table], data: Mapping[str, Any], prefix: str, problems: list[str]) -> Table | None:
    """`data` as `kind`; what is wrong with it goes to `problems`."""
    try:
        # By way of JSON: pydantic's strict mode takes tables and lists for dataclasses and tuples only there.
        return kind.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        problems += describe_errors(error, kind, prefix)
        return None


def describe_errors(error: ValidationError, root: type[BaseModel], prefix: str = "") -> list[str]:
    """One line per mistake, `place   what is wrong`, in the order of the file.

    prefix: replaces the first part of every place (`step[0].` for what was checked under one invented key).
    """
    found: dict[str, list[str]] = {}
    for item in error.errors(include_url=False):
        place = _place(item["loc"][1:] if prefix else item["loc"])
        found.setdefault(prefix + place, []).append(_sentence(item, root))
    width = max(map(len, found))
    return [f"{place:<{width}}   {' or '.join(dict.fromkeys(texts))}" for place, texts in found.items()]


def keys_hint(problems: Iterable[str], steps: Any) -> str | None:
    """The command that lists all keys, if one of the `problems` is an unknown one; steps: of the recipe, as given."""
    if not any(UNKNOWN_KEY in problem for problem in problems):
        return None
    named = [step.get("method") for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    return f"`vitcompress recipes keys {next(filter(None, named), 'NAME')}` lists all keys"


def _place(loc: tuple[int | str, ...]) -> str:
    """`("step", 0, "lr")` as `step[0].lr`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def _sentence(item: Any, root: type[BaseModel]) -> str:
    """What is wrong with one value."""
    kind, seen = item["type"], _shown(item["input"])
    if kind in UNKNOWN:
        known = list(_keys(root, item["loc"][:-1]))
        return f"{UNKNOWN_KEY}{did_you_mean(str(item['loc'][-1]), known) or ', known: ' + ', '.join(known)}"
    if kind in BOUNDS:
        key, words = BOUNDS[kind]
        return f"got {seen}, expected " + words.format(f"{item['ctx'][key]:g}")
    if kind == "literal_error":
        choices = [choice.strip("' ") for choice in item["ctx"]["expected"].replace(" or ", ", ").split(",")]
        return f"got {seen}, expected one of {', '.join(choices)}{did_you_mean(str(item['input']), choices)}"
    if kind.startswith("missing"):
        return "is missing"
    if kind in KINDS:
        return f"got {seen}, expected {KINDS[kind]}"
    return f"got {seen}: {item['msg']}"


def _shown(value: Any) -> str:
    """A value as TOML would write it, short."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _keys(root: type[BaseModel], loc: tuple[int | str, ...]) -> Iterator[str]:
    """The keys that the table at `loc` knows."""
    kind: Any = root
    for part in (part for part in loc if isinstance(part, str)):
        hints = typing.get_type_hints(kind)
        kind = next((option for option in parts_of(hints.get(part)) if _is_table(option)), None)
        if kind is None:
            return
    yield from kind.model_fields if issubclass(kind, BaseModel) else (field.name for field in fields(kind))


def parts_of(hint: Any) -> Iterator[Any]:
    """A type hint and everything inside its unions, lists, tuples and annotations."""
    yield hint
    for inner in typing.get_args(hint):
        yield from parts_of(inner)


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, BaseModel))
