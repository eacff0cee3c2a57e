"""Text, tables, JSON, errors and progress in the terminal: results on standard output, all else on standard error."""

import sys
import textwrap
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import click
from pydantic_core import to_jsonable_python
from rich.cells import cell_len
from rich.console import Console, Group
from rich.markdown import Markdown
from rich.measure import Measurement
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.syntax import Syntax
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from vitcompress.errors import LONGEST_LINE, CheckFailedError, InputError, RecipeError, VitcompressError, printable
from vitcompress.io.files import format_json
from vitcompress.io.progress import Progress
from vitcompress.io.text import Table

PIPE_WIDTH = 120
UNLIMITED = 10_000  # characters
WIDE = 120  # a narrower terminal would cut figures in the tables of a rendered document
STYLES = {"passed": "green", "failed": "bold red", "not run": "yellow"}
TITLES = {InputError: "invalid input", CheckFailedError: "check failed"}


def safe_text(text: str, style: str = "") -> Text:
    """Text to print: names from files may be long, and contain what a terminal acts on."""
    return Text(printable(text, LONGEST_LINE), style=style)


def stream_console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PIPE_WIDTH, highlight=False)


def print_json(value: Any) -> None:
    """Only `value` on standard output: plain data, dataclasses and paths."""
    click.echo(format_json(to_jsonable_python(value, fallback=str)))


def print_text(text: str) -> None:
    """Plain text on standard output, not wrapped."""
    click.echo(printable(text.rstrip("\n")))


def print_line(text: str) -> None:
    """One line on standard error."""
    stream_console(stderr=True).print(safe_text(text), soft_wrap=True)


def print_document(text: str, kind: Literal["toml", "markdown"]) -> None:
    """A document on standard output, colored or, in a wide terminal, rendered."""
    console = None if not sys.stdout.isatty() else stream_console(stderr=False)
    if console is None or (kind == "markdown" and console.width < WIDE):
        return print_text(text)
    text = printable(text)
    console.print(Markdown(text) if kind == "markdown" else Syntax(text, kind, background_color="default"))


def print_table(table: Table, *, wrap: bool = False) -> None:
    """A table on standard output; the first column is aligned left, the others right, and verdicts are colored.

    If the terminal is too narrow, columns with the same value in every row are printed once, below the table; if words
    would still be split, each row is a list. wrap: all columns are aligned left, and long texts are wrapped, those of
    the last column between any letters.
    """
    console, rows, shared = stream_console(stderr=False), table.rows, dict[str, str]()
    unlimited = console.options.update(width=UNLIMITED)
    if not wrap and len(rows) > 1 and Measurement.get(console, unlimited, _as_rich(table)).maximum > console.width:
        varying = [n for n in range(len(table.columns)) if n == 0 or len({row[n] for row in rows}) > 1]
        shared = {name: rows[0][n] for n, name in enumerate(table.columns) if n not in varying and rows[0][n]}
        columns, *rest = (tuple(cells[n] for n in varying) for cells in (table.columns, *rows))
        table = Table(table.title, columns, tuple(rest))
    drawn = words = table
    if wrap:
        drawn = replace(table, rows=tuple((_wrap_name(row[0], console.width // 3), *row[1:]) for row in rows))
        words = Table("", table.columns[:-1], tuple(row[:-1] for row in drawn.rows))
    if Measurement.get(console, unlimited, _as_rich(words, wrap)).minimum <= console.width:
        console.print(_as_rich(drawn, wrap))
    else:
        print_text(table.title)
        for row in table.rows:
            print_pairs((column, cell) for column, cell in zip(table.columns, row, strict=True) if cell)
            print_text("")
    if shared:
        print_text(f"all: {', '.join(f'{column} {text}' for column, text in shared.items())}")


def _wrap_name(name: str, width: int) -> str:
    """Lines of a dotted name, which end at a dot."""
    lines = textwrap.wrap(name.replace(".", ". "), width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(line.replace(". ", ".") for line in lines)


def _as_rich(table: Table, wrap: bool = False) -> RichTable:
    title = safe_text(table.title, style="bold") if table.title else None
    drawn = RichTable(title=title, title_justify="left", header_style="bold")
    for number, column in enumerate(table.columns):
        side: Literal["left", "right"] = "left" if wrap or number == 0 else "right"
        one_word = not any(" " in row[number] for row in table.rows) and not (wrap and column == table.columns[-1])
        longest = max((cell_len(line) for row in table.rows for line in row[number].split("\n")), default=0)
        drawn.add_column(safe_text(column), justify=side, overflow="fold", min_width=longest if one_word else None)
    for row in table.rows:
        drawn.add_row(*(safe_text(cell, style=STYLES.get(cell, "")) for cell in row))
    return drawn


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Names with their descriptions, without borders."""
    table = RichTable(Column(overflow="fold"), Column(overflow="fold"), box=None, show_header=False, pad_edge=False)
    for name, text in pairs:
        table.add_row(safe_text(name, style="bold"), safe_text(text))
    stream_console(stderr=False).print(table)


def print_error(error: VitcompressError) -> None:
    """One panel on standard error: the problem, and the next step."""
    hint = [safe_text(f"\n{error.hint}", style="cyan")] if error.hint else []
    title = next((words for kind, words in TITLES.items() if isinstance(error, kind)), "failed")
    text = Group(safe_text(error.message), *hint)
    stream_console(stderr=True).print(Panel(text, title=title, title_align="left", border_style="red", expand=False))


def error_as_data(error: VitcompressError) -> dict[str, object]:
    """The same as plain data, for `--json`."""
    problems = {"problems": list(error.problems)} if isinstance(error, RecipeError) else {}
    return {"error": error.message, "kind": type(error).__name__, "hint": error.hint, **problems}


SECONDS_BETWEEN_LINES = 15.0  # without a terminal


class ConsoleProgress(Progress):
    """Bars in a terminal; in a pipe or a log, a line per finished part and at most one every 15 seconds."""

    def __init__(self) -> None:
        self._console = stream_console(stderr=True)
        self._bars = Bars(
            TextColumn("  {task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[text]}", markup=False),
            console=self._console,
            transient=True,
            refresh_per_second=2,  # drawn by a thread, which must not disturb measurements
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._last_line = time.monotonic()

    def __enter__(self) -> "ConsoleProgress":
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def stage(self, title: str) -> None:
        for label in list(self._tasks):  # bars of a part that did not finish
            self._bars.remove_task(self._tasks.pop(label))
        self._console.print(safe_text(title, style="bold"), soft_wrap=True)

    def note(self, text: str) -> None:
        self._console.print(safe_text(f"  {text}"), soft_wrap=True)

    def update(self, label: str, done: int, total: int, text: str = "") -> None:
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, completed=done, total=total, text=text)
        self._bars.update(self._tasks[label], completed=done, total=total, text=text)
        if done >= total:
            number = self._tasks.pop(label)
            seconds = next(task.elapsed or 0.0 for task in self._bars.tasks if task.id == number)
            self._bars.remove_task(number)
            self._print_dim(f"  {label}  {done}/{total}  {text}  ({seconds:.0f} s)")
        elif not self._console.is_terminal and time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._print_dim(f"  {label}  {done}/{total}  {text}")

    def _print_dim(self, line: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(safe_text(line.rstrip(), style="dim"), soft_wrap=True)
