"""Recorded speeds, found again by the hash of the file that was measured."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vitcompress.errors import ArtifactError
from vitcompress.io.files import read_json

BENCH = "bench.json"  # what a run measured
SAME = ("runtime", "device", "precision", "threads")
COPIED = ("images_per_second", "latency_ms", "batch", "protocol", *SAME)


def benches(path: Path) -> list[dict[str, Any]]:
    """What `vitcompress bench --json` printed to the file `path`, or a run wrote there, one entry per measurement.

    Raises:
        ArtifactError: it is missing, or neither of these.
    """
    found = read_json(path)
    entries = found if isinstance(found, list) else [found]
    if not all(_is_measurement(entry) for entry in entries):
        raise ArtifactError(f"{path} holds no measurement", hint="give what `vitcompress bench --json` printed")
    return entries


def _is_measurement(entry: Any) -> bool:
    rows = entry.get("rows") if isinstance(entry, dict) else None
    return isinstance(rows, list) and all(isinstance(row, dict) and set(COPIED) <= set(row) for row in rows)


def speed(entries: Iterable[Mapping[str, Any]], sha256: str, **how: Any) -> dict[str, Any] | None:
    """The last measurement of the file with this hash, run as `how` says (keys of SAME); None where there is none."""
    rows = (row for entry in entries for row in entry["rows"])
    same = [row for row in rows if row.get("sha256") == sha256 and all(row.get(key) == how[key] for key in how)]
    return {key: same[-1][key] for key in COPIED} if sha256 and same else None
