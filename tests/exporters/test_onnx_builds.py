"""The two builds of ONNX Runtime, `onnxruntime-gpu` and `onnxruntime`: imported in one place, and not both at once."""

import logging
import sys
from pathlib import Path

import pytest

from vitcompress.errors import DeviceError
from vitcompress.exporters.doctor import examine, onnx_problem
from vitcompress.exporters.onnx.libraries import BUILDS, find_conflict, load_onnxruntime
from vitcompress.io.hardware import package_versions


@pytest.fixture
def both_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `pip install onnxruntime` over `onnxruntime-gpu`."""
    for name in BUILDS:
        folder = tmp_path / f"{name.replace('-', '_')}-1.25.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.25\n")
    monkeypatch.syspath_prepend(tmp_path)
    load_onnxruntime.cache_clear()


@pytest.mark.usefixtures("both_builds")
def test_both_builds_in_one_environment_are_reported_once_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vitcompress"):
        load_onnxruntime()
        load_onnxruntime()
    (record,) = caplog.records
    assert record.message == find_conflict() and record.message in examine()["warnings"]
    assert "onnxruntime-gpu 1.25 and onnxruntime 1.25 are both installed" in record.message
    assert "pip uninstall -y onnxruntime-gpu onnxruntime, then pip install" in record.message


def test_one_build_is_no_conflict() -> None:
    assert len(package_versions(BUILDS)) == 1 and find_conflict() is None and examine()["warnings"] == []


@pytest.fixture
def no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    load_onnxruntime.cache_clear()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)


@pytest.mark.usefixtures("no_build")
def test_without_a_usable_build_the_remedy_is_stated() -> None:
    with pytest.raises(DeviceError, match="ONNX Runtime cannot be imported") as error:
        load_onnxruntime()
    assert error.value.hint and "onnxruntime-gpu!=1.27.*" in error.value.hint
    assert "pip install onnxruntime" in (onnx_problem("cpu") or "")
    rows = {row["target"]: row["run"] for row in examine()["targets"]}
    assert all("cannot be imported" in str(rows[name]) for name in ("onnx", "onnxruntime CPUExecutionProvider"))
    assert rows["torch cpu"] is None
