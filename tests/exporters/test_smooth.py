"""Scales of channels move from a LayerNorm into the layers that read it: same outputs, fewer steps lost to outliers."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from contracts import VARIANTS, build, images
from pruned_models import pruned
from torch import nn

from vitcompress.errors import InputError
from vitcompress.exporters.base import Exported
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.quantize.calibrate import calibrate
from vitcompress.exporters.quantize.smooth import MOST, measure_factors, rescale
from vitcompress.exporters.runtimes import EXPORTERS
from vitcompress.families import family_of
from vitcompress.models.create import input_config
from vitcompress.verify.outputs import Original, output_checks
from vitcompress.verify.weights import compare_tensors

FORMATS = [name for name in ("onnx", "openvino", "trt-rtx") if EXPORTERS[name].unavailable() is None]


def with_outlier(model: nn.Module, norm: str, layer: str, channel: int = 3) -> nn.Module:
    """One channel of a norm is 1,000 times as large, which the next layer undoes."""
    with torch.no_grad():
        for parameter in model.get_submodule(norm).parameters():
            parameter[channel].mul_(1000)
        model.get_submodule(layer).weight[:, channel].div_(1000)
    return model


TRACES: dict[Any, Any] = {}  # of the model of `pruned("layer_scale")`


def write(
    model: nn.Module, x: torch.Tensor, path: Path, name: str, traces: dict[Any, Any] | None = None, **options: Any
) -> Exported:
    settings = ExportOptions(**{"precision": "int8", "smooth": True, **options})
    factors = measure_factors(model, x)

    def ranges(source: Path) -> dict[str, float]:
        return calibrate(source, x, settings.eight_bits or "int8")

    about: Any = {"input": input_config(model), "calibrate": ranges, "factors": factors}
    about["traces"] = {} if traces is None else traces
    EXPORTERS[name].check(settings)
    return EXPORTERS[name].export(model, path / f"model{EXPORTERS[name].suffix}", options=settings, **about)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rescaled_model_computes_the_same_numbers(variant: str) -> None:
    model, x = build(variant, dtype=torch.float32), images(variant, dtype=torch.float32)
    norms = family_of(model).normalized(model)
    factors = measure_factors(model, x)
    assert norms.keys() == factors.keys() and norms
    assert measure_factors(deepcopy(model).double(), x) == factors
    other = rescale(model, factors)
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_an_outlier_is_divided_by_its_size() -> None:
    model = with_outlier(build("plain", dtype=torch.float32), "blocks.1.norm2", "blocks.1.mlp.fc1")
    before = measure_factors(build("plain", dtype=torch.float32), x := images("plain", dtype=torch.float32))
    after = measure_factors(model, x)
    change = [b - a for a, b in zip(before["blocks.1.norm2"], after["blocks.1.norm2"], strict=True)]
    assert change[3] in (9, 10, 11) and not any(change[:3] + change[4:])  # sqrt(1000 x 1000) is almost 2^10
    assert before["blocks.1.norm1"] == after["blocks.1.norm1"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_files_of_folded_and_pruned_models_agree(name: str, precision: str, tmp_path: Path) -> None:
    if precision == "fp8" and name == "openvino":
        pytest.skip("no fp8 in OpenVINO")
    _, model, _ = pruned("layer_scale")
    x = images("layer_scale", dtype=torch.float32)
    engine = {"sm": (89,), "batch": (1, 2, 4)} if name == "trt-rtx" else {}
    done = write(model, x, tmp_path, name, TRACES, precision=precision, **engine)
    source = done.path.with_name(f"{done.path.name}.onnx") if engine else done.path
    contents = EXPORTERS["onnx" if engine else name].contents(source)  # type: ignore[misc]
    tensors = compare_tensors(model, contents)
    assert not tensors.problems and any("norm1.weight" in name for name in tensors.matches)
    record = {**json.loads(contents.metadata["quantization"]), "factors": {}}
    labels = {**contents.metadata, "quantization": json.dumps(record)}
    assert compare_tensors(model, replace(contents, metadata=labels)).problems  # they are rescaled
    assert {check.verdict for check in output_checks(source, Original(model, x))} <= {"passed", "not_run"}
    assert json.loads(done.metadata["quantization"])["factors"].keys() == family_of(model).normalized(model).keys()


def test_wrong_factors_and_norms_are_no_weights_of_the_model(tmp_path: Path) -> None:
    model, x = build("plain", dtype=torch.float32), images("plain", dtype=torch.float32)
    done = write(model, x, tmp_path, "onnx")

    def problems(path: Path, **changes: Any) -> tuple[str, ...]:
        contents = EXPORTERS["onnx"].contents(path)  # type: ignore[misc]
        record = json.loads(contents.metadata["quantization"])
        record["factors"] |= changes
        labels = {**contents.metadata, "quantization": json.dumps(record)}
        return compare_tensors(model, replace(contents, metadata=labels)).problems

    factors = json.loads(done.metadata["quantization"])["factors"]
    first, second = "blocks.0.norm1", "blocks.1.norm2"
    assert not problems(done.path)
    assert any(
        second in text for text in problems(done.path, **{second: [factors[second][0] + 1, *factors[second][1:]]})
    )
    for wrong in ({first: [0]}, {"norm": [0] * 16}, {first: [99] * 16}, {first: "x"}, {"": []}, {first: [0.5] * 16}):
        with pytest.raises(InputError):
            problems(done.path, **wrong)
    file = onnx.load(str(done.path))
    norm = next(t for t in file.graph.initializer if t.name == f"{second}.weight")
    norm.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(norm) * 2, norm.name))
    onnx.save(file, str(tmp_path / "other.onnx"))
    assert any(f"{second}.weight" in text for text in problems(tmp_path / "other.onnx"))
    assert "failed" in {check.verdict for check in output_checks(tmp_path / "other.onnx", Original(model, x))}


def test_a_dead_channel_of_a_norm_has_a_factor_that_fits() -> None:
    model, x = build("plain", dtype=torch.float32), images("plain", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.get_submodule("blocks.1.norm2").parameters():
            parameter[3] = 0.0
    factors = measure_factors(model, x)
    assert factors["blocks.1.norm2"][3] == -MOST
    torch.testing.assert_close(rescale(model, factors)(x), model(x), rtol=0, atol=0)


def test_exports_with_shared_traces_write_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without factors, of bytes, for TensorRT, in half precision and in another opset."""
    exporter, traces, count = torch.onnx.export, dict[Any, Any](), list[str]()
    model, x = build("plain", depth=1, dtype=torch.float32), images("plain", dtype=torch.float32)
    about: Any = {"input": input_config(model), "calibrate": lambda source: calibrate(source, x, "int8")}
    factors = measure_factors(model, x)
    monkeypatch.setattr(torch.onnx, "export", lambda *args, **options: count.append("") or exporter(*args, **options))
    int8, fp32 = ExportOptions(precision="int8"), ExportOptions()
    cases = [(options, scaled, True) for options, scaled in ((int8, 0), (fp32, 0), (int8, 1), (fp32, 1), (int8, 0))]
    cases += [(int8, 0, False), (fp32, 0, False), (int8, 1, False)]
    cases += [(ExportOptions(precision="fp16"), 0, True), (fp32, 0, True)]
    cases += [(replace(int8, uint8=True), 0, True), (replace(fp32, uint8=True), 0, True)]
    cases += [(replace(fp32, opset=22), 0, True), (replace(int8, opset=22), 0, True)]
    alone = dict[Any, Exported]()
    for number, (options, scaled, few) in enumerate(cases):
        form: Any = {"form": "unsigned_input" if few else "float_bias", "options": options, **about}
        more: Any = {"factors": factors} if scaled else {}
        shared = export(model, tmp_path / f"{number}.onnx", **form, **more, traces=traces)
        traced, same = len(count), (options, few, scaled and options.precision == "int8")  # fp32 has no factors
        if same not in alone:
            alone[same] = export(model, tmp_path / "alone.onnx", **form, **more)
            del count[traced:]
        assert shared.sha256 == alone[same].sha256 and shared.metadata == alone[same].metadata, (number, options)
    assert len(count) == 5, "fp32, rescaled, fp16, bytes, opset 22"
    doubled = {name: [exponent + 1 for exponent in exponents] for name, exponents in factors.items()}
    more = {"factors": doubled, "options": int8, **about}
    shared, own = (export(model, tmp_path / "other.onnx", **more, traces=kept).sha256 for kept in (traces, {}))
    assert shared == own, "other factors"
