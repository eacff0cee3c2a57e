"""Warnings of libraries, kept in a file."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def log_warnings(path: Path) -> Iterator[None]:
    """Append all warnings, logged or not, to `path`, which the first of them creates. Where warnings are hidden (by
    `logging.disable` and an empty `warnings.showwarning`), they stay hidden; elsewhere they are shown as well.
    """
    log, shown, root = logging.FileHandler(path, encoding="utf-8", delay=True), warnings.showwarning, logging.root
    log.setLevel(logging.WARNING)
    log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        text = warnings.formatwarning(message, category, filename, lineno, line).strip()
        if log in root.handlers:  # not after the block, if another one began in it and has not ended
            log.emit(logging.LogRecord("warnings", logging.WARNING, filename, lineno, text, None, None))
        shown(message, category, filename, lineno, file, line)

    def restore() -> None:
        if warnings.showwarning is show:  # blocks of several threads may end in any order
            warnings.showwarning = shown

    disabled = root.manager.disable
    named = [one for one in root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    with ExitStack() as stack:
        stack.callback(log.close)
        for handler in {handler for one in (root, *named) for handler in one.handlers}:
            if disabled >= logging.WARNING:
                stack.callback(handler.setLevel, handler.level)
                handler.setLevel(max(handler.level, logging.ERROR))
        for one in (root, *(one for one in named if not one.propagate)):
            one.addHandler(log)
            stack.callback(one.removeHandler, log)
        logging.disable(logging.NOTSET)
        stack.callback(lambda: logging.disable(root.manager.disable or disabled))  # another block may have restored it
        stack.callback(restore)
        warnings.showwarning = show
        yield
