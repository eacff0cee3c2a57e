"""Progress of a command in the terminal."""

import time
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.text import Text

from vitcompress.cli.output.terminal import stream_console
from vitcompress.io.progress import Progress

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
        self._starts: dict[str, float] = {}
        self._last_line = time.monotonic()

    def __enter__(self) -> "ConsoleProgress":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def stage(self, title: str) -> None:
        for label in list(self._tasks):  # bars of a part that did not finish
            self._bars.remove_task(self._tasks.pop(label))
        self._starts.clear()
        self._console.print(Text(title, style="bold"), soft_wrap=True)

    def note(self, text: str) -> None:
        self._console.print(Text(f"  {text}"), soft_wrap=True)

    def update(self, label: str, done: int, total: int, text: str = "") -> None:
        start = self._starts.setdefault(label, time.monotonic())
        if done >= total:
            if label in self._tasks:
                self._bars.remove_task(self._tasks.pop(label))
            del self._starts[label]
            self._print_dim(f"  {label}  {done}/{total}  {text}  ({time.monotonic() - start:.0f} s)")
        elif self._console.is_terminal:
            if label not in self._tasks:
                self._tasks[label] = self._bars.add_task(label, completed=done, total=total, text=text)
            self._bars.update(self._tasks[label], completed=done, total=total, text=text)
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._print_dim(f"  {label}  {done}/{total}  {text}")

    def _print_dim(self, line: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(Text(line.rstrip(), style="dim"), soft_wrap=True)
