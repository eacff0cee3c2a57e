"""A measurement says everything that changes it, keeps every sample, and can fail a build."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from contracts import build, contract
from onnx import TensorProto, helper

from vitcompress.bench import artifacts, environment, machine, suite
from vitcompress.bench.report import run as reports
from vitcompress.bench.suite import BenchOptions
from vitcompress.bench.timing import protocol
from vitcompress.errors import ArtifactError, DeviceError, InputError
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.onnx.session import Session
from vitcompress.exporters.runtimes import RunnerOptions, TorchRunner
from vitcompress.models.checkpoint import write_model
from vitcompress.models.create import input_config

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
    write_model(made, model, contract("plain").plan)
    export(model, made / "model.onnx", input=input_config(model))
    return made


def byte_file(path: Path) -> Path:
    """What another tool writes: bytes in, and no word about them."""
    images = helper.make_tensor_value_info("x", TensorProto.UINT8, ["n", 8, 8, 3])
    logits = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 192])
    nodes = [helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT), helper.make_node("Flatten", ["f"], ["y"])]
    graph = helper.make_graph(nodes, "bytes", [images], [logits])
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]), path)
    return path


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
    for wrong in (0.0, -1.4, float("nan")):
        with pytest.raises(InputError, match="above 0"):
            suite.run([folder, folder], SMALL, fail_under=wrong)
    with pytest.raises(DeviceError):
        suite.run([folder], SMALL, runner=RunnerOptions(device="cuda:9"))


def test_what_makes_a_ratio_unfair_is_said(folder: Path, tmp_path: Path) -> None:
    other = build("plain", dtype=torch.float32)
    other.reset_classifier(3)
    export(other, tmp_path / "model.onnx", input=input_config(other))
    threads = machine.usable_cores() + 1
    found = suite.run(
        [folder / "model.onnx", tmp_path / "model.onnx"], SMALL, runs=1, runner=RunnerOptions(threads=threads)
    )
    assert [row["threads"] for row in found.rows] == [threads, threads]
    said = " ".join(found.warnings)
    assert "different numbers of classes (5:" in said and "; 3:" in said
    assert f"{threads} threads on" in said and "give --threads" in said
    assert "image sizes" not in said and "numbers of threads" not in said
    rows = [
        {"artifact": "a", "device": "cpu", "input_size": [1, 8, 8], "threads": 1},
        {"artifact": "b", "device": "cpu", "input_size": [3, 8, 8], "threads": 2},
    ]
    assert list(environment.unlike(rows)) == [
        "the ratios compare different image sizes (1x8x8: a; 3x8x8: b)",
        "the ratios compare different numbers of threads (1: a; 2: b)",
    ]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="this system does not count threads")
def test_the_threads_that_a_runtime_takes_by_itself_are_counted(folder: Path) -> None:
    for asked in (1, 3):
        session = Session(folder / "model.onnx", RunnerOptions(threads=asked))
        assert session._taken == asked == session.describe()["threads"]
        session.close()
    own = Session(folder / "model.onnx", RunnerOptions()).describe()["threads"]
    assert 1 <= own <= machine.usable_cores()


def test_a_sweep_says_of_every_batch_what_the_protocol_leaves_out(folder: Path) -> None:
    said = suite.run([folder], SMALL, batch=(1, 2), runs=1).notes
    assert len(said) == len(set(said))
    assert all(any(f"paper-1/1/{batch}" in words for words in said) for batch in (1, 2))
    assert any("blocks" in words for words in said)


def test_files_of_bytes_that_say_nothing_of_them_are_timed(tmp_path: Path) -> None:
    path = byte_file(tmp_path / "bytes.onnx")
    (row,) = suite.run([path], SMALL, runs=2).rows
    assert (row["input_type"], row["input_size"]) == ("uint8", [3, 8, 8])
    assert "bytes" in row["input"]


@pytest.mark.parametrize("variants", ["", ",", "all"])
def test_variants_that_nothing_has_are_refused(folder: Path, variants: str) -> None:
    with pytest.raises(InputError, match="variant"):
        suite.run([folder / "model.onnx"], SMALL, variants=variants)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"provider": "cuda"}, "did you mean CUDAExecutionProvider"),
        ({"precision": "int8"}, "int8 was asked for"),
        ({"compile": True}, "setting of torch"),
    ],
)
def test_settings_that_a_file_does_not_have_are_told_with_the_next_step(
    folder: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said) as raised:
        suite.run([folder / "model.onnx"], SMALL, runner=RunnerOptions(**settings))
    assert raised.value.hint and "--precision int8" not in raised.value.hint


def test_a_sweep_measures_every_batch_with_its_own_ratio(folder: Path) -> None:
    data = suite.run([folder, folder / "model.onnx"], SMALL, batch=(1, 2), runs=3).as_data()
    assert [(row["runtime"], row["batch"]) for row in data["rows"]] == [
        (runtime, batch) for batch in (1, 2) for runtime in ("torch", "onnxruntime")
    ]
    assert [ratio["batch"] for ratio in data["ratios"]] == [1, 2]
    assert "ratio" not in data
    assert len(data["machine"]["conditions"]) == 2


def test_variants_of_torch_models_stand_beside_files(folder: Path) -> None:
    found = suite.run([folder, folder / "model.onnx"], SMALL, variants="fp32,bf16", runs=2)
    assert [row["artifact"] for row in found.rows] == [f"{folder} fp32", f"{folder} bf16", str(folder / "model.onnx")]
    assert [row["precision"] for row in found.rows] == ["fp32", "bf16", "fp32"]
    assert len(found.ratios) == 2


def test_variants_by_device() -> None:
    assert "fp16+graph" in artifacts.settings("all", "cuda:1")
    assert "tf32" not in artifacts.settings("all", "cpu")
    assert artifacts.settings("bf16+compile", "cpu") == {"bf16+compile": {"precision": "bf16", "compile": True}}
    with pytest.raises(InputError, match="did you mean compile"):
        artifacts.settings("compil", "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_leaves_out_what_this_machine_cannot_compile(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(artifacts.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert any("compile" in name for name in artifacts.settings("all", device))
    monkeypatch.setattr(artifacts.shutil, "which", lambda name: None)
    assert not any("compile" in name for name in artifacts.settings("all", device))


@pytest.mark.parametrize(("capability", "there"), [((7, 5), False), ((8, 6), True)])
def test_precisions_that_a_gpu_only_seems_to_have_are_left_out(
    capability: tuple[int, int], there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Turing torch takes TF32 for fp32, and emulates bf16."""
    monkeypatch.setattr(artifacts.hardware, "count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    names = set(artifacts.settings("all", "cuda"))
    assert {"fp32", "fp16", "fp16+graph"} <= names
    assert ("tf32" in names, "bf16" in names, "bf16+graph" in names) == (there,) * 3
    if not there:
        with pytest.raises(DeviceError, match="tf32 was asked for, this cuda:0 has none"):
            TorchRunner(torch.nn.Identity(), RunnerOptions("cuda", precision="tf32"), name="model")


def test_timms_own_export_is_an_artifact() -> None:
    found = suite.run(["timm-onnx:test_vit"], SMALL, batch=3, runs=1)
    (row,) = found.rows
    assert (row["artifact"], row["runtime"], row["batch"]) == ("timm-onnx:test_vit", "onnxruntime", 3)
    assert row["precision"] == "fp32"
    own, ours = artifacts.open_all(["timm-onnx:test_vit", "timm:test_vit"], RunnerOptions(), None, ExitStack())
    x = artifacts.synthetic_images(own.input_size, 2, 1)
    torch.testing.assert_close(own(x), ours(x))
    with pytest.raises(InputError, match="is exported by timm in fp32, fp16 was asked") as caught:
        suite.run(["timm-onnx:test_vit"], SMALL, runner=RunnerOptions(precision="fp16"))
    assert "leave --precision out" in str(caught.value.hint)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["", "model.onnx"])
def test_cuda_graphs_are_refused_on_the_cpu(folder: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"(?i)cuda"):
        suite.run([folder / name if name else folder], SMALL, runner=RunnerOptions(cuda_graph=True))


def test_on_the_cpu_there_is_nothing_to_transfer(folder: Path) -> None:
    found = suite.run([folder, folder / "model.onnx"], SMALL, runs=1, runner=RunnerOptions(transfers=True))
    assert [row["transfers"] for row in found.rows] == [False, False]
    assert all("nothing to transfer" in row["input"] for row in found.rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_graph_and_transfers_on_a_gpu(folder: Path) -> None:
    found = suite.run([folder], SMALL, variants="all", runner=RunnerOptions(device="cuda", transfers=True))
    assert {row["clock"] for row in found.rows} == {"cuda events"}
    assert any(row["cuda_graph"] for row in found.rows) and all(row["transfers"] for row in found.rows)
    assert all(bool(row["memory"]["cuda_peak_bytes"]) is not row["cuda_graph"] for row in found.rows)


def test_what_a_protocol_leaves_out_is_said(folder: Path) -> None:
    found = suite.run([folder], SMALL, runs=1)
    said = " ".join(found.notes)
    assert "leaves out" in said and "not the published protocol" in said and "device: cpu" in said
    exact = environment.left_out(protocol("paper"), [{"device": "cuda:0"}])
    assert "not the published protocol" not in " ".join(exact)
    assert list(environment.left_out(protocol("robust"), [{"device": "cuda:0"}])) == []


def test_conditions_of_a_cpu_run_are_recorded(folder: Path) -> None:
    data = suite.run([folder / "model.onnx"], SMALL, runs=2).as_data()
    (seen,) = data["machine"]["conditions"]
    assert set(seen["cpu_before"]) == {"load_average", "clock_mhz", "governor"}
    assert seen["host_peak_bytes"] > 1e6
    assert seen["gpu"] is None
    assert data["machine"]["cpu_flags"] == machine.cpu_flags()
    (row,) = data["rows"]
    assert row["energy_of"]
    assert row["variation"] >= 0


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the kernel does not tell here")
def test_memory_is_that_of_one_artifact(folder: Path) -> None:
    """More images on their way take more, by their own bytes at least; what this process holds does not count."""
    ballast = torch.ones(2**29, dtype=torch.uint8)
    few, many = suite.run([folder / "model.onnx"], SMALL, batch=(1, 16384), runs=1, memory=True).rows
    for row in (few, many):
        assert 0 < row["memory"]["process_start_bytes"] < row["memory"]["process_peak_bytes"]
    images = 16384 * 3 * 8 * 8 * 4
    assert many["memory"]["process_peak_bytes"] > few["memory"]["process_peak_bytes"] + images
    assert few["memory"]["process_peak_bytes"] < machine.peak_bytes() - ballast.numel() // 2
    table = reports.bench_table([{"rows": [few, many]}])
    assert table.columns[-1] == "peak MiB" and int(table.rows[1][-1].removeprefix("+")) > images / 2**20
    assert "peak MiB" not in reports.bench_table([{"rows": suite.run([folder], SMALL, runs=1).rows}]).columns
