"""Weights in files with their own storage: half precision, OpenVINO, data files of ONNX."""

import shutil
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from contracts import build, contract, kept_channels
from pruned_models import check_weights, pruned
from torch import nn

from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.onnx.file import read_contents
from vitcompress.exporters.openvino import runner
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.quantize.calibrate import calibrate
from vitcompress.exporters.runtimes import EXPORTERS
from vitcompress.exporters.sidecar import sidecar_path
from vitcompress.models.checkpoint import load_model, write_model
from vitcompress.models.create import input_config
from vitcompress.surgery import apply_plan
from vitcompress.verify.files import check_file, contents_of
from vitcompress.verify.outputs import PlannedOriginal
from vitcompress.verify.weights import compare_tensors


def passes(model: nn.Module, path: Path) -> bool:
    """Whether the file has the weights of `model`, and not those of a model that differs in a few."""
    other = deepcopy(model)
    with torch.no_grad():
        other.get_submodule("blocks.1.mlp").weight[0] += 1.0
    assert check_weights(other, path).verdict == "failed"
    return check_weights(model, path).verdict == "passed"


def test_weights_in_half_precision_with_fp32_layers_are_compared(tmp_path: Path) -> None:
    model, path = pruned("layer_scale")[1], tmp_path / "model.onnx"
    options = ExportOptions(uint8=True, precision="fp16", islands=("norm", "softmax", "head"))
    export(model, path, input=input_config(model), options=options)
    assert passes(model, path)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_position_biases_of_an_attention_core_in_fp32_are_those_of_half_precision(
    precision: Any, tmp_path: Path
) -> None:
    """BEiT adds them to its scores: torch gathers them from the table in half precision, and stores them in fp32."""
    model, path = build("beit", dtype=torch.float32), tmp_path / "model.onnx"
    table = model.get_parameter("blocks.1.attn.relative_position_bias_table")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    export(model, path, input=input_config(model), options=ExportOptions(precision=precision, islands=("softmax",)))
    assert check_weights(model, path).verdict == "passed"
    with torch.no_grad():
        table[3, 1] += 0.1
    check = check_weights(model, path)
    assert check.verdict == "failed" and "blocks.1.attn.relative_position_bias_table" in check.detail


def test_values_of_a_weight_in_another_order_fail(tmp_path: Path) -> None:
    model, path = pruned("layer_scale")[1], tmp_path / "model.onnx"
    export(model, path, input=input_config(model))
    weight = model.get_parameter("blocks.0.mlp.fc1.weight")
    weight.data = weight.data.flip(0)
    check = check_weights(model, path)
    assert check.verdict == "failed" and "blocks.0.mlp.fc1.weight" in check.detail


# The graph reshapes biases of more than 8,192 values: 4 heads of 7 x 7 tokens, as in most layers of Swin, have 9,604.
@pytest.mark.parametrize(
    ("variant", "args"),
    [("swin", {}), ("swin", {"img_size": 28, "window_size": 7}), ("beit", {}), ("beit", {"img_size": 28})],
)
def test_position_biases_in_another_order_fail(variant: str, args: dict[str, int], tmp_path: Path) -> None:
    """A file stores a value of the table for each pair of tokens, in int8 too; a shifted layer of Swin adds a mask."""
    model, path = pruned(variant, **args)[1], tmp_path / "model.onnx"
    model.load_state_dict({name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()})
    ranges = partial(calibrate, images=torch.randn(4, *input_config(model).size), precision="int8")
    options = ExportOptions(precision="int8")
    export(model, path, input=input_config(model), options=options, calibrate=ranges)
    assert check_weights(model, path).verdict == "passed"
    for name in [name for name, _ in model.named_parameters() if name.endswith("relative_position_bias_table")]:
        for axis in (0, 1):
            wrong = deepcopy(model)
            wrong.get_parameter(name).data = model.get_parameter(name).data.roll(1, axis)
            check = check_weights(wrong, path)
            assert check.verdict == "failed" and name in check.detail


def test_position_biases_that_the_mask_of_a_shifted_window_hides_are_known(tmp_path: Path) -> None:
    """One window as large as its image, and shifted: its corners never attend to each other."""
    changes: dict[str, Any] = {"depths": [2, 2], "always_partition": True, "strict_img_size": False}
    model, path = build("swin", dtype=torch.float32, **changes), tmp_path / "model.onnx"
    apply_plan(model, contract("swin", **changes).plan.delta(kept=kept_channels(model, {"v"})))  # one sum of both
    export(model, path, input=input_config(model))
    assert check_weights(model, path).verdict == "passed"
    with torch.no_grad():
        model.get_parameter("layers.1.blocks.1.attn.relative_position_bias_table")[0] += 0.1
    assert "layers.1.blocks.1.attn.relative_position_bias_table" in str(check_weights(model, path).detail)


@pytest.fixture(scope="module")
def openvino_ir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if EXPORTERS["openvino"].unavailable():
        pytest.skip("OpenVINO is not installed")
    model, path = pruned("layer_scale")[1], tmp_path_factory.mktemp("ir") / "model.xml"
    EXPORTERS["openvino"].export(model, path, input=input_config(model), options=ExportOptions(uint8=True))
    return path


def test_weights_of_openvino_are_compared_and_damage_fails(openvino_ir: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(openvino_ir.parent, tmp_path / "run")) / "model.xml"
    model = pruned("layer_scale")[1]
    assert passes(model, path)
    data = path.with_suffix(".bin")
    data.write_bytes(data.read_bytes()[:-1001])
    check = check_weights(model, path)
    assert check.verdict == "failed" and str(path) in check.detail


def test_without_openvino_its_files_are_not_run(openvino_ir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only OpenVINO reads and runs them: verification on a machine without it must not fail."""
    monkeypatch.setattr(runner, "unavailable", lambda: "openvino is not installed")
    _, model, plan = pruned("layer_scale")
    original = PlannedOriginal(model, torch.zeros(1, 3, 8, 8), plan=plan)
    checks = {check.name: check for check in check_file(openvino_ir, original)[0]}
    for name in ("weights.model.xml", "agreement.model.xml"):
        assert checks[name].verdict == "not_run" and "openvino" in checks[name].detail
        assert str(checks[name].command).startswith("vitcompress verify")


@pytest.mark.parametrize("variant", ["layer_scale", "dinov3"])
def test_openvino_stores_every_tensor_of_the_model_unchanged(variant: str, tmp_path: Path) -> None:
    """LayerScales behind linear layers and behind norms, tables of positions: none is multiplied into another."""
    if EXPORTERS["openvino"].unavailable():
        pytest.skip("OpenVINO is not installed")
    wide = {"embed_dim": 80, "img_size": 32}  # tensors too large to pass as constants of the graph
    model, plan = build(variant, dtype=torch.float32, **wide), contract(variant, **wide).plan
    apply_plan(model, replace(plan, removed={"blocks.0.attn": "norm_identity"}))
    EXPORTERS["openvino"].export(model, tmp_path / "model.xml", input=input_config(model))
    contents = contents_of(tmp_path / "model.xml")
    assert contents is not None and compare_tensors(model, contents).problems == ()


def test_openvino_constants_that_share_their_bytes_are_all_compared(openvino_ir: Path, tmp_path: Path) -> None:
    """OpenVINO writes equal bytes once: here a masked weight shares those of an index."""
    openvino = runner.load()
    ops = openvino.opset13

    model, path = pruned("layer_scale")[1], tmp_path / "model.xml"
    network = runner.core().read_model(str(openvino_ir))
    zeros, index = ops.constant(np.zeros((48, 16), np.float32)), ops.constant(np.zeros(384, np.int64))
    network.add_results([ops.result(index), ops.result(zeros)])  # the last is the first in the file
    openvino.save_model(network, str(path), compress_to_fp16=False)
    shutil.copy(sidecar_path(openvino_ir), tmp_path)
    grown = path.with_suffix(".bin").stat().st_size - openvino_ir.with_suffix(".bin").stat().st_size
    assert 3072 <= grown < 2 * 3072, "written once"
    check = check_weights(model, path)
    assert check.verdict == "failed" and check.value == 1
    assert "(48x16) is no weight of the model, but has the shape of the dense" in check.detail


TRACES: dict[Any, Any] = {}  # of the model of `pruned("layer_scale")`


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """An ONNX file with its tensors in a data file, as the exporter writes large ones."""
    _, model, plan = pruned("layer_scale")
    write_model(tmp_path, model, plan)
    path = tmp_path / "model.onnx"
    export(model, path, input=input_config(model), traces=TRACES)
    onnx_ir.save(onnx_ir.load(str(path)), str(path), external_data="model.onnx.data", size_threshold_bytes=0)
    return path


def test_tensors_in_a_data_file_are_compared(external: Path) -> None:
    model, data = load_model(external.parent), external.with_name("model.onnx.data")
    assert compare_tensors(model, read_contents(external)).size == external.stat().st_size + data.stat().st_size
    assert passes(model, external)
    values, graph = data.read_bytes(), external.read_bytes()
    data.write_bytes(values[: len(values) // 2])
    check = check_weights(model, external)
    assert check.verdict == "failed" and "cannot be read: External data " in check.detail
    data.write_bytes(values)
    data.rename(data.with_name("blob"))
    data.symlink_to("blob")  # as in the cache of Hugging Face; onnx reads no links
    check = check_weights(model, external)
    assert check.verdict == "failed" and "symbolic link" in check.detail
    data.with_name("blob").rename(data)
    external.write_bytes(graph.replace(b"length", b"lengtx"))
    assert check_weights(model, external).verdict == "failed"


def test_a_weight_that_is_listed_twice_fails_although_its_data_are_stored_once(external: Path) -> None:
    model = onnx.load(str(external), load_external_data=False)
    weight = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)
    model.graph.initializer.append(onnx.TensorProto.FromString(weight.SerializeToString()))
    model.graph.initializer[-1].name = "again"
    external.write_bytes(model.SerializeToString())
    check = check_weights(load_model(external.parent), external)
    assert check.verdict == "failed" and "a second time" in check.detail


@pytest.mark.parametrize("kind", ["INT4", "UINT4", "INT8", "FLOAT8E4M3FN"])
def test_quantized_tensors_of_any_type_are_read(kind: str, tmp_path: Path) -> None:
    """Half the distance to the next value is half a step for integers; 1 is a power of two, followed by 1.125."""
    tensors = [
        onnx.helper.make_tensor("w", getattr(onnx.TensorProto, kind), [4, 4], [1.0] * 16),
        onnx.helper.make_tensor("scale", onnx.TensorProto.FLOAT, [], [0.5]),
    ]
    nodes = [onnx.helper.make_node("DequantizeLinear", ["w", "scale"], ["d"])]
    nodes.append(onnx.helper.make_node("MatMul", ["x", "d"], ["y"]))
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 4]) for name in "xy"]
    graph = onnx.helper.make_graph(nodes, "graph", ends[:1], ends[1:], tensors)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)]), tmp_path / "m.onnx")
    stored = next(tensor for tensor in read_contents(tmp_path / "m.onnx").tensors if tensor.name == "w")
    assert stored.dequantized is not None
    values, half = stored.dequantized()
    assert np.all(values == 0.5) and np.all(half == 0.5 * (0.5 if "INT" in kind else 0.125 / 2))
