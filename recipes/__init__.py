"""The recipes and studies of vitcompress, as text. Imports only the standard library."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitcompress.errors import InputError, close_matches

FOLDER = Path(__file__).parent
STUDIES = FOLDER / "studies"


def names() -> tuple[str, ...]:
    """Names of all recipes, sorted."""
    return _stems(FOLDER)


def text(name: str) -> str:
    """The TOML of one recipe, comments included. Raises InputError, which names the nearest."""
    return _read("recipe", name, "`vitcompress recipes` lists all of them")


def study_names() -> tuple[str, ...]:
    """Names of all studies, sorted."""
    return _stems(STUDIES)


def study_text(name: str) -> str:
    """The TOML of one study, comments included. Raises InputError, which names the nearest."""
    return _read("study", name, f"studies: {', '.join(study_names())}")


def check_kind(wanted: str, source: str, data: Mapping[str, Any]) -> None:
    """Raise InputError if `data` is a study but a recipe is `wanted`, or the reverse. The tables tell which it is."""
    own = {"recipe": {"step", "model"}, "study": {"row", "base"}}
    if not own[wanted] & set(data) and any(tables & set(data) for tables in own.values()):
        raise _other_kind(wanted, source)


def _other_kind(wanted: str, source: str) -> InputError:
    kind = "study" if wanted == "recipe" else "recipe"
    return InputError(f"{source} is a {kind}, not a {wanted}", hint=f"`vitcompress {kind} {source}` runs it")


def summaries() -> dict[str, str]:
    """Recipe name -> its one-line summary."""
    return {name: str(tomllib.loads(text(name)).get("summary", "")) for name in names()}


def methods(name: str) -> set[str]:
    """The methods of the steps of a recipe."""
    return {str(step["method"]) for step in tomllib.loads(text(name))["step"]}


def _stems(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def _read(wanted: str, name: str, hint: str) -> str:
    folder, other = (FOLDER, STUDIES) if wanted == "recipe" else (STUDIES, FOLDER)
    if name in (choices := _stems(folder)):
        return (folder / f"{name}.toml").read_text(encoding="utf-8")
    if name in _stems(other):
        raise _other_kind(wanted, name)
    if Path(name).is_file():
        raise InputError(f"{name} is a file, not the name of a {wanted} of this package", hint=hint)
    close = close_matches(name, choices) or [choice for choice in choices if name.lower() in choice.split("_")][:3]
    raise InputError(
        f"there is no {wanted} called {name!r}, and no such file{'; nearest: ' if close else ''}{', '.join(close)}",
        hint=f"{hint}; `vitcompress {wanted} PATH.toml` runs a file of yours",
    )
