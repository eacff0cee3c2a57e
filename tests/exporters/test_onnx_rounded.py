"""Rounding every result emulates half precision on a machine without kernels for it."""

from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
import torch
from contracts import WEIGHTS_IN_ONE_FILE, build, images, traces
from too_large import large_ffn
from torch import Tensor, nn

from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.onnx.rounded import rounded_logits, spell_out_casts
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.precision import convert_precision
from vitcompress.models.create import input_config

X = images("plain", dtype=torch.float32)


def exported(folder: Path, model: nn.Module, precision: str = "fp16", **options: object) -> Path:
    chosen = ExportOptions(precision=precision, **options)  # type: ignore[arg-type]
    return export(model, folder / f"{precision}.onnx", input=input_config(model), options=chosen).path


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the plain model in fp16; never changed."""
    return exported(tmp_path_factory.mktemp("half"), build("plain", dtype=torch.float32))


def bits(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return logits.to(dtype).float()


@torch.no_grad()
@pytest.mark.parametrize(("precision", "dtype", "digits"), [("fp16", torch.float16, 11), ("bf16", torch.bfloat16, 8)])
def test_every_result_is_one_of_half_precision(
    precision: str, dtype: torch.dtype, digits: int, half: Path, tmp_path: Path
) -> None:
    model = build("plain", dtype=torch.float32)
    logits = rounded_logits(half if precision == "fp16" else exported(tmp_path, model, precision), X)
    assert torch.equal(logits, bits(logits, dtype))
    expected = convert_precision(model, precision)(X)
    # The same roundings in another order, some forty from the images to the logits of two blocks, in both.
    torch.testing.assert_close(logits, expected, rtol=0, atol=80 * 2.0**-digits * float(expected.abs().max()))
    assert not torch.equal(logits, bits(model(X), dtype))


@torch.no_grad()
def test_fp32_layers_are_not_rounded(tmp_path: Path) -> None:
    model = build("plain", dtype=torch.float32)
    wide_head = rounded_logits(exported(tmp_path, model, islands=("head",)), X)
    assert not torch.equal(wide_head, bits(wide_head, torch.float16))


@torch.no_grad()
def test_an_overflow_shows(tmp_path: Path) -> None:
    model = large_ffn(build("plain", dtype=torch.float32))
    assert not torch.isfinite(rounded_logits(exported(tmp_path, model), X)).all()


@pytest.mark.parametrize("variant", ["swin", "pvt"])
def test_other_families(variant: str, tmp_path: Path) -> None:
    model, x = build(variant, dtype=torch.float32), images(variant, dtype=torch.float32)
    logits = rounded_logits(exported(tmp_path, model), x)
    with torch.no_grad():
        expected = convert_precision(model, "fp16")(x)
    torch.testing.assert_close(logits, expected, rtol=0, atol=120 * 2.0**-11 * float(expected.abs().max()))


def test_weights_in_a_file_of_their_own(half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WEIGHTS_IN_ONE_FILE, 0)
    model = build("plain", dtype=torch.float32)
    options = ExportOptions(precision="fp16")
    external = export(model, tmp_path / "external.onnx", input=input_config(model), options=options)
    assert len(external.files) == 2
    assert torch.equal(rounded_logits(external.path, X), rounded_logits(half, X))
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


def test_nothing_is_rounded_in_fp32(tmp_path: Path) -> None:
    model = build("plain", dtype=torch.float32)
    path = export(model, tmp_path / "fp32.onnx", input=input_config(model), traces=traces("plain")).path
    before, after = onnx.load(str(path)), spell_out_casts(onnx.load(str(path)))
    assert [node.op_type for node in before.graph.node] == [node.op_type for node in after.graph.node]
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    assert torch.equal(torch.from_numpy(session.run(None, {"images": X.numpy()})[0]), rounded_logits(path, X))
