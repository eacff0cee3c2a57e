"""Validate plain data and arguments with pydantic, and report each problem: the place, the value, what is allowed."""

import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, fields, is_dataclass
from functools import cache, wraps
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic.type_adapter import TypeAdapter

from vitcompress.errors import ArtifactError, InputError, did_you_mean
from vitcompress.io.files import user_path

Table = TypeVar("Table", bound=BaseModel)

# Strict: "30" is not 30. Unknown keys are errors, in nested dataclasses too.
STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True)

KINDS = {
    **dict.fromkeys(("int_type", "int_from_float"), "a whole number"),
    **dict.fromkeys(("tuple_type", "list_type", "sequence_str", "Sequence"), "a list"),
    **dict.fromkeys(("dict_type", "dataclass_type", "model_type"), "a table"),
    "Module": "a model, as of vc.create_model or vc.load_model",
    "Plan": "a plan, as of vc.plan or vc.Plan.from_json",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "finite_number": "a finite number",
}
BOUNDS = {
    "greater_than_equal": ("ge", "{} or more"),
    "greater_than": ("gt", "more than {}"),
    "less_than_equal": ("le", "{} or less"),
    "less_than": ("lt", "less than {}"),
    "too_short": ("min_length", "a list of {} or more"),
}
UNKNOWN_KEY = "unknown key"
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
RESTORE = "restore it, or run the recipe again"


def Doc(text: str) -> Any:
    """The description of an option: `round_to: Annotated[int, Ge(1), Doc("widths are multiples of this")] = 8`."""
    return Field(description=text)


def Matching(pattern: str) -> Any:
    """Limits text to a regular expression."""
    return Field(pattern=pattern)


# Converts numbers of NumPy. It is written after the limits of an int: before them, a JSON Schema would lack them.
WHOLE = BeforeValidator(lambda n: n if isinstance(n, bool) or not isinstance(n, Integral) else int(n))
UserPath = Annotated[Path, AfterValidator(user_path)]


def create_table(**types: Any) -> type[BaseModel]:
    """A table whose keys have these `types`."""
    fields: Any = {name: (kind, None) for name, kind in types.items()}
    return cast(type[BaseModel], create_model("Table", __config__=STRICT, **fields))


def validate(kind: type[Table], data: Mapping[str, object], prefix: str, problems: list[str]) -> Table | None:
    """`data` as `kind`, or None after adding to `problems`. prefix: see `describe_errors`."""
    try:
        # As JSON, because only there strict mode accepts tables for dataclasses and lists for tuples.
        # `tolist`: of numbers of NumPy.
        plain = json.dumps(data, default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value))
        return kind.model_validate_json(plain)
    except ValidationError as error:
        problems += describe_errors(error, kind, data, prefix)
        return None


def validate_options(kind: type[Any], values: Mapping[str, object], prefix: str, problems: list[str]) -> Any | None:
    """An instance of the dataclass `kind`, or None after adding to `problems`."""
    table = validate(create_table(options=kind), {"options": values}, prefix, problems)
    return None if table is None else vars(table)["options"]


def options_of(kind: type[Any], values: Mapping[str, object], what: str) -> Any:
    """An instance of the dataclass `kind` from keyword arguments, validated like a table of a recipe.

    Nested tables are dictionaries or dataclasses. Raises InputError, which lists all unknown names and all values of
    another type or out of range.
    """
    problems: list[str] = []
    plain = {name: asdict(v) if is_dataclass(v) and not isinstance(v, type) else v for name, v in values.items()}
    options = validate_options(kind, plain, "  ", problems)
    if options is None:
        text = "\n".join([f"the options of {what} are invalid:", *problems])
        raise InputError(text, hint=f"options: {', '.join(kind.__dataclass_fields__)}" if UNKNOWN_KEY in text else None)
    return options


_adapter = cache(TypeAdapter)  # building one takes longer than checking a record


def check_record(path: Path, data: Any, kind: Any, problem: str = "has other contents", hint: str = RESTORE) -> Any:
    """`data`, read from `path`. Raises ArtifactError with `problem` and `hint` if it is not of the type `kind`."""
    try:
        _adapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        parts = (problem, ".".join(map(str, first["loc"])), first["msg"].lower())
        raise ArtifactError(f"{path} {': '.join(filter(None, parts))}", hint=hint) from None
    return data


@cache
def validate_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of the package's interface, which raises InputError for arguments that its annotations do not allow.

    Objects are passed on as they are; what is annotated as Any is not examined. Only `create_model` uses the default
    device of the caller.
    """
    signature, hints = inspect.signature(function), typing.get_type_hints(function, include_extras=True)
    table, name = create_table(**{name: hints[name] for name in signature.parameters}), function.__name__

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
            values = vars(table.model_validate(bound.arguments))
        except TypeError as error:  # of a call with too many or too few arguments
            raise TypeError(f"{name}: {error}; help(vitcompress.{name}) describes its arguments") from None
        except ValidationError as error:
            problems = describe_errors(error, table, bound.arguments, "")
            message = "\n  ".join([f"the arguments of {name} are invalid:", *problems])
            raise InputError(message, hint=f"help(vitcompress.{name}) describes all of them") from None
        bound.arguments = {name: values[name] for name in bound.arguments}
        with nullcontext() if name == "create_model" else _on_cpu_by_default():
            return function(*bound.args, **bound.kwargs)

    plain = typing.get_type_hints(function)  # without limits of numbers, which `help` would print as objects
    shown = [parameter.replace(annotation=plain[name]) for name, parameter in signature.parameters.items()]
    vars(call)["__signature__"] = signature.replace(parameters=shown, return_annotation=plain["return"])
    call.__module__ = "vitcompress"  # where pickle finds it
    return call


def _on_cpu_by_default() -> AbstractContextManager[Any]:
    """New tensors are on the CPU unless a device is stated, also if the caller has another default device."""
    torch: Any = sys.modules.get("torch")  # None: nobody has set a default device
    is_other = torch is not None and torch.get_default_device().type != "cpu"
    return torch.device("cpu") if is_other else nullcontext()  # inside it, each call of torch takes longer


def describe_errors(error: ValidationError, root: type[BaseModel], data: Any, prefix: str) -> list[str]:
    """One line per problem of `data`, `place   what is wrong`, in the order of the file.

    prefix: replaces the first part of every place (`step.0.`, if the data was nested in another table to validate it).
    """
    sentences: dict[str, list[str]] = {}
    for item in error.errors(include_url=False):
        place = ".".join(_parts(item, data)[bool(prefix) :])  # ("step", 0, "lr") -> step.0.lr
        sentences.setdefault(prefix + place, []).append(_describe(item, root))
    width = max(map(len, sentences))
    texts = {place: " or ".join(dict.fromkeys(each)) for place, each in sentences.items()}
    return [f"{place:<{width}}   {re.sub(' or got .*?, expected ', ' or ', text)}" for place, text in texts.items()]


def _parts(item: Any, data: Any) -> list[str]:
    """The place of a problem in `data`, without the names that pydantic gives to the types of a union."""
    parts = list[str]()
    for part in item["loc"]:
        entries = dict(enumerate(data)) if isinstance(data, list | tuple) else data
        if isinstance(entries, Mapping) and (part in entries or item["type"].startswith("missing")):
            parts, data = [*parts, str(part)], entries.get(part)
    return parts


def keys_hint(problems: Sequence[str], steps: Sequence[Any]) -> str | None:
    """The command that lists all keys, if a key is unknown. steps: of the recipe, not validated yet."""
    unknown = [text for text in problems if UNKNOWN_KEY in text]
    # The steps with a known method; first those with an unknown key.
    usable = [n for n in range(len(steps)) if not any(text.startswith(f"step.{n}.method ") for text in problems)]
    usable.sort(key=lambda n: not any(text.startswith(f"step.{n}.") for text in unknown))
    method = steps[usable[0]]["method"] if usable else "NAME"
    return f"`vitcompress recipes keys {method} --all` lists all keys" if unknown else None


def _describe(item: Any, root: type[BaseModel]) -> str:
    """The problem of one value."""
    kind, value, context = item["type"], item["input"], item.get("ctx", {})
    shown = f"a value of type {type(value).__name__}" if hasattr(value, "__dict__") else repr(value)
    seen = str(value).lower() if isinstance(value, bool) else " ".join(shown.split())  # in TOML syntax
    seen = seen if len(seen) <= 60 else f"{seen[:57]}..."
    if kind in UNKNOWN:
        *table, key = item["loc"]
        known = list(_keys(root, table))
        inside = [f"{name}.{key}" for name in known if key in _keys(root, [*table, name])]
        near = f", did you mean {' or '.join(inside)}?" if inside else did_you_mean(str(key), known)
        return f"{UNKNOWN_KEY}{near or ', known: ' + (', '.join(known) or 'none')}"
    if kind in BOUNDS:
        key, words = BOUNDS[kind]
        return f"got {seen}, expected " + words.format(str(context[key]).removesuffix(".0"))
    if kind == "literal_error":
        choices = [choice.strip("' ") for choice in context["expected"].replace(" or ", ", ").split(",")]
        return f"got {seen}, expected one of {', '.join(choices)}{did_you_mean(str(value), choices)}"
    if kind.startswith("missing"):
        return "is missing"
    name = kind if kind in KINDS else context.get("class", context.get("class_name"))  # of the class it should have
    return f"got {seen}, expected {KINDS.get(name, f'a {name}')}" if name else f"got {seen}: {item['msg']}"


def _keys(root: type[BaseModel], loc: Sequence[int | str]) -> Iterator[str]:
    """The keys of the table at `loc`."""
    kind: Any = root
    for part in (part for part in loc if isinstance(part, str)):
        if (kind := table_in(typing.get_type_hints(kind).get(part))) is None:
            return
    yield from kind.model_fields if issubclass(kind, BaseModel) else (field.name for field in fields(kind))


def table_in(hint: Any) -> Any:
    """The dataclass or pydantic model inside a type hint; None if there is none."""
    types = (part for part in parts_of(hint) if isinstance(part, type))
    return next((kind for kind in types if is_dataclass(kind) or issubclass(kind, BaseModel)), None)


def parts_of(hint: Any) -> Iterator[Any]:
    """A type hint and everything inside its unions, lists, tuples and annotations."""
    yield hint
    for inner in typing.get_args(hint):
        yield from parts_of(inner)
