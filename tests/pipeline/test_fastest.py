"""`--precision fastest` measures the candidates, and keeps the fastest one that passes its checks."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from vitcompress.bench import suite
from vitcompress.cli import main
from vitcompress.errors import InputError
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.runtimes import EXPORTERS
from vitcompress.exporters.sidecar import read_sidecar
from vitcompress.io.progress import Progress
from vitcompress.models.checkpoint import write_model
from vitcompress.models.create import create_model
from vitcompress.pipeline import export_folder as exports
from vitcompress.pipeline.export_folder import Candidate, options_for
from vitcompress.plan import Plan

ARCH = "vit_tiny_patch16_224"
ARGS = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}

pytestmark = pytest.mark.skipif(EXPORTERS["openvino"].unavailable() is not None, reason="OpenVINO is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "run", create_model(ARCH, ARGS), Plan(ARCH, ARGS))
    return tmp_path / "run"


def export(folder: Path, *options: str) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["export", str(folder), "--precision", "fastest", "--json", *options])
    return {"code": done.exit_code, **json.loads(done.stdout)}


def test_the_fastest_candidate_is_written_and_verified(folder: Path) -> None:
    done = export(folder)
    assert (done["code"], done["verdict"]) == (0, "passed")
    pairs = {(row["format"], row["precision"]): row for row in done["candidates"]}
    both = {(form, precision) for form in ("onnx", "openvino") for precision in ("fp32", "bf16", "int8")}
    assert set(pairs) == {*both, ("openvino", "int8+bf16")}
    assert pairs[done["format"], done["precision"]]["result"] == "chosen"
    assert "no convolution" in pairs["onnx", "bf16"]["result"] and pairs["onnx", "bf16"]["ms"] is None
    times = [row["ms"] for row in done["candidates"] if row["ms"]]
    assert times == sorted(times) and len(times) >= 2
    assert [path.name for path in folder.iterdir() if path.suffix in (".onnx", ".xml")] == [done["path"]]
    assert not (folder / "failed").exists()


def test_a_candidate_that_fails_its_checks_is_not_chosen(folder: Path) -> None:
    """The outputs are differences of large values, which eight significant bits cannot represent."""
    model = create_model(ARCH, ARGS)
    with torch.no_grad():
        model.get_submodule("norm").bias.add_(300)
        head = model.get_submodule("head")
        head.weight.copy_(torch.randn(3, 16, generator=torch.Generator().manual_seed(0)))
        head.weight.sub_(head.weight.mean(1, keepdim=True))
    write_model(folder, model, Plan(ARCH, ARGS))
    done = export(folder, "--format", "openvino")
    assert (done["code"], done["format"], done["precision"], done["verdict"]) == (0, "openvino", "fp32", "passed")
    assert {row["format"] for row in done["candidates"]} == {"openvino"}
    assert read_sidecar(folder / "model.xml")["verified"]


def test_the_name_of_the_file_selects_its_format(folder: Path) -> None:
    done = export(folder, "--out", str(folder / "served.xml"))
    assert done["code"] == 0 and {row["format"] for row in done["candidates"]} == {"openvino"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--format", "foo"], "there is no export format 'foo'"),
        (["--out", "served.foo"], "served.foo cannot be a file of the format onnx"),
        (["--format", "openvino", "--out", "served.onnx"], "served.onnx cannot be a file of the format openvino"),
        (["--out", "run/dense.onnx"], "dense.onnx has the name of a file of the dense model"),
        (["--out", "run/model.onnx", "--dense"], "model.onnx has the name of a file of the compressed model"),
    ],
)
def test_a_wrong_name_or_format_is_rejected_before_anything_is_measured(
    options: list[str], problem: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    done = CliRunner().invoke(main, ["export", "run", "--precision", "fastest", *options])
    assert done.exit_code == 2 and problem in " ".join(done.stderr.replace("│", " ").split())
    assert "Measure" not in done.stderr and "Export" not in done.stderr


def test_a_format_that_does_not_run_here_is_rejected_at_once(folder: Path) -> None:
    if (reason := EXPORTERS["trt-rtx"].cannot_run()) is None:
        pytest.skip("it runs")
    done = export(folder, "--format", "trt-rtx")
    assert done["code"] == 2 and reason in done["error"] and "tmp" not in done["error"]


def test_a_format_without_these_precisions_is_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(options: ExportOptions) -> None:
        raise InputError("only int4")

    monkeypatch.setitem(EXPORTERS, "own", replace(EXPORTERS["onnx"], name="own", check_options=reject))
    done = export(folder, "--format", "own")
    assert done["code"] == 2 and "own has none of the precisions fp32, bf16, int8, int8+bf16" in done["error"]


def test_a_format_that_does_not_run_here_leaves_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "openvino"] + ["openvino"]:
        monkeypatch.setitem(sys.modules, name, None)
    done = export(folder)
    assert (done["code"], done["format"], done["verdict"]) == (0, "onnx", "passed")
    others = [row for row in done["candidates"] if row["format"] == "openvino"]
    assert len(others) == 4 and all("openvino is not installed" in row["result"] for row in others)


def test_options_of_int8_do_not_keep_fp32_from_being_chosen() -> None:
    options = ExportOptions(calibration=32, smooth=True, islands=("blocks.0.mlp",), uint8=True)
    assert options_for(options, Candidate("onnx", "fp32")) == ExportOptions(uint8=True)
    kept = options_for(options, Candidate("openvino", "int8+bf16"))
    assert kept == replace(options, precision="int8+bf16")


def test_a_folder_that_cannot_be_exported_is_the_error(tmp_path: Path) -> None:
    done = export(tmp_path)
    assert done["code"] == 2 and str(tmp_path) in json.dumps(done)
    assert not list(tmp_path.iterdir())


def test_the_fastest_that_passes_is_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The fastest fails its checks, and the second fastest is chosen: neither is exported first."""
    times = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0}
    checked: list[str] = []

    def export(folder: Path, name: str, *, options: ExportOptions, out: Path, **_: Any) -> Any:
        return SimpleNamespace(path=out, precision=options.precision, build={})

    def run(paths: list[Path], *args: Any, **settings: Any) -> Any:
        rows = [{"latency_ms": {"p50": ms}} for ms in times.values()]
        ratios = [{"median": 4 / ms, "ci95": [3.9 / ms, 4.1 / ms]} for ms in list(times.values())[1:]]
        return SimpleNamespace(rows=rows, ratios=ratios, disturbed=())

    def verify(folder: Path, exported: Any, *args: Any, **settings: Any) -> Any:
        checked.append(exported.precision)
        return SimpleNamespace(verdict="failed" if exported.precision == "int8" else "passed", reason="wrong")

    monkeypatch.setattr(exports, "export_folder", export)
    monkeypatch.setattr(exports, "open_runner", lambda path: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(suite, "run", run)
    monkeypatch.setattr(exports, "verify_export", verify)
    best, candidates = exports.choose_fastest(
        tmp_path, "onnx", ExportOptions(), out=None, dense=False, progress=Progress()
    )
    assert checked == ["int8", "bf16"] and (best.precision, best.ms) == ("bf16", 2.0)
    assert [candidate.result for candidate in candidates] == ["wrong", "chosen", "not checked"]
