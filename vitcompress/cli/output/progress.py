"""Progress of a command in the terminal."""

import time
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.text import Text

from vitcompress.cli.output.terminal import stream_console
from vitcompress.io.progress import Progress

SECONDS_BETWEEN_LINES = 15.0  # of the same part


class ConsoleProgress(Progress):
    """Bars in a terminal; in a pipe or a log one line per finished part and one every quarter of a minute."""

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
            refresh_per_second=2,  # drawn by a thread of its own, also while something is timed: seldom enough for that
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
