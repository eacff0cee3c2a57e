"""The table of exporters, and exporters of other packages."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import build, traces
from packages import write_package

from vitcompress.errors import ArtifactError, InputError, OutputError
from vitcompress.exporters.doctor import targets
from vitcompress.exporters.onnx.export import ONNX
from vitcompress.exporters.runtimes import (
    EXPORTERS,
    RUNNERS,
    available_exporter,
    exporter_of,
    find_exporter,
    open_runner,
)
from vitcompress.models.create import input_config

PLUGIN = """
from dataclasses import replace
from vitcompress.exporters.onnx.export import ONNX as EXPORTER
EXPORTER = replace(EXPORTER, name="mine", suffix=".mine")
WRONG = 1
"""


def install(folder: Path, points: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with entry points of `PLUGIN`."""
    modules = {"exporting_tool": PLUGIN, "exits": "raise SystemExit('no license')"}
    monkeypatch.syspath_prepend(write_package(folder, "exporters", points, **modules))


def test_every_built_in_format_declares_its_runner_and_its_readable_tensors() -> None:
    assert set(RUNNERS) == {".onnx", ".xml", ".engine", ".trt", ".plan"}
    readable = {exporter.file_suffix for exporter in EXPORTERS.values() if exporter.contents}
    assert readable == {".onnx", ".xml"}
    for name, exporter in EXPORTERS.items():
        assert find_exporter(name) is find_exporter(exporter) is exporter
        assert RUNNERS[exporter.file_suffix] is exporter.runner
        by_suffix = exporter_of(Path(f"model{exporter.suffix}"))
        assert by_suffix is not None and by_suffix.runner is exporter.runner


def test_an_unknown_format_is_rejected_with_the_closest_name() -> None:
    with pytest.raises(InputError, match="no export format 'onxx', did you mean onnx") as caught:
        find_exporter("onxx")
    assert "openvino" in str(caught.value.hint)


@pytest.mark.parametrize(("path", "other"), [("m.bin", "m.onnx"), (".", "model.onnx"), ("/", "/model.onnx")])
def test_a_name_of_another_format_is_rejected_with_one_that_fits(path: str, other: str) -> None:
    with pytest.raises(InputError, match=r"whose names end in \.onnx") as caught:
        ONNX.check_path(Path(path))
    assert caught.value.hint == f"--out {other}, or another --format"


def test_an_unavailable_format_is_rejected_with_the_reason() -> None:
    with pytest.raises(InputError, match="onnx cannot be exported on this machine: no disk") as caught:
        available_exporter(replace(ONNX, unavailable=lambda: "no disk"), hint="buy one")
    assert caught.value.hint == "buy one"


@pytest.mark.parametrize(("format", "place"), [("onnx", "m.onnx.json"), ("openvino", "m.xml")])
def test_a_folder_in_the_way_of_an_export_leaves_the_previous_files(format: str, place: str, tmp_path: Path) -> None:
    """The previous sidecar was removed, and new data files stayed."""
    if EXPORTERS[format].unavailable():
        pytest.skip("OpenVINO is not here")
    model, path = build("plain", dtype=torch.float32), tmp_path / f"m{EXPORTERS[format].suffix}"
    about: Any = {"input": input_config(model), "traces": traces("plain")}
    EXPORTERS[format].export(model, path, **about)
    (tmp_path / place).unlink()
    (tmp_path / place).mkdir()
    before = {file: file.is_file() and file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(OutputError, match=f"{place} cannot be written: it is a folder"):
        EXPORTERS[format].export(model, path, **about)
    assert {file: file.is_file() and file.read_bytes() for file in tmp_path.iterdir()} == before


def test_an_exporter_of_another_package_is_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", "mine = exporting_tool:EXPORTER", monkeypatch)
    exporter = available_exporter("mine", hint="")
    assert (exporter.name, exporter.file_suffix) == ("mine", ".mine") and "mine" not in EXPORTERS
    model, images = build("plain", dtype=torch.float32), torch.zeros(1, 3, 8, 8)
    about = {"input": input_config(model), "traces": traces("plain")}
    path = exporter.export(model, tmp_path / "model.mine", **about).path
    with closing(open_runner(path)) as runner, torch.no_grad():
        torch.testing.assert_close(runner(images), model(images))
    assert exporter.contents is not None and exporter.contents(path).tensors


def test_an_entry_point_that_is_no_exporter_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", "wrong = exporting_tool:WRONG", monkeypatch)
    with pytest.raises(InputError, match="wrong = exporting_tool:WRONG is not of type Exporter"):
        find_exporter("wrong")


def test_doctor_lists_exporters_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", "mine = exporting_tool:EXPORTER\nwrong = exporting_tool:WRONG", monkeypatch)
    rows = {row["target"]: row for row in targets()}
    assert rows["mine"]["export"] is rows["mine"]["run"] is None
    assert "is not of type Exporter; update or remove the package" in str(rows["wrong"]["run"])


def test_a_file_of_an_unknown_format_cannot_be_run(tmp_path: Path) -> None:
    (tmp_path / "model.mine").touch()
    with pytest.raises(ArtifactError, match="cannot be run"):
        open_runner(tmp_path / "model.mine")


def test_a_broken_exporter_does_not_affect_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = "a_missing = nothing:X\nb_exit = exits:X\nmine = exporting_tool:EXPORTER\nonnx = exporting_tool:EXPORTER"
    install(tmp_path / "site", points, monkeypatch)
    exporter = exporter_of(Path("model.mine"))
    assert exporter is not None and exporter.name == "mine"
    assert exporter_of(Path("model.onnx")) is find_exporter("onnx") is ONNX, "built-in names take precedence"
    with pytest.raises(InputError, match="a_missing = nothing:X does not load"):
        exporter_of(Path("model.unknown"))
    with pytest.raises(InputError, match="b_exit = exits:X does not load: no license"):
        find_exporter("b_exit")
