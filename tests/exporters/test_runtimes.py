"""Runners agree with the model, run as requested or not at all, and reject damaged and unsafe files."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from contracts import build, contract, images, traces
from onnx import TensorProto, helper, numpy_helper
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitcompress.errors import ArtifactError, DeviceError, InputError
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.onnx.libraries import run_errors
from vitcompress.exporters.onnx.providers import HEAVY, assigned_operators
from vitcompress.exporters.onnx.runner import _image_input
from vitcompress.exporters.runtimes import RunnerOptions, TorchRunner, open_runner
from vitcompress.models.checkpoint import write_model
from vitcompress.models.create import create_model, input_config
from vitcompress.training.metrics import evaluate

X = images("plain", dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with an ONNX file."""
    folder = tmp_path_factory.mktemp("run")
    model = build("plain", dtype=torch.float32)
    write_model(folder, model, contract("plain").plan)
    export(model, folder / "model.onnx", input=input_config(model), traces=traces("plain"))
    return folder


@torch.no_grad()
def expected(x: torch.Tensor = X) -> torch.Tensor:
    return build("plain", dtype=torch.float32)(x)


@pytest.mark.parametrize("name", ["model.onnx", ""])
def test_file_and_folder_agree_with_the_model(folder: Path, name: str) -> None:
    runner = open_runner(folder / name if name else folder)
    torch.testing.assert_close(runner(X), expected())
    assert runner.input_size == (3, 8, 8)
    assert runner.input == input_config(build("plain"))
    runner.bind(X)()
    about = runner.describe()
    assert about["sha256"]
    assert (about["device"], about["precision"], about["tf32"]) == ("cpu", "fp32", False)
    json.dumps(about)
    runner.close()


def test_a_timm_name_is_a_runner() -> None:
    runner = open_runner("timm:test_vit")
    assert runner(torch.zeros(1, *runner.input_size)).shape == (1, 1000)


class Batches(list):
    """Replaces an EvalLoader."""

    total = len(X)


def test_a_runner_can_be_evaluated(folder: Path) -> None:
    from vitcompress.training.distributed import Runtime

    best = expected().argmax(1)
    runner = open_runner(folder / "model.onnx")
    batches = Batches([(X, best)])
    assert evaluate(runner, batches, Runtime(torch.device("cpu"))).top1 == 1.0


def test_threads_are_set_for_each_call_and_restored() -> None:
    before = torch.get_num_threads()
    runner = TorchRunner(build("plain", dtype=torch.float32), RunnerOptions(threads=before + 1), name="model")
    runner(X)
    assert torch.get_num_threads() == before + 1 == runner.describe()["threads"]
    runner.close()
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_torch_in_half_precision(precision: str) -> None:
    runner = TorchRunner(build("plain", dtype=torch.float32), RunnerOptions(precision=precision), name="model")
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    with torch.inference_mode():
        own = build("plain", dtype=torch.float32).to(dtype)(X.to(dtype)).float()
    assert torch.equal(runner(X), own)
    assert not torch.equal(own, expected())


def test_the_caller_can_choose_another_attention_kernel() -> None:
    runner = TorchRunner(build("plain", dtype=torch.float32), RunnerOptions(), name="model")
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(runner(X), expected())
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), pytest.raises(RuntimeError, match=r"No (viable|available)"):
        runner(X)


def test_every_model_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch by default compiles eight models of a class, and runs others uncompiled. The limits are restored."""
    torch.compiler.reset()
    compiled, limits = [], ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
    before = [getattr(torch._dynamo.config, name) for name in limits]

    def count(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    shared, sizes = {"img_size": 8, "patch_size": 4, "depth": 1, "num_heads": 1, "num_classes": 2}, range(1, 10)
    with ExitStack() as stack:
        for number in sizes:
            model = create_model("vit_tiny_patch16_224", {**shared, "embed_dim": 8 * number})
            runner = TorchRunner(model, RunnerOptions(compile=True), name="model")
            stack.callback(runner.close)
            runner(X[:2])
            assert len(compiled) == number
        runner(X[:1])
        assert len(compiled) == len(sizes) + 1  # another batch has kernels of its own
        assert [getattr(torch._dynamo.config, name) for name in limits] != before
    assert [getattr(torch._dynamo.config, name) for name in limits] == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("artifact", "options"),
    [
        ("model.onnx", {"device": "cuda"}),
        ("model.onnx", {"device": "cuda", "provider": "TensorrtExecutionProvider"}),
        ("model.onnx", {"provider": "NoSuchExecutionProvider"}),
        ("model.onnx", {"device": "quantum"}),
        ("model.onnx", {"precision": "fp16"}),
        ("model.onnx", {"precision": "tf32"}),
        ("", {"device": "cuda"}),
        ("", {"device": "quantum"}),
        ("", {"precision": "tf32"}),
    ],
)
def test_there_are_no_silent_fallbacks(folder: Path, artifact: str, options: dict[str, str]) -> None:
    with pytest.raises(DeviceError) as caught:
        open_runner(folder / artifact if artifact else folder, **options)
    assert next(iter(reversed(options.values()))) in caught.value.message or "cuda" in caught.value.message.lower()


@pytest.mark.parametrize(
    ("artifact", "options"),
    [
        ("model.onnx", {"compile": True}),
        ("", {"provider": "CPUExecutionProvider"}),
        ("", {"precision": "fp8"}),
    ],
)
def test_settings_of_another_runtime_are_rejected(folder: Path, artifact: str, options: dict[str, object]) -> None:
    with pytest.raises(InputError):
        open_runner(folder / artifact if artifact else folder, **options)


def test_misplaced_nodes_are_detected(folder: Path) -> None:
    options = ort.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    assert assigned_operators(session, "CPUExecutionProvider")[1] == set()
    own, others = assigned_operators(session, "CUDAExecutionProvider")
    assert not own and others & HEAVY >= {"Gemm", "Conv"}


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08", bytes(range(256))])
def test_a_file_that_is_not_onnx(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(content)
    with pytest.raises(ArtifactError, match="not an ONNX file"):
        open_runner(tmp_path / "x.onnx")


def test_a_truncated_file(folder: Path, tmp_path: Path) -> None:
    data = (folder / "model.onnx").read_bytes()
    (tmp_path / "x.onnx").write_bytes(data[: len(data) // 2])
    with pytest.raises(ArtifactError):
        open_runner(tmp_path / "x.onnx")


def test_a_file_that_is_not_the_one_its_sidecar_describes(folder: Path, tmp_path: Path) -> None:
    data = (folder / "model.onnx").read_bytes()
    (tmp_path / "x.onnx").write_bytes(data)
    for sidecar in ({"files": {"x.onnx": "0" * 64}}, {"files": {"gone.data": "0" * 64}}, {"files": ["x.onnx"]}, []):
        (tmp_path / "x.onnx.json").write_text(json.dumps(sidecar))
        with pytest.raises(ArtifactError, match=r"x\.onnx\.json"):
            open_runner(tmp_path / "x.onnx")


@pytest.mark.parametrize("name", ["model.engine", "model.xml", "model.txt", "nothing.onnx", "nowhere"])
def test_an_unknown_or_missing_artifact(name: str, tmp_path: Path) -> None:
    if name == "model.txt":
        (tmp_path / name).write_text("x")
    with pytest.raises(ArtifactError) as caught:
        open_runner(tmp_path / name)
    assert caught.value.hint


def outside(location: str, tmp_path: Path) -> Path:
    """A small model whose weight is stored in `location`."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        weight.external_data.add(key=key, value=value)
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 1, 2, 4]) for n in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Mul", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [weight])
    path = tmp_path / "models" / "x.onnx"
    path.parent.mkdir()
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()
    )
    return path


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "a/../../secret", "link", "missing", ""])
def test_external_data_outside_the_folder_are_rejected(location: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(16))
    path = outside(location, tmp_path)
    if location == "link":
        (path.parent / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ArtifactError, match=r"outside its own folder|missing"):
        open_runner(path)


def test_external_data_inside_the_folder_is_read(tmp_path: Path) -> None:
    path = outside("w.data", tmp_path)
    (path.parent / "w.data").write_bytes(torch.full((4,), 2.0).numpy().tobytes())
    x = torch.ones(1, 1, 2, 4)
    assert torch.equal(open_runner(path)(x), 2 * x)
    with pytest.raises(InputError, match="batches of 1"):
        open_runner(path)(torch.ones(2, 1, 2, 4))


def save_classifier(path: Path, *middle: onnx.NodeProto) -> None:
    """Save an ONNX file whose nodes `middle` make `rows` of `images`, in `(batch, 3, 8, 8)`."""
    numbers = {"sizes": np.array([1, 192]), "axes": np.array([0]), "weight": np.ones((192, 4), np.float32)}
    nodes = [*middle, helper.make_node("MatMul", ["rows", "weight"], ["logits"])]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ("batch", *sizes))
        for name, sizes in (("images", (3, 8, 8)), ("logits", (4,)))
    )
    graph = helper.make_graph(nodes, "net", [x], [y], [numpy_helper.from_array(v, k) for k, v in numbers.items()])
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]), path)


def test_a_file_that_runs_at_other_batch_sizes_only(tmp_path: Path) -> None:
    """Other tools may write the traced batch size into the graph, beside an input that states any."""
    save_classifier(tmp_path / "one.onnx", helper.make_node("Reshape", ["images", "sizes"], ["rows"]))
    runner = open_runner(tmp_path / "one.onnx")
    assert runner(X[:1]).shape == (1, 4)
    for call in (runner, runner.bind):
        with pytest.raises(ArtifactError, match=r"cannot run one.onnx at batch 3: .* reshaped") as error:
            call(X)
        assert "/onnxruntime_src" not in str(error.value) and "dynamic batch" in str(error.value.hint)
    mean = helper.make_node("ReduceMean", ["images", "axes"], ["mean"], keepdims=1)
    save_classifier(tmp_path / "mean.onnx", mean, helper.make_node("Reshape", ["mean", "sizes"], ["rows"]))
    runner = open_runner(tmp_path / "mean.onnx")
    for call in (runner, runner.bind):
        with pytest.raises(ArtifactError, match=r"mean.onnx has an output of 1x4 for 3 images"):
            call(X)


@pytest.mark.parametrize("text", ["Failed to allocate memory for requested buffer", "CUDA error 700"])
def test_errors_of_the_machine_are_none_of_the_file(text: str) -> None:
    with pytest.raises(RuntimeError, match=text), run_errors("model.onnx"):
        raise RuntimeError(text)


def test_a_model_without_an_image_input_is_rejected(tmp_path: Path) -> None:
    ends = [helper.make_tensor_value_info(n, TensorProto.INT64, [3]) for n in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "x.onnx")
    with pytest.raises(ArtifactError, match="image tensor"):
        open_runner(tmp_path / "x.onnx")


@pytest.mark.parametrize(("sizes", "expected"), [([None, 3, 8, 8], ("x", (0, 3, 8, 8))), ([2, 3, None, 8], ("", ()))])
def test_weights_that_old_files_list_as_inputs_are_no_images(sizes: list[int | None], expected: object) -> None:
    """For TensorRT, whose range of batches names the input."""
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, sizes) for n in ("x", "bias", "y")]
    bias = helper.make_tensor("bias", TensorProto.FLOAT, [1], [2.0])
    graph = helper.make_graph([helper.make_node("Add", ["x", "bias"], ["y"])], "g", values[:2], values[2:], [bias])
    assert _image_input(helper.make_model(graph)) == expected
    del graph.initializer[:]
    assert _image_input(helper.make_model(graph)) == ("", ())
