"""The search selects exactly the layers that need the high precision, in models with one such part."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import SMALL, VIT, build, contract, images
from layer_plans import depth_plan
from too_large import large_ffn, large_residual, large_scores
from torch import nn

import vitcompress as vc
from vitcompress.bench import suite
from vitcompress.cli import main
from vitcompress.errors import ArtifactError, CheckFailedError, DeviceError, InputError, PrecisionError
from vitcompress.exporters.base import Exported
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.precision import convert_precision
from vitcompress.exporters.ranges import scan_ranges
from vitcompress.exporters.runtimes import EXPORTERS
from vitcompress.exporters.sidecar import read_sidecar
from vitcompress.io.checks import Check
from vitcompress.io.files import read_json
from vitcompress.io.manifest import find_changes, write_manifest
from vitcompress.io.progress import Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.models.checkpoint import write_model
from vitcompress.models.create import input_config, plan_of
from vitcompress.pipeline import export, fp32_layers
from vitcompress.pipeline import export_folder as exports
from vitcompress.pipeline.calibration import Calibration, model_digest
from vitcompress.pipeline.export import write_export
from vitcompress.pipeline.export_folder import ExportOutcome
from vitcompress.pipeline.fp32_layers import Evaluator, Layers, LayerSearch, best_evaluator, minimize, search
from vitcompress.training.datasets import as_images
from vitcompress.verify.outputs import SHARES, Limits, Original, compare, comparison_checks, output_checks

X = images("plain", dtype=torch.float32)
FORMATS = [name for name in ("onnx", "trt-rtx") if EXPORTERS[name].unavailable() is None]


def plain() -> nn.Module:
    """Logits that differ enough between classes."""
    model = build("plain", dtype=torch.float32)
    with torch.no_grad():
        model.get_submodule("head").weight.mul_(30)
    return model


def with_small_ffn() -> nn.Module:
    """Hidden channels of a few units of the smallest number of fp16, scaled up again behind the FFN.

    Nothing overflows, but much of their precision is lost.
    """
    model = build("layer_scale", dtype=torch.float32)
    with torch.no_grad():
        fc1, fc2 = (model.get_submodule(f"blocks.1.mlp.{name}") for name in ("fc1", "fc2"))
        fc1.weight.mul_(2e-7)
        fc1.bias.mul_(2e-7)
        fc2.weight.mul_(6e4)
        fc2.bias.zero_()
        model.get_submodule("blocks.1.ls2").gamma.mul_(500)
    return model


def torch_evaluator(model: nn.Module) -> Evaluator:
    """The exported module in torch, which has kernels for fp16."""

    @torch.no_grad()
    def evaluate(layers: Layers) -> list[Check]:
        outputs, share = convert_precision(model, "fp16", layers)(X), SHARES["fp16"]
        limits = Limits(share, share, share)
        return comparison_checks(compare(model(X), outputs, limits), limits, "torch", "torch on the CPU")

    return Evaluator("torch", True, evaluate)


def search_fp16(model: nn.Module, fixed: Layers = ()) -> LayerSearch:
    return search(Original(model, X), torch_evaluator(model), "fp16", ranges=scan_ranges(model, X), fixed=fixed)


@pytest.mark.parametrize(
    ("create", "chosen", "first"),
    [
        (plain, (), None),
        (lambda: large_ffn(plain()), ("blocks.0.mlp",), "range scan"),
        (lambda: large_scores(plain()), ("blocks.1.attn.softmax",), "range scan"),
        (with_small_ffn, ("blocks.1.mlp",), "torch"),
    ],
)
def test_exactly_the_needed_layers_are_selected(
    create: Callable[[], nn.Module], chosen: Layers, first: str | None
) -> None:
    result = search_fp16(create())
    assert result.chosen == chosen and result.smallest and len(result.tries) <= 20
    trials = {trial.islands: trial for trial in result.tries}
    assert trials[chosen].verdict == "passed" and set(trials[chosen].figures) == {"flips", "kl", "cosine", "error"}
    assert (None if first is None else trials[()].by) == first
    assert first is None or trials[()].verdict == "failed"
    assert json.loads(json.dumps(asdict(result), allow_nan=False))["chosen"] == list(chosen)


def test_only_a_search_that_ran_out_of_trials_may_not_be_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = search_fp16(with_small_ffn())
    for trials, proven in ((len(complete.tries), True), (len(complete.tries) - 1, False)):
        monkeypatch.setattr(fp32_layers, "MAX_TRIALS", trials)
        result = search_fp16(with_small_ffn())
        assert result.smallest is proven and len(result.tries) == trials
    model = large_residual(plain())
    assert not search(Original(model, X), torch_evaluator(model), "fp16").smallest


def test_no_layer_helps_a_residual_stream_that_is_too_large() -> None:
    model = large_residual(plain())
    with pytest.raises(PrecisionError, match="reaches"):
        search_fp16(model)
    result = search(Original(model, X), torch_evaluator(model), "fp16")
    assert result.chosen is None and {trial.verdict for trial in result.tries} == {"failed"}
    assert result.tries[-1].islands == ("norm", "softmax", "head", "ffn")


def test_bf16_needs_no_layers() -> None:
    model, options = plain(), ExportOptions(precision="bf16")
    original = Original(model, X)
    evaluator = best_evaluator(EXPORTERS["onnx"], original, options, {"input": input_config(model)})
    result = search(original, evaluator, "bf16")
    assert result.chosen == () and len(result.tries) == 1
    assert result.judge == "onnx on cuda" if torch.cuda.is_available() else result.proxy and "bf16" in result.judge


def test_precisions_are_only_names() -> None:
    """A search for a precision that no exporter has yet."""
    notes: list[str] = []
    progress = Progress()
    progress.note = notes.append  # type: ignore[method-assign]

    def evaluate(layers: Layers) -> list[Check]:
        return [Check("outputs", "passed" if "blocks.1.mlp" in layers else "failed", detail="changed")]

    evaluator = Evaluator("a simulation", True, evaluate)
    result = search(Original(plain(), X), evaluator, "int8", progress=progress)
    assert result.chosen == ("blocks.1.mlp",) and result.smallest
    assert notes[0] == "int8 with no layers in fp32: failed (a simulation), outputs: changed"


def test_a_weight_outside_of_the_scanned_ranges_fails_its_set_only() -> None:
    """The export itself rejects the weight, until it belongs to an fp32 layer."""
    model = plain()
    with torch.no_grad():
        model.get_submodule("head").weight[0, 0] = 1e6
    result = search(Original(model, X), torch_evaluator(model), "fp16")
    assert result.chosen == ("head",)
    assert "head.weight" in result.tries[0].reason and result.tries[0].verdict == "failed"


def test_named_layers_belong_to_every_set() -> None:
    result = search_fp16(large_ffn(plain()), fixed=("head",))
    assert result.chosen == ("head", "blocks.0.mlp")
    assert all("head" in trial.islands for trial in result.tries)


@pytest.mark.parametrize("needed", [{3}, {0, 7}, {1, 4, 6}, set(range(9))])
def test_minimizing_leaves_the_needed_items(needed: set[int]) -> None:
    calls: list[Sequence[int]] = []

    def passes(items: Sequence[int]) -> bool:
        calls.append(items)
        return needed <= set(items)

    assert set(minimize(range(9), passes)) == needed
    assert len(calls) < 3 * 9 * len(needed)


# --------------------------------------------------------------------------------------------------------- command line


def run_folder(folder: Path, model: nn.Module) -> Path:
    write_model(folder, model, contract("plain").plan)
    return folder


def run_export(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, object]]:
    with pytest.raises(SystemExit) as ended:
        main(["export", *words, "--json"])
    return int(str(ended.value.code)), json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("format", FORMATS)
def test_the_command_line_records_the_search(format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "run", large_ffn(plain()))
    code, printed = run_export(capsys, str(folder), "--format", format, "--precision", "fp16", "--islands", "auto")
    assert code == 0
    path = folder / f"model-fp16{EXPORTERS[format].suffix}"
    sidecar = read_sidecar(path)
    assert sidecar["islands_search"] == printed["islands_search"]
    record = sidecar["islands_search"]
    assert record["chosen"] == ["blocks.0.mlp"] and json.loads(sidecar["metadata"]["islands"]) == record["chosen"]
    assert [trial["verdict"] for trial in record["tries"]] == ["failed", "passed"]
    checks = {check["name"]: check for check in json.loads((folder / "verify.json").read_text())["checks"]}
    file = path.name if format == "onnx" else f"{path.name}.onnx"
    check = checks[f"agreement.{file}.rounded.error"]
    assert check["verdict"] == "passed" and "a proxy" in check["detail"]


def test_a_file_that_fails_after_the_search_names_the_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search evaluates fewer images than the export."""

    def verify(folder: Path, done: Exported, *arguments: Any, **options: Any) -> ExportOutcome:
        return ExportOutcome(done.path, "failed", (Check("agreement.x.error", "failed"),))

    monkeypatch.setattr(exports, "verify_export", verify)
    words = ["export", str(run_folder(tmp_path / "run", plain())), "--precision", "fp16"]
    for more, named in (["--islands", "auto"], True), ([], False):
        with pytest.raises(SystemExit) as ended:
            main(words + more)
        assert ended.value.code == 1
        assert ("name more layers in --islands" in capsys.readouterr().err) == named


def test_if_no_set_passes_no_file_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "run", large_residual(plain(), 5e4))
    code, printed = run_export(capsys, str(folder), "--precision", "fp16", "--islands", "auto")
    assert code == 1 and "any set of fp32 layers" in json.dumps(printed)
    assert [path.name for path in (folder / "failed").iterdir()] == ["model-fp16.onnx.islands.json"]
    assert not list(folder.glob("model-fp16*"))


def with_outlier() -> nn.Module:
    """One channel of a norm is 1,000 times as large, which the next layer undoes: exact in fp32, one step in int8."""
    model = plain()
    with torch.no_grad():
        norm, fc1 = model.get_submodule("blocks.1.norm2"), model.get_submodule("blocks.1.mlp.fc1")
        norm.weight[3].mul_(1000)
        norm.bias[3].mul_(1000)
        fc1.weight[:, 3].div_(1000)
    return model


NAMES = [name for name in ("onnx", "openvino") if EXPORTERS[name].unavailable() is None]


@cache
def traces(create: Callable[[], nn.Module]) -> dict[Any, Any]:
    """Of the model that `create` returns, for all tests."""
    return {}


def search_int8(
    folder: Path, model: nn.Module, name: str, traces: dict[Any, Any] | None = None, **more: Any
) -> Exported:
    options = ExportOptions(**{"precision": "int8", "islands": ("auto",), "calibration": 3, **more})
    EXPORTERS[name].check(options)
    calibration = Calibration(model, options, RunFolder(folder), as_images([(image, 0) for image in X]))
    path = folder / f"model{EXPORTERS[name].suffix}"
    about: Any = {"calibration": calibration, "traces": traces}
    return write_export(EXPORTERS[name], Original(model, X), path, options=options, **about)


def quantization_of(done: Exported) -> dict[str, Any]:
    return dict(json.loads(done.metadata["quantization"]))


@pytest.mark.parametrize(("create", "smooth"), [(plain, False), (with_outlier, True)])
def test_all_layers_are_in_int8_without_an_outlier_or_with_rescaled_layers(
    tmp_path: Path, create: Callable[[], nn.Module], smooth: bool
) -> None:
    done = search_int8(tmp_path, create(), "onnx", traces(create), smooth=smooth)
    result: Any = done.islands_search
    assert result["chosen"] == () and result["costs"] == {} and len(result["tries"]) == 1
    assert {"head", "patch_embed.proj"} == set(json.loads(done.metadata["islands"]))
    assert {check.verdict for check in output_checks(done.path, Original(create(), X))} == {"passed"}
    assert bool(json.loads(done.metadata["quantization"])["factors"]) is smooth


@pytest.mark.parametrize("name", NAMES)
def test_only_the_layer_with_an_outlier_stays_out_of_int8_and_has_a_cost(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "openvino":  # as on a machine that cannot run the file
        monkeypatch.setattr(suite, "run", no_device)
    done = search_int8(tmp_path, with_outlier(), name, traces(with_outlier))
    result: Any = done.islands_search
    assert result["chosen"] == ("blocks.1.mlp.fc1",) and result["smallest"] and len(result["tries"]) <= 20
    assert result["proxy"] is (name == "openvino")
    assert {"head", "patch_embed.proj", "blocks.1.mlp.fc1"} == set(json.loads(done.metadata["islands"]))
    assert {check.verdict for check in output_checks(done.path, Original(with_outlier(), X))} == {"passed"}
    ((layer, cost),), warnings = result["costs"].items(), read_sidecar(done.path)["build"]["warnings"]
    assert layer == "blocks.1.mlp.fc1" and cost["divergence"] > 0 and 0.1 < cost["macs"] < 0.3
    (line,) = (line for line in warnings if "blocks.1.mlp.fc1" in line)
    if name == "openvino":
        assert cost["speed"] == {} and "12.5 % fewer products" in line
    else:
        assert cost["speed"]["median"] > 0 and "as fast" in line


def test_an_attention_may_be_the_layer_that_stays_out_of_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU on which nothing passes without it."""
    core = "blocks.1.attn.softmax"

    def evaluate(layers: Layers) -> list[Check]:
        return [Check("agreement", "passed" if core in layers else "failed")]

    monkeypatch.setattr(export, "best_evaluator", lambda *about: Evaluator("simulated", True, evaluate))
    done = search_int8(tmp_path, plain(), "onnx", traces(plain), precision="fp8")
    result: Any = done.islands_search
    assert result["chosen"] == (core,) and not any(core in key for key in quantization_of(done)["ranges"])
    assert any("blocks.0.attn.softmax" in key for key in quantization_of(done)["ranges"])
    products, work = 2 * 5 * 5 * 16, 5 * 16 * 16 * (3 + 1 + 2 + 2)  # in a block: of both products, and of its layers
    assert result["costs"][core]["divergence"] > 0
    assert result["costs"][core]["macs"] == pytest.approx(products / (2 * (products + work)))


@pytest.mark.parametrize("islands", [(), ("auto",)])
def test_an_int8_file_in_a_folder_with_a_manifest_is_replaced(tmp_path: Path, islands: tuple[str, ...]) -> None:
    """Each measurement opens the new file, which must be as the manifest records."""
    folder, model = tmp_path / "run", with_outlier()
    write_model(folder, model, plan_of(model))
    write_manifest(folder)
    for calibration in (3, 2, 2, 3):
        done = search_int8(folder, model, "onnx", traces(with_outlier), islands=islands, calibration=calibration)
        assert done.speed and find_changes(folder) == {}


def test_ranges_are_kept_for_each_setting_and_used_only_as_written(tmp_path: Path) -> None:
    folder, model = tmp_path / "run", plain()
    write_model(folder, model, plan_of(model))
    write_manifest(folder)
    settings: list[dict[str, Any]] = [{"calibration": 2}, {"calibration_method": "entropy"}, {"uint8": True}, {}]
    ranges = list[Any]()
    for more in (*settings, *settings):
        done = search_int8(folder, model, "onnx", traces(plain), islands=(), **more)
        ranges.append(json.loads(done.metadata["quantization"])["ranges"])
    files = list(RunFolder(folder).ranges.glob("*.json"))
    assert ranges[:4] == ranges[4:] and all(ranges[3] != other for other in ranges[:3]) and len(files) == 4
    for file in files:
        file.write_text(file.read_text().replace("mlp.fc1", "mlp.fc3"))
    with pytest.raises(ArtifactError, match="is not as it was written"):
        search_int8(folder, model, "onnx", traces(plain), islands=())


def test_damaged_ranges_in_a_folder_without_a_manifest_are_measured_again(tmp_path: Path) -> None:
    folder, model = tmp_path / "run", plain()
    write_model(folder, model, plan_of(model))
    search_int8(folder, model, "onnx", traces(plain), islands=())
    (file,) = RunFolder(folder).ranges.glob("*.json")
    whole = file.read_text()
    others: list[Any] = [[], {}, 3, None, *(dict.fromkeys(json.loads(whole), wrong) for wrong in ("7", -1.0, [1.0]))]
    for text in (whole[:30], "", *map(json.dumps, others)):
        file.write_text(text)
        search_int8(folder, model, "onnx", traces(plain), islands=())
        assert file.read_text() == whole, text


@pytest.mark.parametrize(
    "text", ["[]", "3", "{", '{"model": "DIGEST"}', '{"model": "DIGEST", "ranges": {"head": "1"}}']
)
def test_damaged_trained_ranges_are_rejected(text: str, tmp_path: Path) -> None:
    folder, model = tmp_path / "run", plain()
    write_model(folder, model, plan_of(model))
    trained = RunFolder(folder).trained_ranges
    trained.parent.mkdir()
    text = text.replace("DIGEST", model_digest(model, "int8"))
    trained.write_text(text)
    with pytest.raises(ArtifactError, match=r"trained_ranges.json (has other contents|cannot be read as JSON)"):
        search_int8(folder, model, "onnx", traces(plain), islands=())
    write_manifest(folder)
    trained.write_text(f"{text} ")
    with pytest.raises(ArtifactError, match="is not as it was written"):
        search_int8(folder, model, "onnx", traces(plain), islands=())


def test_ranges_are_not_those_of_a_model_with_equal_weights(tmp_path: Path) -> None:
    """Without an activation, the input of the layer after it has other values; no weight changes before folding."""
    dense, images = vc.create_model(VIT, **SMALL["vit"]), torch.randn(16, 3, 8, 8)
    linear = vc.prune(dense, depth_plan(dense, plan_of(dense), [], [0, 1]))
    vc.save_model(dense, tmp_path / "both")
    ranges = list[Any]()
    for model, folder in ((dense, "both"), (linear, "both"), (linear, "alone")):
        data = [(images, torch.zeros(len(images), dtype=torch.int64))]
        path = vc.export(model, tmp_path / folder / "model.onnx", data=data, precision="int8")
        ranges.append(read_json(Path(f"{path}.json"))["metadata"]["quantization"])
    assert ranges[0] != ranges[1] == ranges[2]


def test_ranges_do_not_depend_on_the_format_that_was_exported_first(tmp_path: Path) -> None:
    about: list[Any] = []
    for order in (("onnx", "trt-rtx"), ("trt-rtx", "onnx")):
        folder, model = tmp_path / order[0], plain()
        write_model(folder, model, plan_of(model))
        for name in order:
            if name in FORMATS:
                search_int8(folder, model, name, traces(plain), islands=())
        about.append(read_json(next(RunFolder(folder).ranges.glob("*.json"))))
    assert about[0] == about[1]


def test_a_search_that_needs_every_layer_lists_its_sets(tmp_path: Path) -> None:
    model = plain()
    with torch.no_grad():
        for block in ("blocks.0", "blocks.1"):
            for norm, layer in (("norm1", "attn.qkv"), ("norm2", "mlp.fc1")):
                model.get_submodule(f"{block}.{norm}").weight[3].mul_(1000)
                model.get_submodule(f"{block}.{norm}").bias[3].mul_(1000)
                model.get_submodule(f"{block}.{layer}").weight[:, 3].div_(1000)
            for first, channel, second in (("attn.qkv", 32, "attn.proj"), ("mlp.fc1", 0, "mlp.fc2")):
                layer = model.get_submodule(f"{block}.{first}")
                layer.weight[channel].mul_(1000)
                layer.bias[channel].mul_(1000).add_(50 * (first == "mlp.fc1"))
                model.get_submodule(f"{block}.{second}").weight[:, 0].div_(1000)
    with pytest.raises(CheckFailedError, match="were tried"):
        search_int8(tmp_path, model, "onnx")
    (record,) = (tmp_path / "failed").glob("*.islands.json")
    assert "no linear layer is left" in record.read_text()


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_named_layers_may_leave_none_to_search(precision: str, tmp_path: Path) -> None:
    with pytest.raises(CheckFailedError, match=f"no linear layer is left to compute in {precision}"):
        search_int8(tmp_path, plain(), "onnx", traces(plain), islands=("blocks", "auto"), precision=precision)


def no_device(*arguments: object, **more: object) -> None:
    raise DeviceError("none")


@pytest.mark.skipif("openvino" not in NAMES, reason="OpenVINO is not installed")
def test_named_layers_stay_out_of_int8_in_openvino(tmp_path: Path) -> None:
    done = search_int8(tmp_path, plain(), "openvino", traces(plain), islands=("blocks.0.mlp",))
    assert json.loads(done.metadata["islands"]) == ["blocks.0.mlp", "head", "patch_embed.proj"]
    assert {check.verdict for check in output_checks(done.path, Original(plain(), X))} == {"passed"}
    for precision in ("fp32", "bf16"):
        with pytest.raises(InputError, match=rf"the format openvino has no such option in {precision}") as caught:
            EXPORTERS["openvino"].check(ExportOptions(precision=precision, islands=("auto",)))
        assert str(caught.value.hint).endswith("openvino supports opset, precision, uint8")  # nothing of int8
