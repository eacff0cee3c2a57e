"""Text, tables, JSON and errors in the terminal: results on standard output, everything else on standard error."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click
from rich.console import Console, Group
from rich.markdown import Markdown
from rich.measure import Measurement
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Column, Table
from rich.text import Text

from vitcompress.errors import CheckFailedError, InputError, RecipeError, VitcompressError

PIPE_WIDTH = 120
UNLIMITED = 10_000  # characters
TITLES = {InputError: "invalid input", CheckFailedError: "check failed"}


def stream_console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PIPE_WIDTH, highlight=False)


def print_json(value: Any) -> None:
    """Only `value` on standard output."""
    print_text(json.dumps(value, indent=1, default=str))


def print_text(text: str) -> None:
    """Plain text on standard output, not wrapped."""
    click.echo(text.rstrip("\n"))


def print_line(text: str) -> None:
    """One line on standard error."""
    stream_console(stderr=True).print(Text(text), soft_wrap=True)


def print_toml(text: str) -> None:
    """TOML on standard output, coloured in a terminal."""
    _print_rich(Syntax(text, "toml", background_color="default"), text)


def print_markdown(text: str) -> None:
    """Markdown on standard output, rendered in a terminal."""
    _print_rich(Markdown(text), text)


def _print_rich(rendered: Syntax | Markdown, text: str) -> None:
    if sys.stdout is not None and sys.stdout.isatty():
        stream_console(stderr=False).print(rendered)
    else:
        print_text(text)


def print_texts(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """A table of texts, which are wrapped and aligned left."""
    table = Table(*(Column(name, overflow="fold") for name in columns), header_style="bold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    stream_console(stderr=False).print(table)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on standard output; the first column is aligned left, the others right.

    If the terminal is too narrow, columns with the same value in every row are printed once, below the table.
    """
    console, cells = stream_console(stderr=False), [["" if cell is None else str(cell) for cell in row] for row in rows]
    table, shared = _build_table(title, columns, cells), dict[str, str]()
    width = Measurement.get(console, console.options.update(width=UNLIMITED), table).maximum
    if len(cells) > 1 and width > console.width:
        varying = [n for n in range(len(columns)) if n == 0 or len({row[n] for row in cells}) > 1]
        shared = {column: cells[0][n] for n, column in enumerate(columns) if n not in varying and cells[0][n]}
        table = _build_table(title, [columns[n] for n in varying], [[row[n] for n in varying] for row in cells])
    console.print(table)
    if shared:
        print_text(f"all: {', '.join(f'{column} {text}' for column, text in shared.items())}")


def _build_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=Text(title, style="bold") if title else None, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Names with their descriptions, without borders."""
    table = Table("", "", box=None, show_header=False, pad_edge=False)
    for name, text in pairs:
        table.add_row(Text(name, style="bold"), Text(text))
    stream_console(stderr=False).print(table)


def print_error(error: VitcompressError) -> None:
    """One panel on standard error: the problem, and the next step."""
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
