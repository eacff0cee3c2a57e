"""Sound files of every family agree with their model in every precision; a file with one damaged tensor does not."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from contracts import build, traces
from onnx import numpy_helper

from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.runtimes import EXPORTERS
from vitcompress.exporters.tensorrt.export import source_path
from vitcompress.models.create import input_config
from vitcompress.verify.outputs import SHARES, Original, output_checks

VARIANTS = ("plain", "dinov3", "beit", "swin", "pvt")  # one of each family
PRECISIONS = ("fp32", "fp16", "bf16")
# With images of data and with noise, so that both meet every precision. OpenVINO: each variant in one precision.
ROWS = [
    (variant, form, precision, (number + index) % 2 == 0)
    for number, variant in enumerate(VARIANTS)
    for index, precision in enumerate(PRECISIONS)
    for form in ("onnx", "openvino")
    if form == "onnx" or index == number % 3
]
ROWS += [("plain", "trt-rtx", "fp16", False)]
Export = Callable[[str, str, str], tuple[Path, Original]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """A file that this machine can run, and its model; of an engine the ONNX file that it is built from."""

    @cache
    def export(variant: str, form: str, precision: str) -> tuple[Path, Original]:
        if reason := EXPORTERS[form].unavailable():
            pytest.skip(reason)
        model = build(variant, dtype=torch.float32)
        more = {"sm": (80,), "batch": (1, 4, 8)} if form == "trt-rtx" else {}
        path, config = tmp_path_factory.mktemp(variant) / f"model{EXPORTERS[form].suffix}", input_config(model)
        options, about = ExportOptions(precision=precision, **more), {"input": config, "traces": traces(variant)}
        EXPORTERS[form].export(model, path, options=options, **about)
        noise = torch.randn(32, *config.size, generator=torch.Generator().manual_seed(0))
        return source_path(path) if form == "trt-rtx" else path, Original(model, noise)

    return export


@pytest.mark.parametrize(("variant", "form", "precision", "real"), ROWS)
def test_a_sound_file_agrees(variant: str, form: str, precision: str, real: bool, exported: Export) -> None:
    path, original = exported(variant, form, precision)
    if real:  # an image and small changes of it: more of them have near ties than noise
        shown = original.images[:1] + 0.01 * original.images.repeat(4, 1, 1, 1)
        original = Original(original.model, shown)
    checks = output_checks(path, original)
    assert [(check.name, check.detail) for check in checks if check.verdict == "failed"] == []
    if form == "onnx" or precision == "fp32":  # not every processor runs every precision in OpenVINO
        assert any(check.verdict == "passed" for check in checks)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_scaled_weight_is_not_taken_for_a_near_tie(
    variant: str, precision: str, exported: Export, tmp_path: Path
) -> None:
    """The outputs alone detect it: those of the ONNX file, without its sidecar and its tensors being read."""
    path, original = exported(variant, "onnx", precision)
    model = onnx.load(path)
    matrices = [tensor for tensor in model.graph.initializer if len(tensor.dims) == 2 and min(tensor.dims) > 4]
    weight = matrices[len(matrices) // 2]
    value = numpy_helper.to_array(weight)
    weight.CopyFrom(numpy_helper.from_array((2 * value.astype(np.float32)).astype(value.dtype), weight.name))
    damaged = tmp_path / "damaged.onnx"
    onnx.save(model, damaged)
    few = replace(original, images=original.images[:8])
    assert "failed" in {check.verdict for check in output_checks(damaged, few)}


def test_near_ties_of_many_images_are_explained_by_rounding(tmp_path: Path) -> None:
    """Two classes with almost the same weights: fp16 swaps them often, in a sound file; other classes never."""
    model = build("plain", dtype=torch.float32)
    head = model.get_submodule("head")
    with torch.no_grad():
        head.weight[1] = head.weight[0] + 1e-5 * torch.randn(16, generator=torch.Generator().manual_seed(1))
        head.bias[:2] = head.bias.max() + 10
    path = tmp_path / "model.onnx"
    EXPORTERS["onnx"].export(model, path, input=input_config(model), options=ExportOptions(precision="fp16"))
    images = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    checks = [check for check in output_checks(path, Original(model, images)) if check.name.endswith("flips")]
    assert {check.verdict for check in checks} == {"passed"} and any("another class" in c.detail for c in checks)
    with torch.no_grad():
        head.bias[1] += 1
    checks = [check for check in output_checks(path, Original(model, images)) if check.name.endswith("flips")]
    assert {check.verdict for check in checks} == {"failed"}  # the file does not know the new bias


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_large_logits_are_explained_by_rounding_and_a_damaged_head_is_not(precision: str, tmp_path: Path) -> None:
    """With logits of 1e5, roundings change the probabilities of an image between two classes."""
    model = build("plain", dtype=torch.float32).eval()
    head, config, path = model.get_submodule("head"), input_config(model), tmp_path / "model.onnx"
    images = torch.randn(64, *config.size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        head.weight.mul_(1e5)
        logits = model(images)
        head.bias[1] += (logits[:, 0] - logits[:, 1]).median()
        head.bias[2:] -= 3 * logits.abs().max()
    islands = ("head",) if precision == "fp16" else ()
    EXPORTERS["onnx"].export(model, path, input=config, options=ExportOptions(precision=precision, islands=islands))
    checks = {check.name: check for check in output_checks(path, Original(model, images))}
    assert {check.verdict for check in checks.values()} == {"passed"}, checks
    kl, limit = checks["agreement.model.onnx.kl"], 2 * SHARES[precision] ** 2
    assert limit < (kl.value or 0) < (kl.tolerance or 0)
    with torch.no_grad():
        head.weight[0].mul_(1.05)  # the file does not know
    assert "failed" in {check.verdict for check in output_checks(path, Original(model, images))}
