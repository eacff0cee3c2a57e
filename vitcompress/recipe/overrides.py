"""`--set table.key=value`: change one value of a recipe from the command line, in TOML syntax; and say in which of such
values two recipes differ.
"""

import re
import tomllib
from typing import Any

from vitcompress.io.text import format_range

REMOVED = object()  # the value of `key=`: the key's default applies


def assign(data: dict[str, Any], assignment: str) -> str | None:
    """Carry out one `table.key=value` in place; the problem if it cannot be."""
    key, equals, text = assignment.partition("=")
    path = [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]\s]+", key)]
    if not equals or not path or isinstance(path[0], int):
        return f"--set {assignment}   expected table.key=value, as in finetune.epochs=10 or step.0.pruned_layers=4"
    try:
        value = _value(text.strip()) if text.strip() else REMOVED
    except tomllib.TOMLDecodeError:
        return f'--set {assignment}   {text.strip()!r} is not a TOML value, as in 3, 0.5, true, "text", [1, 2]'
    target: Any = data
    for part in path[:-1]:
        if isinstance(target, list) and isinstance(part, int) and part >= len(target):
            return f"--set {assignment}   there is no number {part}, but {format_range(0, len(target) - 1)}"
        target = _descend(target, part)
    return _put(target, path[-1], value, assignment)


def _value(text: str) -> Any:
    """A TOML value; a single bare word is text, as shells eat the quotes."""
    if re.fullmatch(r"[A-Za-z_/~.][\w./:~+-]*", text) and text not in ("true", "false", "inf", "nan"):
        return text
    parsed = tomllib.loads(f"value = {text}")
    if set(parsed) != {"value"}:
        raise tomllib.TOMLDecodeError("more than one value")
    return parsed["value"]


def _descend(target: Any, part: int | str) -> Any:
    """The table or list entry called `part`, made if a table does not have it yet; None where it cannot exist."""
    if isinstance(target, dict) and isinstance(part, str):
        return target.setdefault(part, {})
    if isinstance(target, list) and isinstance(part, int) and part < len(target):
        return target[part]
    return None


def _put(target: Any, last: int | str, value: Any, assignment: str) -> str | None:
    if isinstance(target, dict) and isinstance(last, str):
        if value is REMOVED:
            target.pop(last, None)
        else:
            target[last] = value
        return None
    if isinstance(target, list) and isinstance(last, int) and last < len(target) and value is not REMOVED:
        target[last] = value
        return None
    if isinstance(target, list):
        return f"--set {assignment}   a list of {len(target)}: write its number, as in step.0.method"
    return f"--set {assignment}   there is no such place in the recipe"
