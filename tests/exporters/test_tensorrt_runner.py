"""Which engines are opened, and why others are rejected. Running one needs a GPU; rejecting one does not."""

import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from contracts import build

from vitcompress.cli import main
from vitcompress.errors import ArtifactError, DeviceError, InputError, VitcompressError
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.runtimes import EXPORTERS, open_runner
from vitcompress.exporters.sidecar import amend_sidecar, read_sidecar, sidecar_path
from vitcompress.exporters.tensorrt import export, runner
from vitcompress.exporters.tensorrt.flavours import RTX, create_log
from vitcompress.exporters.tensorrt.process import EngineProcess, _environment, receive, send
from vitcompress.exporters.tensorrt.runner import read_trusted_sidecar
from vitcompress.exporters.tensorrt.worker import EngineError, _kind, serve
from vitcompress.io.files import file_sha256
from vitcompress.models.create import input_config

tensorrt_rtx = pytest.importorskip("tensorrt_rtx", reason="no such library for this platform")
NO_GPU = not torch.cuda.is_available()
OPEN = {"cuda_graph": False, "transfers": False, "host_code": False}
CAN_RUN = EXPORTERS["trt-rtx"].cannot_run() is None


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build("plain", dtype=torch.float32)
    path = tmp_path_factory.mktemp("engine") / "model.rtx.engine"
    options = ExportOptions(precision="fp16", batch=(1, 2, 4), keep_onnx=False)
    EXPORTERS["trt-rtx"].export(model, path, input=input_config(model), options=options)
    return path


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    """A copy that tests may damage."""
    for path in (built, sidecar_path(built)):
        shutil.copy(path, tmp_path)
    return tmp_path / built.name


def set_build(engine: Path, **build: Any) -> None:
    """Change the build in the sidecar, with the hash of the current bytes."""
    known = read_sidecar(engine)
    amend_sidecar(engine, build={**known["build"], **build}, files={engine.name: file_sha256(engine)})


def test_an_engine_without_a_sidecar_is_not_opened_unless_trusted(engine: Path) -> None:
    sidecar_path(engine).unlink()
    with pytest.raises(ArtifactError, match="is not trusted") as caught:
        open_runner(engine)
    assert "--trust" in str(caught.value.hint)
    assert read_trusted_sidecar(engine, trust=True) == {}


@pytest.mark.parametrize("damage", ["truncated", "changed", "another file"])
def test_an_engine_that_does_not_match_its_sidecar_is_not_opened(damage: str, engine: Path) -> None:
    data = bytearray(engine.read_bytes())
    data[-1] ^= 1
    engine.write_bytes({"truncated": data[:1000], "changed": data, "another file": b"vtrt" + bytes(100)}[damage])
    with pytest.raises(ArtifactError, match=r"is not trusted.*sha256"):
        open_runner(engine)


def test_a_renamed_engine_is_not_trusted(engine: Path) -> None:
    other = engine.with_name("other.engine")
    engine.rename(other)
    sidecar_path(engine).rename(sidecar_path(other))
    with pytest.raises(ArtifactError, match="missing"):
        open_runner(other)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="does not exist"):
        open_runner(tmp_path / "model.engine")


@pytest.mark.parametrize(
    "content", [b"", b"vtrt", b"\x08\n\x12\x07pytorch" + bytes(100), b"\x03\x07\x00\x00{}" + bytes(99)]
)
def test_a_file_that_is_not_an_engine(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.engine").write_bytes(content)
    with pytest.raises(ArtifactError, match="is not a TensorRT engine"):
        open_runner(tmp_path / "model.engine", trust=True)


def test_the_first_bytes_of_an_engine_identify_its_library(engine: Path) -> None:
    engine.write_bytes(b"ftrt" + engine.read_bytes()[4:])  # TensorRT, with a sidecar that names RTX
    set_build(engine)
    with pytest.raises(ArtifactError, match="was written by TensorRT, but its sidecar names trt-rtx"):
        open_runner(engine)
    amend_sidecar(engine, format="trt")
    with pytest.raises(InputError, match="TensorRT"):  # not installed, or of another version
        open_runner(engine)
    engine.write_bytes(b"vtrt" + engine.read_bytes()[4:])
    set_build(engine)
    with pytest.raises(ArtifactError, match="was written by TensorRT for RTX, but its sidecar names trt"):
        open_runner(engine)


def test_an_engine_of_another_version_is_rejected_with_the_right_version(engine: Path) -> None:
    set_build(engine, runtime_version="1.4.0.9")
    with pytest.raises(
        DeviceError, match=rf"built by TensorRT for RTX 1\.4\.0\.9, which the installed {tensorrt_rtx.__version__}"
    ) as caught:
        open_runner(engine)
    assert "tensorrt-rtx==1.4.0.9" in str(caught.value.hint)


def test_an_engine_for_another_gpu_is_rejected(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "capability", lambda index: 75)  # a Turing GPU, which no test machine has
    with pytest.raises(
        DeviceError, match="built for compute capability 80, 86, 89, 120, but this GPU has 75"
    ) as caught:
        open_runner(engine)
    assert "--sm 75" in str(caught.value.hint)
    monkeypatch.setattr(runner, "capability", lambda index: 90)
    with pytest.raises(DeviceError, match="this GPU has 90") as caught:
        open_runner(engine)
    assert "--format trt" in str(caught.value.hint) and "--sm" not in str(caught.value.hint)  # RTX is not for Hopper


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cpu"}, "runs on a GPU, but the device is cpu"),
        ({"device": "cuda:x"}, "device 'cuda:x' is unknown"),
        ({"device": "cuda:63"}, "no cuda:63"),
        ({"precision": "bf16"}, "built in fp16, not in bf16"),
        ({"compile": True}, "compile is a setting of torch, but .* runs in TensorRT for RTX"),
        (
            {"provider": "CPUExecutionProvider"},
            "provider is a setting of ONNX Runtime, but .* runs in TensorRT for RTX",
        ),
    ],
)
def test_unsupported_settings_are_rejected(settings: dict[str, Any], message: str, engine: Path) -> None:
    with pytest.raises(InputError, match=message):
        open_runner(engine, **settings)


@pytest.mark.skipif(not NO_GPU, reason="about machines without a GPU")
def test_without_a_gpu_a_remedy_is_named(engine: Path) -> None:
    with pytest.raises(DeviceError, match="this machine has no cuda:0") as caught:
        open_runner(engine)
    assert "target" in str(caught.value.hint)


def test_a_version_compatible_engine_needs_trust(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "capability", lambda index: 89)
    set_build(engine, version_compatible=True, runtime_version="1.0.0.0")
    with pytest.raises(DeviceError, match="version-compatible engine and contains executable code"):
        open_runner(engine)


def test_the_process_reports_errors(engine: Path) -> None:
    """With the real process and library: the file is hashed again, and errors of the library are reported."""
    requests, answers = io.BytesIO(), io.BytesIO()
    send(requests, {"path": str(engine), "sha256": "0" * 64, "flavour": "trt-rtx", "index": 0, **OPEN})
    requests.seek(0)
    serve(requests, answers)
    answers.seek(0)
    assert receive(answers)[0] == {"error": "the file has changed", "kind": "engine"}
    if NO_GPU:
        with pytest.raises(VitcompressError, match=r"cannot be run: .*(CUDA|NVIDIA)"):
            EngineProcess(engine, sha256=file_sha256(engine), flavour="trt-rtx", index=0, **OPEN)


@pytest.fixture
def driver_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the driver is too old for the library only, the library warns and returns a null pointer."""

    def none(log: Any) -> Any:
        log.log(tensorrt_rtx.ILogger.WARNING, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    for kind in ("Builder", "Runtime"):
        monkeypatch.setattr(tensorrt_rtx, kind, none)


def test_a_library_that_does_not_work_with_the_driver(
    engine: Path, driver_too_old: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported before the build, in doctor, and when an engine is opened, as an error of the machine."""
    with pytest.raises(DeviceError, match=r"does not work with this driver or GPU: .*error: 35"):
        RTX.create("Builder", create_log(tensorrt_rtx))
    monkeypatch.setattr(export, "capability", lambda: 89)
    assert "error: 35" in str(EXPORTERS["trt-rtx"].cannot_run())
    requests, answers = io.BytesIO(), io.BytesIO()
    send(requests, {"path": str(engine), "sha256": file_sha256(engine), "flavour": "trt-rtx", "index": 0, **OPEN})
    requests.seek(0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    serve(requests, answers)
    answers.seek(0)
    answer = receive(answers)[0]
    assert "error: 35" in answer["error"] and answer["kind"] == "machine"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineError("no memory or no context for it: Error Code 1: Cuda Runtime (out of memory)"), DeviceError),
        (EngineError("it cannot be opened: Serialization assertion failed"), ArtifactError),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"), DeviceError),
        (EngineError("no context: requested GPU memory could not be allocated"), DeviceError),
        (RuntimeError("there is not enough free memory"), DeviceError),
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), DeviceError),
        (RuntimeError("an illegal memory access was encountered"), VitcompressError),
    ],
)
def test_errors_of_the_machine_are_no_errors_of_the_engine(
    error: Exception, kind: type[VitcompressError], engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only engines with errors of their own are moved away."""
    process = EngineProcess.__new__(EngineProcess)
    process._path = engine
    pipe = io.BytesIO()
    send(pipe, {"error": str(error), "kind": _kind(error)})
    pipe.seek(0)
    process._process = SimpleNamespace(stdin=io.BytesIO(), stdout=pipe)  # type: ignore[assignment]
    with pytest.raises(VitcompressError) as caught:
        process.layers()
    assert type(caught.value) is kind
    assert (caught.value.hint or "").startswith("export it again") == (kind is ArtifactError)


def test_times_from_the_process_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written to bench.json, and the file that the process runs may be malicious."""
    process = EngineProcess.__new__(EngineProcess)
    answer = {"times_ms": [1, 2.5], "wall_ms": 4}
    monkeypatch.setattr(process, "_request", lambda request: (answer, b""))
    assert list(map(type, (*process.timed(0, 2)[0], process.timed(0, 2)[1]))) == [float] * 3
    answer["times_ms"] = ["<script>", 2.5]
    with pytest.raises(ValueError, match="could not convert"):
        process.timed(0, 2)


def test_a_crashed_process_is_an_error_message(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(VitcompressError, match=r"the process that ran .* has ended"):
        EngineProcess(engine, sha256=file_sha256(engine), flavour="trt-rtx", index=0, **OPEN)


def test_the_process_inherits_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"HF_TOKEN", "NVIDIA_API_KEY", "CONDA_TOKEN", "NVIDIA_NGC_PASSWORD"}
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    environment = _environment()
    assert not secrets & environment.keys() and environment["CUDA_VISIBLE_DEVICES"] == "0" and "PATH" in environment


def test_messages_pass_a_pipe_and_others_are_rejected() -> None:
    pipe = io.BytesIO()
    send(pipe, {"do": "run"}, b"\x00\n{}")
    pipe.seek(0)
    assert receive(pipe) == ({"do": "run"}, bytearray(b"\x00\n{}"))
    with pytest.raises(EOFError):
        receive(pipe)
    for wrong in (b"[]\n", b"{}\n", b'{"bytes": -1}\n', b'{"bytes": 99999999999999}\n', b"\x80\x04N.\n"):
        with pytest.raises(ValueError):
            receive(io.BytesIO(wrong))
    with pytest.raises(EOFError):
        receive(io.BytesIO(b'{"bytes": 9}\nshort'))


def test_bench_rejects_an_engine_without_sidecar(engine: Path) -> None:
    sidecar_path(engine).unlink()
    done = CliRunner().invoke(main, ["bench", str(engine), "--json"])
    assert done.exit_code == 2 and "is not trusted" in json.loads(done.stdout)["error"]


@pytest.mark.gpu
@pytest.mark.skipif(not CAN_RUN, reason=f"TensorRT for RTX: {EXPORTERS['trt-rtx'].cannot_run()}")
@pytest.mark.parametrize("transfers", [False, True])
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_an_engine_runs_and_is_timed(cuda_graph: bool, transfers: bool, engine: Path) -> None:
    model = build("plain", dtype=torch.float32)
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    runner = open_runner(engine, cuda_graph=cuda_graph, transfers=transfers)
    try:
        with torch.inference_mode():
            expected = model(images)
        for batch in (1, 3, 4):
            got = runner(images[:batch])
            # Half precision: 2**-11 per rounding, fewer than 2**6 of them in a row through two blocks of width 16.
            assert (got - expected[:batch]).abs().max() <= 2.0**-5 * expected.abs().max()
        with pytest.raises(InputError, match="takes batches of 1 to 4, got 5"):
            runner(images.repeat(2, 1, 1, 1)[:5])
        times, wall = runner.bind(images).timed(10)  # type: ignore[misc]
        assert len(times) == 10 and min(times) > 0 and wall >= sum(times) * 0.5
        assert (runner.describe()["cuda_graph"], runner.describe()["transfers"]) == (cuda_graph, transfers)
    finally:
        runner.close()
