"""The terminal, and the only module that knows rich. Results go to standard output, all else to standard error."""

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group
from rich.markdown import Markdown
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from vitcompress.errors import CheckFailedError, InputError, RecipeError, VitcompressError
from vitcompress.progress import Progress

WIDTH_OF_A_PIPE = 120
SECONDS_BETWEEN_LINES = 15.0  # of the same part
TITLES = {InputError: "cannot be used", CheckFailedError: "not good enough"}
VERDICTS = {"passed": "green", "failed": "bold red", "not_run": "yellow"}


class Drawable(Protocol):
    """Text in rows and columns."""

    @property
    def title(self) -> str: ...

    @property
    def columns(self) -> Sequence[str]: ...

    @property
    def rows(self) -> Sequence[Sequence[str]]: ...


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else WIDTH_OF_A_PIPE, highlight=False)


class ConsoleProgress(Progress):
    """Bars in a terminal; in a pipe or a log one line per finished part and one every quarter of a minute."""

    def __init__(self) -> None:
        self._console = _console(stderr=True)
        self._bars = Bars(
            TextColumn("  {task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[text]}", markup=False),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._began: dict[str, float] = {}
        self._spoke = time.monotonic()

    def __enter__(self) -> "ConsoleProgress":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def stage(self, title: str) -> None:
        self._drop_bars()
        self._console.print(Text(title, style="bold"), soft_wrap=True)

    def note(self, text: str) -> None:
        self._console.print(Text(f"  {text}"), soft_wrap=True)

    def update(self, label: str, done: int, total: int, text: str = "") -> None:
        began = self._began.setdefault(label, time.monotonic())
        if done >= total:
            self._finish(label, f"  {label}  {done}/{total}  {text}  ({time.monotonic() - began:.0f} s)")
        elif self._console.is_terminal:
            self._move_bar(label, done, total, text)
        elif time.monotonic() - self._spoke >= SECONDS_BETWEEN_LINES:
            self._say(f"  {label}  {done}/{total}  {text}")

    def _move_bar(self, label: str, done: int, total: int, text: str) -> None:
        if label in self._tasks:
            self._bars.update(self._tasks[label], completed=done, total=total, text=text)
        else:
            self._tasks[label] = self._bars.add_task(label, completed=done, total=total, text=text)

    def _finish(self, label: str, line: str) -> None:
        if label in self._tasks:
            self._bars.remove_task(self._tasks.pop(label))
        self._began.pop(label, None)
        self._say(line)

    def _say(self, line: str) -> None:
        self._spoke = time.monotonic()
        self._console.print(Text(line.rstrip(), style="dim"), soft_wrap=True)

    def _drop_bars(self) -> None:
        for label in list(self._tasks):
            self._bars.remove_task(self._tasks.pop(label))
        self._began.clear()


def print_json(value: Any) -> None:
    """`value` alone on standard output."""
    sys.stdout.write(json.dumps(value, indent=1, default=str) + "\n")


def print_text(text: str) -> None:
    """Plain text on standard output, unwrapped."""
    sys.stdout.write(text.rstrip("\n") + "\n")


def print_line(text: str) -> None:
    """One line on standard error."""
    _console(stderr=True).print(Text(text), soft_wrap=True)


def print_toml(text: str) -> None:
    """TOML on standard output, coloured in a terminal only."""
    _print_drawn(Syntax(text, "toml", background_color="default"), text)


def print_markdown(text: str) -> None:
    """Markdown on standard output, drawn in a terminal, as it is in a pipe."""
    _print_drawn(Markdown(text), text)


def _print_drawn(drawn: Syntax | Markdown, text: str) -> None:
    console = _console(stderr=False)
    console.print(drawn) if console.is_terminal else print_text(text)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on standard output; the first column is text, figures in the others stand right."""
    console = _console(stderr=False)
    table = Table(title=Text(title, style="bold") if title else None, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    console.print(table)


def print_checks(checks: Iterable[Mapping[str, Any]]) -> None:
    """The verdicts of a verification, with value and tolerance; what did not run with the command that runs it."""
    console = _console(stderr=False)
    table = Table("check", "verdict", "value", "tolerance", "detail", header_style="bold")
    for check in checks:
        verdict = str(check["verdict"])
        detail = " ".join(str(check[key]) for key in ("detail", "command") if check.get(key))
        table.add_row(
            Text(str(check["name"])),
            Text(verdict.replace("_", " "), style=VERDICTS.get(verdict, "")),
            _figure(check.get("value")),
            _figure(check.get("tolerance")),
            Text(detail),
        )
    console.print(table)


def _figure(value: Any) -> Text:
    if value is None:
        return Text("")
    return Text(f"{value:.3g}" if isinstance(value, float) else str(value))


def print_recipes(summaries: Mapping[str, str]) -> None:
    """Names and summaries of the recipes."""
    _print_pairs(summaries.items())


def _print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Topics and what is said of them, without lines around."""
    table = Table("", "", box=None, show_header=False, pad_edge=False)
    for topic, text in pairs:
        table.add_row(Text(topic, style="bold"), Text(text))
    _console(stderr=False).print(table)


def print_outlook(outlook: Mapping[str, Any]) -> None:
    """What a recipe would do: stages, cost before and after, and what is missing here."""
    print_text(f"{outlook['recipe']}, run folder {outlook['folder']}; nothing is written now\n")
    stages = [{**row, "images": _images(row)} for row in outlook["stages"]]
    print_records("stages (epochs of each round, images of each epoch)", stages)
    print_records(
        f"cost (layers: {outlook['layers']})", [{"model": name, **figures} for name, figures in outlook["cost"].items()]
    )
    missing = outlook["missing"]
    print_text(
        "\n".join(["needed and not here yet:", *(f"  - {line}" for line in missing)])
        if missing
        else "nothing is missing on this machine"
    )


def _images(stage: Mapping[str, Any]) -> Any:
    """The images of a stage; a question mark where it needs some and the data is not there to count."""
    return "?" if stage["images"] is None and stage["epochs"] is not None else stage["images"]


def print_export(done: Mapping[str, Any]) -> None:
    """Where an exported file lies and what it is."""
    print_text(
        f"{done['folder']}/{done['path']}  {done['format']} {done['precision']}, {done['bytes']:,} bytes, opset "
        f"{done['opset']} ({done['opset_reason']})"
    )


def print_result(table: Drawable, folder: object) -> None:
    """Before and after, and where everything lies."""
    print_table(table.title, table.columns, table.rows)
    print_text(f"all of it, with how it was measured: {folder}/report.md")


def print_comparison(found: Mapping[str, Any]) -> None:
    """Several runs side by side."""
    print_table("", found["table"]["columns"], found["table"]["rows"])
    if found["plot"]:
        print_text(f"plot: {found['plot']}")


def print_bench(found: Mapping[str, Any], table: Drawable) -> None:
    """Throughput and latency of every artifact, the ratios with their intervals, and what to beware of."""
    print_table(table.title, table.columns, table.rows)
    for ratio in found["ratios"]:
        low, high = ratio["ci95"]
        upper = "open" if high is None else f"{high:.3f}"
        times = f"{ratio['median']:.3f} times as fast as {ratio['a']} (95 % interval {low:.3f} to {upper})"
        print_text(f"{ratio['b']} is {times}: {ratio['verdict']}")
    for warning in found["warnings"]:
        print_line(f"note: {warning}")


def print_accuracy(found: Mapping[str, Any]) -> None:
    """Accuracy with counts, and McNemar's test of every later artifact against the first."""
    rows = [
        [
            row["artifact"],
            f"{100 * row['top1']:.2f} %",
            f"{row['correct']}/{row['total']}",
            "{:.2f} to {:.2f} %".format(*(100 * end for end in row["top1_ci95"])),
            f"{100 * row['top5']:.2f} %",
        ]
        for row in found["rows"]
    ]
    print_table("", ["artifact", "top-1", "right", "95 % interval", "top-5"], rows)
    for test in found["mcnemar"]:
        only = f"{test['only_a']} images only the first gets right, {test['only_b']} only the other"
        print_text(f"{test['a']} against {test['b']}: {only}, p = {test['p_value']:.3g} (McNemar, exact)")


def print_doctor(found: Mapping[str, Any]) -> None:
    """What this machine can do, one line each, and how to get the rest."""
    lines = [("machine", ", ".join(f"{key} {value}" for key, value in found["machine"].items()))]
    lines += [("library", f"{name} {version}") for name, version in found["versions"].items()]
    lines += [("device", f"{name}: {what or 'none'}") for name, what in found["devices"].items()]
    lines += [("export", f"{name}: {reason or 'yes'}") for name, reason in found["export"].items()]
    lines += [
        ("run", f"ONNX Runtime, {provider}: {'yes' if works else 'not on this machine'}")
        for provider, works in found["providers"].items()
    ]
    lines += [
        ("optional", f"{item['package']} ({item['for']}): {'yes' if item['present'] else 'no, ' + item['install']}")
        for item in found["optional"]
    ]
    _print_pairs(lines)


def print_records(title: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Records with the same keys as a table, whole numbers with separators."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    rows = [[_cell(record.get(column)) for column in columns] for record in records]
    print_table(title, [column.replace("_", " ") for column in columns], rows)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def print_error(error: VitcompressError) -> None:
    """One panel on standard error: what is wrong, and the next step."""
    lines: list[Text] = [Text(error.message)]
    if error.hint:
        lines.append(Text(f"\n{error.hint}", style="cyan"))
    title = next((words for kind, words in TITLES.items() if isinstance(error, kind)), "failed")
    _console(stderr=True).print(Panel(Group(*lines), title=title, title_align="left", border_style="red", expand=False))


def error_as_data(error: VitcompressError) -> dict[str, Any]:
    """The same as plain data, for `--json`."""
    data: dict[str, Any] = {"error": error.message, "kind": type(error).__name__, "hint": error.hint}
    if isinstance(error, RecipeError):
        data["problems"] = list(error.problems)
    return data
