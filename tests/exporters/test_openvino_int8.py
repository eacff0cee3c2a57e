"""OpenVINO files whose linear layers are in int8, with fp32 or bf16 elsewhere."""

import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from contracts import build
from PIL import Image
from torch import nn

from vitcompress.bench.report.snippet import snippet
from vitcompress.errors import ArtifactError, DeviceError, InputError
from vitcompress.exporters.base import Exported
from vitcompress.exporters.openvino.export import read_contents
from vitcompress.exporters.openvino.runner import HINT, core, load, needs_variable_batch, read_ir
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.quantize.calibrate import calibrate
from vitcompress.exporters.runtimes import EXPORTERS, open_runner
from vitcompress.exporters.sidecar import read_sidecar
from vitcompress.io import hardware
from vitcompress.io.files import decode_json_values
from vitcompress.models.create import create_model, input_config
from vitcompress.pipeline.export import compare_with_fp32, measure_quickly
from vitcompress.verify.outputs import Original, output_checks
from vitcompress.verify.weights import compare_tensors

SIZE = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
IMAGES = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
AVX2, VNNI = "flags\t: avx2\n", "flags\t: avx2 avx512f avx512_vnni\n"

pytestmark = pytest.mark.skipif(EXPORTERS["openvino"].unavailable() is not None, reason="OpenVINO is not installed")


@pytest.fixture
def model() -> nn.Module:
    return create_model("vit_tiny_patch16_224", {**SIZE, "depth": 2})


@cache
def traces(changed: str = "") -> dict[Any, Any]:
    """Of `model`, or of a model with this name: each is traced once for all its exports."""
    return {}


def export(model: nn.Module, path: Path, traces: dict[Any, Any] | None = None, **options: Any) -> Exported:
    settings, exporter = ExportOptions(**options), EXPORTERS["openvino"]
    exporter.check(settings)
    about: Any = {"input": input_config(model), "calibrate": lambda source: calibrate(source, IMAGES, "int8")}
    return exporter.export(model, path, options=settings, traces={} if traces is None else traces, **about)


@pytest.mark.parametrize(("width", "hidden"), [(32, 128), (128, 256), (128, 320)])
def test_small_models_run_at_every_batch_size(width: int, hidden: int, tmp_path: Path) -> None:
    """OpenVINO 2026.4 crashes at 4, 6 and 8 where it joins products by weights with at most 256 rows and columns."""
    model = create_model("vit_tiny_patch16_224", {**SIZE, "depth": 2, "embed_dim": width, "mlp_ratio": hidden / width})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    runner = open_runner(export(model, tmp_path / "m.xml").path)
    assert runner._compiled(3).inputs[0].partial_shape.is_static is (hidden > 256)
    for batch in range(1, 9):
        expected = model(IMAGES[:batch]).detach()
        torch.testing.assert_close(runner(IMAGES[:batch]), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("activation", ["gelu", "relu", "sigmoid", "tanh"])
def test_a_small_model_runs_with_any_activation(activation: str, tmp_path: Path) -> None:
    """OpenVINO 2026.4 crashes where one of these alone is between the two products."""
    args = {**SIZE, "depth": 2, "class_token": False, "global_pool": "avg", "act_layer": activation}
    model = create_model("vit_tiny_patch16_224", args)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    path = export(model, tmp_path / "m.xml").path
    assert needs_variable_batch(read_ir(path))  # otherwise the next lines would end this process
    with closing(open_runner(path)) as runner:
        for batch in (1, 4, 6, 8):
            expected = model(IMAGES[:batch]).detach()
            torch.testing.assert_close(runner(IMAGES[:batch]), expected, rtol=1e-3, atol=1e-3)


def test_the_lines_of_the_report_run_a_small_model(tmp_path: Path) -> None:
    """With 4 tokens and a fixed shape, OpenVINO 2026.4 ends the process that they run in."""
    args = {**SIZE, "in_chans": 3, "depth": 2, "class_token": False, "global_pool": "avg"}
    model = create_model("vit_tiny_patch16_224", args)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    about: Any = {"input": input_config(model), "classes": tuple("abcde")}
    done = EXPORTERS["openvino"].export(model, tmp_path / "m.xml", **about)
    assert done.build["variable_batch"] and "variable_batch" in read_sidecar(done.path)["build"]
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "photo.jpg")
    file: Any = {"file": "m.xml", "format": "openvino", "precision": "fp32", "variable_batch": True}
    code = snippet(vars(input_config(model)), file)
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert "model.reshape(images.shape)\n" in snippet(vars(input_config(model)), {**file, "variable_batch": False})


@pytest.mark.parametrize(("precision", "hint"), [("int8", "f32"), ("int8+bf16", "bf16")])
def test_the_file_agrees_and_states_its_precision(precision: str, hint: str, model: nn.Module, tmp_path: Path) -> None:
    done = export(model, tmp_path / "m.xml", traces(), precision=precision)
    assert (done.build["weights"], done.build["settings"]) == ("int8", {"INFERENCE_PRECISION_HINT": hint})
    assert decode_json_values(done.metadata)["precision"] == done.precision == precision
    file = {"file": "m.xml", "format": "openvino", "precision": precision}
    assert f"{{'INFERENCE_PRECISION_HINT': '{hint}'}}" in snippet(vars(input_config(model)), file).replace('"', "'")
    checks = output_checks(done.path, Original(model, IMAGES))
    if checks[0].verdict == "not_run":
        assert precision == "int8+bf16" and "computes in int8 on this processor" in checks[0].detail
        return
    assert {check.verdict for check in checks} == {"passed"}
    assert any(check.name.endswith(".unrounded.emulation") for check in checks) is (precision == "int8+bf16")
    exact, runner = model(IMAGES).detach(), open_runner(done.path)
    error = float((runner(IMAGES) - exact).abs().max() / exact.abs().max())
    assert runner.describe()["precision"] == precision and 1e-4 < error < 0.08
    with torch.no_grad():
        model.get_submodule("head").weight.neg_()
    assert "failed" in {check.verdict for check in output_checks(done.path, Original(model, IMAGES))}


@pytest.mark.parametrize("variant", ["pvt", "pvt_linear", "avg_pooled"])
def test_a_variable_batch_has_the_outputs_of_a_fixed_one(variant: str, tmp_path: Path) -> None:
    """OpenVINO 2026.4 moves the scale of a LayerNorm behind a Reshape, for a variable batch along a wrong axis."""
    sizes: dict[str, Any] = {"pretrained_cfg_overlay": {"input_size": [3, 64, 64]}} if "pvt" in variant else {}
    model, path = build(variant, dtype=torch.float32, **sizes), tmp_path / "m.xml"
    x = torch.randn(3, *input_config(model).size, generator=torch.Generator().manual_seed(7))
    about: Any = {"input": input_config(model), "calibrate": lambda source: calibrate(source, x, "int8")}
    EXPORTERS["openvino"].export(model, path, options=ExportOptions(precision="int8"), **about)
    network, outputs = read_ir(path), []
    for batch in (-1, len(x)):
        network.reshape([batch, *x.shape[1:]])
        outputs.append(torch.from_numpy(core().compile_model(network, "CPU", {HINT: "f32"})(x.numpy())[0].copy()))
    change = (outputs[1] - model(x)).detach().abs().max()
    assert change > 0 and (outputs[0] - outputs[1]).abs().max() <= change  # sums in another order change a few steps


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        ("distilled", {"embed_dim": 192, "num_heads": 2}),  # two queries of class tokens in the last block
        ("pvt", {"pretrained_cfg_overlay": {"input_size": [3, 16, 16]}}),  # four reduced tokens, four heads
    ],
)
def test_attentions_with_as_many_tokens_as_heads_run_at_a_fixed_batch(
    variant: str, sizes: dict[str, Any], precision: Any, batch: int, tmp_path: Path
) -> None:
    model = build(variant, dtype=torch.float32, **sizes)
    x = torch.randn(batch, *input_config(model).size, generator=torch.Generator().manual_seed(1))
    about: Any = {"input": input_config(model), "calibrate": lambda path: calibrate(path, x, "int8")}
    done = EXPORTERS["openvino"].export(model, tmp_path / "m.xml", options=ExportOptions(precision), **about)
    outputs = []
    for size in (-1, batch):
        network = read_ir(done.path)
        network.reshape([size, *x.shape[1:]])
        outputs.append(torch.from_numpy(core().compile_model(network, "CPU", {HINT: "f32"})(x.numpy())[0].copy()))
    change = float((outputs[0] - model(x)).abs().max())  # by rounding to int8
    assert (outputs[0] - outputs[1]).abs().max() <= 0.5 * change + 1e-5


@pytest.mark.parametrize("uint8", [False, True])
def test_every_stored_weight_is_within_half_a_step_of_the_model(uint8: bool, model: nn.Module, tmp_path: Path) -> None:
    contents = read_contents(export(model, tmp_path / "m.xml", traces(), precision="int8", uint8=uint8).path)
    represented = [stored.name for stored in contents.tensors if stored.dequantized is not None]
    assert len(represented) == 2 * 4 * 2 + 3  # weights and biases in eight bits, and tensors in fp16
    assert not compare_tensors(model, contents).problems
    weight = model.get_submodule("blocks.1.mlp.fc1").weight
    with torch.no_grad():
        weight[3, 5] += 0.02 * weight.abs().max()
    problems = compare_tensors(model, contents).problems
    assert any("blocks.1.mlp.fc1.weight" in problem for problem in problems) and len(problems) == 2


def test_zero_points_belong_to_the_values(model: nn.Module, tmp_path: Path) -> None:
    """The quantizer writes only zeros."""
    done, xml = export(model, tmp_path / "m.xml", traces(), precision="int8"), ElementTree.parse(tmp_path / "m.xml")
    (place,) = [
        one.find("data").attrib  # type: ignore[union-attr]
        for one in xml.iter("layer")
        if (name := str(one.get("name"))).startswith("blocks.1.mlp.fc1.weight") and name.endswith("zero_point")
    ]
    data = bytearray((tmp_path / "m.bin").read_bytes())
    data[int(place["offset"])] += 1  # of the first output
    (tmp_path / "m.bin").write_bytes(data)
    problems = compare_tensors(model, read_contents(done.path)).problems
    assert any("blocks.1.mlp.fc1.weight" in problem for problem in problems)


def test_close_biases_are_each_matched(model: nn.Module, tmp_path: Path) -> None:
    """As after a few steps of training. Both are within the large steps of the second, which is first in the file."""
    names = ["blocks.1.attn.proj.bias", "blocks.1.mlp.fc2.bias"]
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).copy_(1e-3 * torch.randn(32, generator=torch.Generator().manual_seed(0)).sign())
        model.get_parameter(names[1]).mul_(1.02)
        model.get_submodule("blocks.1.mlp.fc2").weight.mul_(10_000)
    contents = read_contents(export(model, tmp_path / "m.xml", precision="int8").path)
    compared = compare_tensors(model, contents)
    assert not compared.problems
    assert [compared.matches[name].name for name in names] == [f"{name}_quantized" for name in names]


@pytest.mark.parametrize(("cpu", "bits", "expected"), [(AVX2, None, 7), (VNNI, None, 8), (AVX2, 8, 8), (VNNI, 7, 7)])
def test_weights_have_eight_bits_where_their_products_are_exact(
    cpu: str, bits: Any, expected: int, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(cpu)
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
    done = export(model, tmp_path / "m.xml", traces(), precision="int8", weight_bits=bits)
    assert decode_json_values(done.metadata)["quantization"]["weight_bits"] == expected
    stored = [s for s in read_contents(done.path).tensors if s.name.endswith(".weight_quantized")]
    assert max(np.abs(np.frombuffer(s.read(), np.int8).astype(int)).max() for s in stored) in (
        (64,) if expected == 7 else (127, 128)
    )


@pytest.mark.parametrize("apart", [True, False])
def test_layer_norms_are_quantized_apart_from_their_scales(
    apart: bool, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not apart:
        monkeypatch.setattr("vitcompress.exporters.openvino.export._separate_scales", lambda model: None)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # else the scales are 1 and the shifts 0
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    done = export(model, tmp_path / "m.xml", traces("scaled"), precision="int8")
    quantized = [node for node in read_ir(done.path).get_ops() if node.get_type_name() == "FakeQuantize"]
    ranks = [len(node.get_output_partial_shape(0)) for node in quantized]
    assert (len(ranks), ranks.count(3)) == (2 * 4, 3 * apart)  # the first LayerNorm is before the tokens are in rows
    checks = output_checks(done.path, Original(model, IMAGES))
    assert {check.verdict for check in checks} == {"passed"}
    with closing(open_runner(done.path)) as runner:
        nodes = runner._compiled(len(IMAGES)).get_runtime_model().get_ops()
        layers = [str(getattr(kind := node.get_rt_info()["layerType"], "value", kind)) for node in nodes]
    assert layers.count("FakeQuantize") == (0 if apart else 3)  # slow nodes, which OpenVINO's CPU plugin joins


@pytest.mark.parametrize("bits", [7, 8])
def test_saturated_products_are_detected(bits: int, model: nn.Module, tmp_path: Path) -> None:
    """As in test_quantize.py; test_avx2.py runs it on a processor whose products of 8 bits saturate."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "blocks" in name and weight.ndim == 2:  # weights near the largest one in each row
                weight.copy_(weight.sign() * weight.abs().clamp(min=0.08))
    done = export(model, tmp_path / "m.xml", traces("clamped"), precision="int8", weight_bits=bits)
    checks = {check.name.rpartition(".")[2]: check for check in output_checks(done.path, Original(model, IMAGES))}
    sets = hardware.instruction_sets() or {}
    saturates = bits == 8 and sets.get("AVX2") and not sets["VNNI"]
    assert checks["emulation"].verdict == ("failed" if saturates else "passed")
    assert ("--weight-bits 7" in checks["emulation"].detail) == bool(bits == 8 and hardware.slow_reason("int8"))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_every_batch_size_is_compiled_with_its_shape(precision: str, tmp_path: Path) -> None:
    model = create_model("vit_tiny_patch16_224", {**SIZE, "embed_dim": 128, "depth": 1})
    path = export(model, tmp_path / "m.xml", traces("one block"), precision=precision).path
    exact, runner = model(IMAGES).detach(), open_runner(path)
    expected = runner(IMAGES)
    assert float((expected - exact).abs().max() / exact.abs().max()) < (0.08 if precision == "int8" else 1e-4)
    for count in (1, 7, 2, 3, 5, 1, 20):  # more than are kept
        assert list(runner._compiled(count).inputs[0].shape) == [count, 1, 8, 8]
        torch.testing.assert_close(runner(IMAGES[:count]), expected[:count], rtol=1e-4, atol=1e-5)
        runner.bind(IMAGES[:count])()
    assert runner._compiled.cache_info().currsize == 4
    compiled = []
    for _ in range(2):
        for count in (2, 3, 5, 20):
            runner.predict(IMAGES[:count])
        compiled.append(runner._compiled.cache_info().misses)
    assert compiled[0] == compiled[1]
    runner.close()


def test_a_file_with_a_fixed_batch_runs_at_that_batch_alone(tmp_path: Path) -> None:
    opset = load().opset13
    images = opset.parameter([2, 1, 8, 8], np.float32)
    sums = opset.reduce_sum(images, opset.constant([1, 2, 3]), keep_dims=False)
    logits = opset.add(opset.unsqueeze(sums, opset.constant([1])), opset.constant(np.ones((2, 3), np.float32)))
    load().save_model(load().Model([logits], [images]), str(tmp_path / "fixed.xml"), compress_to_fp16=False)
    runner = open_runner(tmp_path / "fixed.xml")
    torch.testing.assert_close(runner(IMAGES[:2]), 1 + IMAGES[:2].sum((1, 2, 3))[:, None].expand(2, 3))
    for call in (runner, runner.bind):
        with pytest.raises(ArtifactError, match=r"fixed\.xml at batch 3: "):
            call(IMAGES[:3])
    assert runner.describe()["classes"] == 3


def test_other_precisions_are_rejected(model: nn.Module, tmp_path: Path) -> None:
    path = export(model, tmp_path / "m.xml", traces(), precision="int8").path
    with pytest.raises(DeviceError, match="cannot run in 'fp32'"):
        open_runner(path, precision="fp32")
    with pytest.raises(DeviceError, match=r"cannot run in 'int8\+bf16'"):
        open_runner(export(model, tmp_path / "wide.xml", traces()).path, precision="int8+bf16")
    for name, options in (("onnx", {"precision": "int8+bf16"}), ("openvino", {"weight_bits": 8})):
        with pytest.raises(InputError):
            EXPORTERS[name].check(ExportOptions(**options))


def test_unknown_instruction_sets_are_not_reported_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
    assert hardware.slow_reason("fp32") is None
    for name in ("bf16", "int8", "int8+bf16"):
        assert "unknown here" in str(hardware.slow_reason(name)), name


@pytest.mark.parametrize(("form", "remedy"), [("onnx", "--precision fastest"), ("openvino", "use --format onnx")])
def test_a_file_that_is_slower_than_fp32_is_reported(
    form: str, remedy: str, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(AVX2)
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
    large = create_model("vit_tiny_patch16_224", {**SIZE, "img_size": 32, "depth": 12, "embed_dim": 192})
    exporter, about = EXPORTERS[form], {"input": input_config(large), "traces": traces("large")}
    done = exporter.export(large, tmp_path / f"m{exporter.suffix}", **about)
    slower = compare_with_fp32(
        Exported(**{**vars(done), "precision": "int8"}),
        lambda path: exporter.export(model, path, input=input_config(model), traces=traces()),
    )
    assert slower.speed["verdict"] == "slower" and slower.speed["a"] == "fp32"
    warning = slower.build["warnings"][0]
    assert "slower here" in warning and remedy in warning and ("no VNNI" in warning) == (form == "openvino")


def test_files_with_a_range_are_measured_at_their_smallest_batch(model: nn.Module, tmp_path: Path) -> None:
    done = EXPORTERS["onnx"].export(model, tmp_path / "m.onnx", input=input_config(model), traces=traces())
    for about, batch in (({"batch": [2, 4, 8]}, 2), ({}, 1)):
        rows = measure_quickly([replace(done, build=about)]).rows
        assert [row["batch"] for row in rows] == [batch]
