"""What all commands share: common options, progress, output, and errors as a panel and an exit code."""

import _thread
import contextlib
import functools
import logging
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from vitcompress.cli.output import progress, terminal
from vitcompress.errors import CheckFailedError, InputError, VitcompressError, first_line
from vitcompress.io.progress import Progress

STOPPED = 130  # what a shell reports of a program that Ctrl-C ended
AGAIN = 0.05  # seconds after which a Ctrl-C that was lost is repeated
OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|failed to allocate memory|bad_alloc", re.IGNORECASE)

OF_THE_GPU = re.compile(r"CUDA error|CUDA driver|NVIDIA driver|CUBLAS_STATUS|CUDNN_STATUS|NCCL", re.IGNORECASE)


class Stopped(Exception):
    """Ctrl-C while a command worked."""


class Commands(click.Group):
    """The commands, and the one place where an error becomes a panel (or JSON) and an exit code."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """As click's, but every way out is one of the exit codes 0, 1, 2, 130."""
        _open_streams()
        arguments = list(sys.argv[1:] if args is None else args)
        call = functools.partial(
            super().main, arguments, prog_name or "vitcompress", complete_var, standalone_mode=False, **extra
        )
        code = _exit_code(call, arguments)
        _let_go_of_streams()
        sys.exit(code)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with repeated_interrupts():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Stopped from None


@contextlib.contextmanager
def repeated_interrupts() -> Iterator[None]:
    """Repeat a Ctrl-C that Python lost: it ignores exceptions in finalizers, and freeing a torch graph runs many."""
    before, repeats = sys.unraisablehook, list[threading.Timer]()

    def hook(lost: Any) -> None:
        if lost.exc_type is not KeyboardInterrupt:
            before(lost)
            return
        repeats.append(threading.Timer(AGAIN, _thread.interrupt_main))  # at once, it would be lost in this hook
        repeats[-1].start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
        for repeat in repeats:
            repeat.cancel()


def _open_streams() -> None:
    """Give a process that was started without a standard stream a place to write to."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open as long as the process lives


def _let_go_of_streams() -> None:
    """Redirect streams that cannot be written to: Python would flush them again at exit, and change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _exit_code(call: Callable[[], Any], arguments: Sequence[str]) -> int:
    as_json, debug = "--json" in arguments, "--debug" in arguments
    try:
        return int(call() or 0)
    except (Stopped, click.Abort):
        terminal.print_line(
            "stopped; the same command continues" if arguments[:1] in (["recipe"], ["study"]) else "stopped"
        )
        return STOPPED
    except click.ClickException as error:
        return _fail(InputError(error.format_message(), hint=_usage_hint(error)), as_json, debug=False)
    except VitcompressError as error:
        return _fail(error, as_json, debug)
    except Exception as error:  # noqa: BLE001 - the last line of defence: a person never sees a traceback unasked
        return _fail(_surprise(error), as_json, debug)


def _surprise(error: Exception) -> VitcompressError:
    """An unexpected error in words: too little memory, an error of the operating system, else a defect of ours."""
    if isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error)):
        return VitcompressError(
            f"there is not enough memory: {first_line(error)}",
            hint="use a smaller batch or model, or a machine with more; --debug shows where it happened",
        )
    if isinstance(error, OSError) and error.strerror:
        place = f" ({error.filename})" if error.filename else ""
        return VitcompressError(f"the system refused{place}: {error.strerror}", hint="--debug shows where it happened")
    if OF_THE_GPU.search(str(error)):
        return VitcompressError(
            f"the GPU or its driver failed: {first_line(error)}",
            hint="`vitcompress doctor` tries what is here; --debug shows where it happened",
        )
    return VitcompressError(
        f"unexpected {type(error).__name__}: {error}",
        hint="this is a bug in vitcompress; --debug shows where it happened",
    )


def _fail(error: VitcompressError, as_json: bool, debug: bool) -> int:
    """Say what is wrong, once, however many processes torchrun has started."""
    if debug:
        traceback.print_exc()
    if isinstance(error, InputError) and not _first_of_host():
        return error.exit_code
    try:
        (terminal.print_json(terminal.error_as_data(error)) if as_json else terminal.print_error(error))
    except OSError:  # standard output itself may be what refuses
        terminal.print_error(error)
    return error.exit_code


def _usage_hint(error: click.ClickException) -> str | None:
    context = getattr(error, "ctx", None)
    return f"`{context.command_path} --help` explains it" if context else None


def _first_of_host() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def first() -> bool:
    """Whether this process is the one that prints, of all that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def working(debug: bool) -> Iterator[Progress]:
    """Progress for the duration of the work; what libraries print goes to standard error, results alone to output."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if not debug:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.callback(logging.disable, logging.root.manager.disable)
            logging.disable(logging.WARNING)
            # A library's thread that fails prints a traceback; what it means for the work is raised and told.
            stack.callback(setattr, threading, "excepthook", threading.excepthook)
            threading.excepthook = lambda failed: None
        yield stack.enter_context(progress.ConsoleProgress()) if first() else Progress()


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that every command takes."""
    command = click.option("--debug", is_flag=True, help="Show tracebacks and the warnings of libraries.")(command)
    return click.option("--json", "as_json", is_flag=True, help="Print machine-readable output alone.")(command)


def answer(data: Any, as_json: bool, draw: Callable[[Any], None]) -> int:
    """The result of a command: as JSON, or drawn; on one of several processes only."""
    if first():
        (terminal.print_json if as_json else draw)(data)
    return 0


def foreseen(outlook: dict[str, Any], as_json: bool, draw: Callable[[Any], None]) -> int:
    """The result of a dry run; the exit code is that of the run, which begins only where nothing is missing."""
    answer(outlook, as_json, draw)
    return InputError.exit_code if outlook["missing"] else 0


def fell_short(what: str, command: str | None, as_json: bool) -> int:
    """Exit code 1, with a panel unless the JSON already says it."""
    if not as_json and first():
        terminal.print_error(CheckFailedError(what, hint=f"`{command}` shows which" if command else None))
    return CheckFailedError.exit_code
