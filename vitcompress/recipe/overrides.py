"""`--set table.key=value`: change one value of a recipe from the command line, in TOML syntax."""

import re
import tomllib
from typing import Any

from vitcompress.io.text import format_range

REMOVED = object()  # the value of `key=`: the default applies


def assign(data: dict[str, Any], assignment: str) -> str | None:
    """Apply one `table.key=value` to `data` in place. Returns the problem, if there is one."""
    key, equals, text = assignment.partition("=")
    path = [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]\s]+", key)]
    if not equals or not path or isinstance(path[0], int):
        return f"--set {assignment}   expected table.key=value, as in finetune.epochs=10 or step.0.pruned_layers=4"
    try:
        value = _value(text.strip()) if text.strip() else REMOVED
    except tomllib.TOMLDecodeError:
        return f'--set {assignment}   {text.strip()!r} is not a TOML value, as in 3, 0.5, true, "text", [1, 2]'
    target: Any = data
    for number, part in enumerate(path):
        last = number == len(path) - 1
        if isinstance(target, list) and isinstance(part, int) and part >= len(target):
            return f"--set {assignment}   there is no number {part}, but {format_range(0, len(target) - 1)}"
        if isinstance(target, list) and (not isinstance(part, int) or (last and value is REMOVED)):
            return f"--set {assignment}   a list of {len(target)}: write its number, as in step.0.method"
        if not isinstance(target, list) and not (isinstance(target, dict) and isinstance(part, str)):
            return f"--set {assignment}   there is no such place in the recipe"
        if not last:
            target = target[part] if isinstance(target, list) else target.setdefault(part, {})
        elif value is REMOVED and isinstance(target, dict):
            target.pop(part, None)
        else:
            target[part] = value
    return None


def _value(text: str) -> Any:
    """A TOML value; a single bare word is text, because shells remove quotes."""
    if re.fullmatch(r"[A-Za-z_/~.][\w./:~+-]*", text) and text not in ("true", "false", "inf", "nan"):
        return text
    parsed = tomllib.loads(f"value = {text}")
    if set(parsed) != {"value"}:
        raise tomllib.TOMLDecodeError("more than one value")
    return parsed["value"]
