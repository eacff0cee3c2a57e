"""Methods, families and exporters of other installed packages: entry points in the group `vitcompress.<kind>`."""

from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar, cast

from vitcompress.errors import InputError, did_you_mean

T = TypeVar("T")


def find_by_name(
    name: str | T, table: Mapping[str, T], group: str, what: str, others: Iterable[str] = (), hint: str = ""
) -> T:
    """The object called `name`: from `table`, or from an entry point in `vitcompress.<group>`.

    An object is returned unchanged. what, others, hint: for the error: the kind of object, other allowed names, and the
    next step, in which `{names}` becomes the names in the table and in installed packages. Raises InputError if there
    is none, or the entry point does not load, or is of another type than those in the table.
    """
    if not isinstance(name, str):
        return name
    if name in table:
        return table[name]
    for point in entry_points(group=f"vitcompress.{group}", name=name):
        return cast(T, _load(point, type(next(iter(table.values())))))
    names = dict.fromkeys((*table, *plugin_names(group)))
    message = f"there is no {what} {name!r}{did_you_mean(name, (*names, *others))}"
    hint = (hint or "use one of {names}, or install the package that declares it").format(names=", ".join(names))
    raise InputError(message, hint=hint)


def plugin_names(group: str) -> list[str]:
    """The names that installed packages declare; nothing is imported."""
    return sorted(point.name for point in entry_points(group=f"vitcompress.{group}"))


def load_all(table: Mapping[str, T], group: str, kind: type[Any]) -> Iterator[tuple[str, T]]:
    """Names and objects in `table`, then in the group. At the end, raises InputError if one of these is no `kind`."""
    yield from table.items()
    errors = []
    for point in (point for point in entry_points(group=f"vitcompress.{group}") if point.name not in table):
        try:
            yield point.name, _load(point, kind)
        except InputError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _load(point: EntryPoint, kind: type[Any]) -> Any:
    source, hint = f"entry point {point.name} = {point.value}", "update or remove the package that declares it"
    try:
        plugin = point.load()
    except (Exception, SystemExit) as error:  # any code may run here
        raise InputError(f"{source} does not load: {error}", hint=hint) from error
    if not isinstance(plugin, kind):
        raise InputError(f"{source} is not of type {kind.__name__}", hint=hint)
    return plugin
