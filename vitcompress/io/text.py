"""Format numbers, ranges, tables and differences between settings."""

import html
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitcompress.errors import printable


def natural_key(text: str) -> tuple[list[int | str], str]:
    """Sorts names as timm does, by their numbers (class2 before class10), and equal ones (01 and 1) by their text."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text.lower())], text


def format_number(value: float, digits: int = 3) -> str:
    """0.228, 1.25e-06, 26.6, 951,836: this many digits, or the integer part if it is longer."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def few(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def format_range(least: object, most: object) -> str:
    """`2 to 8`, or `2` if both ends are equal."""
    low, high = str(least), str(most)
    return low if low == high else f"{low} to {high}"


def suggest_range(name: str, least: int, most: int) -> str:
    """A hint with the values that a setting allows: `choose name = 2`, `choose name from 2 to 8`."""
    return f"choose {name} {'=' if least == most else 'from'} {format_range(least, most)}"


def format_count(number: float, like: float = 0) -> str:
    """54867152 -> 54.87 M. like: another number in the same row of a table, whose unit is used if it is larger."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if max(abs(number), abs(like)) >= 0.999995 * size:  # otherwise 1000.00 of the unit below
            return f"{number / size:.2f} {unit}" if abs(number) >= size / 10 else f"{number / size:.2g} {unit}"
    return f"{number:g}"


def format_percent(share: float) -> str:
    """`97.0 %`; with more digits where 0.0 or 100.0 would not be exact."""
    digits = next((n for n in range(1, 20) if 0 < round(share, n + 2) < 1), 1)
    return f"{100 * share:.{digits}f} %"


def format_change(before: float, after: float) -> str:
    return f"{format_signed(100 * (after / before - 1))} %" if before else ""


def format_signed(value: float) -> str:
    """A difference in percent or points: +1.5, -12.0; two digits of a small one: -0.048 is neither -0.0 nor -0.1."""
    return f"{value:+.1f}" if abs(value) >= 0.5 or not value else f"{value:+.2g}"


def format_shape(shape: Sequence[int]) -> str:
    """(64, 16) -> 64x16"""
    return "x".join(map(str, shape)) or "scalar"


def describe_value(value: object) -> str:
    """(0.485, 1.0) -> 0.485,1, as options take it"""
    if isinstance(value, tuple | list):
        return ",".join(map(describe_value, value))
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def format_ratio(ratio: float, digits: int = 2) -> str:
    """1.48, 183.7, 0.0043; in three digits also `<1.000` and `>1.000`"""
    if digits == 3 and ratio != 1 and round(ratio, 3) == 1:
        return f"{'<' if ratio < 1 else '>'}1.000"
    return f"{ratio:,.1f}" if ratio >= 10 else f"{ratio:.{digits}{'f' if ratio >= 0.1 else 'g'}}"


def format_interval(ends: Sequence[float | None], digits: int = 2, title: str = "95 % interval ") -> str:
    """The 95 % interval of a ratio of `bench.timing`; without both ends there is none."""
    low, high = ends
    if low is None or high is None:
        return "no interval"  # of fewer than 6 rounds
    return f"{title}{format_ratio(low, digits)} to {format_ratio(high, digits)}"


def format_speedup(ratio: Mapping[str, Any], title: str = "") -> str:
    """`1.51x (1.45 to 1.56)`, or `1.51x (no interval)`; with 3 digits where an end near 1 would be 1.00."""
    digits = 3 if any(end not in (None, 1.0) and round(end, 2) == 1 for end in ratio["ci95"]) else 2
    return f"{format_ratio(ratio['median'], digits)}x ({format_interval(ratio['ci95'], digits, title)})"


def shorten_paths(names: Iterable[str]) -> dict[str, str]:
    """Each path -> its shortest unique suffix: `a/model.onnx` and `b/model.onnx`."""
    result = dict.fromkeys(names, "")
    for name in result:
        others, parts = result.keys() - {name}, Path(name).parts
        tails = (parts[-count:] for count in range(1, len(parts)))
        unique = (tail for tail in tails if all(Path(other).parts[-len(tail) :] != tail for other in others))
        result[name] = str(Path(*next(unique, (name,))))
    return result


def join_names(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Pairs of text and name as text -> its names, each once: `{"noisy": "torch, openvino"}`."""
    names: dict[str, list[str]] = {}
    for text, name in pairs:
        names.setdefault(text, []).append(name)
    return {text: ", ".join(dict.fromkeys(own)) for text, own in names.items()}


def escape_markdown(text: str) -> str:
    """`text` on one line, without effect as Markdown or HTML: names of classes and files may contain anything."""
    line = html.escape(printable(" ".join(text.split())), quote=False)
    return re.sub(r"([\\`*\[\]|~]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", line)  # not the _ inside words


def shorten_names(text: str, names: Iterable[str]) -> str:
    """`text` with each path among the `names` as its shortest unique suffix, the longest first."""
    for name, short in sorted(shorten_paths(names).items(), key=lambda pair: -len(pair[0])):
        text = text.replace(name, short) if "/" in name else text
    return text


NOT_MEASURED = "not measured"
NONE = "-"
# Heading -> cell: a format string with the keys of a record (`"{accuracy:.1f} %"`), or a function of the record.
Columns = Mapping[str, str | Callable[[Any], object]]


@dataclass(frozen=True)
class Table:
    """Text in rows and columns."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(cls, title: str, columns: Columns, records: Iterable[Any]) -> "Table":
        """One row per record."""
        cells = [c.format_map if isinstance(c, str) else c for c in columns.values()]
        return cls(title, tuple(columns), tuple(tuple(str(cell(record)) for cell in cells) for record in records))

    def markdown(self) -> str:
        lines = [" | ".join(map(escape_markdown, row)) for row in (self.columns, *self.rows)]
        lines.insert(1, " | ".join("---:" if self._is_numeric(i) else "---" for i in range(len(self.columns))))
        return "\n".join(f"| {line} |" for line in lines)

    def _is_numeric(self, column: int) -> bool:
        """Whether a column is right-aligned: numbers are; words, hashes and the first column are not."""
        cells = [row[column] for row in self.rows if row[column] not in ("", NOT_MEASURED, NONE)]
        return column > 0 and self.columns[column] != "sha256" and all(re.match(r"[+<>-]?\d", cell) for cell in cells)


SHOWN = 3  # differences in a message


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Nested tables and lists as pairs of dotted key and value: `("finetune.epochs", "10")`."""
    table = dict(enumerate(value)) if isinstance(value, list) else value
    if isinstance(table, Mapping) and (table or not name):
        for key, inner in table.items():
            yield from flatten(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, repr(value)


def describe_differences(there: Any, here: Any) -> list[str]:
    """One sentence for each of the first differences between two tables, and the number of others."""
    before, now = dict(flatten(there)), dict(flatten(here))
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    keys = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]  # empty on one side only
    lines = [f"{key} is {before.get(key, 'not set')} there, {now.get(key, 'not set')} here" for key in keys[:SHOWN]]
    return [*lines, *([f"{len(keys) - SHOWN} more"] if len(keys) > SHOWN else [])]
