"""Methods, families and exporters of other installed packages: entry points in the group `vitcompress.<kind>`."""

from collections.abc import Iterable, Mapping
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
    names = (*table, *sorted(point.name for point in entry_points(group=f"vitcompress.{group}")))
    message = f"there is no {what} {name!r}{did_you_mean(name, (*names, *others))}"
    hint = (hint or "use one of {names}, or install the package that declares it").format(names=", ".join(names))
    raise InputError(message, hint=hint)


def is_plugin(method: str) -> bool:
    """Whether an installed package declares a method of this name; nothing is imported."""
    return bool(entry_points(group="vitcompress.methods", name=method))


def load_plugins(group: str, kind: type[Any]) -> dict[str, Any]:
    """All objects in the group, by name. Raises InputError if one does not load, or is not a `kind`."""
    return {point.name: _load(point, kind) for point in entry_points(group=f"vitcompress.{group}")}


def _load(point: EntryPoint, kind: type[Any]) -> Any:
    try:
        plugin = point.load()
    except Exception as error:  # any code may run here
        raise InputError(f"entry point {point.name} = {point.value} does not load: {error}", hint=_HINT) from error
    if not isinstance(plugin, kind):
        raise InputError(f"entry point {point.name} = {point.value} is not of type {kind.__name__}", hint=_HINT)
    return plugin


_HINT = "update or remove the package that declares it"
