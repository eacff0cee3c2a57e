"""The recipes that come with vitcompress, as text. Reading and listing them needs nothing but the standard library."""

import tomllib
from pathlib import Path

from vitcompress.errors import InputError, nearest

FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """The names of all recipes, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def text(name: str) -> str:
    """The TOML of one recipe, comments included. Raises InputError with the nearest names."""
    if name not in names():
        close = ", ".join(nearest(name, names()) or names())
        raise InputError(
            f"there is no recipe called {name!r}, and no such file; nearest: {close}",
            hint="`vitcompress recipes` lists all of them; the path of a .toml file works as well",
        )
    return (FOLDER / f"{name}.toml").read_text(encoding="utf-8")


def summaries() -> dict[str, str]:
    """Recipe name -> its one-line summary."""
    return {name: str(tomllib.loads(text(name)).get("summary", "")) for name in names()}
