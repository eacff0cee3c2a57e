"""A measurement says everything that changes it, keeps every sample, and can fail a build."""

import json
from pathlib import Path

import pytest
import torch
from contracts import build, contract

from vitcompress import checkpoint
from vitcompress.bench import machine, suite
from vitcompress.bench.suite import BenchOptions
from vitcompress.errors import ArtifactError, DeviceError, InputError
from vitcompress.exporters.onnx_graph import export
from vitcompress.exporters.runtimes import RunnerOptions
from vitcompress.models import input_config

SMALL = BenchOptions("paper", batch=2, warmup=1, runs=20)
ROW = {
    "artifact", "sha256", "runtime", "runtime_version", "device", "provider", "precision", "tf32", "threads", "sdpa",
    "compile", "channels_last", "cuda_graph", "batch", "input_size", "warmup", "runs", "images_per_second",
    "latency_ms", "samples_ms", "block_wall_ms", "protocol", "clock", "drift",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    model = build("plain", dtype=torch.float32)
    checkpoint.save_model(made, model, contract("plain").plan)
    export(model, made / "model.onnx", input=input_config(model))
    return made


def test_onnx_and_torch_side_by_side(folder: Path) -> None:
    found = suite.run([folder / "model.onnx", folder], SMALL)
    data = json.loads(json.dumps(found.as_data(), allow_nan=False))
    assert [row["runtime"] for row in data["rows"]] == ["onnxruntime", "torch"]
    for row in data["rows"]:
        assert set(row) >= ROW
        assert sum(map(len, row["samples_ms"])) == row["runs"] == 20
        assert row["protocol"] == "paper-1/20/2"
        assert row["latency_ms"]["p90"] is None
    (ratio,) = data["ratios"]
    assert data["ratio"] == ratio
    assert ratio["ci95"][0] <= ratio["median"] <= ratio["ci95"][1]
    assert data["machine"]["versions"]["torch"]
    assert found.passed


@pytest.mark.parametrize(("fail_under", "passes"), [(1e-6, True), (1e6, False)])
def test_a_gate_holds_the_lower_end_of_the_interval(folder: Path, fail_under: float, passes: bool) -> None:
    found = suite.run([folder, folder / "model.onnx"], SMALL, fail_under=fail_under)
    assert found.passed == passes
    assert (suite.gated(found) is None) == passes
    assert passes or "was asked for" in str(suite.gated(found))


def test_a_single_run_has_an_open_interval_and_valid_json(folder: Path) -> None:
    found = suite.run([folder, folder], SMALL, runs=1, fail_under=0.5)
    assert json.loads(json.dumps(found.as_data(), allow_nan=False))["ratios"][0]["ci95"] == [0.0, None]
    assert not found.passed
    assert suite.gated(found)


def test_nothing_is_measured_when_one_cannot_be_opened(folder: Path) -> None:
    with pytest.raises(ArtifactError):
        suite.run([folder, folder / "missing.onnx"], SMALL)
    with pytest.raises(InputError, match="only one"):
        suite.run([folder], SMALL, fail_under=1.0)
    with pytest.raises(InputError, match="nothing to measure"):
        suite.run([], SMALL)
    with pytest.raises(DeviceError):
        suite.run([folder], SMALL, runner=RunnerOptions(device="cuda:9"))


def test_other_processes_are_counted() -> None:
    assert machine.others_cores((0.0, 10.0, 4.0), (2.0, 15.0, 6.0)) == 1.5
    assert machine.others_cores(None, (2.0, 15.0, 6.0)) is None
    assert machine.usable_cores() >= 1
