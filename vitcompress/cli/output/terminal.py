"""Text, tables, JSON and errors in the terminal: results on standard output, all else on standard error."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.markdown import Markdown
from rich.measure import Measurement
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from vitcompress.errors import CheckFailedError, InputError, RecipeError, VitcompressError

WIDTH_OF_A_PIPE = 120
UNBOUND = 10_000  # characters: as wide as a table would like to be


def stream_console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else WIDTH_OF_A_PIPE, highlight=False)


def print_json(value: Any) -> None:
    """`value` alone on standard output."""
    print_text(json.dumps(value, indent=1, default=str))


def print_text(text: str) -> None:
    """Plain text on standard output, unwrapped."""
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()  # else an error would show only at exit, where nothing reports it


def print_line(text: str) -> None:
    """One line on standard error."""
    stream_console(stderr=True).print(Text(text), soft_wrap=True)


def print_toml(text: str) -> None:
    """TOML on standard output, coloured in a terminal only."""
    _print_drawn(Syntax(text, "toml", background_color="default"), text)


def print_markdown(text: str) -> None:
    """Markdown on standard output, drawn in a terminal, as it is in a pipe."""
    _print_drawn(Markdown(text), text)


def _print_drawn(drawn: Syntax | Markdown, text: str) -> None:
    console = stream_console(stderr=False)
    console.print(drawn) if console.is_terminal else print_text(text)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on standard output; the first column is text, figures in the others stand right.

    Where the terminal is too narrow, what is the same in every row is told once, under the table.
    """
    console, texts = stream_console(stderr=False), [["" if cell is None else str(cell) for cell in row] for row in rows]
    table, same = _drawn(title, columns, texts), dict[str, str]()
    liked = Measurement.get(console, console.options.update(width=UNBOUND), table).maximum
    if len(texts) > 1 and liked > console.width:
        varying = [n for n in range(len(columns)) if n == 0 or len({row[n] for row in texts}) > 1]
        same = {column: texts[0][n] for n, column in enumerate(columns) if n not in varying and texts[0][n]}
        table = _drawn(title, [columns[n] for n in varying], [[row[n] for n in varying] for row in texts])
    console.print(table)
    if same:
        print_text(f"all: {', '.join(f'{column} {text}' for column, text in same.items())}")


def _drawn(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=Text(title, style="bold") if title else None, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Topics beside what is said of them, without borders."""
    table = Table("", "", box=None, show_header=False, pad_edge=False)
    for topic, text in pairs:
        table.add_row(Text(topic, style="bold"), Text(text))
    stream_console(stderr=False).print(table)


def print_records(title: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Records with the same keys as a table, whole numbers with separators."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    rows = [[_cell(record.get(column)) for column in columns] for record in records]
    print_table(title, [column.replace("_", " ") for column in columns], rows)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


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
