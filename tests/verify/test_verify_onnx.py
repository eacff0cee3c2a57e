"""Each mistake in the structure of an ONNX file fails the check for it, and no other."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import timm
import torch
from contracts import build, contract, images, traces
from onnx import helper, numpy_helper
from torch import nn

from vitcompress.exporters.onnx.export import export
from vitcompress.io.checks import Check
from vitcompress.models.create import input_config
from vitcompress.plan import Plan
from vitcompress.verify.files import contents_of, file_label, graph_checks, is_about, metadata_check, structure_checks
from vitcompress.verify.outputs import PlannedOriginal

MODEL = build("plain", dtype=torch.float32)
PLAN = contract("plain").plan
ORIGINAL = PlannedOriginal(MODEL, images("plain", dtype=torch.float32), plan=PLAN)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    about: Any = {"input": input_config(MODEL), "plan_digest": PLAN.digest, "traces": traces("plain")}
    return export(MODEL, path, **about).path


def edited(exported: Path, folder: Path, edit: Callable[[Any], object]) -> Path:
    model = onnx.load(str(exported))
    edit(model.graph)
    onnx.save(model, str(folder / "model.onnx"))
    return folder / "model.onnx"


def wrong(checks: list[Check]) -> dict[str, str]:
    return {check.name.removeprefix("onnx."): check.detail for check in checks if check.verdict != "passed"}


def times_zero(graph: Any) -> None:
    graph.initializer.append(numpy_helper.from_array(np.zeros((1, 5), np.float32), "nothing"))
    graph.node.append(helper.make_node("Mul", [graph.output[0].name, "nothing"], ["product"], name="masked"))


def passed_on(graph: Any) -> None:
    graph.node.append(helper.make_node("Identity", [graph.output[0].name], ["same"], name="idle"))


def once_more(graph: Any) -> None:
    node = next(node for node in graph.node if node.op_type in ("MatMul", "Gemm") and node.input[1] in names(graph))
    graph.node.append(helper.make_node("MatMul", [node.input[0], node.input[1]], ["again"]))


def one_less(graph: Any) -> None:
    graph.node.remove(
        next(node for node in graph.node if node.op_type in ("MatMul", "Gemm") and node.input[1] in names(graph))
    )


def names(graph: Any) -> set[str]:
    return {tensor.name for tensor in graph.initializer}


def other_operator(old: str) -> Callable[[Any], None]:
    def change(graph: Any) -> None:
        next(node for node in graph.node if node.op_type == old).op_type = "Other"

    return change


def without_weight(graph: Any) -> None:
    del next(node for node in graph.node if node.op_type in ("MatMul", "Gemm")).input[1:]


def tanh_form(graph: Any) -> None:
    gelu = next(node for node in graph.node if node.op_type == "Gelu")
    del gelu.attribute[:]
    gelu.attribute.append(helper.make_attribute("approximate", "tanh"))


def text_as_epsilon(graph: Any) -> None:
    norm = next(node for node in graph.node if node.op_type == "LayerNormalization")
    epsilon = next(attribute for attribute in norm.attribute if attribute.name == "epsilon")
    epsilon.CopyFrom(helper.make_attribute("epsilon", "text"))


@pytest.mark.parametrize(
    ("edit", "check", "says"),
    [
        (times_zero, "idle", "1 wrong: masked (times zero)"),
        (passed_on, "idle", "1 wrong: idle"),
        (once_more, "shapes", "in the file, "),
        (one_less, "shapes", "in the file, "),
        (other_operator("Softmax"), "layers", "1 wrong: attentions: 1 in the file, 2 in torch"),
        (other_operator("Gelu"), "layers", "1 wrong: Gelu with approximate none: 1 in the file, 2 in torch"),
        (
            other_operator("LayerNormalization"),
            "layers",
            "1 wrong: LayerNormalization with epsilon 1e-06: 4 in the file, 5 in torch",
        ),
        (tanh_form, "layers", "Gelu with approximate tanh: 1 in the file, 0 in torch"),
        (text_as_epsilon, "layers", "LayerNormalization with epsilon text: 1 in the file, 0 in torch"),
    ],
)
def test_each_mistake_in_the_graph_fails_its_own_check(
    edit: Callable[[Any], None], check: str, says: str, exported: Path, tmp_path: Path
) -> None:
    problems = wrong(graph_checks(MODEL, edited(exported, tmp_path, edit), "onnx"))
    assert wrong(graph_checks(MODEL, exported, "onnx")) == {}
    assert set(problems) == {check} and says in problems[check]


def test_layers_that_are_zero_in_the_model_may_be_zero_in_its_file(exported: Path, tmp_path: Path) -> None:
    """As an empty branch that cannot be folded, or a head before its training; other mistakes are still found."""
    model = build("plain", dtype=torch.float32)
    nn.init.zeros_(model.get_submodule("blocks.0.mlp.fc2").weight)  # type: ignore[arg-type]
    about: Any = {"input": input_config(model), "plan_digest": PLAN.digest, "traces": {}}
    path = export(model, tmp_path / "zero.onnx", **about).path
    assert wrong(graph_checks(model, path, "onnx")) == {}
    assert "times zero" in wrong(graph_checks(MODEL, path, "onnx"))["idle"]
    assert set(wrong(graph_checks(model, edited(path, tmp_path, passed_on), "onnx"))) == {"idle"}


class OwnGELU(nn.GELU):
    pass


@pytest.mark.parametrize(
    "activation", ["gelu", "gelu_tanh", nn.GELU, partial(OwnGELU, approximate="tanh"), "quick_gelu"]
)
def test_each_form_of_gelu_passes(activation: Any, tmp_path: Path) -> None:
    """timm has layers of its own for names: SigLIP's largest models have `gelu_tanh`."""
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=16, num_heads=2, act_layer=activation
    )
    path = export(model, tmp_path / "model.onnx", input=input_config(model)).path
    assert wrong(graph_checks(model, path, "onnx")) == {}


def test_a_file_that_is_not_well_formed_or_was_replaced(exported: Path, tmp_path: Path) -> None:
    assert wrong(structure_checks(exported, ORIGINAL)) == {}
    unknown = edited(exported, tmp_path, other_operator("Softmax"))
    assert set(wrong(structure_checks(unknown, None))) == {"checker", "file"}  # it has no sidecar

    def of_another_size(graph: Any) -> None:
        graph.output[0].type.tensor_type.shape.dim[1].dim_value = 7

    assert set(wrong(structure_checks(edited(exported, tmp_path, of_another_size), None))) == {"checker", "file"}
    # The graph of such a file is not read any further.
    assert set(wrong(structure_checks(edited(exported, tmp_path, without_weight), ORIGINAL))) == {"checker", "file"}
    sidecar = exported.with_name("model.onnx.json")
    (tmp_path / sidecar.name).write_bytes(sidecar.read_bytes())
    (tmp_path / exported.name).write_bytes(exported.read_bytes())
    assert wrong(structure_checks(tmp_path / exported.name, ORIGINAL)) == {}
    assert set(wrong(structure_checks(edited(exported, tmp_path, passed_on), None))) == {"file"}
    (tmp_path / exported.name).write_bytes(b"nothing of the kind")
    assert set(wrong(structure_checks(tmp_path / exported.name, ORIGINAL))) == {"checker", "file"}


def sparse_constant(model: Any) -> None:
    values, places = helper.make_tensor("values", 1, [1], [1.0]), helper.make_tensor("places", 7, [1], [2])
    sparse = helper.make_sparse_tensor(values, places, [300])
    model.graph.node.insert(0, helper.make_node("Constant", [], ["unread"], sparse_value=sparse))


def two_precisions(model: Any) -> None:
    next(entry for entry in model.metadata_props if entry.key == "precision").value = '"int8"'


@pytest.mark.parametrize("edit", [sparse_constant, two_precisions])
def test_a_well_formed_graph_that_cannot_be_read_fails(
    edit: Callable[[Any], None], exported: Path, tmp_path: Path
) -> None:
    model = onnx.load(str(exported))
    edit(model)
    onnx.save(model, tmp_path / "model.onnx")
    checks = structure_checks(tmp_path / "model.onnx", ORIGINAL)
    assert {check.name: check.verdict for check in checks} == {
        "onnx.file": "failed",  # it has no sidecar
        "onnx.checker": "passed",
        "onnx.graph": "failed",
    }


def test_a_data_file_that_is_too_short_fails(exported: Path, tmp_path: Path) -> None:
    model = onnx_ir.load(exported)
    onnx_ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data", size_threshold_bytes=512)
    assert set(wrong(structure_checks(tmp_path / "model.onnx", ORIGINAL))) == {"file"}
    data = tmp_path / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-400])
    assert "graph" in wrong(structure_checks(tmp_path / "model.onnx", ORIGINAL))


def test_a_graph_of_an_earlier_opset_is_read(tmp_path: Path) -> None:
    """Up to opset 10 the widths of a Pad are an attribute."""
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Pad", ["x"], ["y"], pads=[0, 0, 0, 0])], "old", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 10)]), tmp_path / "model.onnx")
    assert {"shapes", "layers"} == set(wrong(graph_checks(MODEL, tmp_path / "model.onnx", "onnx")))


def test_the_form_of_images_is_compared_if_the_file_shows_it(exported: Path) -> None:
    """Contents that an exporter of another package reads need not state it."""
    contents = contents_of(exported)
    assert contents is not None and contents.uint8 is False
    assert metadata_check(exported, ORIGINAL, replace(contents, uint8=None)).verdict == "passed"
    check = metadata_check(exported, ORIGINAL, replace(contents, uint8=True))
    assert check.verdict == "failed" and "input is 'float32' in " in check.detail and "layout" in check.detail


def test_a_file_of_another_plan_fails(exported: Path) -> None:
    assert metadata_check(exported, ORIGINAL, contents_of(exported)).verdict == "passed"
    check = metadata_check(exported, replace(ORIGINAL, plan=Plan("vit", {})), contents_of(exported))
    assert check.verdict == "failed" and check.detail.startswith("2 wrong: plan_sha256 is ")  # in it, and its sidecar


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("model.onnx", "onnx"),
        ("dense.onnx", "onnx.dense"),
        ("model-fp16.onnx", "onnx.model-fp16"),
        ("model.rtx.engine.onnx", "model.rtx.engine.source"),
        ("model.engine", "model.engine"),
        ("model.xml", "model.xml"),
    ],
)
def test_the_names_of_checks_tell_the_files_apart(name: str, label: str) -> None:
    assert file_label(Path(name)) == label
    assert is_about(Path(name), f"{label}.file") and is_about(Path(name), label)
    others = {"model.onnx", "dense.onnx", "model-fp16.onnx", "model.engine", "model.xml"} - {name}
    assert not any(is_about(Path(other), f"{label}.file") for other in others)


def test_checks_of_files_with_longer_names_are_not_those_of_a_file() -> None:
    path = Path("model.onnx")
    for name in ("agreement.model.onnx", "agreement.model.onnx.kl", "weights.model.onnx", "weights.model.onnx.bytes"):
        assert is_about(path, name)
    for name in ("agreement.model.onnx2.kl", "weights.model.onnx_old", "onnx.dense.idle", "weights", "agreement.model"):
        assert not is_about(path, name)
