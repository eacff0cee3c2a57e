"""Where the bytes of an exported file go, and that nothing which a plan took away can hide in one."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from pruned_models import pruned
from torch import nn

from vitcompress import surgery
from vitcompress.bench.report import files
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.sidecar import sidecar_path
from vitcompress.families import family_of
from vitcompress.models.checkpoint import load_model, write_model
from vitcompress.models.create import input_config
from vitcompress.plan import Plan
from vitcompress.verify.folder import verify_folder
from vitcompress.verify.weights import account, account_checks, plan_check, plan_rows, readable_files, weight_checks


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with its ONNX file."""
    folder = tmp_path_factory.mktemp("run")
    _, model, plan = pruned("layer_scale")
    write_model(folder, model, plan)
    export(model, folder / "model.onnx", input=input_config(model), plan_digest=plan.digest)
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def verdicts(folder: Path) -> dict[str, tuple[str, str]]:
    """Verdict and detail of each check."""
    model, plan = load_model(folder), Plan.from_json((folder / "plan.json").read_text())
    return {
        check.name: (check.verdict, check.detail) for check in weight_checks(model, plan, readable_files(folder))[0]
    }


def changed(path: Path, edit: Any) -> None:
    """The ONNX file after `edit` of its graph."""
    model = onnx.load(str(path))
    edit(model.graph)
    onnx.save(model, str(path))


def test_every_byte_of_a_file_is_explained(tmp_path: Path) -> None:
    """Of the family that has most beside its weights: masks, index tables, and biases that are read through them."""
    _, model, plan = pruned("swin_dynamic")
    path = tmp_path / "model.onnx"
    export(model, path, input=input_config(model))
    found = account(model, path, plan_rows(plan))
    assert found.wrong == () and [check.verdict for check in account_checks(found, "x")] == ["passed"] * 2
    assert found.size == path.stat().st_size == found.of_model + found.of_constants + found.graph
    held = set(found.found) | {"layers.0.blocks.1.attn.relative_position_bias_table"}  # folded to what it is read as
    assert {name for name, parameter in model.named_parameters() if parameter.numel() > 64} <= held | {
        "layers.1.blocks.0.attn.relative_position_bias_table"
    }


def test_a_finished_folder_passes_and_its_table_tells_the_way_of_each_weight(folder: Path) -> None:
    found = verify_folder(folder)
    checks = {check.name: check for check in found.checks}
    for name in ("weights", "weights.model.onnx", "weights.model.onnx.bytes"):
        assert checks[name].verdict == "passed", checks[name]
    assert checks["weights.model.onnx.bytes"].value == checks["weights.model.onnx.bytes"].tolerance
    table = json.loads((folder / "verify.json").read_text())["weights"]
    rows = {row["name"]: row for row in table["tensors"]}
    folded = rows["blocks.1.mlp.weight"]
    assert folded["change"] == "folded" and folded["planned"] == folded["torch"] == [16, 16]
    assert sorted(folded["dense"].values()) == [[16, 32], [32, 16]]
    assert folded["files"]["model.onnx"]["shape"] == [16, 16] and folded["files"]["model.onnx"]["bytes"] == 4 * 256
    gone, sliced = rows["blocks.0.attn.qkv.weight"], rows["blocks.1.attn.qkv.weight"]
    assert (gone["change"], gone["planned"], gone["torch"], gone["files"]) == ("removed", None, None, {})
    assert sliced["change"] == "sliced" and sliced["planned"] == sliced["torch"] != sliced["dense"][sliced["name"]]
    assert sorted(sliced["files"]["model.onnx"]["shape"]) == sorted(sliced["planned"])
    shown = files.weights(table)
    assert ("blocks.1.mlp.weight", "16x16, 1,024 B", "model.onnx") in [(row[0], *row[-2:]) for row in shown.rows]
    (said,) = files.bytes_of(table)
    model = load_model(folder)
    assert f"({sum(p.numel() for p in model.parameters()):,} parameters)" in said
    assert f"{(folder / 'model.onnx').stat().st_size:,} bytes" in said


# ---------------------------------------------------------------------------------------------------- what cannot hide


def dense_weight(rows: int, columns: int) -> onnx.TensorProto:
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    return numpy_helper.from_array(values, "left_over")


def in_a_constant(graph: onnx.GraphProto) -> None:
    graph.node.insert(0, helper.make_node("Constant", [], ["left_over"], value=dense_weight(48, 16)))


def in_an_attribute(graph: onnx.GraphProto) -> None:
    graph.node.insert(0, helper.make_node("Constant", [], ["left_over"], value_floats=[0.5] * 768))


def in_a_comment(graph: onnx.GraphProto) -> None:
    graph.doc_string = "x" * 3072


def twice(graph: onnx.GraphProto) -> None:
    weight = next(tensor for tensor in graph.initializer if len(tensor.dims) == 2)
    again = onnx.TensorProto()
    again.CopyFrom(weight)
    again.name = "again"
    graph.initializer.append(again)


@pytest.mark.parametrize(
    ("edit", "fails", "says"),
    [
        (lambda graph: graph.initializer.append(dense_weight(48, 16)), "weights.model.onnx", "dense blocks.0.attn.qkv"),
        (lambda graph: graph.initializer.append(dense_weight(16, 48)), "weights.model.onnx", "dense blocks.0.attn.qkv"),
        (in_a_constant, "weights.model.onnx", "left_over (48x16)"),
        (in_an_attribute, "weights.model.onnx", "value_floats"),
        (in_a_comment, "weights.model.onnx.bytes", "bytes beside"),
        (twice, "weights.model.onnx", "a second time"),
    ],
    ids=["dense", "dense, turned", "constant", "attribute", "comment", "twice"],
)
def test_a_weight_that_nothing_reads_does_not_hide(edit: Any, fails: str, says: str, folder: Path) -> None:
    before = verdicts(folder)
    changed(folder / "model.onnx", edit)
    after = verdicts(folder)
    assert before[fails][0] == "passed" and after[fails][0] == "failed" and says in after[fails][1]


def test_masks_and_indices_are_no_weights_and_zeros_are(folder: Path) -> None:
    index = numpy_helper.from_array(np.arange(200, dtype=np.int64), "index")
    mask = numpy_helper.from_array(np.where(np.arange(256).reshape(16, 16) % 3, 0.0, -100.0).astype(np.float32), "mask")
    changed(folder / "model.onnx", lambda graph: graph.initializer.extend([index, mask]))
    assert verdicts(folder)["weights.model.onnx"][0] == "passed"
    quantised = numpy_helper.from_array(np.arange(768, dtype=np.int8).reshape(48, 16), "quantised")
    changed(folder / "model.onnx", lambda graph: graph.initializer.append(quantised))
    assert "quantised (48x16) is no weight" in verdicts(folder)["weights.model.onnx"][1]
    zeros = numpy_helper.from_array(np.zeros((48, 16), np.float32), "zeros")
    changed(folder / "model.onnx", lambda graph: graph.initializer.append(zeros))
    verdict, detail = verdicts(folder)["weights.model.onnx"]
    assert verdict == "failed" and "zeros (48x16) is no weight of the model, but has the size of the dense" in detail


@pytest.mark.parametrize(
    ("values", "different", "weight"),
    [(64, 64, False), (65, 65, True), (256, 16, False), (256, 17, True), (65, 2, False), (65, 1, True)],
)
def test_a_constant_has_few_values_or_few_different_ones(
    values: int, different: int, weight: bool, folder: Path
) -> None:
    held = 1.5 + np.arange(values, dtype=np.float32) % different
    changed(folder / "model.onnx", lambda graph: graph.initializer.append(numpy_helper.from_array(held, "beside")))
    found = account(load_model(folder), folder / "model.onnx")
    assert found.wrong == ((f"beside ({values}) is no weight of the model",) if weight else ())
    assert ("beside" in [tensor.name for tensor in found.constants]) is not weight


@pytest.mark.parametrize(("times", "wrong"), [(1, False), (2, False), (3, True)])
def test_equal_tensors_of_the_model_are_held_as_often_or_once(times: int, wrong: bool, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(9, 9, bias=False) for _ in range(2)))
    model.load_state_dict(dict.fromkeys(("0.weight", "1.weight"), torch.randn(9, 9)))
    values = model[0].weight.detach().numpy()
    held = [numpy_helper.from_array(values, f"held {number}") for number in range(times)]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 9]) for name in "xy")
    nodes = [helper.make_node("MatMul", ["x", "held 0"], ["y"])]
    onnx.save(helper.make_model(helper.make_graph(nodes, "equal", [x], [y], held)), tmp_path / "model.onnx")
    found = account(model, tmp_path / "model.onnx")
    assert [line.split(") ")[1] for line in found.wrong] == ["holds 0.weight a second time"] * wrong
    assert set(found.found) == {"0.weight", "1.weight"} and found.of_model == 4 * 81 * min(times, 2)


def test_bytes_that_no_reader_knows_do_not_hide(folder: Path) -> None:
    path = folder / "model.onnx"
    path.write_bytes(path.read_bytes() + b"\xba\x3e\x80\x08" + bytes(1024))  # a field 999 of 1024 bytes
    assert verdicts(folder)["weights.model.onnx.bytes"][0] == "failed"


def test_masked_weights_and_unfolded_pairs_are_not_what_was_planned(folder: Path) -> None:
    """Zeros where channels should be gone, two layers where one should be: same answers, another file."""
    dense, model, plan = pruned("layer_scale")
    masked = surgery.apply_to_copy(dense, replace(plan, kept={}, heads={}, folded=()))
    with torch.no_grad():
        for space in family_of(masked).spaces(masked):
            gone = sorted(set(range(space.size)) - set(plan.kept.get(space.name, range(space.size))))
            for axis in space.axes if space.name in plan.kept else ():
                at = [axis.offset + copy * space.size + channel for copy in range(axis.copies) for channel in gone]
                masked.get_parameter(axis.tensor).index_fill_(axis.dim, torch.tensor(at), 0.0)
    export(masked, folder / "model.onnx", input=input_config(model))
    assert verdicts(folder)["weights.model.onnx"][0] == "failed"
    wrong = account(model, folder / "model.onnx", plan_rows(plan)).wrong
    hiding = r"\((16x32|32x16)\) is no weight of the model, but has the size of the dense blocks\.\d\.mlp\.fc"
    assert sum(bool(re.search(hiding, line)) for line in wrong) == 4, wrong
    assert "blocks.1.mlp.weight (16x16) is not in the file" in wrong


def test_a_model_of_other_sizes_than_planned_fails(folder: Path) -> None:
    _, model, plan = pruned("layer_scale")
    other = replace(plan, kept={name: channels[1:] for name, channels in plan.kept.items() if "mlp" in name})
    checks = weight_checks(model, other, readable_files(folder))[0]
    assert checks[0].verdict == "failed" and "planned" in checks[0].detail


def test_tensors_that_were_not_planned_or_are_not_there_are_told_with_their_sizes() -> None:
    _, model, plan = pruned("layer_scale")
    rows = plan_rows(plan)
    assert plan_check(rows, model).verdict == "passed"
    model.register_buffer("statistics", torch.zeros(3, 2))
    assert plan_check(rows, model).detail == "1 wrong: statistics: none planned, 3x2 in the model"
    del model.statistics
    model.get_submodule("norm").bias = None
    assert plan_check(rows, model).detail == "1 wrong: norm.bias: 16 planned, none in the model"


def test_a_damaged_file_is_a_failed_check(folder: Path) -> None:
    (folder / "model-fp16.onnx").write_bytes(b"nothing of the kind")
    (folder / "model.xml").write_text("<net><layers>")
    found = verdicts(folder)
    assert found["weights.model-fp16.onnx"][0] == found["weights.model.xml"][0] == "failed"
    assert found["weights.model.onnx"][0] == "passed" and not sidecar_path(folder / "model.xml").exists()


def test_small_tensors_must_be_in_the_file_too(folder: Path) -> None:
    model = load_model(folder)
    with torch.no_grad():
        model.get_submodule("blocks.1.mlp").bias[3] += 0.5
    assert account(model, folder / "model.onnx").wrong == ("blocks.1.mlp.bias (16) is not in the file",)


def test_packed_values_are_no_constants(folder: Path) -> None:
    """Two to a byte: how many of them are different cannot be told from the bytes."""
    packed = helper.make_tensor("packed", TensorProto.INT4, [48, 16], np.arange(768) % 4)
    changed(folder / "model.onnx", lambda graph: graph.initializer.append(packed))
    assert "packed (48x16) is no weight" in verdicts(folder)["weights.model.onnx"][1]


def test_biases_of_zero_may_be_left_out_and_others_may_not(folder: Path) -> None:
    model = load_model(folder)
    with torch.no_grad():
        model.get_submodule("blocks.1.mlp").bias = nn.Parameter(torch.full((65,), 0.0))
    assert account(model, folder / "model.onnx").wrong == ()
    with torch.no_grad():
        model.get_submodule("blocks.1.mlp").bias[3] = 0.5
    missing = ("blocks.1.mlp.bias (65) is not in the file",)
    assert account(model, folder / "model.onnx").wrong == missing
    few = numpy_helper.from_array(np.array([0.0, 0.5], np.float32), "few")  # its values, but not what it is read as
    changed(folder / "model.onnx", lambda graph: graph.initializer.append(few))
    assert account(model, folder / "model.onnx").wrong == missing
