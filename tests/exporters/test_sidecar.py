"""Sidecars that people edited or that other versions wrote: every reader says what is wrong, or does without."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import build, contract
from damage import edits

from vitcompress.errors import ArtifactError, VitcompressError
from vitcompress.exporters import EXPORTERS
from vitcompress.exporters.base import Exported
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.runtimes import open_runner
from vitcompress.exporters.sidecar import (
    Sidecar,
    amend_sidecar,
    checked_sha256,
    class_names,
    exported_files,
    input_of,
    read_sidecar,
    sidecar_path,
)
from vitcompress.io.checks import Check
from vitcompress.models.create import input_config
from vitcompress.verify import quarantine
from vitcompress.verify.engine import engine_checks, engine_weights

IMAGES = torch.zeros(1, 3, 8, 8)
MODEL = build("plain", dtype=torch.float32)
SEARCHED = {"judge": "torch", "proxy": True, "tries": [{"islands": []}], "chosen": ["head"]}
TRUTH = {"name": "engine.precision", "verdict": "passed", "value": 1.0, "tolerance": 1.0, "detail": "all"}


@pytest.fixture(scope="module", params=["onnx", "trt-rtx"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported file whose sidecar holds whatever a sidecar may hold."""
    exporter = EXPORTERS[request.param]
    if exporter.unavailable():
        pytest.skip(f"{exporter.name} cannot be written here")
    more: dict[str, Any] = {"sm": (89,), "batch": (1, 2, 4), "keep_onnx": False} if exporter.suffix != ".onnx" else {}
    path = tmp_path_factory.mktemp("made") / f"model{exporter.suffix}"
    exporter.export(MODEL, path, input=input_config(MODEL), classes=tuple("abcde"), options=ExportOptions(**more))
    quarantine.record(
        path, [Check(f"agreement.{path.name}", "not_run", detail="no GPU", command="vitcompress verify run")]
    )
    known = read_sidecar(path) or {}
    amend_sidecar(path, islands_search=SEARCHED, build={**known["build"], "truth": [TRUTH]})
    return path


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.parent, tmp_path / "run")) / made.name


def ask(path: Path) -> None:
    with closing(open_runner(path)) as runner:
        runner(IMAGES)


def verified(path: Path) -> list[Check]:
    return [
        *engine_checks(path, MODEL, "", IMAGES),
        *engine_weights(path, MODEL, contract("plain").plan, path.with_name("unfolded.safetensors")),
    ]


def recorded(path: Path) -> None:
    quarantine.record(path, [Check("agreement.x", "passed")])


def named(path: Path) -> tuple[str, ...]:
    """Class names are read from model.onnx's, whatever the file."""
    if path.suffix != ".onnx":
        shutil.copy(sidecar_path(path), path.with_name("model.onnx.json"))
        known = json.loads(sidecar_path(path).read_text())
        if isinstance(known.get("files"), dict):
            known["files"]["model.onnx"] = ""
        path.with_name("model.onnx.json").write_text(json.dumps(known))
    return class_names(path)


READERS: tuple[Callable[[Path], object], ...] = (read_sidecar, checked_sha256, ask, verified, recorded, named)


def failures(path: Path, changed: object) -> Iterator[tuple[str, str]]:
    """What each reader says of the file with another sidecar."""
    for reader in READERS:
        sidecar_path(path).write_text(json.dumps(changed))
        try:
            reader(path)
        except VitcompressError as error:
            yield reader.__name__, error.message


def test_each_key_that_is_missing_or_of_another_type_is_told_by_every_reader(path: Path) -> None:
    whole, refused = json.loads(sidecar_path(path).read_text()), set[str]()
    assert "read_sidecar" not in dict(failures(path, whole))
    for what, changed in edits(whole):
        said = dict(failures(path, changed))
        if "read_sidecar" in said:
            key = what.split(" ")[0]
            assert sidecar_path(path).name in said["read_sidecar"], what
            assert key.split(".")[0] in said["read_sidecar"] and set(said) >= {"checked_sha256", "ask", "recorded"}, (
                what
            )
            refused.add(key)
    assert refused >= {field.name for field in fields(Exported)} | {"sidecar_format", "metadata.mean", "files"}


@pytest.mark.parametrize("text", ["", "[]", "7", "null", "{", '{"files": {}}'])
def test_what_is_no_sidecar_at_all_is_told(text: str, path: Path) -> None:
    for reader in READERS:
        sidecar_path(path).write_text(text)
        if reader is verified:
            assert any(check.verdict == "failed" for check in verified(path))
        elif reader is not named or path.suffix == ".onnx":
            with pytest.raises(ArtifactError, match="model"):
                reader(path)


@pytest.mark.parametrize(
    ("changes", "says"),
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
def test_what_looks_almost_right_is_refused_by_every_reader(changes: dict[str, Any], says: str, path: Path) -> None:
    """A newer version's, numbers as text, truth as a number, a range of batches without three ends, another file's."""
    known = json.loads(sidecar_path(path).read_text())
    assert "read_sidecar" not in dict(failures(path, known))
    said = dict(failures(path, {**known, **changes}))
    assert set(said) >= {"read_sidecar", "checked_sha256", "ask", "recorded"} and says in said["read_sidecar"]


def test_only_the_first_few_things_are_told(path: Path) -> None:
    sidecar_path(path).write_text('{"sidecar_format": 1}')
    with pytest.raises(ArtifactError, match="path is missing; format is missing; precision is missing; and 10 more"):
        read_sidecar(path)


def test_a_sidecar_reaches_no_files_but_those_beside_it(path: Path) -> None:
    outside = path.parent.parent / "precious.txt"
    outside.write_text("mine")
    known = json.loads(sidecar_path(path).read_text())
    for name in ("../precious.txt", str(outside), "..\\precious.txt"):
        sidecar_path(path).write_text(json.dumps({**known, "files": {**known["files"], name: "0"}}))
        with pytest.raises(ArtifactError, match="the name of a file beside it"):
            read_sidecar(path)
        quarantine.set_aside(path)
        assert outside.read_text() == "mine"
        for moved in (path.parent / quarantine.FAILED).iterdir():
            moved.replace(path.parent / moved.name)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        *(("size", value) for value in ("no JSON", 7, None, [1], ["a", 8, 8])),
        *((key, value) for key in ("mean", "std") for value in ("no JSON", 7, None, [1], ["a", "b", "c"], {"a": 1})),
        *((key, value) for key in ("interpolation", "crop_mode") for value in (7, None, ["bicubic"])),
        *(("crop_pct", value) for value in ("no JSON", None, [1])),
    ],
)
def test_metadata_that_say_something_else_are_told(key: str, wrong: object) -> None:
    """They lie in ONNX files and IRs, too, which are read in the same way."""
    known = {**asdict(input_config(MODEL)), "classes": []}
    assert input_of("it", known) == input_config(MODEL)
    with pytest.raises(ArtifactError, match=f"the metadata of it cannot be used: {key} is"):
        input_of("it", {**known, key: wrong})
    assert input_of("it", {name: value for name, value in known.items() if name != key}) is None


def test_the_size_that_a_file_takes_counts_more_than_what_its_metadata_say() -> None:
    known = {**asdict(input_config(MODEL)), "classes": []}
    assert input_of("it", known, (3, 16, 24)) == replace(input_config(MODEL), size=(3, 16, 24))
    with pytest.raises(ArtifactError, match="mean is"):
        input_of("it", known, (1, 8, 8))


def test_exported_files_are_told_by_their_names_and_sidecars(tmp_path: Path) -> None:
    for name in ("dense.onnx", "dense-fp16.onnx", "edge.onnx", "model.onnx", "model.xml", "model.bin", "notes.onnx"):
        (tmp_path / name).touch()
    for name in ("dense.onnx", "edge.onnx"):
        sidecar_path(tmp_path / name).touch()

    def named_files(*words: Any) -> list[str]:
        return [path.name for path in exported_files(tmp_path, *words)]

    assert named_files("dense", (".onnx", ".xml")) == ["dense-fp16.onnx", "dense.onnx"]
    assert named_files("model", (".onnx", ".xml")) == ["edge.onnx", "model.onnx", "model.xml"]
    assert named_files("model", (".xml",)) == ["model.xml"]


@pytest.mark.parametrize("text", ["no JSON", "7", "[1]", '{"a": 1}', "null"])
def test_class_names_that_are_none_are_told(text: str, path: Path) -> None:
    known = json.loads(sidecar_path(path).read_text())
    changed = {**known, "metadata": {**known["metadata"], "classes": text}}
    assert "classes is" in dict(failures(path, changed))["named"]


def test_the_keys_are_those_that_are_written(path: Path) -> None:
    assert {field.name for field in fields(Exported)} | {"sidecar_format", "verification"} == set(Sidecar.model_fields)
    assert set(json.loads(sidecar_path(path).read_text())) == set(Sidecar.model_fields)
