"""Execution providers of ONNX Runtime: chosen by name, configured, or rejected with a reason and a remedy."""

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
import torch
from contracts import build, images, traces

from vitcompress.bench import suite
from vitcompress.errors import DeviceError, InputError, OutputError
from vitcompress.exporters.doctor import onnx_problem
from vitcompress.exporters.onnx import libraries, providers
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.onnx.providers import CPU, CUDA, PROVIDERS, TENSORRT
from vitcompress.exporters.runtimes import RunnerOptions, open_runner
from vitcompress.models.create import input_config

X = images("plain", dtype=torch.float32)
ON_GPUS = [name for name, provider in PROVIDERS.items() if provider.device == "cuda"]
PROFILE = ("images:1x3x8x8", "images:4x3x8x8", "images:8x3x8x8")


@pytest.fixture(scope="module")
def onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    model = build("plain", dtype=torch.float32)
    export(model, path, input=input_config(model), traces=traces("plain"))
    return path


def test_the_table_has_the_names_of_onnx_runtime() -> None:
    ours = {CPU, CUDA, TENSORRT} & set(ort.get_available_providers())
    assert CPU in ours and all(PROVIDERS[name].present for name in ours)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("name", ON_GPUS)
def test_without_a_gpu_the_remedy_is_named(name: str, onnx: Path) -> None:
    with pytest.raises(DeviceError, match=rf"{name} is not available: .*torch finds no cuda here") as caught:
        open_runner(onnx, provider=name)
    assert PROVIDERS[name].remedy in str(caught.value.hint) and "--device cpu" in str(caught.value.hint)
    assert "pip install" in str(onnx_problem(provider=name))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"provider": "CUDAExecutionProvidr"}, "did you mean CUDAExecutionProvider"),
        ({"provider": CPU, "device": "cuda"}, "does not run on cuda"),
        ({"provider": CUDA, "device": "cpu"}, "does not run on cpu"),
        ({"device": "cuda:x"}, "unknown"),
        ({"device": "cpu:1"}, "unknown"),
        ({"cuda_graph": True}, "CUDA graphs are not supported"),
    ],
)
def test_contradicting_settings_are_rejected(options: dict[str, Any], message: str, onnx: Path) -> None:
    with pytest.raises(DeviceError, match=message) as caught:
        open_runner(onnx, **options)
    assert caught.value.hint


def test_a_cache_without_a_build_is_rejected(onnx: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="builds nothing"):
        open_runner(onnx, engine_cache=tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


def test_the_cpu_by_its_name_is_the_default(onnx: Path) -> None:
    for options in ({}, {"provider": CPU}, {"device": "cpu"}):
        with closing(open_runner(onnx, **options)) as runner:
            about = runner.describe()
            assert (about["provider"], about["device"], about["nodes_on_cpu"]) == (CPU, "cpu", [])
            assert about["batch_range"] is None and about["provider_options"] == {}


def test_tensorrt_options_have_the_batch_range_and_no_precision(tmp_path: Path) -> None:
    options = PROVIDERS[TENSORRT].options(RunnerOptions(engine_cache=tmp_path), PROFILE)
    assert {options[f"trt_{kind}_enable"] for kind in ("fp16", "bf16", "int8")} == {
        "0"
    }  # the file states its precision
    assert [options[f"trt_profile_{kind}_shapes"] for kind in ("min", "opt", "max")] == list(PROFILE)
    assert options["trt_engine_cache_path"] == options["trt_timing_cache_path"] == str(tmp_path)
    bare = PROVIDERS[TENSORRT].options(RunnerOptions(), ())
    assert not [key for key in bare if "profile" in key or "cache" in key]


@pytest.mark.skipif(TENSORRT not in ort.get_available_providers(), reason="not in this ONNX Runtime")
def test_the_library_knows_every_option() -> None:
    folder = Path(ort.__file__).parent / "capi"
    (library,) = (path for path in folder.iterdir() if "providers_tensorrt" in path.name)
    options = PROVIDERS[TENSORRT].options(RunnerOptions(engine_cache=folder), PROFILE)
    known = library.read_bytes()
    assert [key for key in options if key.startswith("trt_") and key.encode() not in known] == []


@pytest.mark.parametrize(
    ("name", "stored", "wanted", "computed"),
    [
        (CPU, "fp32", None, "fp32"),
        (CUDA, "fp32", None, "fp32"),
        (CUDA, "fp32", "tf32", "tf32"),
        (CUDA, None, "fp32", "fp32"),
        (CUDA, "fp16", None, "fp16"),
        (TENSORRT, "fp32", None, "tf32"),
        (TENSORRT, "fp32", "tf32", "tf32"),
        (TENSORRT, None, "tf32", "tf32"),
        (TENSORRT, None, None, "as stored"),
        (TENSORRT, "bf16", None, "bf16"),
        (CPU, "bf16", None, DeviceError),
        (CPU, "fp32", "tf32", DeviceError),
        (CUDA, "fp16", "tf32", DeviceError),
        (TENSORRT, "fp32", "fp32", DeviceError),
        (TENSORRT, None, "fp32", DeviceError),
        (CPU, None, "tf32", DeviceError),
        (TENSORRT, "fp16", "fp32", DeviceError),
    ],
)
def test_the_file_determines_the_precision_and_tf32_is_never_reported_as_fp32(
    name: str, stored: str | None, wanted: str | None, computed: Any
) -> None:
    if computed is DeviceError:
        with pytest.raises(DeviceError) as error:
            providers.resolve_precision(Path("m.onnx"), stored, wanted, PROVIDERS[name])
        assert "export it with --precision tf32" not in str(error.value.hint)  # ONNX files store no tf32
    else:
        assert providers.resolve_precision(Path("m.onnx"), stored, wanted, PROVIDERS[name]) == computed


@pytest.fixture
def logged() -> Iterator[None]:
    ort.set_default_logger_severity(3)
    yield
    ort.set_default_logger_severity(2)


@pytest.mark.skipif(TENSORRT not in ort.get_available_providers(), reason="not in this ONNX Runtime")
@pytest.mark.skipif(find_spec("tensorrt") is not None, reason="TensorRT is installed")
def test_a_library_that_is_missing_is_named(onnx: Path, logged: None) -> None:
    provider = PROVIDERS[TENSORRT]
    provider.load()
    argument = [(provider.name, provider.options(RunnerOptions(), ()))]
    with pytest.raises(RuntimeError) as caught, libraries.capture_stderr() as lines:
        ort.InferenceSession(str(onnx), providers=argument, enable_fallback=0)
    assert libraries.error_text(caught.value).startswith("Please install TensorRT libraries")
    assert re.fullmatch(r"libnvinfer\.so\.\d+ is missing", str(libraries.missing_library(lines)))


def test_stderr_is_captured_inside_the_block_only(capfd: pytest.CaptureFixture[str]) -> None:
    with libraries.capture_stderr() as lines:
        os.write(2, b"first\nno lib.so.1: cannot open shared object file\nlast\n\n")
    os.write(2, b"later\n")
    assert lines[0] == "first" and capfd.readouterr().err == "later\n"
    assert libraries.missing_library(lines) == "lib.so.1 is missing" and libraries.missing_library(lines[2:]) is None


def test_each_thread_captures_its_own_lines(capfd: pytest.CaptureFixture[str]) -> None:
    """Standard error is restored when both are done."""
    first_is_in, caught = threading.Event(), dict[str, list[str]]()

    def catch(name: str, wait: float) -> None:
        with libraries.capture_stderr() as lines:
            first_is_in.set()
            time.sleep(wait)
            os.write(2, f"{name}\n".encode())
        caught[name] = lines

    first = threading.Thread(target=catch, args=("first", 0.2))
    first.start()
    first_is_in.wait()
    catch("second", 0.0)
    first.join()
    os.write(2, b"later\n")
    assert caught == {"first": ["first"], "second": ["second"]} and capfd.readouterr().err == "later\n"


def test_an_error_restores_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="inside"), libraries.capture_stderr() as lines:
        print("buffered", file=sys.__stderr__, end="")
        raise ValueError("inside")
    os.write(2, b"later\n")
    assert lines == ["buffered"] and capfd.readouterr().err == "later\n"


def test_a_process_without_stderr_captures_nothing() -> None:
    stderr = os.dup(2)
    os.close(2)
    try:
        with libraries.capture_stderr() as lines:
            pass
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
    assert lines == []


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_a_cache_that_others_can_write_to_is_rejected(tmp_path: Path) -> None:
    """Its files are executed."""
    cache = libraries.prepare_cache(tmp_path / "mine" / "cache")
    assert cache.is_dir() and cache.stat().st_mode & 0o077 == 0
    assert libraries.prepare_cache(cache) == cache
    cache.chmod(0o777)
    with pytest.raises(OutputError, match="others can write") as caught:
        libraries.prepare_cache(cache)
    assert "chmod" in str(caught.value.hint)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="Not a directory"):
        libraries.prepare_cache(tmp_path / "file" / "cache")


# ------------------------------------------------------------------------------------------------------------ on a GPU


def here(name: str) -> str:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if problem := onnx_problem(provider=name):
        pytest.skip(problem)
    return name


@torch.no_grad()
def expected(x: torch.Tensor) -> torch.Tensor:
    return build("plain", dtype=torch.float32)(x)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPUS)
def test_a_provider_runs_all_heavy_operators_and_agrees_with_the_model(name: str, onnx: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache" if PROVIDERS[here(name)].builds else None
    with closing(open_runner(onnx, provider=name, batch=(1, 4, 8), engine_cache=cache)) as runner:
        about = runner.describe()
        share = 1e-2 if about["precision"] == "tf32" else 1e-3  # as in the agreement checks
        for batch in (1, 3, 8):
            x = X.repeat(8, 1, 1, 1)[:batch]
            assert (runner(x) - expected(x)).abs().max() <= share * expected(x).abs().max()
        assert (about["provider"], about["device"]) == (name, "cuda:0") and about["device_name"]
        assert about["provider_options"]["device_id"] == "0"
        assert about["batch_range"] == ([1, 4, 8] if PROVIDERS[name].builds else None)
        times, wall = runner.bind(X).timed(5)  # type: ignore[misc]
        assert len(times) == 5 and min(times) > 0 and wall > 0
        if PROVIDERS[name].builds:
            assert any(tmp_path.joinpath("cache").iterdir())
            with pytest.raises(InputError, match="takes batches of 1 to 8, got 9"):
                runner(X.repeat(9, 1, 1, 1)[:9])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in ON_GPUS if PROVIDERS[n].graphs])
def test_each_binding_replays_its_own_graph(name: str, onnx: Path) -> None:
    """Two alternating bindings with other images and sizes: a wrong graph would return the other logits."""
    with closing(open_runner(onnx, provider=here(name), batch=(1, 4, 8), cuda_graph=True)) as runner:
        inputs = [X[:1], X.flip(0)]
        bound = [runner.bind(x) for x in inputs]
        for turn in (0, 1, 0, 1):
            bound[turn]()
            got = bound[turn]._values[1].float().cpu()  # type: ignore[attr-defined]
            want = expected(inputs[turn])
            assert (got - want).abs().max() <= 1e-2 * want.abs().max()
    options = suite.BenchOptions("paper", (1, 4), 1, 3, RunnerOptions(provider=name, cuda_graph=True))
    rows = suite.run([onnx], options).rows
    assert [(row["batch"], row["cuda_graph"], row["clock"]) for row in rows] == [
        (1, True, "cuda events"),
        (4, True, "cuda events"),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in ON_GPUS if not PROVIDERS[n].graphs])
def test_providers_with_one_graph_per_session_reject_graphs(name: str, onnx: Path) -> None:
    with pytest.raises(InputError, match="supports only one CUDA graph per session"):
        open_runner(onnx, provider=here(name), cuda_graph=True)
