"""Look up recorded speeds by the hash of the measured file."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

from vitcompress.bench.report.records import BenchRecord, SpeedRecord
from vitcompress.errors import ArtifactError
from vitcompress.io.files import read_json

COPIED = SpeedRecord.__annotations__.keys()


def read_benchmarks(path: Path) -> list[BenchRecord]:
    """The measurements in a bench.json, or in a file with the output of `vitcompress bench --json`.

    Raises:
        ArtifactError: the file is missing, or contains something else.
    """
    content = read_json(path)
    entries: list[BenchRecord] = content if isinstance(content, list) else [content]
    if not all(map(_is_measurement, entries)):
        raise ArtifactError(f"{path} contains no measurement", hint="give the output of `vitcompress bench --json`")
    return entries


def _is_measurement(entry: object) -> bool:
    rows = entry.get("rows") if isinstance(entry, dict) else None
    return isinstance(rows, list) and all(isinstance(row, dict) and row.keys() >= COPIED for row in rows)


def find_speed(
    entries: Iterable[BenchRecord], sha256: str | None, settings: Mapping[str, object] | None = None
) -> SpeedRecord | None:
    """The last measurement of the file with this hash; None without one. settings: values that its row must have."""
    rows: list[dict[str, object]] = [dict(row) for entry in entries for row in entry["rows"]]
    same = [row for row in rows if row.get("sha256") == sha256 and (settings or {}).items() <= row.items()]
    return cast(SpeedRecord, {key: same[-1][key] for key in COPIED}) if sha256 and same else None
