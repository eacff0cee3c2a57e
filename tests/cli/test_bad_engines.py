"""Engines and ONNX files that a command cannot use: one message, exit code 2, and nothing written.

The engines are of TensorRT for RTX, which builds them without a GPU.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from click.testing import CliRunner
from command_line import begin, copy_run, expect_error

from vitcompress import cli
from vitcompress.exporters.onnx.providers import PROVIDERS
from vitcompress.exporters.sidecar import amend_sidecar, read_sidecar, sidecar_path
from vitcompress.io.files import file_sha256
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import save_tensors
from vitcompress.models.checkpoint import load_model

tensorrt_rtx = pytest.importorskip("tensorrt_rtx", reason="not available for this platform")
ENGINE = "model.rtx.engine"
EXPORT = ("export", "run", "--format", "trt-rtx", "--sm", "89", "--batch", "1:2:4")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@pytest.fixture(scope="module")
def finished(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a finished run and its engine."""
    with pytest.MonkeyPatch.context() as patch:
        begin(tmp_path_factory.mktemp("finished") / "home", patch)
        copy_run(small_run)
        done = CliRunner().invoke(cli.main, [*EXPORT, "--json"])
        assert done.exit_code == 0, done.output
        return Path.cwd()


@pytest.fixture(autouse=True)
def home(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it as working folder."""
    shutil.copytree(finished, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    return Path("run", ENGINE)


# ------------------------------------------------------------------------------------------------------------- engines


def truncated(engine: Path) -> Path:
    engine.write_bytes(engine.read_bytes()[:5000])
    return engine


def cut_to_its_header(engine: Path) -> Path:
    """With a matching hash in the sidecar."""
    return claim(engine, engine.read_bytes()[:20])


def renamed(engine: Path) -> Path:
    return engine.rename("other.engine")


def renamed_with_its_sidecar(engine: Path) -> Path:
    sidecar_path(engine).rename("other.engine.json")
    return engine.rename("other.engine")


def of_tensorrt_proper(engine: Path) -> Path:
    return claim(engine, b"ftrt" + engine.read_bytes()[4:])


def of_rtx_called_proper(engine: Path) -> Path:
    amend_sidecar(engine, format="trt")
    return engine


def of_another_version(engine: Path) -> Path:
    build = read_sidecar(engine)["build"]
    amend_sidecar(engine, build={**build, "runtime_version": "1.4.0.9"})
    return engine


def claim(engine: Path, content: bytes) -> Path:
    """Write other bytes, with a matching hash in the sidecar."""
    engine.write_bytes(content)
    amend_sidecar(engine, files={engine.name: file_sha256(engine)})
    return engine


@pytest.mark.parametrize("command", [("bench",), ("evaluate", "--data", "digits")], ids=["bench", "evaluate"])
@pytest.mark.parametrize(
    ("make", "sentence", "step"),
    [
        (truncated, "is not trusted", "--trust"),
        (renamed, "there is no such file", "--trust"),
        (renamed_with_its_sidecar, "missing", "--trust"),
        (cut_to_its_header, "is not a TensorRT engine", "export it again"),
        (of_tensorrt_proper, "written by TensorRT, but its sidecar names trt-rtx", "export it again"),
        (of_rtx_called_proper, "written by TensorRT for RTX, but its sidecar names trt", "export it again"),
        (
            of_another_version,
            f"built by TensorRT for RTX 1.4.0.9, which the installed {tensorrt_rtx.__version__} does not run",
            "==1.4.0.9",
        ),
    ],
)
def test_a_damaged_engine(
    make: Callable[[Path], Path], sentence: str, step: str, command: tuple[str, ...], home: Path
) -> None:
    message = expect_error(command[0], str(make(home)), *command[1:])
    assert sentence in message and step in message


def edited(path: Path, **changes: object) -> str:
    """Edit the sidecar of a file; None removes a key."""
    sidecar = {**json.loads(sidecar_path(path).read_text()), **changes}
    sidecar_path(path).write_text(json.dumps({key: value for key, value in sidecar.items() if value is not None}))
    return str(path)


@pytest.mark.parametrize("command", [("bench",), ("evaluate", "--data", "digits")], ids=["bench", "evaluate"])
@pytest.mark.parametrize("name", [ENGINE, "model.onnx"])
def test_an_edited_sidecar(name: str, command: tuple[str, ...]) -> None:
    RunFolder(Path("run")).manifest.unlink()  # would report the edit first
    message = expect_error(command[0], edited(Path("run", name), build=["none"]), *command[1:])
    assert f"{name}.json cannot be used: build got ['none'], expected a table" in message and "export" in message


def test_an_edited_sidecar_is_rejected_by_export_and_verify() -> None:
    edited(Path("run/model.onnx"), metadata=None)
    assert "run is not as it was written: model.onnx.json: sha256" in expect_error(*EXPORT)
    RunFolder(Path("run")).manifest.unlink()
    edited(Path("run", ENGINE), build={"sm": "89"}, opset=None)
    done = CliRunner().invoke(cli.main, ["verify", "run", "--adopt", "--json"])
    assert done.exit_code == 1 and "Traceback" not in done.stderr, done.output
    failed = {check["name"]: check["detail"] for check in json.loads(done.stdout)["checks"] if not check["passed"]}
    assert "metadata is missing" in failed["onnx.file"] and "metadata is missing" in failed["agreement.model.onnx"]
    assert "build.sm got '89', expected a list" in failed[f"{ENGINE}.file"] and "opset" in failed[f"{ENGINE}.file"]


@without_gpu
@pytest.mark.parametrize("command", [("bench", "--batch", "2"), ("evaluate", "--data", "digits")])
def test_an_engine_without_a_gpu(command: tuple[str, ...], home: Path) -> None:
    message = expect_error(command[0], str(home), *command[1:])
    assert "this machine has no cuda:0" in message and "on the target" in message


def test_a_batch_outside_the_range_of_an_engine(home: Path) -> None:
    message = expect_error("bench", str(home), "--batch", "1,8")
    assert "takes batches of 1 to 4, got 8" in message and "--batch MIN:OPT:MAX" in message


@without_gpu
def test_tensorrt_without_a_gpu() -> None:
    message = expect_error("export", "run", "--format", "trt")
    assert "trt cannot be exported on this machine" in message and (
        "pip install" in message or "on the target" in message
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--batch", "8:4:16"), "not in ascending order"),
        (("--batch", "4:2:1"), "not in ascending order"),
        (("--batch", "0:1:2"), "expected MIN:OPT:MAX"),
        (("--sm", "61"), "does not support compute capability 61"),
        (("--sm", "90"), "--format trt"),
        (("--sm", "ampere"), "expected compute capabilities"),
        (("--precision", "fp8"), "fp8"),
        (
            ("--precision", "fp17"),
            "'fp17' is not one of 'fp32', 'tf32', 'fp16', 'bf16', 'int8', 'int8+bf16', 'fp8', 'fastest'",
        ),
        (("--workspace", "9999999G"), "workspace   got 10737417166258176, expected 1125899906842624 or less"),
        (("--opset", "-1"), "opset   got -1, expected 1 or more"),
        (("--sm", "0"), "sm.0   got 0, expected 1 or more"),
    ],
)
def test_options_that_no_engine_supports(words: tuple[str, ...], sentence: str) -> None:
    assert sentence in expect_error(*EXPORT[:4], *words)


def test_an_error_is_one_panel(home: Path) -> None:
    done = CliRunner().invoke(cli.main, ["bench", str(truncated(home))])
    assert done.exit_code == 2 and done.stdout == "" and done.stderr.count("╭") == 1
    assert "Traceback" not in done.stderr and "--trust" in done.stderr


# ---------------------------------------------------------------------------------------------------------- ONNX files


def changed(path: Path, name: str | None = None, batch: int | None = None) -> str:
    """A copy of an ONNX file whose input has another name or a fixed batch."""
    model = onnx.load(str(path))
    (images,) = model.graph.input
    for node in model.graph.node:
        node.input[:] = [name if name and one == images.name else one for one in node.input]
    images.name = name or images.name
    if batch:
        images.type.tensor_type.shape.dim[0].dim_value = batch
    onnx.save(model, "changed.onnx")
    return "changed.onnx"


def test_an_input_may_have_another_name() -> None:
    path = changed(Path("run/model.onnx"), name="pixel_values")
    done = CliRunner().invoke(cli.main, ["bench", path, "--protocol", "paper", "--runs", "2", "--batch", "2", "--json"])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["rows"]
    assert row["batch"] == 2


def test_a_file_with_a_fixed_batch() -> None:
    path = changed(Path("run/model.onnx"), batch=3)
    message = expect_error("bench", path, "--batch", "8")
    assert "takes batches of 3, got 8" in message and "--batch 3" in message


def with_large(layer: str) -> None:
    """Give the run a model in which the output of `layer` exceeds the range of half precision, and no manifest."""
    RunFolder(Path("run")).manifest.unlink()
    model = load_model("run")
    with torch.no_grad():
        model.get_submodule(layer).bias.add_(1e5)
    weights = RunFolder(Path("run")).weights
    weights.unlink()
    save_tensors(weights, model.state_dict())


@pytest.mark.parametrize(
    ("form", "islands"), [("onnx", ""), ("onnx", "head"), ("onnx", "auto"), ("openvino", ""), ("trt-rtx", "")]
)
def test_a_model_outside_the_range_of_half_precision(form: str, islands: str) -> None:
    """The range scan detects it before the export. No island helps, so none is suggested or searched."""
    with_large("patch_embed.proj")
    options = ("--islands", islands) if islands else ()
    message = expect_error("export", "run", "--format", form, "--precision", "fp16", *options)
    largest = "on these images, the largest number in half precision is 65504"
    assert re.search(rf"^\S+ reaches 1000\d\d {largest}", message), message
    assert "use --precision bf16" in message and "--islands" not in message


@pytest.mark.parametrize(("form", "remedy"), [("onnx", "--islands head or auto, or "), ("openvino", "")])
def test_a_layer_outside_the_range_of_half_precision_can_stay_in_fp32(form: str, remedy: str) -> None:
    with_large("head")
    message = expect_error("export", "run", "--format", form, "--precision", "fp16")
    largest = "on these images, the largest number in half precision is 65504 "
    assert re.search(rf"^head reaches (999|1000)\d\d {largest}", message), message
    assert f"use {remedy}--precision bf16" in message


@without_gpu
@pytest.mark.parametrize("name", [name for name, provider in PROVIDERS.items() if provider.device == "cuda"])
@pytest.mark.parametrize("command", [("bench",), ("evaluate", "--data", "digits")], ids=["bench", "evaluate"])
def test_a_provider_that_cannot_work_here(command: tuple[str, ...], name: str) -> None:
    message = expect_error(command[0], "run/model.onnx", *command[1:], "--provider", name, "--engine-cache", "kept")
    assert name in message and "pip install" in message and "torch finds no cuda here" in message


def test_an_unknown_provider() -> None:
    message = expect_error("bench", "run/model.onnx", "--provider", "CUDAExecutionProvidr")
    assert "did you mean CUDAExecutionProvider?" in message and "TensorrtExecutionProvider" in message
