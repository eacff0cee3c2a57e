"""Methods, families and exporters of other installed packages: entry points in the group `vitcompress.<kind>`."""

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from vitcompress.errors import InputError


def load_plugin(group: str, name: str, kind: type[Any]) -> Any | None:
    """The object that an installed package declares as `name` in the entry point group `vitcompress.<group>`, or None.

    Raises:
        InputError: the entry point does not load, or is not a `kind`.
    """
    return next((_load(point, kind) for point in entry_points(group=f"vitcompress.{group}", name=name)), None)


def load_plugins(group: str, kind: type[Any]) -> dict[str, Any]:
    """All objects in the group, by name. Raises InputError as `load_plugin`."""
    return {point.name: _load(point, kind) for point in entry_points(group=f"vitcompress.{group}")}


def _load(point: EntryPoint, kind: type[Any]) -> Any:
    try:
        plugin = point.load()
    except Exception as error:  # any code may run here
        raise InputError(f"entry point {point.name} = {point.value} does not load: {error}", hint=_HINT) from error
    if not isinstance(plugin, kind):
        raise InputError(f"entry point {point.name} = {point.value} is not a {kind.__name__}", hint=_HINT)
    return plugin


_HINT = "update or remove the package that declares it"
