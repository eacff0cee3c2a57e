"""Linear layers in int8 and fp8: the file computes what its emulation in torch computes, in three forms."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from contracts import build, images, traces
from onnx import numpy_helper
from torch import nn

from vitcompress.errors import InputError, PrecisionError
from vitcompress.exporters.base import Exported
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.onnx.file import read_contents
from vitcompress.exporters.onnx.rounded import open_changed, rounded_logits, unsigned_integers
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.quantize.calibrate import calibrate
from vitcompress.exporters.quantize.emulate import EightBitProducts, round_values
from vitcompress.exporters.quantize.graph import (
    LARGEST,
    Quantization,
    _store_in_half,
    find_products,
    find_wrong_steps,
    quantize,
)
from vitcompress.exporters.runtimes import EXPORTERS
from vitcompress.exporters.sidecar import amend_sidecar
from vitcompress.exporters.uint8 import from_bytes, to_bytes
from vitcompress.io import hardware
from vitcompress.io.checks import Check
from vitcompress.io.files import file_sha256
from vitcompress.models.create import input_config, plan_of
from vitcompress.verify import outputs
from vitcompress.verify.files import check_file, graph_checks
from vitcompress.verify.outputs import SHARES, Original, PlannedOriginal, output_checks
from vitcompress.verify.tolerance import quantization_limit
from vitcompress.verify.weights import compare_tensors

X = torch.cat([images("plain", dtype=torch.float32), images("plain", dtype=torch.float32).flip(3)])
INT8, UINT8 = onnx.TensorProto.INT8, onnx.TensorProto.UINT8
LAYERS = [f"blocks.{block}.{layer}" for block in (0, 1) for layer in ("attn.proj", "attn.qkv", "mlp.fc1", "mlp.fc2")]

SETS = hardware.instruction_sets() or {}
SATURATES = SETS.get("AVX2") and not SETS["VNNI"]  # see test_avx2.py


def model() -> nn.Module:
    """Logits that differ enough between classes."""
    torch.manual_seed(0)
    plain = build("plain", dtype=torch.float32)
    with torch.no_grad():
        plain.get_submodule("head").weight.mul_(30)
    return plain


TRACES: dict[Any, Any] = {}  # of `model()`


def write(folder: Path, source: nn.Module | None = None, method: Any = "minmax", **options: Any) -> Exported:
    kept, source = TRACES if source is None else {}, source or model()
    form = options.pop("form", "unsigned_input")
    settings = ExportOptions(**{"precision": "int8", **options})

    def ranges(path: Path) -> dict[str, float]:
        return calibrate(path, X, settings.precision, method)  # type: ignore[arg-type]

    about: Any = {"input": input_config(source), "calibrate": ranges, "traces": kept}
    return export(source, folder / "model.onnx", options=settings, form=form, **about)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Exported]:
    """Built once for each set of options, and never changed."""

    @cache
    def build_file(**options: Any) -> Exported:
        return write(tmp_path_factory.mktemp("file"), **options)

    return build_file


def settings_of(done: Exported) -> Quantization:
    return Quantization(**json.loads(done.metadata["quantization"]))


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_all_metadata_are_json(precision: str, file: Callable[..., Exported]) -> None:
    """As programs without vitcompress read them."""
    entries = {entry.key: json.loads(entry.value) for entry in onnx.load(file(precision=precision).path).metadata_props}
    assert entries["size"] == [3, 8, 8] and entries["quantization"]["precision"] == precision


def checks_of(path: Path) -> dict[str, Check]:
    return {check.name.rpartition(".")[2]: check for check in output_checks(path, Original(model(), X))}


@pytest.mark.parametrize("uint8", [False, True])
def test_the_file_computes_what_its_emulation_computes(tmp_path: Path, uint8: bool) -> None:
    """One layer at a time: after another that rounds, a difference of one bit may become one of a whole step."""
    exact, config = model(), input_config(model())
    plain = export(exact, tmp_path / "plain.onnx", options=ExportOptions(uint8=uint8), input=config, traces=TRACES).path
    x = from_bytes(to_bytes(X, config), config) if uint8 else X
    ranges = calibrate(plain, x, "int8")
    assert sorted(ranges) == sorted([*LAYERS, "head"])
    cases: list[Any] = [("int8", "int32_bias", 7), ("int8", "unsigned_input", 8), ("int8", "float_bias", 8)]
    for layer in LAYERS[4:]:
        for precision, form, bits in [*cases, ("fp8", "float_bias", 8)]:
            settings = Quantization(precision, {layer: ranges[layer]}, form, bits)
            quantize(plain, tmp_path / "model.onnx", settings)
            with torch.no_grad(), EightBitProducts(exact, settings):
                emulated = exact(x)
            with torch.no_grad():
                error = float((emulated - exact(x)).abs().max())
            # A value between two steps may be rounded to either: one of hundreds of errors of the same size.
            assert 0 < float((rounded_logits(tmp_path / "model.onnx", x) - emulated).abs().max()) + 1e-9 < 0.5 * error


def test_only_the_attentions_with_ranges_are_emulated() -> None:
    exact, x = model(), torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    blocks = [exact.get_submodule(f"blocks.{number}") for number in (0, 1)]
    ranges = {f"blocks.1.attn.softmax.{product}.{side}": 1.0 for product in (0, 1) for side in (0, 1)}
    with torch.no_grad():
        plain = [block(x) for block in blocks]
        with EightBitProducts(exact, Quantization("fp8", ranges, "float_bias")):
            emulated = [block(x) for block in blocks]
        assert torch.equal(emulated[0], plain[0]) and not torch.equal(emulated[1], plain[1])
        assert torch.equal(blocks[1](x), plain[1]), "hooks are left"
        linear, outputs = {"blocks.1.attn.qkv": 4.0}, []
        for parts in (linear, {**linear, **ranges}):  # the linear layer does not end the attention
            with EightBitProducts(exact, Quantization("fp8", parts, "float_bias")):
                outputs.append(blocks[1](x))
        assert not torch.equal(*outputs)


def test_values_beyond_the_range_are_clipped_as_in_the_file(tmp_path: Path) -> None:
    """int8 has one number more below 0 than above."""
    exact = model()
    plain = export(exact, tmp_path / "plain.onnx", input=input_config(exact), traces=TRACES).path
    settings = Quantization("int8", {LAYERS[5]: calibrate(plain, X, "int8")[LAYERS[5]] / 4}, "int32_bias", 7)
    quantize(plain, tmp_path / "model.onnx", settings)
    with torch.no_grad(), EightBitProducts(exact, settings):
        emulated = exact(X)
    served = rounded_logits(tmp_path / "model.onnx", X)
    with torch.no_grad():
        assert float((served - exact(X)).abs().max()) > 1e-3
    assert float((served - emulated).abs().max()) < 1e-6 * float(served.abs().max())


@pytest.mark.parametrize("form", ["int32_bias", "unsigned_input", "float_bias"])
def test_biases_are_rounded_as_in_the_file(tmp_path: Path, form: Any) -> None:
    """With a range so large that every input rounds to 0, the layer returns its bias in the steps of the products."""
    exact = model()
    plain = export(exact, tmp_path / "plain.onnx", input=input_config(exact), traces=TRACES).path
    settings = Quantization("int8", {LAYERS[5]: 1e6}, form, 8)
    quantize(plain, tmp_path / "model.onnx", settings)
    with torch.no_grad(), EightBitProducts(exact, settings):
        emulated = exact(X)
    served = rounded_logits(tmp_path / "model.onnx", X)
    assert float((served - emulated).abs().max()) < 1e-6 * float(served.abs().max())
    bias = exact.get_submodule(LAYERS[5]).bias
    with torch.no_grad(), EightBitProducts(exact, replace(settings, form="float_bias")):
        unrounded = exact(X)
    assert bias.abs().max() > 0 and (float((unrounded - emulated).abs().max()) > 1e-3) is (form != "float_bias")


@pytest.mark.parametrize("form", ["int32_bias", "unsigned_input", "float_bias"])
def test_a_row_of_zeros_keeps_its_bias(tmp_path: Path, form: Any) -> None:
    """The quantizer would round it to whole steps of the input, here of 1."""
    exact, layer = model(), LAYERS[5]
    with torch.no_grad():
        exact.get_parameter(f"{layer}.weight")[[0, 2, 3]] = 0
        exact.get_parameter(f"{layer}.bias")[:3] = torch.tensor([0.3, 5.0, -0.3])
        exact.get_parameter(f"{layer}.bias")[3] = 0
    plain = export(exact, tmp_path / "plain.onnx", input=input_config(exact)).path
    quantize(plain, tmp_path / "model.onnx", Quantization("int8", {layer: 127.0}, form, 8))
    stored = read_contents(tmp_path / "model.onnx").tensors
    (weight,) = [s.dequantized()[0] for s in stored if s.name.startswith(f"{layer}.weight") and s.dequantized]
    rows = weight if weight.shape == exact.get_parameter(f"{layer}.weight").shape else weight.T
    assert not rows[[0, 2, 3]].any() and rows[1].any()
    biases = [s.dequantized()[0] for s in stored if s.name.startswith(f"{layer}.bias") and s.dequantized]
    assert len(biases) == (form != "float_bias")
    for bias in biases:
        np.testing.assert_allclose(bias[[0, 2, 3]], [0.3, -0.3, 0.0], rtol=1e-6)


@pytest.mark.parametrize("size", [1e-37, 1e-44])
@pytest.mark.parametrize("part", ["a weight of one output", "all weights", "inputs"])
def test_values_of_nearly_zero_are_rounded_as_in_the_file(part: str, size: float, tmp_path: Path) -> None:
    """Steps, or those of biases, would be no normal numbers of float32: outputs of the emulation were NaN."""
    exact, layer = model(), LAYERS[5]
    with torch.no_grad():
        weight = exact.get_parameter(f"{layer}.weight")
        {"a weight of one output": weight[:1], "all weights": weight, "inputs": weight[:0]}[part].mul_(size)
    plain = export(exact, tmp_path / "plain.onnx", input=input_config(exact)).path
    cases: list[Any] = [("int8", "unsigned_input"), ("int8", "float_bias"), ("fp8", "float_bias")]
    for precision, form in cases:
        largest = size if part == "inputs" else calibrate(plain, X, precision)[layer]
        settings = Quantization(precision, {layer: largest}, form, 8)
        quantize(plain, tmp_path / "model.onnx", settings)
        with torch.no_grad(), EightBitProducts(exact, settings):
            emulated = exact(X)
        served = rounded_logits(tmp_path / "model.onnx", X)
        assert float((served - emulated).abs().max()) < 1e-4 * float(served.abs().max())
        assert find_wrong_steps(tmp_path / "model.onnx", settings) == []
        assert np.isfinite(quantization_limit(exact, X, settings).logit)


@pytest.mark.parametrize("variant", ["plain", "pvt"])
def test_unsigned_inputs_have_the_values_of_signed_ones(variant: str, tmp_path: Path) -> None:
    """ONNX Runtime has no fast kernel for a signed input of several products, such as q and kv of the last PVTv2."""
    source, x = build(variant, dtype=torch.float32), images(variant, dtype=torch.float32)
    about: Any = {"input": input_config(source), "calibrate": lambda path: calibrate(path, x, "int8")}
    about["traces"] = traces(variant)
    logits, inputs = [], []
    for form in ("int32_bias", "unsigned_input"):
        options = ExportOptions("int8")
        path = export(source, tmp_path / f"{form}.onnx", options=options, form=form, **about).path  # type: ignore[arg-type]
        logits.append(rounded_logits(path, x))
        graph = onnx.load(str(path)).graph
        types = {tensor.name: tensor.data_type for tensor in graph.initializer}
        inputs.append([types[node.input[2]] for node in graph.node if node.op_type == "QuantizeLinear"])
    assert torch.equal(*logits) and [set(kinds) for kinds in inputs] == [{INT8}, {UINT8}]
    optimized = optimize(path)
    products = [node for node in optimized.graph.node if node.op_type == "QGemm"]
    types = {tensor.name: tensor.data_type for tensor in optimized.graph.initializer}
    assert len(products) > 4 and {types[node.input[2]] for node in products} == {UINT8}
    readers = [node.input[0] for node in products]
    assert (len(set(readers)) < len(readers)) is (variant == "pvt")


def optimize(path: Path) -> Any:
    """The graph that ONNX Runtime executes."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path.with_suffix(".optimized"))
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return onnx.load(options.optimized_model_filepath)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_the_forms_share_one_calibration(file: Callable[..., Exported], precision: str) -> None:
    ours, theirs = (file(precision=precision, form=form) for form in ("unsigned_input", "float_bias"))
    a, b = (settings_of(done) for done in (ours, theirs))
    assert a.ranges == b.ranges and (a.weight_bits, b.weight_bits) == (7, 8)
    cores = [key for key in a.ranges if ".softmax." in key]
    assert len(cores) == (8 if precision == "fp8" else 0)  # two products with two inputs in each of two attentions
    kinds = {t.data_type for t in onnx.load(str(theirs.path)).graph.initializer if "bias" in t.name}
    assert kinds == {onnx.TensorProto.FLOAT}
    if precision == "int8":
        weights = [t for t in onnx.load(str(ours.path)).graph.initializer if t.name.endswith("weight_quantized")]
        sizes = [int(np.abs(onnx.numpy_helper.to_array(tensor).astype(int)).max()) for tensor in weights]
        assert sizes == [64] * len(LAYERS)


@pytest.mark.parametrize(
    "options", [{}, {"weight_bits": 8}, {"form": "float_bias"}, {"uint8": True}, {"precision": "fp8"}]
)
def test_outputs_and_weights_agree_with_the_model(file: Callable[..., Exported], options: dict[str, Any]) -> None:
    done = file(**options)
    contents = EXPORTERS["onnx"].contents(done.path)  # type: ignore[misc]
    tensors = compare_tensors(model(), contents)
    assert not tensors.problems and {f"{layer}.weight" for layer in LAYERS} <= set(tensors.matches)
    checks = checks_of(done.path)
    assert {"flips", "kl", "cosine", "error"} | ({"saturation"} if done.precision == "int8" else set()) <= set(checks)
    failed = {name for name, check in checks.items() if check.verdict == "failed"}
    assert "saturation" in failed if SATURATES and "weight_bits" in options else not failed


@pytest.mark.parametrize(
    ("variant", "layers"), [("plain", ("blocks.0.mlp.fc1", "blocks.1.mlp.fc1")), ("distilled", ("head", "head_dist"))]
)
def test_equal_layers_have_their_own_tensors_and_ranges(variant: str, layers: tuple[str, str], tmp_path: Path) -> None:
    """torch stores small equal tensors once. Here the second layer has larger inputs."""
    source = build(variant, dtype=torch.float32)
    first, second = (source.get_submodule(layer) for layer in layers)
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        source.get_submodule("blocks.1.norm2").weight.mul_(4)
    done = write(tmp_path, source)
    ranges = settings_of(done).ranges
    if variant == "plain":
        assert ranges[layers[1]] > 2 * ranges[layers[0]]
    assert _problems(source, done.path) == ()
    contents = EXPORTERS["onnx"].contents(done.path)  # type: ignore[misc]
    matches = compare_tensors(source, contents).matches
    names = [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    assert all(matches[name].name.startswith(name) for name in names)
    checks = output_checks(done.path, Original(source, images(variant, dtype=torch.float32)))
    assert {check.verdict for check in checks} == {"passed"}


def test_a_weight_off_by_more_than_half_a_step_is_no_weight_of_the_model(tmp_path: Path) -> None:
    done, other = write(tmp_path), model()
    with torch.no_grad():
        weight = other.get_submodule("blocks.1.mlp.fc2").weight
        place, step = (3, int(weight[3].abs().argmin())), float(weight[3].abs().max()) / 64
        stored = round(float(weight[place]) / step) * step
        weight[place] = stored + 0.6 * step
    contents = EXPORTERS["onnx"].contents(done.path)  # type: ignore[misc]
    problems = compare_tensors(other, contents).problems
    assert any("blocks.1.mlp.fc2.weight" in problem for problem in problems)


def test_damaged_outputs_and_saturation_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = write(tmp_path)
    assert {check.verdict for check in checks_of(done.path).values()} == {"passed"}
    with monkeypatch.context() as patch:
        patch.setattr(outputs, "open_changed", lambda *args, **options: lambda x: [out + 1.0 for out in call(x)])
        call = open_changed(done.path, unsigned_integers(onnx.load(str(done.path))).SerializeToString(), optimize=True)
        assert {checks_of(done.path)[name].verdict for name in ("saturation", "emulation")} == {"failed"}
    wrong = onnx.load(str(done.path))
    scale = next(t for t in wrong.graph.initializer if t.name == "blocks.1.mlp.fc2.weight_scale")
    scale.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale) * 8, scale.name))
    (tmp_path / "model.onnx.json").unlink()
    onnx.save(wrong, str(done.path))
    assert checks_of(done.path)["error"].verdict == "failed"


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_another_scale_of_the_scores_is_detected(tmp_path: Path, precision: str) -> None:
    """It changes the logits by less than the limit of fp8 allows."""
    done = write(tmp_path, precision=precision, form="float_bias")
    assert "failed" not in {check.verdict for check in checks_of(done.path).values()}
    wrong = onnx.load(str(done.path))
    product = next(node for node in wrong.graph.node if node.name == "blocks.0.attn.softmax.0")
    source = {name: node for node in wrong.graph.node for name in node.output}
    node = source[product.input[0]]
    while node.op_type != "Mul":
        node = source[node.input[0]]
    scale = next(t for t in wrong.graph.initializer if t.name in node.input)
    scale.CopyFrom(numpy_helper.from_array(np.float32(1.3) * numpy_helper.to_array(scale), scale.name))
    (tmp_path / "model.onnx.json").unlink()
    onnx.save(wrong, str(done.path))
    checks = checks_of(done.path)
    assert checks["emulation"].verdict == "failed" and checks["error"].verdict == "passed"


@pytest.mark.parametrize("bits", [7, 8])
def test_saturated_products_are_detected(tmp_path: Path, bits: Any) -> None:
    """Products of 8 bits saturate without VNNI; all others are the same to the bit. test_avx2.py runs both kernels."""
    source = model()
    with torch.no_grad():
        for layer in LAYERS:  # weights near the largest one in each row, as pairs must be to saturate
            (weight := source.get_parameter(f"{layer}.weight")).copy_(weight.sign() * weight.abs().clamp(min=0.08))
    done = write(tmp_path, source, weight_bits=bits)
    checks = {check.name.rpartition(".")[2]: check for check in output_checks(done.path, Original(source, X))}
    if bits == 8 and SATURATES:
        assert checks["saturation"].verdict == "failed"
    else:
        assert checks["saturation"].value == 0 and {check.verdict for check in checks.values()} == {"passed"}


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_limits_follow_from_the_steps(file: Callable[..., Exported], precision: str) -> None:
    settings, exact = settings_of(file(precision=precision)), model()
    limit = quantization_limit(exact, X, settings)
    with torch.no_grad(), EightBitProducts(exact, settings):
        emulated = exact(X)
    with torch.no_grad():
        error = float((emulated - exact(X)).abs().max())
    assert 0 < error < limit.logit < 100 * error
    coarse = Quantization(settings.precision, {k: 16 * v for k, v in settings.ranges.items()}, weight_bits=7)
    assert (quantization_limit(exact, X, coarse).logit > 4 * limit.logit) is (precision == "int8")


def test_shares_are_derived_from_roundings() -> None:
    """Half a step of int8 is a roundoff of bf16, 2^-8, of the range. fp8: Gaussian values of four deviations."""
    assert SHARES["int8"] == SHARES["bf16"]
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).clamp(-4, 4)
    errors = [(round_values(x, 4 / LARGEST[kind], kind) - x).square().mean().sqrt() for kind in ("int8", "fp8")]
    assert SHARES["fp8"] / SHARES["int8"] == pytest.approx(float(errors[1] / errors[0]), rel=0.1)


@pytest.mark.parametrize("method", ["percentile", "entropy", "mse"])
def test_other_methods_cut_off_at_most_the_largest_values(tmp_path: Path, method: str) -> None:
    done = write(tmp_path, method=method)
    largest = settings_of(write(tmp_path)).ranges
    ranges = settings_of(done).ranges
    assert all(0 < ranges[layer] <= largest[layer] * (1 + 1e-6) for layer in LAYERS) and ranges != largest
    if method == "percentile":  # hardly any value is beyond; also where they are negative
        assert all(ranges[layer] > 0.8 * largest[layer] for layer in LAYERS)


@pytest.mark.parametrize("method", ["percentile", "entropy", "mse"])
def test_inputs_of_nearly_equal_values_have_ranges(tmp_path: Path, method: Any) -> None:
    """Their histogram would have bins without a width."""
    exact = model()
    with torch.no_grad():
        norm = exact.get_submodule("blocks.1.norm2")
        norm.weight.fill_(1e-6)
        norm.bias.fill_(2.0)
    plain = export(exact, tmp_path / "plain.onnx", input=input_config(exact)).path
    assert calibrate(plain, X, "int8", method)["blocks.1.mlp.fc1"] == pytest.approx(2.0, rel=0.02)


def test_percentile_leaves_out_one_value_of_ten_thousand_and_mse_has_the_least_error(tmp_path: Path) -> None:
    exact, inputs = model(), dict[str, torch.Tensor]()
    plain = export(exact, tmp_path / "plain.onnx", input=input_config(exact), traces=TRACES).path
    for name in LAYERS:
        exact.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: inputs.update({name: args[0].detach().abs().flatten()})
        )
    many = torch.randn(200, *X.shape[1:], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact(many)
    ranges = calibrate(plain, many, "int8", "percentile")
    beyond = [float((values > ranges[name]).double().mean()) for name, values in inputs.items()]
    assert 5e-5 < sum(beyond) / len(beyond) < 4e-4  # the histograms of the tails are coarse
    after_gelu = next(share for name, share in zip(inputs, beyond, strict=True) if "fc2" in name)
    assert after_gelu > 7.5e-5  # of the values of one sign, too, one of ten thousand and not of twenty thousand

    def errors(method: Any) -> list[float]:
        steps = {name: largest / 127 for name, largest in calibrate(plain, many, "int8", method).items()}
        return [float((round_values(x, steps[name], "int8") - x).square().sum()) for name, x in first.items()]

    first = {name: values for name, values in inputs.items() if "blocks.0" in name}  # the last one has fewer tokens
    least = errors("mse")
    for other in map(errors, ("minmax", "percentile", "entropy")):
        assert sum(least) < sum(other) and all(x <= 1.01 * y for x, y in zip(least, other, strict=True))


def test_random_errors_are_at_most_those_of_rounding() -> None:
    """Half the distance to the next number of E4M3: 4 significant bits, and a smallest normal number of 2^-6."""
    x = torch.logspace(-3, 2, 100_000)
    half = {"int8": torch.full_like(x, 0.5), "fp8": 2.0 ** (x.log2().floor().clamp(min=-6) - 4)}
    for precision, largest in half.items():
        for generator in (None, torch.Generator().manual_seed(0)):
            errors = (round_values(x, 1.0, precision, generator) - x).abs() / largest
            parts = (x < 2**-6, x >= 2**-6) if precision == "fp8" else (x > 0.5,)
            assert all(0.99 < float(errors[part].max()) < 1.0001 for part in parts)


def test_islands_without_a_product_are_rejected(tmp_path: Path) -> None:
    for islands, precision in (
        (("norm",), "int8"),
        (("blocks.0.mlp", "softmax"), "int8"),
        (("blocks.0.norm1",), "fp8"),
    ):
        form = "float_bias" if precision == "fp8" else "unsigned_input"
        with pytest.raises(InputError, match=f"the island {islands[-1]} has no effect in {precision}"):
            write(tmp_path, islands=islands, precision=precision, form=form)
    assert not list(tmp_path.iterdir())
    write(tmp_path, islands=("softmax",), precision="fp8", form="float_bias")


def test_islands_head_and_patch_embedding_stay_in_float(file: Callable[..., Exported]) -> None:
    done = file(islands=("blocks.0.mlp", "blocks.1.attn.qkv"))
    kept = {"blocks.0.mlp.fc1", "blocks.0.mlp.fc2", "blocks.1.attn.qkv"}
    assert set(settings_of(done).ranges) == set(LAYERS) - kept
    assert json.loads(done.metadata["islands"]) == ["blocks.0.mlp", "blocks.1.attn.qkv", "head", "patch_embed.proj"]
    types = {t.name: t.data_type for t in onnx.load(str(done.path)).graph.initializer}
    full, half = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
    assert {types[f"{layer}.weight"] for layer in kept} == {full}
    stored = {"pos_embed.half", "patch_embed.proj.weight.half", "head.weight.half"}
    assert {name for name, kind in types.items() if kind == half} == stored


@pytest.mark.parametrize("uint8", [False, True])
def test_what_stays_in_float_is_stored_in_half(tmp_path: Path, uint8: bool) -> None:
    """Each of these tensors is compared with the model, within half a step; islands are not rounded."""
    done = write(tmp_path, uint8=uint8)
    for name in ("pos_embed", "patch_embed.proj.weight", "head.weight"):
        with torch.no_grad():
            (other := model()).get_parameter(name).mul_(1 + 2**-9)
        assert _problems(model(), done.path) == () and any(name in problem for problem in _problems(other, done.path))
    (tmp_path / "island").mkdir()
    island = write(tmp_path / "island", uint8=uint8, islands=("head",))
    with torch.no_grad():
        (other := model()).get_parameter("head.weight").mul_(1 + 2**-20)
    assert _problems(model(), island.path) == () and any("head.weight" in p for p in _problems(other, island.path))


def test_only_named_tensors_may_be_stored_in_half(tmp_path: Path) -> None:
    done = write(tmp_path, islands=("blocks.0.mlp",))
    assert _problems(model(), done.path) == ()
    wrong = onnx.load(str(done.path))
    _store_in_half(wrong, {"blocks.0.mlp.fc1.weight"})
    onnx.save(wrong, str(done.path))
    assert any("blocks.0.mlp.fc1.weight" in problem for problem in _problems(model(), done.path))


def test_a_weight_beyond_the_range_of_fp16_stays_in_fp32(tmp_path: Path) -> None:
    with torch.no_grad():
        (wide := model()).get_parameter("patch_embed.proj.weight")[0, 0, 0, 0] = 1e5
    done = write(tmp_path, wide)
    types = {t.name: t.data_type for t in onnx.load(str(done.path)).graph.initializer}
    assert types["patch_embed.proj.weight"] == onnx.TensorProto.FLOAT and _problems(wide, done.path) == ()


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("part", ["scale", "zero point"])
def test_another_scale_or_zero_point_of_a_weight_is_a_problem(tmp_path: Path, precision: str, part: str) -> None:
    done = write(tmp_path, precision=precision)
    assert _problems(model(), done.path) == ()
    wrong = onnx.load(str(done.path))
    named = {tensor.name: tensor for tensor in wrong.graph.initializer}
    weights = (n for n in wrong.graph.node if n.op_type == "DequantizeLinear" and "fc1.weight" in n.input[0])
    tensor = named[next(weights).input[{"scale": 1, "zero point": 2}[part]]]
    values = onnx.numpy_helper.to_array(tensor)
    changed = (values.astype(np.float32) * 1.1 if part == "scale" else values.astype(np.float32) + 4).astype(
        values.dtype
    )
    tensor.CopyFrom(onnx.numpy_helper.from_array(changed, tensor.name))
    onnx.save(wrong, str(done.path))
    assert any("fc1.weight" in problem for problem in _problems(model(), done.path))


def _larger_scale(graph: Any, tensors: dict[str, Any], write: Any, read: Any) -> None:
    _store(tensors[read.input[1]], lambda scale: scale * np.float32(1.01))


def _other_zero_point(graph: Any, tensors: dict[str, Any], write: Any, read: Any) -> None:
    _store(tensors[read.input[2]], lambda zero: (zero.astype(float) + 1).astype(zero.dtype))


def _scale_of_another_layer(graph: Any, tensors: dict[str, Any], write: Any, read: Any) -> None:
    write.input[1] = read.input[1] = next(name for name in tensors if name.endswith("_scale") and name != read.input[1])


def _two_scales(graph: Any, tensors: dict[str, Any], write: Any, read: Any) -> None:
    graph.initializer.add().CopyFrom(tensors[read.input[1]])
    read.input[1] = graph.initializer[-1].name = "other"
    _store(graph.initializer[-1], lambda scale: scale * np.float32(1.01))


def _computed_input_scale(graph: Any, tensors: dict[str, Any], write: Any, read: Any) -> None:
    graph.node.insert(0, onnx.helper.make_node("Identity", [read.input[1]], ["computed"]))
    write.input[1] = read.input[1] = "computed"


def _no_rounding(graph: Any, tensors: dict[str, Any], write: Any, read: Any) -> None:
    for node in graph.node:
        node.input[:] = [write.input[0] if name == read.output[0] else name for name in node.input]


def _store(tensor: Any, change: Callable[[Any], Any]) -> None:
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), tensor.name))


INPUT_DAMAGES = [_larger_scale, _other_zero_point, _scale_of_another_layer, _two_scales, _no_rounding]


@pytest.mark.parametrize("damage", [*INPUT_DAMAGES, _computed_input_scale])
@pytest.mark.parametrize("options", [{}, {"form": "float_bias"}, {"precision": "fp8", "form": "float_bias"}])
def test_another_scale_or_zero_point_of_an_input_is_a_problem(
    damage: Callable[..., None], options: dict[str, Any], file: Callable[..., Exported], tmp_path: Path
) -> None:
    """Outputs within their limits do not show it."""
    done, source = file(**options), model()
    wrong = onnx.load(str(done.path))
    reads = {node.input[0]: node for node in wrong.graph.node if node.op_type == "DequantizeLinear"}
    write = [node for node in wrong.graph.node if node.op_type == "QuantizeLinear"][-1]
    damage(wrong.graph, {tensor.name: tensor for tensor in wrong.graph.initializer}, write, reads[write.output[0]])
    onnx.save(wrong, str(tmp_path / "model.onnx"))
    checks = [{c.name: c.verdict for c in graph_checks(source, p, "x")} for p in (done.path, tmp_path / "model.onnx")]
    assert [verdicts["x.steps"] for verdicts in checks] == ["passed", "failed"]


def test_another_epsilon_of_a_layer_norm_is_a_problem(file: Callable[..., Exported], tmp_path: Path) -> None:
    """Outputs do not show it, because rounding to eight bits changes them more."""
    source, path = model(), tmp_path / "model.onnx"
    wrong = onnx.load(str(file().path))
    norm = next(node for node in wrong.graph.node if node.op_type == "LayerNormalization")
    next(attribute for attribute in norm.attribute if attribute.name == "epsilon").f *= 1000
    onnx.save(wrong, str(path))
    assert {check.verdict for check in output_checks(path, Original(source, X))} == {"passed"}
    checks = [{c.name: c for c in graph_checks(source, p, "x")}["x.layers"] for p in (file().path, path)]
    assert [check.verdict for check in checks] == ["passed", "failed"]
    assert "LayerNormalization with epsilon 0.001: 1 in the file, 0 in torch" in checks[1].detail


def test_an_input_of_several_products_has_the_largest_of_their_ranges(tmp_path: Path) -> None:
    """As after a training of the ranges."""
    source, x = build("pvt", dtype=torch.float32), images("pvt", dtype=torch.float32)
    config, changes = input_config(source), {"stages.1.blocks.0.attn.q": 2.0, "stages.1.blocks.0.attn.kv": 3.0}
    ranges: Any = lambda path: {**calibrate(path, x, "int8"), **changes}  # noqa: E731
    done = export(source, tmp_path / "m.onnx", options=ExportOptions("int8"), input=config, calibrate=ranges)
    assert find_wrong_steps(done.path, settings_of(done)) == []
    changed = replace(settings_of(done), ranges={**settings_of(done).ranges, "stages.1.blocks.0.attn.kv": 4.0})
    assert set(find_wrong_steps(done.path, changed)) == set(changes)


def _problems(source: nn.Module, path: Path) -> tuple[str, ...]:
    contents = EXPORTERS["onnx"].contents(path)  # type: ignore[misc]
    return compare_tensors(source, contents).problems


def _another_axis(graph: Any, node: Any) -> None:
    node.attribute[0].i = 0


def _no_axis(graph: Any, node: Any) -> None:
    node.attribute[0].i = 9


def _computed_scale(graph: Any, node: Any) -> None:
    graph.node.insert(0, onnx.helper.make_node("Identity", [node.input[1]], ["computed"]))
    node.input[1] = "computed"


def _shorter_scale(graph: Any, node: Any) -> None:
    scale = next(tensor for tensor in graph.initializer if tensor.name == node.input[1])
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale)[:-1], scale.name))


def _computed_zero_point(graph: Any, node: Any) -> None:
    graph.node.insert(0, onnx.helper.make_node("Identity", [node.input[2]], ["computed"]))
    node.input[2] = "computed"


def _unknown_type(graph: Any, node: Any) -> None:
    graph.initializer[0].data_type = 99


def _undefined_type(graph: Any, node: Any) -> None:
    graph.initializer[0].data_type = onnx.TensorProto.UNDEFINED


def _wrong_sizes(graph: Any, node: Any) -> None:
    shapes = {node.input[1] for node in graph.node if node.op_type == "Reshape"}
    sizes = next(tensor for tensor in graph.initializer if tensor.name in shapes and tensor.dims[0] > 1)
    sizes.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(sizes) + 1, sizes.name))


@pytest.mark.parametrize(
    "damage",
    [
        _another_axis,
        _no_axis,
        _computed_scale,
        _computed_zero_point,
        _shorter_scale,
        _unknown_type,
        _undefined_type,
        _wrong_sizes,
    ],
)
def test_a_damaged_graph_fails_its_checks(damage: Callable[[Any, Any], None], tmp_path: Path) -> None:
    """Whatever is wrong in it: other files of a folder are checked after it."""
    done = write(tmp_path)
    wrong = onnx.load(str(done.path))
    reads = (node for node in wrong.graph.node if node.op_type == "DequantizeLinear")
    damage(wrong.graph, next(node for node in reads if node.input[0].endswith(".weight_quantized")))
    onnx.save(wrong, str(done.path))
    amend_sidecar(done.path, files={done.path.name: file_sha256(done.path)})
    checks, _ = check_file(done.path, PlannedOriginal(model(), X, plan=plan_of(model())))
    failed = {check.name for check in checks if check.verdict == "failed"}
    assert failed & {f"weights.{done.path.name}", f"agreement.{done.path.name}"}


def test_the_zero_point_of_a_weight_may_be_omitted(tmp_path: Path) -> None:
    """Without one it is 0."""
    done = write(tmp_path)
    file = onnx.load(str(done.path))
    for node in (node for node in file.graph.node if node.op_type == "DequantizeLinear"):
        if node.input[0].endswith(".weight_quantized"):
            del node.input[2]
    onnx.save(file, str(done.path))
    assert compare_tensors(model(), read_contents(done.path)).problems == ()


@pytest.mark.parametrize(("key", "value"), [("precision", '"fp32"'), ("precision", '"fp8"'), ("quantization", "null")])
def test_precision_and_quantization_belong_together(key: str, value: str, tmp_path: Path) -> None:
    done = write(tmp_path)
    wrong = onnx.load(str(done.path))
    next(entry for entry in wrong.metadata_props if entry.key == key).value = value
    onnx.save(wrong, str(done.path))
    amend_sidecar(done.path, files={done.path.name: file_sha256(done.path)})
    checks, _ = check_file(done.path, PlannedOriginal(model(), X, plan=plan_of(model())))
    failed = {check.name: check.detail for check in checks if check.verdict == "failed"}
    assert any(name.startswith("agreement.") for name in failed)
    assert "the metadata state the precision" in failed[f"weights.{done.path.name}"]


def test_two_exports_are_the_same_bytes(tmp_path: Path) -> None:
    first = write(tmp_path).path.read_bytes()
    assert write(tmp_path, model()).path.read_bytes() == first  # traced again


@pytest.mark.parametrize("form", ["unsigned_input", "int32_bias", "float_bias"])
def test_products_alone_read_rounded_values(form: str, tmp_path: Path) -> None:
    """The convolutions of PVTv2 read the outputs of LayerNorms, too, and stay in fp32."""
    (source := build("pvt", dtype=torch.float32)).eval()
    x = images("pvt", count=8, dtype=torch.float32)
    about: Any = {"input": input_config(source), "calibrate": lambda path: calibrate(path, x, "int8")}
    options = ExportOptions(precision="int8")
    path = export(source, tmp_path / "m.onnx", options=options, form=form, **about).path  # type: ignore[arg-type]
    nodes = onnx.load(str(path)).graph.node
    assert any(node.op_type == "Conv" for node in nodes)
    rounded = {node.output[0] for node in nodes if node.op_type == "QuantizeLinear"}
    rounded = {node.output[0] for node in nodes if node.input[0] in rounded}
    readers = {node.op_type for node in nodes if rounded & {*node.input}}
    assert readers and readers <= {"Gemm", "MatMul"}


def test_stated_ranges_need_no_images(tmp_path: Path) -> None:
    """As after a training with fixed or learned ranges."""
    about: Any = {"input": input_config(model()), "calibrate": lambda path: dict.fromkeys(LAYERS, 3.0)}
    about["traces"] = TRACES
    done = export(model(), tmp_path / "model.onnx", options=ExportOptions(precision="int8"), **about)
    assert set(settings_of(done).ranges.values()) == {3.0}


def infinite_weight() -> nn.Module:
    broken = model()
    with torch.no_grad():
        broken.get_submodule("blocks.0.mlp.fc1").weight[0, 0] = float("inf")
    return broken


def test_wrong_input(tmp_path: Path) -> None:
    plain = export(model(), tmp_path / "plain.onnx", input=input_config(model()), traces=TRACES)
    for wrong, text in (
        (X[:, :, :5], "calibration needs images of"),
        (X[:0], "calibration needs images of"),
        (torch.zeros_like(X), "single color"),
    ):
        with pytest.raises(InputError, match=text):
            calibrate(plain.path, wrong, "int8")
    with pytest.raises(PrecisionError, match="nan on the calibration images"):
        calibrate(plain.path, X * float("nan"), "int8")
    for ranges, error, text in (
        ({}, PrecisionError, "no linear layer is left"),
        ({LAYERS[0]: float("nan")}, PrecisionError, f"the input of {LAYERS[0]} is nan"),
        ({LAYERS[0]: float("inf")}, PrecisionError, "is inf"),
    ):
        with pytest.raises(error, match=text):
            quantize(plain.path, tmp_path / "none.onnx", Quantization("int8", ranges))
    broken = onnx.load(str(export(infinite_weight(), tmp_path / "inf.onnx", input=input_config(model())).path))
    assert len(list(find_products(broken, "int8"))) == len(LAYERS) + 1  # and the head
    with pytest.raises(PrecisionError, match=r"mlp\.fc1\.weight is inf"):
        quantize(tmp_path / "inf.onnx", tmp_path / "none.onnx", Quantization("fp8", dict.fromkeys(LAYERS, 1.0)))
    assert not (tmp_path / "none.onnx").exists()


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("onnx", {"precision": "int8", "opset": 18}, "opset 18 is not supported"),
        ("onnx", {"precision": "int8+bf16"}, "use one of fp32.* or --format openvino"),
        ("onnx", {"precision": "fp8", "opset": 23}, "one node"),
        ("onnx", {"precision": "fp32", "weight_bits": 7}, "weight_bits has no effect in fp32"),
        ("onnx", {"precision": "fp16", "calibration": 8}, "calibration has no effect in fp16"),
        ("onnx", {"precision": "fp8", "weight_bits": 7}, "weight_bits has no effect in fp8"),
        ("trt-rtx", {"precision": "fp8", "sm": (80, 89)}, "fp8 needs compute capability 89 .Ada. or later, got 80:"),
        ("trt-rtx", {"precision": "fp8"}, "fp8 needs compute capability 89 .Ada. or later, got 80, 86"),
        ("trt-rtx", {"precision": "int8", "sm": (75,)}, "supports fp16 only"),
        (
            "trt-rtx",
            {"precision": "int8+bf16"},
            "no precision 'int8.bf16': use one of tf32, fp32, fp16, bf16, int8, fp8",
        ),
    ],
)
def test_unsupported_options(name: str, options: dict[str, Any], text: str) -> None:
    if EXPORTERS[name].unavailable() is None:
        with pytest.raises(InputError) as caught:
            EXPORTERS[name].check(ExportOptions(**options))
        assert re.search(text, f"{caught.value.message}: {caught.value.hint}")


def test_fp8_is_for_all_compute_capabilities_from_ada_on() -> None:
    for target in (89, 90, 100, 103, 120, 121):
        EXPORTERS["trt"].check(ExportOptions("fp8", sm=(target,)))
    with pytest.raises(InputError, match=r"fp8 needs compute capability 89 \(Ada\) or later, got 86, 87"):
        EXPORTERS["trt"].check(ExportOptions("fp8", sm=(89, 86, 87)))


def test_without_images_there_are_no_ranges(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs images of the training data"):
        export(model(), tmp_path / "model.onnx", options=ExportOptions(precision="int8"), input=input_config(model()))
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(EXPORTERS["trt-rtx"].unavailable() is not None, reason="TensorRT for RTX is not installed")
@pytest.mark.parametrize(("precision", "sm"), [("int8", (80, 89)), ("fp8", (89, 120))])
def test_two_engines_have_the_same_bytes_or_in_int8_the_same_size(
    tmp_path: Path, precision: Any, sm: tuple[int, ...]
) -> None:
    def ranges(path: Path) -> dict[str, float]:
        return calibrate(path, X, precision)

    about: Any = {"input": input_config(model()), "calibrate": ranges}
    options = ExportOptions(precision=precision, sm=sm, batch=(1, 2, 4))
    first, second = (  # the second one is traced again
        EXPORTERS["trt-rtx"].export(model(), tmp_path / f"{n}.rtx.engine", options=options, traces=kept, **about)
        for n, kept in (("a", TRACES), ("b", {}))
    )
    # In int8, internal names inside an engine may differ.
    assert first.bytes == second.bytes if precision == "int8" else first.sha256 == second.sha256
    assert first.build["sm"] == list(sm)
    assert settings_of(first).form == "float_bias" and settings_of(first).weight_bits == 8


def test_a_file_that_takes_bytes_stores_the_same_tensors_in_half(tmp_path: Path) -> None:
    stored = []
    for uint8 in (False, True):
        (tmp_path / str(uint8)).mkdir()
        graph = onnx.load(str(write(tmp_path / str(uint8), uint8=uint8).path)).graph
        halves = [tensor.name for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT16]
        stored.append({name.removesuffix(".half") for name in halves})
    assert stored == 2 * [{"patch_embed.proj.weight", "pos_embed", "head.weight"}]
