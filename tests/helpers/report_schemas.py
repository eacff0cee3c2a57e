"""JSON Schemas of the files of a run folder: `python -m tests.helpers.report_schemas` rewrites them."""

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vitcompress.bench.report import records
from vitcompress.bench.report.records import BenchRecord, Report, VerificationRecord
from vitcompress.exporters.sidecar import Sidecar
from vitcompress.io.files import write_json

FOLDER = Path(records.__file__).parent / "schemas"
TYPES: dict[str, TypeAdapter[Any]] = {
    "report": TypeAdapter(Report),
    "bench": TypeAdapter(list[BenchRecord]),
    "verify": TypeAdapter(VerificationRecord),
    "sidecar": TypeAdapter(Sidecar),
}


def schema(name: str) -> dict[str, object]:
    """JSON Schema (draft 2020-12) of report.json, bench.json, verify.json or the sidecar of an exported file."""
    properties = TYPES[name].json_schema()
    if name == "report":  # TypedDict has no syntax for keys that are file names
        properties["$defs"]["AccuracyPair"]["additionalProperties"] = {"$ref": "#/$defs/FileAccuracy"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **properties}


def write_schemas(folder: Path = FOLDER) -> None:
    """Write `NAME.schema.json` of every type into `folder`."""
    for name in TYPES:
        write_json(folder / f"{name}.schema.json", schema(name))


if __name__ == "__main__":
    write_schemas()
