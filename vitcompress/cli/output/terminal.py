"""Text, tables, JSON and errors in the terminal: results on standard output, everything else on standard error."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from typing import Any

import click
from rich.console import Console, Group
from rich.markdown import Markdown
from rich.measure import Measurement
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table as RichTable
from rich.text import Text

from vitcompress.errors import CheckFailedError, InputError, RecipeError, VitcompressError
from vitcompress.io.text import Table

PIPE_WIDTH = 120
UNLIMITED = 10_000  # characters
STYLES = {"passed": "green", "failed": "bold red", "not run": "yellow"}
TITLES = {InputError: "invalid input", CheckFailedError: "check failed"}


def stream_console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PIPE_WIDTH, highlight=False)


def print_json(value: Any) -> None:
    """Only `value` on standard output: plain data, dataclasses and paths."""
    print_text(json.dumps(value, indent=1, default=lambda item: asdict(item) if is_dataclass(item) else str(item)))


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


def print_table(table: Table, *, wrap: bool = False) -> None:
    """A table on standard output; the first column is aligned left, the others right, and verdicts are coloured.

    If the terminal is too narrow, columns with the same value in every row are printed once, below the table. wrap:
    long texts, which are wrapped and aligned left instead.
    """
    console, rows, shared = stream_console(stderr=False), table.rows, dict[str, str]()
    unlimited = console.options.update(width=UNLIMITED)
    if not wrap and len(rows) > 1 and Measurement.get(console, unlimited, _as_rich(table)).maximum > console.width:
        varying = [n for n in range(len(table.columns)) if n == 0 or len({row[n] for row in rows}) > 1]
        shared = {name: rows[0][n] for n, name in enumerate(table.columns) if n not in varying and rows[0][n]}
        columns, *rest = (tuple(cells[n] for n in varying) for cells in (table.columns, *rows))
        table = Table(table.title, columns, tuple(rest))
    console.print(_as_rich(table, wrap))
    if shared:
        print_text(f"all: {', '.join(f'{column} {text}' for column, text in shared.items())}")


def _as_rich(table: Table, wrap: bool = False) -> RichTable:
    title = Text(table.title, style="bold") if table.title else None
    drawn = RichTable(title=title, title_justify="left", header_style="bold")
    for number, column in enumerate(table.columns):
        drawn.add_column(Text(column), justify="left" if wrap or number == 0 else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    return drawn


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Names with their descriptions, without borders."""
    table = RichTable("", "", box=None, show_header=False, pad_edge=False)
    for name, text in pairs:
        table.add_row(Text(name, style="bold"), Text(text))
    stream_console(stderr=False).print(table)


def print_error(error: VitcompressError) -> None:
    """One panel on standard error: the problem, and the next step."""
    hint = [Text(f"\n{error.hint}", style="cyan")] if error.hint else []
    title = next((words for kind, words in TITLES.items() if isinstance(error, kind)), "failed")
    text = Group(Text(error.message), *hint)
    stream_console(stderr=True).print(Panel(text, title=title, title_align="left", border_style="red", expand=False))


def error_as_data(error: VitcompressError) -> dict[str, object]:
    """The same as plain data, for `--json`."""
    problems = {"problems": list(error.problems)} if isinstance(error, RecipeError) else {}
    return {"error": error.message, "kind": type(error).__name__, "hint": error.hint, **problems}
