"""The recipes and studies that come with vitcompress, as text. Reading and listing them needs nothing but the standard
library.
"""

import tomllib
from pathlib import Path

from vitcompress.errors import InputError, nearest

FOLDER = Path(__file__).parent
STUDIES = FOLDER / "studies"


def names() -> tuple[str, ...]:
    """The names of all recipes, sorted."""
    return _stems(FOLDER)


def text(name: str) -> str:
    """The TOML of one recipe, comments included. Raises InputError with the nearest names."""
    if name not in names():
        raise _unknown("recipe", name, names(), "`vitcompress recipes` lists all of them")
    return (FOLDER / f"{name}.toml").read_text(encoding="utf-8")


def study_names() -> tuple[str, ...]:
    """The names of all studies, sorted."""
    return _stems(STUDIES)


def study_text(name: str) -> str:
    """The TOML of one study, comments included. Raises InputError with the nearest names."""
    if name not in study_names():
        raise _unknown("study", name, study_names(), f"there are: {', '.join(study_names())}")
    return (STUDIES / f"{name}.toml").read_text(encoding="utf-8")


def summaries() -> dict[str, str]:
    """Recipe name -> its one-line summary."""
    return {name: str(tomllib.loads(text(name)).get("summary", "")) for name in names()}


def _stems(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def _unknown(what: str, name: str, choices: tuple[str, ...], hint: str) -> InputError:
    close = nearest(name, choices)
    return InputError(
        f"there is no {what} called {name!r}, and no such file{'; nearest: ' if close else ''}{', '.join(close)}",
        hint=f"{hint}; the path of a .toml file works as well",
    )
