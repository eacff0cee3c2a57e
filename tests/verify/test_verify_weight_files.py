"""The bytes of files that hold weights in ways of their own: half precision, OpenVINO, data files beside ONNX."""

import re
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from contracts import build, contract
from pruned_models import file_checks, pruned
from torch import nn

from vitcompress.exporters import EXPORTERS
from vitcompress.exporters.contents import contents
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.openvino import library
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.sidecar import sidecar_path
from vitcompress.models.checkpoint import load_model, write_model
from vitcompress.models.create import input_config
from vitcompress.surgery import apply_plan
from vitcompress.verify.weights import account, as_exported, plan_rows


def passes(model: nn.Module, path: Path) -> bool:
    """Whether the file holds `model`, and not one that differs in a few weights."""
    other = deepcopy(model)
    with torch.no_grad():
        other.get_submodule("blocks.1.mlp").weight[0] += 1.0
    assert file_checks(other, path)[0].verdict == "failed"
    return [check.verdict for check in file_checks(model, path)] == ["passed", "passed"]


def test_half_precision_with_islands_is_accounted_for_as_it_is(tmp_path: Path) -> None:
    model, path = pruned("layer_scale")[1], tmp_path / "model.onnx"
    options = ExportOptions(uint8=True, precision="fp16", islands=("norm", "softmax", "head"))
    export(model, path, input=input_config(model), options=options)
    assert passes(model, path)


@pytest.fixture(scope="module")
def openvino_ir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if EXPORTERS["openvino"].unavailable():
        pytest.skip("OpenVINO is not here")
    model, path = pruned("layer_scale")[1], tmp_path_factory.mktemp("ir") / "model.xml"
    EXPORTERS["openvino"].export(model, path, input=input_config(model), options=ExportOptions(uint8=True))
    return path


def test_openvino_is_accounted_for_as_it_is_and_damage_found(openvino_ir: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(openvino_ir.parent, tmp_path / "run")) / "model.xml"
    model = pruned("layer_scale")[1]
    assert passes(model, path)
    data = path.with_suffix(".bin")
    data.write_bytes(data.read_bytes()[:-1001])
    (check,) = file_checks(model, path)
    assert check.verdict == "failed" and "is not whole: model.bin ends before" in check.detail


@pytest.mark.parametrize("variant", ["layer_scale", "dinov3"])
def test_openvino_keeps_every_tensor_as_the_model_has_it(variant: str, tmp_path: Path) -> None:
    """LayerScales behind linear layers and behind norms, tables of positions: nothing is multiplied into another."""
    if EXPORTERS["openvino"].unavailable():
        pytest.skip("OpenVINO is not here")
    wide = {"embed_dim": 80, "img_size": 32}  # tensors too large to pass as constants of the graph
    model, plan = build(variant, dtype=torch.float32, **wide), contract(variant, **wide).plan
    apply_plan(model, replace(plan, removed={"blocks.0.attn": "norm_identity"}))
    EXPORTERS["openvino"].export(model, tmp_path / "model.xml", input=input_config(model))
    assert [check.verdict for check in file_checks(model, tmp_path / "model.xml")] == ["passed", "passed"]


def test_openvino_constants_of_the_same_bytes_in_one_place_are_all_looked_at(openvino_ir: Path, tmp_path: Path) -> None:
    """OpenVINO writes equal bytes once: here a masked weight lies where an index does."""
    openvino = library.load()
    ops = openvino.opset13

    model, path = pruned("layer_scale")[1], tmp_path / "model.xml"
    network = library.core().read_model(str(openvino_ir))
    zeros, index = ops.constant(np.zeros((48, 16), np.float32)), ops.constant(np.zeros(384, np.int64))
    network.add_results([ops.result(index), ops.result(zeros)])  # in the file the last comes first
    openvino.save_model(network, str(path), compress_to_fp16=False)
    shutil.copy(sidecar_path(openvino_ir), tmp_path)
    grown = path.with_suffix(".bin").stat().st_size - openvino_ir.with_suffix(".bin").stat().st_size
    assert 3072 <= grown < 2 * 3072, "written once"
    found = account(as_exported(model, path), path, plan_rows(pruned("layer_scale")[2]))
    (wrong,) = found.wrong
    assert "(48x16) is no weight of the model, but has the size of the dense" in wrong
    held = contents(path)
    assert sum(tensor.own for tensor in held.tensors) + held.graph == held.size


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """The ONNX file with its tensors in a data file, as the exporter writes large ones."""
    _, model, plan = pruned("layer_scale")
    write_model(tmp_path, model, plan)
    path = tmp_path / "model.onnx"
    export(model, path, input=input_config(model))
    onnx_ir.save(onnx_ir.load(str(path)), str(path), external_data="model.onnx.data", size_threshold_bytes=0)
    return path


def test_data_beside_the_file_are_counted_and_gaps_and_damage_in_them_found(beside: Path) -> None:
    model, data = load_model(beside.parent), beside.with_name("model.onnx.data")
    found = account(model, beside)
    assert (
        found.size == beside.stat().st_size + data.stat().st_size == found.of_model + found.of_constants + found.graph
    )
    assert [check.verdict for check in file_checks(model, beside)] == ["passed", "passed"]
    whole, graph = data.read_bytes(), beside.read_bytes()
    data.write_bytes(whole + bytes(4096))
    checks = file_checks(model, beside)
    assert checks[1].verdict == "failed" and checks[1].value - checks[1].tolerance == 4096
    data.write_bytes(whole[: len(whole) // 2])
    (check,) = file_checks(model, beside)
    assert check.verdict == "failed" and "is not whole" in check.detail
    data.write_bytes(whole)
    beside.write_bytes(graph.replace(b"length", b"lengtx"))
    (check,) = file_checks(model, beside)
    assert re.search(r"is not whole: its place in a data file is given as .*lengtx", check.detail)


def test_data_that_two_tensors_share_explain_their_bytes_once(beside: Path) -> None:
    """Else as many bytes that nothing explains could lie beside them."""

    def shared(graph: onnx.GraphProto) -> None:
        weight = next(tensor for tensor in graph.initializer if len(tensor.dims) == 2)
        graph.initializer.append(onnx.TensorProto.FromString(weight.SerializeToString()))
        graph.initializer[-1].name = "again"

    model = onnx.load(str(beside), load_external_data=False)
    shared(model.graph)
    beside.write_bytes(model.SerializeToString())
    assert [check.verdict for check in file_checks(load_model(beside.parent), beside)] == ["passed", "passed"]
    data = beside.with_name("model.onnx.data")
    data.write_bytes(data.read_bytes() + bytes(256))
    assert file_checks(load_model(beside.parent), beside)[1].verdict == "failed"
