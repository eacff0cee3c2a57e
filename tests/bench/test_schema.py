"""The JSON Schemas equal the types, and the files of real runs follow them."""

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from report_schemas import FOLDER, TYPES, schema, write_schemas
from whole_runs import SMALL, run, with_steps

from vitcompress.io.run_folder import RunFolder

one_version = pytest.mark.skipif(
    tuple(map(int, version("pydantic").split(".")[:2])) < (2, 14),
    reason="older versions of pydantic write other, equivalent schemas",
)
WIDTHS = 'method = "isomorphic"\nimages = 40\nround_to = 2'


@one_version
@pytest.mark.parametrize("name", TYPES)
def test_the_schema_files_equal_the_types(name: str) -> None:
    """If this fails after a change of the types: `python -m tests.helpers.report_schemas`."""
    assert json.loads((FOLDER / f"{name}.schema.json").read_text()) == schema(name)


@one_version
def test_all_schema_files_are_written(tmp_path: Path) -> None:
    names = sorted(path.name for path in FOLDER.iterdir())
    write_schemas(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert all((tmp_path / name).read_bytes() == (FOLDER / name).read_bytes() for name in names)


def closed(tree: Any) -> Any:
    """A schema that rejects unknown keys too: every key that is written must be described."""
    if isinstance(tree, list):
        return [closed(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    extra = {"additionalProperties": False} if "properties" in tree and "additionalProperties" not in tree else {}
    return {key: closed(value) for key, value in tree.items()} | extra


@pytest.fixture(scope="module", params=["layers", "widths"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run folder."""
    path = tmp_path_factory.mktemp(request.param)
    text = SMALL if request.param == "layers" else with_steps(WIDTHS)
    run(path, text=text)
    return path / "run"


def files(folder: Path) -> Iterator[tuple[str, Path]]:
    paths = RunFolder(folder)
    yield from (("report", paths.report), ("bench", paths.benchmark), ("verify", paths.verification))
    yield from (("sidecar", path.with_name(f"{path.name}.json")) for path in folder.glob("*.onnx"))


def test_the_files_of_a_run_follow_the_schemas(folder: Path) -> None:
    names = set()
    for name, path in files(folder):
        data = json.loads(path.read_text())
        jsonschema.validate(data, closed(schema(name)) if name != "sidecar" else schema(name))
        names.add(name)
    assert names == set(TYPES)


def test_a_wrong_type_is_rejected(folder: Path) -> None:
    report = json.loads(RunFolder(folder).report.read_text())
    report["bench"][0]["rows"][0]["latency_ms"]["p50"] = "fast"
    with pytest.raises(jsonschema.ValidationError, match="'fast' is not of type 'number'"):
        jsonschema.validate(report, schema("report"))
