"""The recorded reasons for an opset hold: count the operators of the runtimes' optimized graphs."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
from torch import nn

from vitcompress import surgery
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.runtimes import EXPORTERS
from vitcompress.families import family_of
from vitcompress.models.create import create_model, input_config
from vitcompress.plan import Plan

ARCH, DEPTH = "vit_tiny_patch16_224", 2
ARGS = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": DEPTH, "num_heads": 2, "num_classes": 3}
openvino = pytest.mark.skipif(EXPORTERS["openvino"].unavailable() is not None, reason="OpenVINO is not installed")


@cache
def traces(qk: int) -> dict[Any, Any]:
    """Of `model(qk)`, for all formats."""
    return {}


def model(qk: int = 16) -> nn.Module:
    """Heads of 16 channels, with `qk` channels of each q and k."""
    network = create_model(ARCH, ARGS)
    spaces = [space for space in family_of(network).spaces(network) if space.kind == "qk"]
    kept = {space.name: tuple(c for c in range(space.size) if c % 16 < qk) for space in spaces}
    return network if qk == 16 else surgery.apply_plan(network, Plan(ARCH, ARGS, kept=kept))


def written(qk: int, path: Path, opset: int) -> Path:
    network = model(qk)
    about: Any = {"input": input_config(network), "traces": traces(qk)}
    return export(network, path, options=ExportOptions(opset=opset), **about).path


@pytest.mark.parametrize("qk", [16, 8])
def test_onnx_runtime_folds_the_scale_into_a_product(qk: int, tmp_path: Path) -> None:
    path = written(qk, tmp_path / "m.onnx", 20)
    assert Counter(node.op_type for node in onnx.load(str(path)).graph.node)["Mul"] == DEPTH
    options = ort.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimized.onnx"), 3
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    operators = Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)
    assert (operators["FusedMatMul"], operators["MatMul"], operators["Mul"]) == (DEPTH, DEPTH, 0)


def layers(compiled: Any) -> Counter[str]:
    kinds = (op.get_rt_info()["layerType"] for op in compiled.get_runtime_model().get_ops())
    return Counter(str(getattr(kind, "value", kind)) for kind in kinds)


@openvino
@pytest.mark.parametrize("qk", [16, 8])
def test_openvino_fuses_attention_completely(qk: int, tmp_path: Path) -> None:
    from vitcompress.exporters.openvino.runner import core

    network = model(qk)
    about: Any = {"input": input_config(network), "traces": traces(qk)}
    path = EXPORTERS["openvino"].export(network, tmp_path / "m.xml", **about).path
    node = written(qk, tmp_path / "m.onnx", 23)  # attention as one node
    config = {"INFERENCE_PRECISION_HINT": "f32"}
    ours, whole = (layers(core().compile_model(str(m), "CPU", config)) for m in (path, node))
    assert (ours["Subgraph"], ours["Softmax"]) == (whole["Subgraph"], whole["Softmax"]) == (DEPTH, 0)
    assert 0 < ours["Eltwise"] <= whole["Eltwise"] and ours["Transpose"] <= whole["Transpose"]
