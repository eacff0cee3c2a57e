"""Versions of installed packages."""

from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those of `packages` (names of distributions) that are installed."""
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
