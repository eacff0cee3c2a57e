"""A lean graph has the outputs of the graph that torch wrote, with fewer rows and one node per linear layer."""

from contextlib import closing
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import pytest
import torch
from contracts import build, traces
from onnx_agreement import failures
from onnx_ir.passes.common import ShapeInferencePass
from torch import nn

from vitcompress import surgery
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.onnx.file import graph_facts
from vitcompress.exporters.onnx.gemm import join_linear_layers, multiply_patches
from vitcompress.exporters.onnx.tokens import drop_unread_tokens
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.runtimes import open_runner
from vitcompress.exporters.sidecar import sidecar_path
from vitcompress.families import family_of
from vitcompress.models.create import input_config
from vitcompress.plan import Plan


def without_last_attention() -> nn.Module:
    """Two blocks, the second one without attention: the class token is the only one that it needs."""
    model = build("plain", dtype=torch.float32)
    surgery.apply_plan(model, Plan("vit", {}, removed={"blocks.1.attn": "drop"}))
    return model


def rows(path: Path, operator: str) -> list[int | None]:
    """Tokens that the nodes of a kind work on, in order; None for values of two axes."""
    graph = onnx_ir.from_proto(onnx.shape_inference.infer_shapes(onnx.load(path))).graph
    shapes = [node.outputs[0].shape for node in graph if node.op_type == operator]
    return [None if shape is None or len(shape) < 3 else shape[-2] for shape in shapes]


def count_short(variant: str, path: Path) -> int:
    model = build(variant, dtype=torch.float32)
    export(model, path, input=input_config(model), form="float_bias", traces=traces(variant))
    graph = onnx_ir.load(path).graph
    before = {value: value.shape for node in graph for value in node.outputs}
    drop_unread_tokens(graph)
    return sum(value.shape != shape for value, shape in before.items())


@pytest.mark.parametrize("opset", [20, 23])
def test_the_last_scores_are_those_of_the_class_token(opset: int, tmp_path: Path) -> None:
    model = build("plain", dtype=torch.float32)
    about: Any = {"input": input_config(model), "traces": traces("plain")}
    path = export(model, tmp_path / "m.onnx", options=ExportOptions(opset=opset), **about).path
    tokens = 5  # four patches and the class token
    assert rows(path, "Softmax" if opset == 20 else "Attention") == [tokens, 1]
    assert failures(model, path) == []


def test_blocks_behind_the_last_attention_see_one_token(tmp_path: Path) -> None:
    model = without_last_attention()
    about: Any = {"input": input_config(model), "traces": {}}
    whole = export(model, tmp_path / "whole.onnx", form="float_bias", **about).path
    path = export(model, tmp_path / "m.onnx", **about).path
    assert rows(whole, "Softmax") == [5]
    assert rows(path, "Softmax") == [1]
    assert (
        graph_facts(path).operators["Gemm"] == graph_facts(whole).operators["MatMul"] - 2 + 1
    )  # all but the attention's; the head
    assert failures(model, path) == failures(model, whole) == []


def test_a_distilled_model_keeps_both_its_tokens(tmp_path: Path) -> None:
    model = build("distilled", dtype=torch.float32)
    path = export(model, tmp_path / "m.onnx", input=input_config(model), traces=traces("distilled")).path
    assert rows(path, "Softmax")[-1] == 2
    assert failures(model, path, "distilled") == []


@pytest.mark.parametrize("variant", ["swin", "pvt"])
def test_averaged_tokens_are_all_computed(variant: str, tmp_path: Path) -> None:
    assert count_short(variant, tmp_path / "m.onnx") == 0


def test_unread_tokens_are_not_computed(tmp_path: Path) -> None:
    assert count_short("plain", tmp_path / "m.onnx") > 0


@pytest.mark.parametrize("variant", ["plain", "swin", "pvt"])
def test_runtimes_infer_the_shapes_of_intermediate_values(variant: str, tmp_path: Path) -> None:
    model = build(variant, dtype=torch.float32)
    path = export(model, tmp_path / "m.onnx", input=input_config(model), traces=traces(variant)).path
    graph = onnx.load(path).graph
    results = {name for node in graph.node for name in node.output}
    assert not [v.name for v in graph.value_info if v.name in results and v.type.tensor_type.HasField("shape")]
    assert [dim.dim_value for dim in graph.output[0].type.tensor_type.shape.dim][1:] == [model.num_classes]


def test_linear_layers_are_one_node_each(tmp_path: Path) -> None:
    model = build("layer_scale", dtype=torch.float32)
    path = export(model, tmp_path / "m.onnx", input=input_config(model), traces=traces("layer_scale")).path
    nodes = onnx.load(path).graph.node
    linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert sum(node.op_type == "Gemm" for node in nodes) == linear
    assert sum(node.op_type == "MatMul" for node in nodes) == 2 * 2  # two products in each attention
    around = 2 * 2  # each attention's heads are formed and joined
    ends = 6  # patches become tokens, and rows twice; the last attention cuts them to one, which the head reads
    assert sum(node.op_type == "Reshape" for node in nodes) == around + ends
    assert failures(model, path, "layer_scale") == []


def test_axes_that_are_counted_from_the_first_stay_valid(tmp_path: Path) -> None:
    model, path = build("plain", dtype=torch.float32), tmp_path / "m.onnx"
    export(model, path, input=input_config(model), form="float_bias", traces=traces("plain"))
    sidecar_path(path).unlink()
    file = onnx_ir.load(path)
    for node in (node for node in file.graph if node.op_type == "LayerNormalization"):
        node.attributes.add(onnx_ir.AttrInt64("axis", 2))
    join_linear_layers(file.graph)
    onnx_ir.save(file, path)
    with closing(open_runner(path)) as runner, torch.no_grad():
        torch.testing.assert_close(runner(torch.ones(2, 3, 8, 8)), model(torch.ones(2, 3, 8, 8)))


def convolutions(path: Path) -> int:
    return graph_facts(path).operators.get("Conv", 0)


@pytest.mark.parametrize("uint8", [False, True])
@pytest.mark.parametrize(("variant", "size"), [("plain", [8, 16]), ("swin", [16, 16])])
def test_a_product_of_patches_is_their_convolution(variant: str, size: list[int], uint8: bool, tmp_path: Path) -> None:
    model, images = build(variant, dtype=torch.float32, img_size=size), torch.randint(0, 9, (3, 3, *size))
    stem = model.get_submodule(family_of(model).stem)
    if not uint8:  # sums of small integers are exact in any order
        stem.weight.data, stem.bias.data = (torch.randint(-9, 9, t.shape).float() for t in (stem.weight, stem.bias))
    path = export(model, tmp_path / "m.onnx", input=input_config(model), options=ExportOptions(uint8=uint8)).path
    program = onnx_ir.load(path)
    graph = ShapeInferencePass()(program).model.graph
    multiply_patches(graph)
    onnx_ir.save(program, product_path := tmp_path / "product.onnx")
    assert (convolutions(path), convolutions(product_path)) == (1, 0)
    images = images.to(torch.uint8).permute(0, 2, 3, 1) if uint8 else images.float()
    with closing(open_runner(path)) as convolution, closing(open_runner(product_path)) as product:
        torch.testing.assert_close(product(images), convolution(images), rtol=0, atol=1e-5 * uint8)


@pytest.mark.parametrize("uint8", [False, True])
@pytest.mark.parametrize(("variant", "multiplied"), [("plain", 1), ("swin", 1), ("pvt", 0)])
def test_patches_are_multiplied_in_half_precision(variant: str, multiplied: int, uint8: bool, tmp_path: Path) -> None:
    model, options = build(variant, dtype=torch.float32), ExportOptions("fp16", uint8=uint8)
    about: Any = {"input": input_config(model), "options": options}
    path = export(model, tmp_path / "m.onnx", **about).path
    kept = export(model, tmp_path / "kept.onnx", form="float_bias", **about).path
    assert convolutions(path) == convolutions(kept) - multiplied  # PVT's patches overlap
    assert uint8 or failures(model, path, variant) == []
