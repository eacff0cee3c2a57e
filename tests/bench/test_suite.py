"""A measurement records everything that affects it, keeps every sample, and can fail a build."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from contracts import build, contract
from onnx import TensorProto, helper

from vitcompress.bench import artifacts, environment, machine, suite
from vitcompress.bench.report.measurements import bench_table
from vitcompress.bench.suite import BenchOptions
from vitcompress.bench.timing import PROTOCOLS
from vitcompress.errors import ArtifactError, DeviceError, InputError, VitcompressError
from vitcompress.exporters.calls import BoundCall
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.onnx.runner import OnnxRunner
from vitcompress.exporters.runner import Runner
from vitcompress.exporters.runtimes import RunnerOptions, TorchRunner
from vitcompress.io import hardware
from vitcompress.io.validation import options_of
from vitcompress.models.checkpoint import write_model
from vitcompress.models.create import input_config

SMALL = BenchOptions("paper", batch=2, warmup=1, runs=20)
ROW = {
    "artifact", "sha256", "runtime", "runtime_version", "device", "provider", "precision", "tf32", "threads",
    "compile", "cuda_graph", "batch", "input_size", "warmup", "runs", "images_per_second",
    "latency_ms", "samples_ms", "block_wall_ms", "protocol", "clock", "drift",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    model = build("plain", dtype=torch.float32)
    write_model(path, model, contract("plain").plan)
    export(model, path / "model.onnx", input=input_config(model))
    return path


def uint8_file(path: Path) -> Path:
    """A file of another tool: uint8 input without metadata."""
    images = helper.make_tensor_value_info("x", TensorProto.UINT8, ["n", 8, 8, 3])
    logits = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 192])
    nodes = [helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT), helper.make_node("Flatten", ["f"], ["y"])]
    graph = helper.make_graph(nodes, "bytes", [images], [logits])
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]), path)
    return path


def test_onnx_and_torch_side_by_side(folder: Path) -> None:
    bench = suite.run([folder / "model.onnx", folder], SMALL)
    data = json.loads(json.dumps(bench.to_dict(), allow_nan=False))
    assert [row["runtime"] for row in data["rows"]] == ["onnxruntime", "torch"]
    for row in data["rows"]:
        assert set(row) >= ROW
        assert sum(map(len, row["samples_ms"])) == row["runs"] == 20
        assert row["protocol"] == "paper-1/20/2"
        assert row["latency_ms"]["p90"] is None
    (ratio,) = data["ratios"]
    assert ratio["ci95"][0] <= ratio["median"] <= ratio["ci95"][1]
    assert data["machine"]["versions"]["torch"]
    assert data["passed"] and bench.failure() is None


class Zeros(Runner):
    """The runner of another package, which describes no more than its runtime."""

    input, input_size = None, (3, 8, 8)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(images), 10)

    def _bind(self, images: torch.Tensor) -> BoundCall:
        return BoundCall(lambda: self(images))

    def _describe(self) -> dict[str, object]:
        return {"runtime": "zeros"}


def test_a_runtime_that_states_no_device_is_measured_on_the_cpu() -> None:
    bench = suite.compare(
        [Zeros("x", RunnerOptions(), "zeros"), TorchRunner(build("plain"), RunnerOptions(), name="plain")], SMALL
    )
    assert [row["device"] for row in bench.to_dict()["rows"]] == ["cpu", "cpu"]


@pytest.mark.parametrize(("fail_under", "passes"), [(1e-6, True), (1e6, False)])
def test_the_limit_applies_to_the_lower_end_of_the_interval(folder: Path, fail_under: float, passes: bool) -> None:
    bench = suite.run([folder, folder / "model.onnx"], replace(SMALL, fail_under=fail_under))
    assert bench.to_dict()["passed"] == passes
    assert (bench.failure() is None) == passes
    assert passes or "the limit of --fail-under is 1e+06" in str(bench.failure())


def test_every_artifact_and_batch_size_below_the_limit_is_named(folder: Path) -> None:
    artifacts = [folder, folder / "model.onnx", "timm-onnx:test_vit"]
    lines = str(suite.run(artifacts, replace(SMALL, batch=(1, 2), fail_under=1e6)).failure()).splitlines()
    names = [f"batch {batch}: {name} is" for batch in (1, 2) for name in ("model.onnx", "timm-onnx:test_vit")]
    assert [line.startswith(name) for line, name in zip(lines, names, strict=False)] == [True] * 4 and len(lines) == 5


def test_a_ratio_below_the_limit_is_printed_in_three_digits() -> None:
    figures = [(183.655, [1.5, None]), (1.5, [1.00004, 1.6]), (0.00432, [0.00421, 0.0999])]
    ratios: Any = tuple({"a": "x", "b": "y", "median": median, "ci95": ends, "batch": 2} for median, ends in figures)
    machine: Any = {}
    assert str(suite.Bench((), ratios, machine, (), fail_under=1.6).failure()).splitlines() == [
        "batch 2: y is 183.7 times as fast as x (no interval)",
        "batch 2: y is 1.500 times as fast as x (95 % interval >1.000 to 1.600)",
        "batch 2: y is 0.00432 times as fast as x (95 % interval 0.00421 to 0.0999)",
        "the limit of --fail-under is 1.6",
    ]


def test_the_most_important_warnings_come_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "disturbances", lambda conditions: ["others used 2 cores"])
    monkeypatch.setattr(environment, "sample_warnings", lambda samples, rows: ["model.onnx: noisy"])
    bench = suite.run(
        [folder, "timm:test_vit"], replace(SMALL, batch=(1, 2), runs=1, runner=RunnerOptions(transfers=True))
    )
    first, sizes, classes, transfers, interval, last = bench.warnings
    assert (first, last) == (bench.disturbed[0], "model.onnx: noisy")
    assert "image sizes" in sizes and "numbers of classes" in classes and "no interval" in interval
    assert transfers == f"--transfers has no effect on the CPU, where nothing is copied ({folder}, timm:test_vit)"


def test_a_single_run_has_an_open_interval_and_valid_json(folder: Path) -> None:
    bench = suite.run([folder, folder], replace(SMALL, runs=1, fail_under=0.5))
    data = json.loads(json.dumps(bench.to_dict(), allow_nan=False))
    assert data["ratios"][0]["ci95"] == [0.0, None] and not data["passed"]
    assert bench.failure()


def test_nothing_is_measured_when_one_cannot_be_opened(folder: Path) -> None:
    with pytest.raises(ArtifactError):
        suite.run([folder, folder / "missing.onnx"], SMALL)
    with pytest.raises(InputError, match="got only one"):
        suite.run([folder], replace(SMALL, fail_under=1.0))
    with pytest.raises(InputError, match=r"engine_cache is a setting of ONNX Runtime, but .* runs in torch"):
        suite.run([folder], replace(SMALL, runner=RunnerOptions(engine_cache=folder / "cache")))
    for wrong in (0.0, -1.4, float("nan"), float("inf")):
        with pytest.raises(InputError, match=r"fail_under   got .*, expected (more than 0|a finite number)"):
            options_of(BenchOptions, {"fail_under": wrong}, "bench")
    with pytest.raises(DeviceError):
        suite.run([folder], replace(SMALL, runner=RunnerOptions(device="cuda:9")))


def test_differences_that_make_a_ratio_unfair_are_reported(folder: Path, tmp_path: Path) -> None:
    other = build("plain", dtype=torch.float32)
    other.reset_classifier(3)
    export(other, tmp_path / "model.onnx", input=input_config(other))
    threads = machine.usable_cores() + 1
    bench = suite.run(
        [folder / "model.onnx", tmp_path / "model.onnx"], replace(SMALL, runs=1, runner=RunnerOptions(threads=threads))
    )
    assert [row["threads"] for row in bench.rows] == [threads, threads]
    warnings = " ".join(bench.warnings)
    assert "different numbers of classes (5:" in warnings and "; 3:" in warnings
    assert f"{threads} threads on" in warnings and "use --threads" in warnings
    assert "image sizes" not in warnings and "numbers of threads" not in warnings
    rows = [
        {"artifact": "a", "device": "cpu", "input_size": [1, 8, 8], "threads": 1},
        {"artifact": "b", "device": "cpu", "input_size": [3, 8, 8], "threads": 2},
    ]
    assert list(environment.comparison_warnings(rows)) == [
        "the ratios compare different image sizes (1x8x8: a; 3x8x8: b)",
        "the ratios compare different numbers of threads (1: a; 2: b)",
    ]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="this system does not report threads")
def test_the_default_threads_of_a_runtime_are_counted(folder: Path) -> None:
    for threads in (1, 3):
        session = OnnxRunner(folder / "model.onnx", RunnerOptions(threads=threads))
        assert session._started_threads == threads == session.describe()["threads"]
        session.close()
    own = OnnxRunner(folder / "model.onnx", RunnerOptions()).describe()["threads"]
    assert 1 <= own <= machine.usable_cores()


def test_a_sweep_has_the_notes_of_every_batch(folder: Path) -> None:
    notes = suite.run([folder], replace(SMALL, batch=(1, 2), runs=1)).notes
    assert len(notes) == len(set(notes))
    assert all(any(f"paper-1/1/{batch}" in note for note in notes) for batch in (1, 2))
    assert any("blocks" in note for note in notes)


def test_uint8_files_without_metadata_are_timed(tmp_path: Path) -> None:
    path = uint8_file(tmp_path / "bytes.onnx")
    (row,) = suite.run([path], replace(SMALL, runs=2)).rows
    assert (row["input_type"], row["input_size"]) == ("uint8", [3, 8, 8])
    assert "bytes" in row["input"]


def test_memory_that_cannot_be_measured_names_the_artifact_and_the_reason() -> None:
    with pytest.raises(
        VitcompressError, match="memory of nothing cannot be measured: nothing does not exist"
    ) as caught:
        suite.measure_memory("nothing", None, RunnerOptions(), 1)
    assert str(caught.value.hint).startswith("leave --memory out; a script must")


@pytest.mark.parametrize("variants", ["", ",", "all"])
def test_unusable_variants_are_rejected(folder: Path, variants: str) -> None:
    with pytest.raises(InputError, match="variant"):
        suite.run([folder / "model.onnx"], replace(SMALL, variants=variants))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"provider": "cuda"}, "did you mean CUDAExecutionProvider"),
        ({"precision": "int4"}, "int4"),
        ({"compile": True}, "setting of torch"),
    ],
)
def test_unsupported_settings_of_a_file_are_rejected_with_the_next_step(
    folder: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as raised:
        suite.run([folder / "model.onnx"], replace(SMALL, runner=RunnerOptions(**settings)))
    assert raised.value.hint and "--precision int4" not in raised.value.hint


def test_a_sweep_measures_every_batch_with_its_own_ratio(folder: Path) -> None:
    data = suite.run([folder, folder / "model.onnx"], replace(SMALL, batch=(1, 2), runs=3)).to_dict()
    assert [(row["runtime"], row["batch"]) for row in data["rows"]] == [
        (runtime, batch) for batch in (1, 2) for runtime in ("torch", "onnxruntime")
    ]
    assert [ratio["batch"] for ratio in data["ratios"]] == [1, 2]
    assert len(data["machine"]["conditions"]) == 2


def test_variants_of_torch_models_are_compared_with_files(folder: Path) -> None:
    bench = suite.run([folder, folder / "model.onnx"], replace(SMALL, variants="fp32,bf16", runs=2))
    assert [row["artifact"] for row in bench.rows] == [f"{folder} fp32", f"{folder} bf16", str(folder / "model.onnx")]
    assert [row["precision"] for row in bench.rows] == ["fp32", "bf16", "fp32"]
    assert len(bench.ratios) == 2


def test_variants_by_device() -> None:
    assert "fp16+graph" in artifacts.parse_variants("all", "cuda:1")
    assert "tf32" not in artifacts.parse_variants("all", "cpu")
    assert artifacts.parse_variants("bf16+compile", "cpu") == {"bf16+compile": {"precision": "bf16", "compile": True}}
    with pytest.raises(InputError, match="did you mean compile"):
        artifacts.parse_variants("compil", "cpu")
    for twice in ("fp16+bf16", "fp32,bf16+compile+bf16"):
        with pytest.raises(InputError, match=r"bf16' sets something twice"):
            artifacts.parse_variants(twice, "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_leaves_out_what_this_machine_cannot_compile(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(artifacts.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert any("compile" in name for name in artifacts.parse_variants("all", device))
    monkeypatch.setattr(artifacts.shutil, "which", lambda name: None)
    assert not any("compile" in name for name in artifacts.parse_variants("all", device))


@pytest.mark.parametrize(("capability", "there"), [((7, 5), False), ((8, 6), True)])
def test_precisions_that_a_gpu_only_emulates_are_left_out(
    capability: tuple[int, int], there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Turing torch computes TF32 in fp32, and emulates bf16."""
    monkeypatch.setattr(artifacts.hardware, "count_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    names = set(artifacts.parse_variants("all", "cuda"))
    assert {"fp32", "fp16", "fp16+graph"} <= names
    assert ("tf32" in names, "bf16" in names, "bf16+graph" in names) == (there,) * 3
    if not there:
        with pytest.raises(DeviceError, match="tf32"):
            TorchRunner(torch.nn.Identity(), RunnerOptions("cuda", precision="tf32"), name="model")


def test_timms_own_export_is_an_artifact() -> None:
    (row,) = suite.run(["timm-onnx:test_vit"], replace(SMALL, batch=3, runs=1)).rows
    assert (row["artifact"], row["runtime"], row["batch"]) == ("timm-onnx:test_vit", "onnxruntime", 3)
    assert row["precision"] == "fp32"
    own, ours = artifacts.open_artifacts(["timm-onnx:test_vit", "timm:test_vit"], RunnerOptions(), None, ExitStack())
    x = artifacts.synthetic_images(own.input_size, 2)
    torch.testing.assert_close(own(x), ours(x))
    with pytest.raises(
        InputError, match="timm exports timm-onnx:test_vit in fp32, the requested precision is fp16"
    ) as caught:
        suite.run(["timm-onnx:test_vit"], replace(SMALL, runner=RunnerOptions(precision="fp16")))
    assert "leave --precision out" in str(caught.value.hint)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["", "model.onnx"])
def test_cuda_graphs_are_rejected_on_the_cpu(folder: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"(?i)cuda"):
        suite.run([folder / name if name else folder], replace(SMALL, runner=RunnerOptions(cuda_graph=True)))


def test_on_the_cpu_there_is_nothing_to_transfer(folder: Path) -> None:
    rows = suite.run([folder, folder / "model.onnx"], replace(SMALL, runs=1, runner=RunnerOptions(transfers=True))).rows
    assert [row["transfers"] for row in rows] == [False, False]
    assert all("nothing to transfer" in row["input"] for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_graph_and_transfers_on_a_gpu(folder: Path) -> None:
    rows = suite.run([folder], replace(SMALL, variants="all", runner=RunnerOptions(device="cuda", transfers=True))).rows
    assert {row["clock"] for row in rows} == {"cuda events"}
    assert any(row["cuda_graph"] for row in rows) and all(row["transfers"] for row in rows)
    assert all(bool(row["memory"]["cuda_peak_bytes"]) is not row["cuda_graph"] for row in rows)


def test_notes_state_the_limits_of_a_protocol(folder: Path) -> None:
    notes = " ".join(suite.run([folder], replace(SMALL, runs=1)).notes)
    assert "leaves out" in notes and "not the published protocol" in notes and "device: cpu" in notes
    exact = environment.protocol_notes(PROTOCOLS["paper"], [{"device": "cuda:0"}])
    assert "not the published protocol" not in " ".join(exact)
    assert list(environment.protocol_notes(PROTOCOLS["robust"], [{"device": "cuda:0"}])) == []


def test_conditions_of_a_cpu_run_are_recorded(folder: Path) -> None:
    data = suite.run([folder / "model.onnx"], replace(SMALL, runs=2)).to_dict()
    (seen,) = data["machine"]["conditions"]
    assert set(seen["cpu_before"]) == {"load_average", "clock_mhz", "governor"}
    assert seen["gpu"] is None
    assert data["machine"]["cpu_flags"] == hardware.cpu_flags()
    (row,) = data["rows"]
    assert row["energy_of"]
    assert row["variation"] >= 0


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peak memory is not known here")
def test_memory_is_that_of_one_artifact(folder: Path) -> None:
    """More images need more memory, at least their own bytes; the memory of this process does not count."""
    ballast = torch.ones(2**29, dtype=torch.uint8)
    few, many = suite.run([folder / "model.onnx"], replace(SMALL, batch=(1, 16384), runs=1, memory=True)).rows
    for row in (few, many):
        assert 0 < row["memory"]["process_start_bytes"] < row["memory"]["process_peak_bytes"]
    images = 16384 * 3 * 8 * 8 * 4
    assert many["memory"]["process_peak_bytes"] > few["memory"]["process_peak_bytes"] + images
    assert few["memory"]["process_peak_bytes"] < machine.peak_bytes() - ballast.numel() // 2
    table = bench_table([{"rows": [few, many]}])
    assert table.columns[-1] == "peak MiB" and int(table.rows[1][-1].removeprefix("+")) > images / 2**20
    assert "peak MiB" not in bench_table([{"rows": suite.run([folder], replace(SMALL, runs=1)).rows}]).columns


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peak memory is not known here")
def test_memory_of_an_export_of_timm_is_that_of_its_file(folder: Path) -> None:
    """torch's exporter needs some 100 MiB, the two small models less than one."""
    artifacts = [folder / "model.onnx", "timm-onnx:test_vit"]
    own, timms = (row["memory"] for row in suite.run(artifacts, replace(SMALL, runs=1, memory=True)).rows)
    assert own["process_peak_bytes"] and timms["process_peak_bytes"]
    assert timms["process_peak_bytes"] < own["process_peak_bytes"] + 50 * 2**20
