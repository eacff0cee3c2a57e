"""Checks of inspector output, in both forms; each check can fail.

The ResNet-18 of TensorRT 8 is recorded. No output for a transformer, and none of TensorRT 11, is available under a
license that allows keeping it here. The other samples are written by hand: fields as documented, kinds and names of
layers as users of TensorRT 9 and 10 report them (github.com/NVIDIA/TensorRT/issues/3665 and 4397).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import build

from vitcompress.errors import ArtifactError
from vitcompress.exporters.tensorrt.layers import IDLE, layer_checks, parse_layers, unavailable_checks, unfused_warnings
from vitcompress.families import family_of
from vitcompress.plan import Plan
from vitcompress.surgery import apply_to_copy

DATA = Path(__file__).parent / "data"


def inspector_output(version: int) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((DATA / f"inspector_{version}.json").read_text())
    return data


def verdicts(data: dict[str, Any], precision: str = "fp16", attentions: int = 1) -> dict[str, str]:
    checks = layer_checks(parse_layers(json.dumps(data)), precision, attentions)
    return {check.name.removeprefix("engine."): check.verdict for check in checks}


def retyped(data: dict[str, Any], text: str, layers: str = "") -> dict[str, Any]:
    """`data` with another type in all layers whose kind contains `layers`."""
    for layer in data["Layers"]:
        if layers in layer["LayerType"]:
            for tensor in (*layer["Inputs"], *layer["Outputs"]):
                tensor["Datatype" if "Datatype" in tensor else "Format/Datatype"] = text
            layer.pop("Weights", None)
    return data


def test_without_inspector_output_no_check_runs() -> None:
    checks = layer_checks(parse_layers(json.dumps(inspector_output(11))), "fp16", 1)
    assert [(check.name, "not_run") for check in checks] == [
        (c.name, c.verdict) for c in unavailable_checks("no inspector")
    ]


def test_both_forms_give_the_same_layers() -> None:
    old, new = (parse_layers(json.dumps(inspector_output(version))) for version in (10, 11))
    assert old == new and len(old) == 14
    assert sum(layer.heavy for layer in old) == 7  # patch embedding, q/k/v, attention, projection, two of the FFN, head
    assert {layer.precision for layer in old if layer.heavy} == {"fp16"}
    assert [layer.name for layer in old if layer.copies] == [old[0].name, "__myl_Cast_myl3_14"]
    assert [layer.name for layer in old if layer.fused_attention] == ["_gemm_mha_v2_myl3_6"]


@pytest.mark.parametrize("version", [10, 11])
def test_a_good_engine_passes(version: int) -> None:
    assert verdicts(inspector_output(version)) == {"precision": "passed", "attention": "passed", "copies": "passed"}


@pytest.mark.parametrize("version", [10, 11])
def test_a_silently_wider_engine_fails(version: int) -> None:
    assert verdicts(retyped(inspector_output(version), "Float", "gemm"))["precision"] == "failed"
    assert verdicts(inspector_output(version), "bf16")["precision"] == "failed"
    assert verdicts(retyped(inspector_output(version), "BFloat16"), "bf16")["precision"] == "passed"


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("Row major linear FP32", "fp32"),
        ("Row major linear FP16 format", "fp16"),
        ("Channel major FP16 format where channel % 8 == 0", "fp16"),
        ("Thirty-two wide channel vectorized row major Int8 format", "int8"),
        ("BFloat16", "bf16"),
        ("FP8", "fp8"),
        ("Int32", "other"),
        ("Bool", "other"),
        ("N/A due to dynamic shapes", None),
        ("", None),
    ],
)
def test_types_in_every_format(text: str, precision: str | None) -> None:
    layer = {"Name": "a", "LayerType": "gemm", "Inputs": [{"Name": "t", "Format/Datatype": text}], "Outputs": []}
    assert parse_layers(json.dumps({"Layers": [layer]}))[0].operands == (precision,)


def test_separate_attention_fails_and_pruned_attention_is_not_missed() -> None:
    separate = inspector_output(10)
    for layer in separate["Layers"]:
        if "mha" in layer["Name"]:
            layer["Name"], layer["TacticName"] = "__myl_MaxSubExpSumDivMul_myl3_6", "__myl_MaxSubExpSumDivMul"
    assert verdicts(separate)["attention"] == "failed"
    assert verdicts(inspector_output(10), attentions=2)["attention"] == "failed"
    assert verdicts(inspector_output(10), attentions=0)["attention"] == "passed"
    assert verdicts(retyped(inspector_output(10), "Float"), "fp32")["attention"] == "not_run"


def test_many_casts_fail() -> None:
    data = inspector_output(11)
    data["Layers"] += [{**data["Layers"][-1], "Name": f"__myl_CastMove_myl3_{n}"} for n in range(3)]
    assert verdicts(data)["copies"] == "failed"


def test_tf32_fails_in_fp32_and_passes_if_requested() -> None:
    data = retyped(inspector_output(10), "Float")
    assert verdicts(data, "fp32")["precision"] == verdicts(data, "tf32")["precision"] == "passed"
    for layer in data["Layers"]:
        if layer["LayerType"] == "gemm":
            layer["TacticName"] = "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x32_stage3"
    assert verdicts(data, "fp32")["precision"] == "failed"
    assert verdicts(data, "tf32")["precision"] == "passed"


def test_unknown_precisions_do_not_pass() -> None:
    assert verdicts(retyped(inspector_output(10), "N/A due to dynamic shapes"))["precision"] == "not_run"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"Layers": [1]}', '{"Layers": ["a", "b"], "Bindings": []}'])
def test_other_json_is_rejected(text: str) -> None:
    with pytest.raises(ArtifactError):
        parse_layers(text)


def test_recorded_inspector_output() -> None:
    """In all 40 layers: 21 convolutions and products, all in fp16; 2 of the 25 that do anything reformat (8 %)."""
    layers = parse_layers((DATA / "inspector_8_resnet18.json").read_text())
    assert [layer.name for layer in layers if layer.heavy] == ["Conv_0 + Relu_1", "Conv_24 + Relu_25", "Gemm_48"]
    assert [layer.kind for layer in layers if layer.copies] == ["Reformat", "Reformat"]
    assert [layer.kind for layer in layers if IDLE.search(layer.kind)] == ["NoOp"]
    for wanted, verdict in (("fp16", "passed"), ("fp32", "failed")):
        assert layer_checks(layers, wanted, attentions=0)[0].verdict == verdict


def tensor(kind: str, *sizes: int) -> dict[str, Any]:
    return {"Name": "t", "Dimensions": list(sizes), "Format/Datatype": kind}


def layer(name: str, kind: str, inputs: list[dict[str, Any]], tactic: str = "") -> dict[str, Any]:
    return {"Name": name, "LayerType": kind, "Inputs": inputs, "Outputs": [], "TacticName": tactic}


def test_factors_of_a_product_do_not_widen_it() -> None:
    """An fp16 product has alpha and beta as single fp32 values."""
    half, factor = tensor("Half", 12, 197, 64), tensor("Float", 1)
    data = [layer("__mye6723_unroll0", "gemm", [half, half, factor, factor], "sm80_xmma_gemm_f16f16_f16f16_f16_nn")]
    assert verdicts({"Layers": data}, attentions=0)["precision"] == "passed"
    data[0]["Inputs"][2] = tensor("Float", 12, 197, 64)
    assert verdicts({"Layers": data}, attentions=0)["precision"] == "failed"


def test_a_module_with_the_name_mha_is_not_fused_attention() -> None:
    half = tensor("Half", 1, 40, 256)
    projection = layer("/layers_0/mha/query/MatMul_myl0_9", "gemm", [half], "sm80_xmma_gemm_f16f16_f16f16_f16_nn")
    fused = layer("_gemm_mha_v2_myl0_17", "kgen", [half, half, half], "_gemm_mha_v2_0x957a2fe2")
    assert verdicts({"Layers": [projection]})["attention"] == "failed"
    assert verdicts({"Layers": [projection, fused]})["attention"] == "passed"


def test_a_linear_layer_in_a_generated_kernel_is_heavy() -> None:
    data = [layer("__myl_FcCastAddErf_myl0_3", "fusion", [tensor("Float", 197, 192)], "by_fusion_tactic")]
    assert verdicts({"Layers": data}, attentions=0)["precision"] == "failed"


def test_idle_layers_are_not_counted() -> None:
    data = inspector_output(10)
    data["Layers"] += [layer(f"__mye{n}", kind, []) for n, kind in enumerate(["wait", "signal", "shape_call"] * 9)]
    checks = layer_checks(parse_layers(json.dumps(data)), "fp16", 1)
    assert checks == layer_checks(parse_layers(json.dumps(inspector_output(10))), "fp16", 1)


def test_abbreviated_names_of_casts() -> None:
    names = (
        "__myl_Cas_myl0_1",
        "__myl_CasMov_myl0_2",
        "__myl_bb1_1_RepCasMov",
        "__myl_CasMeaSub_myl0_4",
        "__myl_Fc_myl0_5",
    )
    layers = parse_layers(json.dumps({"Layers": [layer(name, "kgen", []) for name in names]}))
    assert [layer.copies for layer in layers] == [True, True, True, False, False]


def test_opaque_layers_do_not_pass() -> None:
    data = [layer("{ForeignNode[/blocks.0/norm1...head]}", "Myelin", [tensor("Half", 1, 3, 8, 8)])]
    assert verdicts({"Layers": data}) == {"precision": "not_run", "attention": "not_run", "copies": "passed"}


def test_attentions_of_unequal_widths_cause_a_warning() -> None:
    whole = build("plain", dtype=torch.float32)
    spaces = {space.name: space for space in family_of(whole).spaces(whole)}
    qk = next(space for space in spaces.values() if space.kind == "qk")
    width = qk.size // qk.heads
    half = tuple(head * width + channel for head in range(qk.heads) for channel in range(width // 2))
    plan = Plan("any", kept={qk.name: half})
    narrow, padded = apply_to_copy(whole, plan), apply_to_copy(whole, replace(plan, padded=(qk.attention,)))
    (warning,) = unfused_warnings(narrow, "fp16")
    assert warning.startswith(f"1 attention ({qk.attention}) with heads whose q and k") and "layout" in warning
    assert unfused_warnings(narrow, "fp32") == unfused_warnings(padded, "fp16") == unfused_warnings(whole, "bf16") == []


@pytest.mark.parametrize(("unknown", "verdict"), [(0, "passed"), (1, "passed"), (2, "not_run"), (10, "not_run")])
def test_the_precision_of_nine_in_ten_heavy_layers_must_be_known(unknown: int, verdict: str) -> None:
    half, unknown_type = tensor("Half", 1, 40, 256), tensor("N/A due to dynamic shapes", -1, 40, 256)
    data = [layer(f"mm{n}", "gemm", [unknown_type if n < unknown else half]) for n in range(10)]
    assert verdicts({"Layers": data}, attentions=0)["precision"] == verdict


def test_without_heavy_layers_the_precision_is_not_run() -> None:
    data = [layer("__myl_Add_myl0_1", "kgen", [tensor("Half", 1, 40, 256)])]
    assert verdicts({"Layers": data}, attentions=0)["precision"] == "not_run"
