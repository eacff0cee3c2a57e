"""The software bill of materials is valid CycloneDX and names files, packages and the source of the weights."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from command_line import begin, copy_run, expect_error
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from vitcompress import __version__, cli
from vitcompress.io.files import file_sha256


def test_the_bill_of_materials(small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path / "home", monkeypatch)
    folder = copy_run(small_run)
    sidecar = (folder / "model.onnx.json").read_text()  # of `export --out run/phone.onnx`
    (folder / "phone.onnx.json").write_text(sidecar.replace("model.onnx", "phone.onnx"))
    (folder / "phone.onnx").write_bytes((folder / "model.onnx").read_bytes())
    result = CliRunner().invoke(cli.main, ["report", "run", "--json", "--sbom"])
    assert result.exit_code == 0, result.output
    text = Path("sbom.cdx.json").read_text()
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(text) is None
    assert validator.validate_str(text.replace('"file"', '"fiel"')) is not None
    data, report = json.loads(text), json.loads((folder / "report.json").read_text())
    model = data["metadata"]["component"]
    assert (model["type"], model["name"]) == ("machine-learning-model", report["recipe"])
    properties = {entry["name"]: entry["value"] for entry in model["properties"]}
    assert properties["vitcompress:weights"] == report["model"]["weights"]
    assert properties["vitcompress:plan_sha256"] == report["plan_sha256"]
    hashes = {c["name"]: c["hashes"][0]["content"] for c in data["components"] if c["type"] == "file"}
    assert {"model.safetensors", "plan.json", "model.onnx", "dense.onnx"} <= hashes.keys()
    assert {"phone.onnx", "phone.onnx.json"} <= hashes.keys()
    assert all(file_sha256(folder / name) == sha256 for name, sha256 in hashes.items())
    purls = [c["purl"] for c in data["components"] if c["type"] == "library"]
    assert f"pkg:pypi/vitcompress@{__version__}" in purls or __version__ == "0+checkout"
    assert any(purl.startswith("pkg:pypi/torch@") for purl in purls)
    assert "one run folder" in expect_error("report", "run", "run", "--sbom", "both.json")
