"""torch == ONNX at batches 1, 2 and 5 for every variant of every family; a failed export leaves nothing behind."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from contracts import BYPASSES, WEIGHTS_IN_ONE_FILE, build, every_variant, having, kept_channels, spaces_of, traces
from layer_plans import depth_plan
from onnx_agreement import failures
from torch import nn

from vitcompress import surgery
from vitcompress.errors import InputError, OutputError, PrecisionError
from vitcompress.exporters.onnx import export as onnx_export
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.onnx.file import graph_facts, metadata, read_onnx
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.runtimes import EXPORTERS
from vitcompress.exporters.sidecar import read_sidecar, sidecar_path
from vitcompress.io.files import file_sha256, write_json
from vitcompress.models.create import input_config
from vitcompress.plan import Plan

CLASSES = ("ant", "bee", "cat", "dog", "eel")
BYPASS = "norm_identity"


def dense(variant: str) -> nn.Module:
    return build(variant, dtype=torch.float32)


def pruned(variant: str, bypass: str = BYPASS) -> nn.Module:
    """Block 0 without its activation (if it is removable), block 1 without both, folded."""
    model = dense(variant)
    linear = having(model, "activation", [0, 1])
    plan = depth_plan(model, Plan("vit", {}), [1], linear, attention_bypass=bypass, both_pruned_output_act="gelu")
    surgery.apply_plan(model, plan)
    surgery.fold_linears(model, plan)
    return model


def exported(
    model: nn.Module,
    folder: Path,
    *,
    traces: dict[Any, Any] | None = None,
    **options: Any,
) -> Path:
    wanted = ExportOptions(**options)
    path = folder / "model.onnx"
    about: Any = {"input": input_config(model), "classes": CLASSES, "plan_digest": "ab12"}
    about["traces"] = {} if traces is None else traces
    return export(model, path, options=wanted, **about).path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The file of `dense` or `pruned` with these arguments; built once and never changed."""

    @cache
    def build_file(model: Callable[..., nn.Module], *words: str, precision: str = "fp32") -> Path:
        kept = traces(*words) if model is dense else None
        return exported(model(*words), tmp_path_factory.mktemp("file"), traces=kept, precision=precision)

    return build_file


@every_variant
def test_every_variant_agrees_with_torch(variant: str, file: Callable[..., Path]) -> None:
    assert failures(pruned(variant), file(pruned, variant, BYPASS), variant) == []


# Each pair of two settings; the place of the weights does not change the graph.
@pytest.mark.parametrize(
    ("opset", "precision", "external"),
    [(20, "fp32", True), (20, "fp16", False), (23, "fp32", False), (23, "fp16", True)],
)
def test_every_setting_agrees_with_torch(
    opset: int, precision: str, external: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dense("layer_scale")
    if external:
        monkeypatch.setattr(WEIGHTS_IN_ONE_FILE, 0)
    path = exported(model, tmp_path, traces=traces("layer_scale"), opset=opset, precision=precision)
    facts = graph_facts(path)
    written = onnx.load(path, load_external_data=False).opset_import[0].version
    assert (written, facts.operators.get("Attention", 0)) == (opset, 2 if opset == 23 else 0)
    assert (tmp_path / "model.onnx.data").is_file() == external
    assert failures(model, path) == []


def test_a_replaced_file_leaves_none_of_its_data_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dense("layer_scale")
    (tmp_path / "notes.txt").touch()
    with monkeypatch.context() as patch:
        patch.setattr(WEIGHTS_IN_ONE_FILE, 0)
        for _ in range(2):
            path = exported(model, tmp_path, traces=traces("layer_scale"))
            assert {"model.onnx", "model.onnx.data"} == set(read_sidecar(path)["files"])
    sidecar = read_sidecar(path)
    write_json(sidecar_path(path), {**sidecar, "files": {**sidecar["files"], "notes.txt": ""}})
    exported(model, tmp_path, traces=traces("layer_scale"))
    left = sorted(entry.name for entry in tmp_path.iterdir())
    assert left == ["model.onnx", "model.onnx.json", "notes.txt"] and failures(model, path) == []


@pytest.mark.parametrize("bypass", BYPASSES)
def test_no_idle_node_is_left_by_any_bypass(bypass: str, file: Callable[..., Path]) -> None:
    path = file(pruned, "plain", bypass)
    assert failures(pruned("plain", bypass), path) == []
    facts = graph_facts(path)
    assert (facts.operators["Softmax"], facts.operators["Gelu"]) == (1, 1)


def test_a_wrong_weight_is_noticed(file: Callable[..., Path]) -> None:
    model = pruned("plain")
    with torch.no_grad():
        model.get_submodule("blocks.0.attn.qkv").weight[0, 0] += 0.01
    assert set(failures(model, file(pruned, "plain", BYPASS))) >= {"onnx.batch1", "onnx.batch2", "onnx.batch5"}


def test_the_dense_file_is_not_the_pruned_model(file: Callable[..., Path]) -> None:
    assert set(failures(pruned("plain"), file(dense, "plain"))) >= {"onnx.batch1", "onnx.shapes", "onnx.layers"}


def test_sliced_attention_with_unequal_widths(tmp_path: Path) -> None:
    model = dense("plain")
    kept = {"blocks.0.qk": (0, 1, 4, 5, 8, 9, 12, 13), "blocks.0.v": tuple(c for c in range(16) if c % 4 != 1)}
    surgery.apply_plan(model, Plan("vit", {}, kept=kept))
    assert failures(model, exported(model, tmp_path)) == []


@pytest.mark.parametrize("variant", ["attention_pool", "swin", "swin_padded", "pvt", "pvt_linear"])
def test_sliced_and_rewired_models_agree_with_torch(variant: str, tmp_path: Path) -> None:
    """Widths of every kind, whole heads; one block has no FFN, so that its attention is alone."""
    model = dense(variant)
    kept = kept_channels(model, {"qk", "v", "mlp", "residual", "sr"}, whole_heads=True)
    heads = {space.attention: 2 for space in spaces_of(model).values() if space.attention}
    ffn = [name.removesuffix(".qk") + ".mlp" for name in kept if name.endswith(".qk")][1]
    del kept[ffn]
    surgery.apply_plan(model, Plan("staged", {}, removed={ffn: "drop"}, kept=kept, heads=heads))
    assert failures(model, exported(model, tmp_path), variant) == []


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("variant", ["swin", "pvt", "swiglu"])
def test_other_families_agree_with_torch_before_pruning(
    variant: str, precision: str, file: Callable[..., Path]
) -> None:
    assert failures(dense(variant), file(dense, variant, precision=precision), variant) == []


@pytest.mark.parametrize(("variant", "pads"), [("swin", 0), ("swin_padded", 3)])
def test_windows_are_padded_only_where_they_are_not_whole(variant: str, pads: int, file: Callable[..., Path]) -> None:
    """timm pads the tokens of every block, mostly by nothing; here three blocks of 5 x 6 and 3 x 3 need it."""
    path = file(dense, variant)
    merging = 1 if pads else 0  # the tokens of the first stage are merged two by two
    assert graph_facts(path).operators.get("Pad", 0) == pads + merging
    assert failures(dense(variant), path, variant) == []


def test_a_pad_that_adds_nothing_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_export, "_remove_empty_pads", lambda graph: None)
    model = dense("swin")
    assert failures(model, exported(model, tmp_path), "swin") == ["onnx.idle"]


def test_metadata_describe_the_file(file: Callable[..., Path]) -> None:
    path = file(dense, "plain")
    stored = {key: json.loads(value) for key, value in metadata(read_onnx(path)).items()}
    assert stored["classes"] == list(CLASSES)
    assert stored["size"] == [3, 8, 8]
    assert (stored["plan_sha256"], stored["precision"]) == ("ab12", "fp32")
    assert (stored["input"], stored["layout"]) == ("float32", "NCHW")
    assert set(stored) >= {"mean", "std", "interpolation", "crop_pct", "crop_mode", "versions", "opset_reason"}
    sidecar = json.loads(path.with_name(f"{path.name}.json").read_text())
    assert (sidecar["sha256"], sidecar["bytes"]) == (file_sha256(path), path.stat().st_size)
    assert str(Path.cwd()) not in path.read_bytes().decode(errors="ignore")


def test_the_same_model_gives_the_same_bytes_and_is_unchanged(tmp_path: Path) -> None:
    model = dense("plain").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    half = ExportOptions(precision="fp16")
    first = export(model, tmp_path / "a.onnx", input=input_config(model), options=half)
    assert first.sha256 == export(model, tmp_path / "b.onnx", input=input_config(model), options=half).sha256
    assert first.sha256 == file_sha256(first.path)
    assert json.loads(metadata(read_onnx(first.path))["classes"]) == ["0", "1", "2", "3", "4"]  # without class names
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("wrong", [{"precision": "fp8"}, {"opset": 17}])
def test_unsupported_settings_are_rejected(wrong: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=str(next(iter(wrong.values())))):
        exported(dense("plain"), tmp_path, **wrong)
    assert list(tmp_path.iterdir()) == []


def test_weights_beyond_half_precision_are_rejected(tmp_path: Path) -> None:
    model = dense("plain")
    with torch.no_grad():
        model.get_submodule("head").weight[0, 0] = 1e6
    with pytest.raises(PrecisionError, match=r"head\.weight"):
        exported(model, tmp_path, precision="fp16")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_target_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").mkdir()  # a folder with the name of the file
    with pytest.raises(OutputError):
        exported(dense("plain"), tmp_path, traces=traces("plain"))
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_the_table_of_exporters_is_usable() -> None:
    assert EXPORTERS["onnx"].unavailable() is None and EXPORTERS["onnx"].cannot_run() is None
    assert EXPORTERS["onnx"].suffix == ".onnx"
    assert onnx.defs.onnx_opset_version() >= 23
