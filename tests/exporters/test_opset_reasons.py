"""What the recorded reasons for an opset say of a runtime, counted in what the runtime makes of the file."""

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
from torch import nn

from vitcompress import surgery
from vitcompress.exporters import EXPORTERS
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.options import ExportOptions
from vitcompress.families import family_of
from vitcompress.models.create import create_model, input_config
from vitcompress.plan import Plan

ARCH, DEPTH = "vit_tiny_patch16_224", 2
ARGS = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": DEPTH, "num_heads": 2, "num_classes": 3}
openvino = pytest.mark.skipif(EXPORTERS["openvino"].unavailable() is not None, reason="OpenVINO is not installed")


def model(qk: int = 16) -> nn.Module:
    """Heads of 16 channels, `qk` of them left of each q and k."""
    made = create_model(ARCH, ARGS)
    spaces = [space for space in family_of(made).spaces(made) if space.kind == "qk"]
    kept = {space.name: tuple(c for c in range(space.size) if c % 16 < qk) for space in spaces}
    return made if qk == 16 else surgery.apply_plan(made, Plan(ARCH, ARGS, kept=kept))


def written(made: nn.Module, path: Path, opset: int) -> Path:
    return export(made, path, input=input_config(made), options=ExportOptions(opset=opset)).path


@pytest.mark.parametrize("qk", [16, 8])
def test_onnx_runtime_folds_the_scale_into_a_product(qk: int, tmp_path: Path) -> None:
    path = written(model(qk), tmp_path / "m.onnx", 20)
    assert Counter(node.op_type for node in onnx.load(str(path)).graph.node)["Mul"] == DEPTH
    options = ort.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimised.onnx"), 3
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    found = Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)
    assert (found["FusedMatMul"], found["MatMul"], found["Mul"]) == (DEPTH, DEPTH, 0)


def layers(compiled: Any) -> Counter[str]:
    kinds = (op.get_rt_info()["layerType"] for op in compiled.get_runtime_model().get_ops())
    return Counter(str(getattr(kind, "value", kind)) for kind in kinds)


@openvino
@pytest.mark.parametrize("qk", [16, 8])
def test_openvino_fuses_attention_and_nothing_is_left_beside_it(qk: int, tmp_path: Path) -> None:
    from vitcompress.exporters.openvino.library import core

    made = model(qk)
    path = EXPORTERS["openvino"].export(made, tmp_path / "m.xml", input=input_config(made)).path
    node = written(made, tmp_path / "m.onnx", 23)  # attention in one node to begin with
    how = {"INFERENCE_PRECISION_HINT": "f32"}
    ours, whole = (layers(core().compile_model(str(m), "CPU", how)) for m in (path, node))
    assert (ours["Subgraph"], ours["Softmax"]) == (whole["Subgraph"], whole["Softmax"]) == (DEPTH, 0)
    assert 0 < ours["Eltwise"] <= whole["Eltwise"] and ours["Transpose"] <= whole["Transpose"]
