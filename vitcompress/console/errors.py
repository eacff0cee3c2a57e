"""An error in one panel, or as data."""

from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from vitcompress.console.drawing import stream_console
from vitcompress.errors import CheckFailedError, InputError, RecipeError, VitcompressError

TITLES = {InputError: "cannot be used", CheckFailedError: "not good enough"}


def print_error(error: VitcompressError) -> None:
    """One panel on standard error: what is wrong, and the next step."""
    lines: list[Text] = [Text(error.message)]
    if error.hint:
        lines.append(Text(f"\n{error.hint}", style="cyan"))
    title = next((words for kind, words in TITLES.items() if isinstance(error, kind)), "failed")
    stream_console(stderr=True).print(
        Panel(Group(*lines), title=title, title_align="left", border_style="red", expand=False)
    )


def error_as_data(error: VitcompressError) -> dict[str, Any]:
    """The same as plain data, for `--json`."""
    data: dict[str, Any] = {"error": error.message, "kind": type(error).__name__, "hint": error.hint}
    if isinstance(error, RecipeError):
        data["problems"] = list(error.problems)
    return data
