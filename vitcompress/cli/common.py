"""Shared by all commands: common options, progress, results, and errors as a panel and an exit code."""

import contextlib
import contextvars
import errno
import functools
import itertools
import logging
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from vitcompress.cli.options import SET_EXAMPLE, add_options, flag
from vitcompress.errors import GPU_ERROR, OUT_OF_MEMORY, CheckFailedError, InputError, VitcompressError, first_line
from vitcompress.io.progress import SILENT, Progress

STOPPED = 130  # what a shell reports for a program that Ctrl-C ended
UNUSABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)  # paths that only the user can correct


class Commands(click.Group):
    """The commands, and the one place where an error becomes a panel (or JSON) and an exit code."""

    def main(self, args: Sequence[str] | None = None, **extra: Any) -> NoReturn:  # type: ignore[override]
        """As click's `main`, but the exit code is always 0, 1, 2 or 130."""
        arguments = list(sys.argv[1:] if args is None else args)
        common = {name.strip("-") for name in ("--json", "--debug") if name in arguments}  # before options are parsed
        _open_closed_streams()
        with contextlib.suppress(AttributeError):  # a standard output without an encoding
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        extra |= {"prog_name": extra.get("prog_name") or "vitcompress", "standalone_mode": False, "obj": common}
        try:
            code = int(super().main(arguments, **extra) or 0)
        except click.Abort:
            resumes = arguments[:1] in (["recipe"], ["study"])
            click.echo(f"stopped{'; the same command continues' if resumes else ''}", err=True)
            code = STOPPED
        except Exception as error:  # noqa: BLE001 - no traceback without --debug
            if "debug" in common and not isinstance(error, click.ClickException):
                traceback.print_exc()
            code = _print_error(_explain(error), "json" in common)
        try:
            sys.stdout.flush()
        except OSError:  # a full disk
            sys.stdout = None  # Python would flush it again and change the exit code
        sys.exit(code)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for before, word in itertools.pairwise(["vitcompress", *args]):
            if not word or re.fullmatch("--[a-z-]+=", word):
                place = word.rstrip("=") or (before if before.startswith("-") else f"the argument after `{before}`")
                raise InputError(f"{place} is empty", hint="is a variable of the shell not set?")
            if re.search("[\ud800-\udfff]", word):  # Python's form of other bytes
                raise InputError(f"{word!r} is not UTF-8", hint="rename the file, or set LC_ALL to a UTF-8 locale")
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        with abort_on_interrupts():
            return super().invoke(ctx)


@contextlib.contextmanager
def abort_on_interrupts() -> Iterator[None]:
    """After Ctrl-C, raise KeyboardInterrupt again and again until code handles it, and click.Abort at the end.

    Python ignores exceptions in finalizers, and libraries ignore some of them. Code that cleans up is not disturbed.
    """
    # Windows has no timers, other threads cannot set handlers, and a shell may let a background job ignore Ctrl-C.
    possible = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if not possible or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    before, process, pressed = sys.unraisablehook, os.getpid(), list[int]()

    def interrupt(number: int, frame: Any) -> None:
        if os.getpid() == process:  # a worker that torch has forked ends by itself
            pressed.append(number)
            signal.setitimer(signal.ITIMER_REAL, 0.1)  # seconds until it is repeated
        handled = sys.exception()
        while not isinstance(handled, KeyboardInterrupt | None):
            handled = handled.__context__
        if number == signal.SIGINT or handled is None:
            raise KeyboardInterrupt

    handlers = [(number, signal.signal(number, interrupt)) for number in (signal.SIGINT, signal.SIGALRM)]
    sys.unraisablehook = lambda lost: None if lost.exc_type is KeyboardInterrupt else before(lost)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for handler in handlers:
            signal.signal(*handler)
        sys.unraisablehook = before
        if pressed:
            raise click.Abort


def _open_closed_streams() -> None:
    """Replace closed standard streams by os.devnull, so that no other file has their descriptors."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _explain(error: Exception) -> VitcompressError:
    """Any error as one of ours: wrong arguments, out of memory, the operating system, the GPU, or a bug."""
    if isinstance(error, VitcompressError):
        return error
    if isinstance(error, click.ClickException):
        context: click.Context | None = getattr(error, "ctx", None)
        hint = f"`{context.command_path} --help` lists arguments and options" if context else None
        if context and isinstance(error, click.NoSuchOption) and any("--set" in p.opts for p in context.command.params):
            hint = f"--set changes a key, {SET_EXAMPLE}; {hint}"
        return InputError(error.format_message(), hint=hint)
    if isinstance(error, OSError) and error.filename and error.errno in UNUSABLE:
        return InputError(f"{error.filename}: {error.strerror}", hint="use another path, or correct its permissions")
    if isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error)):
        message = f"there is not enough memory: {first_line(error)}"
        remedy = "use a smaller batch or model, or a machine with more; "
    elif isinstance(error, OSError) and error.strerror:
        place = f" ({error.filename})" if error.filename else ""
        message, remedy = f"system error{place}: {error.strerror}", ""
    elif GPU_ERROR.search(str(error)):
        message = f"the GPU or its driver failed: {first_line(error)}"
        remedy = "`vitcompress doctor` tests this machine; "
    else:
        message, remedy = f"unexpected {type(error).__name__}: {error}", "this is a bug in vitcompress or a plugin; "
    return VitcompressError(message, hint=f"{remedy}--debug shows where it happened")


def _print_error(error: VitcompressError, as_json: bool) -> int:
    """Print the error once, by one of the processes that torchrun has started. Returns the exit code."""
    from vitcompress.cli.output import terminal

    if isinstance(error, InputError) and os.environ.get("LOCAL_RANK", "0") != "0":
        return error.exit_code
    try:
        terminal.print_json(terminal.error_as_data(error)) if as_json else terminal.print_error(error)
    except OSError:  # standard output itself may be the problem
        terminal.print_error(error)
    return error.exit_code


def is_main_process() -> bool:
    """Whether this process prints, of all that torchrun has started."""
    return os.environ.get("RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1"


def _keep(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(set).add(param.name)


def _is_set(option: str) -> bool:
    """Whether an option of all commands is set, in the command that runs."""
    context = click.get_current_context(silent=True)
    return context is not None and option in (context.obj or ())


_kept = functools.partial(flag, expose_value=False, callback=_keep, is_eager=True)  # before errors of others


@contextlib.contextmanager
def show_progress() -> Iterator[Progress]:
    """Show progress. Output of libraries goes to standard error; their warnings are hidden, and logged by runs."""
    from vitcompress.cli.output.terminal import ConsoleProgress

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if not (_is_set("debug") or _is_set("verbose")):
            stack.enter_context(warnings.catch_warnings())
            warnings.showwarning = lambda *warning: None
            stack.callback(logging.disable, logging.root.manager.disable)
            logging.disable(logging.WARNING)
            # A failed thread of a library prints a traceback; its effect on the work is raised as an error.
            stack.callback(setattr, threading, "excepthook", threading.excepthook)
            threading.excepthook = lambda args: None
        progress = stack.enter_context(ConsoleProgress()) if is_main_process() and not _is_set("quiet") else SILENT
        own = logging.StreamHandler()  # what vitcompress itself warns of is shown
        own.setFormatter(logging.Formatter("warning: %(message)s"))
        logging.getLogger("vitcompress").addHandler(own)
        stack.callback(logging.getLogger("vitcompress").removeHandler, own)
        yield progress


# Arguments and options that name files which must exist -> the next step if one does not.
FILES = {
    **dict.fromkeys(("folder", "folders"), "name a run folder, such as runs/digits_hetdpt"),
    "artifacts": "use a run folder, an exported file, timm:NAME or timm-onnx:NAME",
    "artifact": "use a run folder or an exported file",
    "data": "expected PATH/train/CLASS/IMAGE and PATH/val/CLASS/IMAGE",
    "weights": "use a file (.safetensors, .pth, .pth.tar), a folder, random, hub or train",
    **dict.fromkeys(("classes", "bench"), "check the path"),
}
NO_FILES = {"weights": ("random", "hub", "train"), "data": ("digits", "tinted")}


def check_files(values: Mapping[str, Any]) -> None:
    """Raise InputError if one of the options `values` is a file that does not exist."""
    for name, hint in FILES.items():
        value = values.get(name)
        for path in value if isinstance(value, tuple) else (value,):
            if path is None or str(path) in NO_FILES.get(name, ()) or re.match("[a-z-]{2,}:", str(path)):  # timm:NAME
                continue
            if not os.path.exists(os.path.expanduser(path)):  # noqa: PTH110, PTH111 - names may be too long, users unknown
                word = str(path) if str(path).isidentifier() else "NAME"  # perhaps of timm
                raise InputError(f"{path} does not exist", hint=hint.replace("NAME", word))


def check_signatures(values: Mapping[str, Any]) -> None:
    """Check the signatures of the artifacts and folders in `values`, and let runners open no other files."""
    from vitcompress.io.files import signed_files
    from vitcompress.io.signature import check_signature, read_public_keys

    places = [place for place in os.environ.get("VITCOMPRESS_TRUSTED_KEYS", "").split(os.pathsep) if place]
    keys = read_public_keys(map(Path, places or [f"{click.get_app_dir('vitcompress')}/trusted_keys"]))
    artifacts = [*filter(None, [values.get("folder")]), *values.get("folders", ()), *values.get("artifacts", ())]
    hashes = [file for artifact in artifacts for file in check_signature(Path(artifact), keys).items()]
    signed_files.set({file.resolve(): sha256 for file, sha256 in hashes})


def common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of all commands, and check files before the command imports libraries."""

    @functools.wraps(command)
    def run(*args: Any, **values: Any) -> Any:
        if "dry_run" not in values:  # such a command decides itself whether it needs them
            check_files(values)  # before libraries are imported, which takes seconds
        context = contextvars.copy_context()
        if values.pop("require_signed", False):
            context.run(check_signatures, values)
        return context.run(command, *args, **values)

    return add_options(
        _kept("--json", "Print the result as JSON."),
        _kept("--verbose -v", "Show library warnings."),
        _kept("--quiet -q", "Show no progress."),
        _kept("--debug", "Show tracebacks and library warnings."),
    )(run)


def print_result(data: Any, draw: Callable[[Any], None], failure: str | None = None) -> int:
    """Print the result of a command as JSON or with `draw`, in one process only. Returns the exit code.

    failure: which limit or check failed, one per line; nothing if empty.
    """
    from vitcompress.cli.output import terminal

    if is_main_process():
        (terminal.print_json if _is_set("json") else draw)(data)
    return report_failure(failure) if failure else 0


def report_failure(message: str, hint: str | None = None) -> int:
    """Print a panel, unless the JSON has the reason. Returns exit code 1."""
    from vitcompress.cli.output import terminal

    if not _is_set("json") and is_main_process():
        terminal.print_error(CheckFailedError(message, hint=hint))
    return CheckFailedError.exit_code
