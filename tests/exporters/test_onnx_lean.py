"""A lean graph gives the answers of the graph as torch wrote it, with fewer rows and one node per linear layer."""

from pathlib import Path

import onnx
import onnx_ir
import pytest
import torch
from contracts import build, images
from torch import nn

from vitcompress import surgery
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.onnx.file import facts
from vitcompress.exporters.onnx.tokens import drop_unread_tokens
from vitcompress.exporters.options import ExportOptions
from vitcompress.models.create import input_config
from vitcompress.plan import Plan
from vitcompress.verify.onnx import onnx_checks


def without_last_attention() -> nn.Module:
    """Two blocks, the second one without attention: all of it is needed for the class token alone."""
    model = build("plain", dtype=torch.float32)
    surgery.apply_plan(model, Plan("vit", {}, removed={"blocks.1.attn": "drop"}))
    return model


def failed(model: nn.Module, path: Path, variant: str = "plain") -> list[str]:
    x = images(variant, count=5, dtype=torch.float32)
    return [check.name for check in onnx_checks(model, path, x) if check.verdict != "passed"]


def rows(path: Path, operator: str) -> list[int | None]:
    """Tokens that the nodes of a kind work on, in order; None for values of two axes."""
    graph = onnx_ir.load(path).graph
    shapes = [node.outputs[0].shape for node in graph if node.op_type == operator]
    return [None if shape is None or len(shape) < 3 else shape[-2] for shape in shapes]


def count_short(model: nn.Module, path: Path) -> int:
    export(model, path, input=input_config(model), lean=False)
    return drop_unread_tokens(onnx_ir.load(path).graph)


@pytest.mark.parametrize("opset", [20, 23])
def test_the_last_scores_are_those_of_the_class_token(opset: int, tmp_path: Path) -> None:
    model = build("plain", dtype=torch.float32)
    path = export(model, tmp_path / "m.onnx", input=input_config(model), options=ExportOptions(opset=opset)).path
    tokens = 5  # four patches and the class token
    assert rows(path, "Softmax" if opset == 20 else "Attention") == [tokens, 1]
    assert failed(model, path) == []


def test_blocks_behind_the_last_attention_see_one_token(tmp_path: Path) -> None:
    model = without_last_attention()
    whole = export(model, tmp_path / "whole.onnx", input=input_config(model), lean=False).path
    path = export(model, tmp_path / "m.onnx", input=input_config(model)).path
    assert rows(whole, "Softmax") == [5]
    assert rows(path, "Softmax") == [1]
    assert (
        facts(path).operators["Gemm"] == facts(whole).operators["MatMul"] - 2 + 1
    )  # all but the attention's; the head
    assert failed(model, path) == failed(model, whole) == []


def test_a_distilled_model_keeps_both_its_tokens(tmp_path: Path) -> None:
    model = build("distilled", dtype=torch.float32)
    path = export(model, tmp_path / "m.onnx", input=input_config(model)).path
    assert rows(path, "Softmax")[-1] == 2
    assert failed(model, path, "distilled") == []


@pytest.mark.parametrize("variant", ["swin", "pvt"])
def test_where_all_tokens_are_averaged_all_are_computed(variant: str, tmp_path: Path) -> None:
    assert count_short(build(variant, dtype=torch.float32), tmp_path / "m.onnx") == 0


def test_where_one_token_is_read_fewer_are_computed(tmp_path: Path) -> None:
    assert count_short(build("plain", dtype=torch.float32), tmp_path / "m.onnx") > 0


def test_linear_layers_are_one_node_each(tmp_path: Path) -> None:
    model = build("layer_scale", dtype=torch.float32)
    path = export(model, tmp_path / "m.onnx", input=input_config(model)).path
    found = onnx.load(path).graph.node
    linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert sum(node.op_type == "Gemm" for node in found) == linear
    assert sum(node.op_type == "MatMul" for node in found) == 2 * 2  # two products in each attention
    around = 2 * 2  # each attention's heads are formed and joined
    ends = 6  # patches become tokens, and rows twice; the last attention cuts them to one, which the head reads
    assert sum(node.op_type == "Reshape" for node in found) == around + ends
    assert failed(model, path, "layer_scale") == []
