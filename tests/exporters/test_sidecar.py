"""Every reader reports what is wrong with a sidecar that people edited or another version wrote."""

import json
import math
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import build, traces
from damage import edits

from vitcompress.errors import ArtifactError, VitcompressError
from vitcompress.exporters.base import Exported
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.runtimes import EXPORTERS, exported_files, exporter_of, open_runner
from vitcompress.exporters.sidecar import (
    Sidecar,
    amend_sidecar,
    check_sha256,
    read_input,
    read_sidecar,
    sidecar_path,
)
from vitcompress.exporters.sidecar import (
    read_classes as read_from_file,
)
from vitcompress.io.checks import Check
from vitcompress.io.run_folder import RunFolder
from vitcompress.models.create import input_config
from vitcompress.verify.files import quarantine, record_status, structure_checks

IMAGES = torch.zeros(1, 3, 8, 8)
MODEL = build("plain", dtype=torch.float32)
SEARCH = {"judge": "torch", "proxy": True, "tries": [{"islands": []}], "chosen": ["head"]}
TRUTH = {"name": "engine.precision", "verdict": "passed", "value": 1.0, "tolerance": 1.0, "detail": "all"}


@pytest.fixture(scope="module", params=["onnx", "trt-rtx"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported file whose sidecar has every optional key."""
    exporter = EXPORTERS[request.param]
    if exporter.unavailable():
        pytest.skip(f"{exporter.name} cannot be written here")
    more: dict[str, Any] = {"sm": (89,), "batch": (1, 2, 4), "keep_onnx": False} if exporter.suffix != ".onnx" else {}
    path = tmp_path_factory.mktemp("exported") / f"model{exporter.suffix}"
    about: Any = {"input": input_config(MODEL), "classes": tuple("abcde"), "traces": traces("plain")}
    exporter.export(MODEL, path, options=ExportOptions(**more), **about)
    record_status(path, [Check(f"agreement.{path.name}", "not_run", detail="no GPU", command="vitcompress verify run")])
    known = read_sidecar(path)
    amend_sidecar(path, islands_search=SEARCH, build={**known["build"], "truth": [TRUTH]})
    return path


@pytest.fixture
def path(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported.parent, tmp_path / "run")) / exported.name


def run(path: Path) -> None:
    with closing(open_runner(path)) as runner:
        runner(IMAGES)


def verify(path: Path) -> list[Check]:
    return structure_checks(path, None)


def record(path: Path) -> None:
    record_status(path, [Check("agreement.x", "passed")])


def read_classes(path: Path) -> tuple[str, ...]:
    """Class names are read from the sidecar of model.onnx, whatever the file."""
    if path.suffix != ".onnx":
        shutil.copy(sidecar_path(path), path.with_name("model.onnx.json"))
        data = json.loads(sidecar_path(path).read_text())
        if isinstance(data.get("files"), dict):
            data["files"]["model.onnx"] = ""
        path.with_name("model.onnx.json").write_text(json.dumps(data))
    return read_from_file(path)


READERS: tuple[Callable[[Path], object], ...] = (read_sidecar, check_sha256, run, verify, record, read_classes)
ALWAYS = {"read_sidecar", "check_sha256", "run", "record"}  # readers that need every key


def errors(path: Path, sidecar: object) -> dict[str, str]:
    """Reader -> its error for the file with another sidecar."""
    messages = {}
    for reader in READERS:
        sidecar_path(path).write_text(json.dumps(sidecar))
        try:
            reader(path)
        except VitcompressError as error:
            messages[reader.__name__] = error.message
    return messages


def test_every_reader_reports_a_key_that_is_missing_or_has_another_type(path: Path) -> None:
    whole, reported = json.loads(sidecar_path(path).read_text()), set[str]()
    assert "read_sidecar" not in errors(path, whole)
    for edit, changed in edits(whole):
        messages = errors(path, changed)
        if "read_sidecar" in messages:
            key = edit.split(" ")[0]
            assert sidecar_path(path).name in messages["read_sidecar"], edit
            assert key.split(".")[0] in messages["read_sidecar"] and set(messages) >= ALWAYS, edit
            reported.add(key)
    assert reported >= {field.name for field in fields(Exported)} | {"sidecar_format", "metadata.mean", "files"}


@pytest.mark.parametrize("text", ["", "[]", "7", "null", "{", '{"files": {}}'])
def test_every_reader_reports_a_file_that_is_no_sidecar(text: str, path: Path) -> None:
    for reader in READERS:
        sidecar_path(path).write_text(text)
        if reader is verify:
            assert any(check.verdict == "failed" for check in verify(path))
        elif reader is not read_classes or path.suffix == ".onnx":
            with pytest.raises(ArtifactError, match="model"):
                reader(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sidecar_format": 2}, "sidecar_format"),
        ({"bytes": "12"}, "bytes"),
        ({"verified": 1}, "verified"),
        ({"verified": "true"}, "verified"),
        ({"build": {"batch": [1, 2]}}, "build.batch"),
        ({"build": {"batch": [1, 2, 3, 4]}}, "build.batch"),
        ({"islands_search": {"judge": "torch"}}, "islands_search"),
        ({"files": {"other.onnx": "0"}}, "is missing from its files"),
    ],
)
def test_every_reader_rejects_almost_correct_values(changes: dict[str, Any], message: str, path: Path) -> None:
    """A newer format, numbers as text, a number as a truth value, a batch range of another length, another file."""
    known = json.loads(sidecar_path(path).read_text())
    assert "read_sidecar" not in errors(path, known)
    messages = errors(path, {**known, **changes})
    assert set(messages) >= ALWAYS and message in messages["read_sidecar"]


def test_a_sidecar_of_another_version_is_named_as_such(path: Path) -> None:
    known = json.loads(sidecar_path(path).read_text())
    sidecar_path(path).write_text(json.dumps({**known, "sidecar_format": 2}))
    with pytest.raises(ArtifactError, match="cannot be used: sidecar_format") as caught:
        check_sha256(path)
    assert "replaced" not in str(caught.value.hint)


def test_a_message_names_the_first_problems_only(path: Path) -> None:
    sidecar_path(path).write_text('{"sidecar_format": 1}')
    with pytest.raises(ArtifactError, match="path is missing; format is missing; precision is missing; and 10 more"):
        read_sidecar(path)


def test_a_sidecar_names_only_files_beside_it(path: Path) -> None:
    outside = path.parent.parent / "precious.txt"
    outside.write_text("mine")
    known = json.loads(sidecar_path(path).read_text())
    for name in ("../precious.txt", str(outside), "..\\precious.txt", "x" * 300):
        sidecar_path(path).write_text(json.dumps({**known, "files": {**known["files"], name: "0"}}))
        with pytest.raises(ArtifactError, match="the name of a file beside it"):
            read_sidecar(path)
        quarantine(path)
        assert outside.read_text() == "mine"
        for moved in RunFolder(path.parent).failed.iterdir():
            moved.replace(path.parent / moved.name)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        *(("size", value) for value in ("no JSON", 7, None, [1], ["a", 8, 8])),
        *((key, value) for key in ("mean", "std") for value in ("no JSON", 7, None, [1], ["a", "b", "c"], {"a": 1})),
        *((key, value) for key in ("interpolation", "crop_mode") for value in (7, None, ["bicubic"])),
        *(("crop_pct", value) for value in ("no JSON", None, [1])),
        *(("std", [wrong, 1.0, 1.0]) for wrong in (0.0, -1.0, math.nan, math.inf)),
        *(("mean", [wrong, 0.0, 0.0]) for wrong in (math.nan, -math.inf, 1e9)),
        *(("crop_pct", value) for value in (0.0, -0.9, 1e-9, math.nan, math.inf)),
        *(("size", [3, side, 8]) for side in (0, -1, 10**9)),
        ("interpolation", "cubist"),
        ("crop_mode", "left"),
    ],
)
def test_metadata_of_another_type_or_out_of_range_are_reported(key: str, wrong: object) -> None:
    """ONNX files and IRs contain them, too, and are read in the same way."""
    known = {**asdict(input_config(MODEL)), "classes": []}
    assert read_input("it", known) == input_config(MODEL)
    with pytest.raises(ArtifactError, match=f"the metadata of it cannot be used: {key} is"):
        read_input("it", {**known, key: wrong})
    assert read_input("it", {name: value for name, value in known.items() if name != key}) is None


def test_the_input_size_of_a_file_replaces_the_recorded_size() -> None:
    known = {**asdict(input_config(MODEL)), "classes": []}
    assert read_input("it", known, (3, 16, 24)) == replace(input_config(MODEL), size=(3, 16, 24))
    with pytest.raises(ArtifactError, match="mean is"):
        read_input("it", known, (1, 8, 8))


def test_exported_files_are_recognized_by_their_suffixes_and_sidecars(tmp_path: Path) -> None:
    for name in ("dense.onnx", "dense-fp16.onnx", "edge.onnx", "model.onnx", "model.xml", "model.bin", "notes.onnx"):
        (tmp_path / name).touch()
    for name in ("dense.onnx", "edge.onnx", "model.tflite"):
        sidecar_path(tmp_path / name).touch()
    (tmp_path / "model.tflite").touch()  # of an exporter from another package
    assert [path.name for path in exported_files(tmp_path, "dense")] == ["dense-fp16.onnx", "dense.onnx"]
    files = ["edge.onnx", "model.onnx", "model.tflite", "model.xml"]
    assert [path.name for path in exported_files(tmp_path, "model")] == files
    assert exporter_of(tmp_path / "model.xml") is EXPORTERS["openvino"]
    assert exporter_of(tmp_path / "model.tflite") is None


@pytest.mark.parametrize("text", ["no JSON", "7", "[1]", '{"a": 1}', "null"])
def test_wrong_class_names_are_reported(text: str, path: Path) -> None:
    known = json.loads(sidecar_path(path).read_text())
    changed = {**known, "metadata": {**known["metadata"], "classes": text}}
    assert "classes is" in errors(path, changed)["read_classes"]


def test_the_schema_has_all_written_keys(path: Path) -> None:
    assert {field.name for field in fields(Exported)} | {"sidecar_format", "verification"} == set(Sidecar.model_fields)
    assert set(json.loads(sidecar_path(path).read_text())) == set(Sidecar.model_fields)
