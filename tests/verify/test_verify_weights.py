"""Every tensor has its planned shape, every file the values of the model, and no pruned weight remains in a file."""

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
from contracts import build, traces
from onnx import TensorProto, helper, numpy_helper
from pruned_models import check_weights, pruned
from torch import nn

from vitcompress import surgery
from vitcompress.bench.report.run import describe_bytes, weight_table
from vitcompress.errors import ArtifactError
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.onnx.file import read_contents
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.quantize.calibrate import calibrate
from vitcompress.exporters.runtimes import EXPORTERS
from vitcompress.exporters.sidecar import sidecar_path
from vitcompress.families import family_of
from vitcompress.models.checkpoint import load_model, write_model
from vitcompress.models.create import create_on_meta, input_config
from vitcompress.plan import Plan
from vitcompress.surgery.shapes import PlannedTensor, planned_tensors
from vitcompress.verify.folder import verify_folder
from vitcompress.verify.weights import FileTensors, compare_tensors, exported_module, shape_check


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


def rows_of(plan: Plan) -> tuple[PlannedTensor, ...]:
    return planned_tensors(create_on_meta(plan.arch, plan.arch_args), plan)


def tensors_in(path: Path, model: nn.Module) -> FileTensors:
    return compare_tensors(model, read_contents(path), rows_of(pruned("layer_scale")[2]))


def change(path: Path, edit: Any) -> None:
    """Edit the graph of an ONNX file."""
    model = onnx.load(str(path))
    edit(model.graph)
    onnx.save(model, str(path))


def test_every_tensor_of_a_file_is_explained(tmp_path: Path) -> None:
    """Swin has most beside its weights: masks, index tables, and biases that are gathered with them."""
    _, model, plan = pruned("swin_dynamic")
    path = tmp_path / "model.onnx"
    export(model, path, input=input_config(model))
    tensors = compare_tensors(model, read_contents(path), rows_of(plan))
    assert tensors.problems == () and tensors.check("x").verdict == "passed"
    assert tensors.size == path.stat().st_size
    gathered = {f"layers.{block}.attn.relative_position_bias_table" for block in ("0.blocks.1", "1.blocks.0")}
    large = {name for name, parameter in model.named_parameters() if parameter.numel() > 64}
    assert large <= set(tensors.matches) | gathered
    for name in gathered:
        with torch.no_grad():
            model.get_parameter(name)[0, 0] += 1e-3
    problems = " ".join(compare_tensors(model, read_contents(path)).problems)
    assert all(f"{name} (49x4) is not in the file" in problems for name in gathered)


def test_a_finished_folder_passes_and_its_table_has_every_changed_weight(folder: Path) -> None:
    checks = {check.name: check for check in verify_folder(folder).checks}
    assert checks["weights"].verdict == checks["weights.model.onnx"].verdict == "passed", checks
    table = json.loads((folder / "verify.json").read_text())["weights"]
    rows = {row["name"]: row for row in table["tensors"]}
    folded = rows["blocks.1.mlp.weight"]
    assert folded["change"] == "folded" and folded["planned"] == folded["torch"] == [16, 16]
    assert sorted(folded["dense"].values()) == [[16, 32], [32, 16]]
    assert folded["files"]["model.onnx"]["shape"] == [16, 16] and folded["files"]["model.onnx"]["bytes"] == 4 * 256
    removed, sliced = rows["blocks.0.attn.qkv.weight"], rows["blocks.1.attn.qkv.weight"]
    assert (removed["change"], removed["planned"], removed["torch"], removed["files"]) == ("removed", None, None, {})
    assert sliced["change"] == "sliced" and sliced["planned"] == sliced["torch"] != sliced["dense"][sliced["name"]]
    assert sorted(sliced["files"]["model.onnx"]["shape"]) == sorted(sliced["planned"])
    (entry,) = table["files"]
    assert entry["bytes"] == entry["of_model"] + entry["of_constants"] + entry["of_graph"]
    assert entry["of_model"] == 4 * entry["parameters"] and entry["of_constants"] > 0
    printed = weight_table(table)
    assert ("blocks.1.mlp.weight", "16x16, 1,024 B", "model.onnx") in [(row[0], *row[-2:]) for row in printed.rows]
    (sentence,) = describe_bytes(table)
    model = load_model(folder)
    assert f"({sum(p.numel() for p in model.parameters()):,} parameters)" in sentence
    assert f"{(folder / 'model.onnx').stat().st_size:,} bytes" in sentence


# -------------------------------------------------------------------------------------------------- unexpected tensors


def dense_weight(rows: int, columns: int) -> onnx.TensorProto:
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    return numpy_helper.from_array(values, "left_over")


def in_a_constant(graph: onnx.GraphProto) -> None:
    graph.node.insert(0, helper.make_node("Constant", [], ["left_over"], value=dense_weight(48, 16)))


def in_an_attribute(graph: onnx.GraphProto) -> None:
    graph.node.insert(0, helper.make_node("Constant", [], ["left_over"], value_floats=[0.5] * 768))


def twice(graph: onnx.GraphProto) -> None:
    weight = next(tensor for tensor in graph.initializer if len(tensor.dims) == 2)
    again = onnx.TensorProto()
    again.CopyFrom(weight)
    again.name = "again"
    graph.initializer.append(again)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda graph: graph.initializer.append(dense_weight(48, 16)), "dense blocks.0.attn.qkv"),
        (lambda graph: graph.initializer.append(dense_weight(16, 48)), "dense blocks.0.attn.qkv"),
        (in_a_constant, "left_over (48x16)"),
        (in_an_attribute, "value_floats"),
        (twice, "a second time"),
    ],
    ids=["dense", "dense, transposed", "constant", "attribute", "twice"],
)
def test_a_weight_that_the_graph_does_not_read_fails(edit: Any, problem: str, folder: Path) -> None:
    path, model = folder / "model.onnx", load_model(folder)
    assert check_weights(model, path).verdict == "passed"
    change(path, edit)
    check = check_weights(model, path)
    assert check.verdict == "failed" and problem in check.detail


def test_a_weight_of_fp32_that_is_stored_in_fp16_fails(folder: Path) -> None:
    """Only files in eight bits store rounded tensors, and name them."""

    def round_one(graph: onnx.GraphProto) -> None:
        weight = next(tensor for tensor in graph.initializer if tensor.name.endswith("qkv.weight"))
        graph.node.insert(0, helper.make_node("Cast", ["narrow"], [weight.name], to=onnx.TensorProto.FLOAT))
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).astype(np.float16), "narrow"))

    change(folder / "model.onnx", round_one)
    check = check_weights(load_model(folder), folder / "model.onnx")
    assert check.verdict == "failed" and "narrow" in check.detail and "qkv.weight" in check.detail


def test_masks_and_indices_are_no_weights_and_zeros_are(folder: Path) -> None:
    path, model = folder / "model.onnx", load_model(folder)
    index = numpy_helper.from_array(np.arange(48, dtype=np.int64), "index")
    mask = numpy_helper.from_array(np.where(np.arange(256).reshape(16, 16) % 3, 0.0, -100.0).astype(np.float32), "mask")
    change(folder / "model.onnx", lambda graph: graph.initializer.extend([index, mask]))
    assert check_weights(model, path).verdict == "passed"
    quantized = numpy_helper.from_array(np.arange(768, dtype=np.int8).reshape(48, 16), "quantized")
    change(folder / "model.onnx", lambda graph: graph.initializer.append(quantized))
    assert "quantized (48x16) is no weight" in check_weights(model, path).detail
    zeros = numpy_helper.from_array(np.zeros((48, 16), np.float32), "zeros")
    change(folder / "model.onnx", lambda graph: graph.initializer.append(zeros))
    check = check_weights(model, path)
    assert check.verdict == "failed"
    assert "zeros (48x16) is no weight of the model, but has the shape of the dense" in check.detail


@pytest.mark.parametrize(
    ("shape", "first", "weight"),
    [
        ((64,), 1000, False),
        ((48, 16), 0, True),
        ((8, 2, 8, 2, 3), -4, True),
        ((2000,), 0, True),
        ((48, 16), None, False),
    ],
)
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_an_index_is_small_or_has_positions_in_the_image(
    kind: Any, shape: tuple[int, ...], first: int | None, weight: bool, folder: Path
) -> None:
    """Integers of other values may be a quantized weight; as positions, numbers from 0 to 7 in an image of 8 x 8."""
    data = np.arange(np.prod(shape), dtype=kind).reshape(shape)
    data = data % 8 if first is None else data + first
    change(folder / "model.onnx", lambda graph: graph.initializer.append(numpy_helper.from_array(data, "added")))
    problems = tensors_in(folder / "model.onnx", load_model(folder)).problems
    assert ("added" in "".join(problems)) is weight and len(problems) == weight


@pytest.mark.parametrize("name", ["onnx", "openvino"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("variant", ["plain", "swin", "beit", "inner_norms_rotary", "pvt_linear"])
def test_every_index_of_a_file_is_a_constant(variant: str, precision: Any, name: str, tmp_path: Path) -> None:
    """Scales, and in PVTv2 the positions that pooling reads, which are more values than any weight is long."""
    if EXPORTERS[name].unavailable():
        pytest.skip("OpenVINO is not installed")
    model, path = build(variant, dtype=torch.float32), tmp_path / f"model{EXPORTERS[name].suffix}"
    images = torch.randn(2, *input_config(model).size, generator=torch.Generator().manual_seed(0))
    about: Any = {"input": input_config(model), "calibrate": lambda source: calibrate(source, images, "int8")}
    EXPORTERS[name].export(model, path, options=ExportOptions(precision), traces=traces(variant), **about)
    assert check_weights(model, path).verdict == "passed"


@pytest.mark.parametrize(
    ("values", "different", "weight"),
    [(64, 64, False), (65, 65, True), (256, 16, False), (256, 17, True), (65, 2, False), (65, 1, True)],
)
def test_a_constant_has_few_values_or_few_different_ones(
    values: int, different: int, weight: bool, folder: Path
) -> None:
    data = 1.5 + np.arange(values, dtype=np.float32) % different
    change(folder / "model.onnx", lambda graph: graph.initializer.append(numpy_helper.from_array(data, "added")))
    tensors = tensors_in(folder / "model.onnx", load_model(folder))
    assert tensors.problems == ((f"added ({values}) is no weight of the model",) if weight else ())
    assert ("added" in [tensor.name for tensor in tensors.constants]) is not weight


@pytest.mark.parametrize(("times", "wrong"), [(1, False), (2, False), (3, True)])
def test_equal_tensors_are_stored_once_or_as_often_as_in_the_model(times: int, wrong: bool, tmp_path: Path) -> None:
    model, pair = build("plain", dtype=torch.float32), ("blocks.0.attn.proj.weight", "blocks.1.attn.proj.weight")
    values = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    values[pair[1]][:] = values[pair[0]]  # in the model, too
    arrays = {f"stored {number}": values[pair[0]] for number in range(times)}
    arrays |= {name: array for name, array in values.items() if name not in pair}
    stored = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 16]) for name in "xy")
    nodes = [helper.make_node("MatMul", ["x", "stored 0"], ["y"])]
    onnx.save(helper.make_model(helper.make_graph(nodes, "equal", [x], [y], stored)), tmp_path / "model.onnx")
    tensors = compare_tensors(model, read_contents(tmp_path / "model.onnx"))
    assert [line.split(") ")[1] for line in tensors.problems] == [f"holds {pair[0]} a second time"] * wrong
    assert len({tensors.matches[name].name for name in pair}) == min(times, 2)


def test_masked_weights_and_unfolded_pairs_fail(folder: Path) -> None:
    """Zeros instead of removed channels, two layers instead of one: the same outputs, another file."""
    dense, model, plan = pruned("layer_scale")
    masked = surgery.apply_to_copy(dense, replace(plan, kept={}, heads={}, folded=()))
    with torch.no_grad():
        for space in family_of(masked).spaces(masked):
            removed = sorted(set(range(space.size)) - set(plan.kept.get(space.name, range(space.size))))
            for axis in space.axes if space.name in plan.kept else ():
                at = [axis.offset + copy * space.size + channel for copy in range(axis.copies) for channel in removed]
                masked.get_parameter(axis.tensor).index_fill_(axis.dim, torch.tensor(at), 0.0)
    export(masked, folder / "model.onnx", input=input_config(model))
    assert check_weights(model, folder / "model.onnx").verdict == "failed"
    problems = tensors_in(folder / "model.onnx", model).problems
    unfolded = r"\((16x32|32x16)\) is no weight of the model, but has the shape of the dense blocks\.\d\.mlp\.fc"
    assert sum(bool(re.search(unfolded, line)) for line in problems) == 4, problems
    assert "blocks.1.mlp.weight (16x16) is not in the file" in problems


def test_a_model_of_other_shapes_than_planned_fails() -> None:
    _, model, plan = pruned("layer_scale")
    other = replace(plan, kept={name: channels[1:] for name, channels in plan.kept.items() if "mlp" in name})
    check = shape_check(rows_of(other), model)
    assert check.verdict == "failed" and "planned" in check.detail


def test_unplanned_and_missing_tensors_are_reported_with_their_shapes() -> None:
    _, model, plan = pruned("layer_scale")
    rows = rows_of(plan)
    assert shape_check(rows, model).verdict == "passed"
    model.register_buffer("statistics", torch.zeros(3, 2))
    assert shape_check(rows, model).detail == "1 wrong: statistics: none planned, 3x2 in the model"
    del model.statistics
    model.get_submodule("norm").bias = None
    assert shape_check(rows, model).detail == "1 wrong: norm.bias: 16 planned, none in the model"


def test_a_damaged_file_is_a_failed_check(folder: Path) -> None:
    (folder / "model-fp16.onnx").write_bytes(b"nothing of the kind")
    (folder / "model.xml").write_text("<net><layers>")
    verdicts = {check.name: check.verdict for check in verify_folder(folder).checks}
    assert verdicts["weights.model-fp16.onnx"] == verdicts["weights.model.xml"] == "failed"
    assert verdicts["weights.model.onnx"] == "passed" and not sidecar_path(folder / "model.xml").exists()


def test_small_tensors_must_be_in_the_file_too(folder: Path) -> None:
    model = load_model(folder)
    with torch.no_grad():
        model.get_submodule("blocks.1.mlp").bias[3] += 0.5
    assert tensors_in(folder / "model.onnx", model).problems == ("blocks.1.mlp.bias (16) is not in the file",)


def test_packed_values_are_no_constants(folder: Path) -> None:
    """Quantized weights have few different values, too."""
    packed = helper.make_tensor("packed", TensorProto.INT4, [48, 16], np.arange(768) % 4)
    change(folder / "model.onnx", lambda graph: graph.initializer.append(packed))
    assert "packed (48x16) is no weight" in check_weights(load_model(folder), folder / "model.onnx").detail


def test_text_in_a_node_is_no_place_for_weights(folder: Path) -> None:
    node = helper.make_node("Constant", [], ["unread"], value_strings=["00"] * 33)
    change(folder / "model.onnx", lambda graph: graph.node.insert(0, node))
    assert "value_strings is a long list" in check_weights(load_model(folder), folder / "model.onnx").detail


def test_biases_of_zero_may_be_omitted_and_others_may_not(folder: Path) -> None:
    model = load_model(folder)
    with torch.no_grad():
        model.get_submodule("blocks.1.mlp").bias = nn.Parameter(torch.full((65,), 0.0))
    assert tensors_in(folder / "model.onnx", model).problems == ()
    with torch.no_grad():
        model.get_submodule("blocks.1.mlp").bias[3] = 0.5
    missing = ("blocks.1.mlp.bias (65) is not in the file",)
    assert tensors_in(folder / "model.onnx", model).problems == missing
    few = numpy_helper.from_array(np.array([0.0, 0.5], np.float32), "few")  # its values, but in another shape
    change(folder / "model.onnx", lambda graph: graph.initializer.append(few))
    assert tensors_in(folder / "model.onnx", model).problems == missing


@pytest.mark.parametrize("metadata", [{"precision": "int4"}, {"precision": "fp16", "islands": "3"}])
def test_metadata_that_no_export_writes_are_rejected(metadata: dict[str, str]) -> None:
    with pytest.raises(ArtifactError, match="not written by vitcompress"):
        exported_module(build("plain"), metadata)
