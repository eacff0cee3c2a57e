"""Saved == loaded, and every kind of damage is reported in a sentence."""

import os
from argparse import Namespace
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from contracts import (
    assert_moved,
    assert_same,
    build,
    contract,
    every_variant,
    images,
    kept_channels,
    logits,
    sites_of,
    without_act,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel

import vitcompress as vc
from vitcompress.errors import (
    ArtifactError,
    InputError,
    PlanError,
    UnsupportedModelError,
    VitcompressError,
    WeightsError,
)
from vitcompress.families import family_of
from vitcompress.io.files import write_text
from vitcompress.io.tensors import load_tensors, read_checkpoint, save_tensors
from vitcompress.models.checkpoint import load_model, save_model, write_model
from vitcompress.models.create import class_names_of, create_model, input_config, plan_of
from vitcompress.pipeline.api import prune
from vitcompress.plan import Plan
from vitcompress.surgery import apply_plan, fold_linears

# -------------------------------------------------------------------------------------------------------------- models


def compressed(variant: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Plan]:
    """Three blocks that lost something of every kind."""
    model = build(variant, depth=3, dtype=dtype)
    _, second, last = (site.name for site in sites_of(model, "block"))
    linear = {n: s for a in sites_of(model, "activation") if a.block == second for n, s in without_act(a).items()}
    kept = kept_channels(model, {"qk", "v", "mlp", "residual", "sr"})
    plan = replace(
        contract(variant, depth=3).plan,
        removed={f"{second}.attn": "norm_identity", **linear, f"{last}.attn": "drop"},
        appended={second: "gelu"},
        kept={n: k for n, k in kept.items() if not n.startswith((last, f"{second}.qk", f"{second}.v", f"{second}.sr"))},
    )
    return model, fold_linears(apply_plan(model, plan), plan)[0]


@every_variant
def test_saved_equals_loaded(variant: str, tmp_path: Path) -> None:
    model, plan = compressed(variant)
    x = images(variant)
    write_model(tmp_path / "run", model, plan)
    again = load_model(tmp_path / "run")
    assert again.plan == plan
    assert not any(module.training for module in again.modules())
    assert list(again.state_dict()) == list(model.state_dict())
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(logits(again, x), logits(model, x))
    assert_moved(logits(again, x), logits(build(variant, depth=3), x))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["model.safetensors", "plan.json"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_come_back_in_the_type_they_were_saved_in(dtype: torch.dtype, tmp_path: Path) -> None:
    model, plan = compressed("layer_scale", dtype)
    write_model(tmp_path, model, plan)
    assert {p.dtype for p in load_model(tmp_path).parameters()} == {dtype}


def saved(folder: Path) -> Path:
    write_model(folder, *compressed("plain"))
    return folder


@pytest.mark.parametrize("missing", ["plan.json", "model.safetensors"])
def test_a_folder_without_a_part_is_not_a_finished_run(missing: str, tmp_path: Path) -> None:
    (saved(tmp_path) / missing).unlink()
    with pytest.raises(ArtifactError, match=f"not a finished run folder: {missing} is missing"):
        load_model(tmp_path)


def test_an_edited_plan_is_rejected(tmp_path: Path) -> None:
    plan = Plan.from_json((saved(tmp_path) / "plan.json").read_text())
    write_text(tmp_path / "plan.json", replace(plan, appended={}).to_json())
    with pytest.raises(PlanError, match=r"model\.safetensors was saved with another plan"):
        load_model(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[1"])
def test_a_damaged_plan(content: bytes, tmp_path: Path) -> None:
    (saved(tmp_path) / "plan.json").write_bytes(content)
    with pytest.raises(PlanError):
        load_model(tmp_path)


def test_weights_of_another_shape(tmp_path: Path) -> None:
    plan = Plan.from_json((saved(tmp_path) / "plan.json").read_text())
    save_tensors(tmp_path / "model.safetensors", {"head.weight": torch.zeros(3)}, {"plan": plan.digest})
    with pytest.raises(WeightsError, match=r"does not fit its plan: Missing key"):
        load_model(tmp_path)


def test_a_model_that_was_trained_further_is_saved_with_another_classifier(tmp_path: Path) -> None:
    write_model(tmp_path / "run", *compressed("plain", torch.float32))
    model, x = load_model(tmp_path / "run"), images("plain", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert_moved(logits(model, x), logits(load_model(tmp_path / "run"), x))
    save_model(model, tmp_path / "same")
    assert torch.equal(logits(load_model(tmp_path / "same"), x), logits(model, x))
    model.reset_classifier(7)
    save_model(model, tmp_path / "seven")
    again = load_model(tmp_path / "seven")
    assert again.num_classes == 7 and torch.equal(again.head.weight, model.head.weight)


def test_weights_of_several_types_come_back(tmp_path: Path) -> None:
    model = build("plain").bfloat16()
    model.head.float()
    write_model(tmp_path, model, plan_of(build("plain")))
    loaded = load_model(tmp_path).state_dict()
    assert {name: value.dtype for name, value in loaded.items()} == {k: v.dtype for k, v in model.state_dict().items()}


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_another_pooling_is_saved(name: str, tmp_path: Path) -> None:
    args: dict[str, Any] = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}
    model, x = vc.create_model(name, num_classes=3, **args), torch.randn(2, 1, 8, 8)
    pooled = vc.prune(model, vc.plan(model, "magnitude", keep_heads=0.5, device="cpu"))
    before = logits(pooled, x)
    pooled.reset_classifier(3, {"token": "avg", "avg": "token"}[pooled.global_pool])
    pooled.head.load_state_dict(model.head.state_dict())
    save_model(pooled, tmp_path / "pooled")
    assert_moved(before, logits(pooled, x))
    assert torch.equal(logits(load_model(tmp_path / "pooled"), x), logits(pooled, x))


def test_a_pruned_pooling_cannot_be_exchanged(tmp_path: Path) -> None:
    args: dict[str, Any] = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}
    model = vc.create_model("vit_base_patch16_siglip_224", num_classes=3, **args)
    pooled = vc.prune(model, vc.plan(model, "magnitude", keep_heads=0.5, device="cpu"))
    pooled.reset_classifier(3, "avg")
    with pytest.raises(PlanError, match=r"attn_pool: the model has no such attention") as caught:
        save_model(pooled, tmp_path / "pooled")
    assert "`reset_classifier` with another pooling" in str(caught.value.hint) and not any(tmp_path.iterdir())


@pytest.mark.parametrize("classes", [None, ["cat", "dog", "bird"]])
def test_preprocessing_that_was_changed_is_saved(classes: list[str] | None, tmp_path: Path) -> None:
    args: dict[str, Any] = {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    dense = vc.create_model("deit_tiny_patch16_224", **args, pretrained_cfg_overlay={"crop_pct": 0.7})
    model = vc.prune(dense, vc.plan(dense, "magnitude", keep_heads=0.5))
    before = input_config(model)
    model.pretrained_cfg |= {"mean": (0.1, 0.2, 0.3), "interpolation": "nearest"}
    save_model(model, tmp_path / "model", classes)
    loaded = load_model(tmp_path / "model")
    assert input_config(loaded) == replace(before, mean=(0.1, 0.2, 0.3), interpolation="nearest")
    assert before.crop_pct == 0.7 and class_names_of(loaded) == tuple(classes or ())


def test_an_input_size_that_was_changed_is_saved(tmp_path: Path) -> None:
    row = contract("pvt")
    dense = vc.create_model(row.arch, **row.arch_args)
    pruned = vc.prune(dense, dense.plan.delta(removed={"stages.0.blocks.0.attn": "drop"}))
    for name, model in (("dense", dense), ("pruned", pruned), ("timm", build("pvt", dtype=torch.float32))):
        model.pretrained_cfg["input_size"] = (3, 96, 64)  # PVTv2 has no argument for it
        save_model(model, tmp_path / name)
        loaded = load_model(tmp_path / name)
        assert input_config(loaded).size == (3, 96, 64) and vc.count_cost(loaded) == vc.count_cost(model)
    padded = contract("plain", dynamic_img_size=True, dynamic_img_pad=True)  # takes images of any size
    other = vc.create_model(padded.arch, **padded.arch_args)
    other.set_input_size((16, 24))
    save_model(other, tmp_path / "padded")
    plan = load_model(tmp_path / "padded").plan
    assert plan.arch_args == {**padded.arch_args, "img_size": [16, 24]}


def test_models_that_cannot_be_saved_are_rejected_and_nothing_is_written(tmp_path: Path) -> None:
    write_model(tmp_path / "run", *compressed("plain", torch.float32))
    model = load_model(tmp_path / "run")
    with pytest.raises(ArtifactError, match=r"plan\.json is a file"):
        save_model(model, tmp_path / "run/plan.json")
    with pytest.raises(ArtifactError, match="run is not empty"):
        save_model(model, tmp_path / "run")
    with pytest.raises(InputError, match=r"not as timm builds it with .*: blocks\.0\.mlp\.act differs"):
        save_model(apply_plan(build("plain"), Plan("any", removed={"blocks.0.mlp.act": "identity"})), tmp_path / "new")
    others = {"norm": nn.LayerNorm(3), "blocks.0.mlp.act": nn.ReLU(), "blocks.0.norm1": nn.LayerNorm(16, eps=0.5)}
    for part, replacement in others.items():  # the last two have tensors of the same shapes, or none
        changed = deepcopy(model)
        changed.set_submodule(part, replacement)
        with pytest.raises(WeightsError, match=f"is not the model of its plan: {part} differs"):
            save_model(changed, tmp_path / "new")
    assert not (tmp_path / "new").exists()


CHANGES: dict[str, Any] = {"blocks.0.attn.num_heads": 4, "blocks.1.attn.scale": 1.0, "pool_include_prefix": True}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("create", [vc.create_model, timm.create_model])
def test_changed_attributes_that_loading_would_not_repeat_are_rejected(name: str, create: Any, tmp_path: Path) -> None:
    args: dict[str, Any] = {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    model = create("vit_tiny_patch16_224", **args).eval()
    model.set_grad_checkpointing(True)  # changes no output
    model.epochs = 90  # an attribute of the user's own
    save_model(model, tmp_path / "model")
    module, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(module), attribute, CHANGES[name])
    with pytest.raises(VitcompressError, match=rf"{name} differs"):
        save_model(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("create", [vc.create_model, timm.create_model])
def test_other_windows_are_saved(create: Any, tmp_path: Path) -> None:
    args: dict[str, Any] = {"img_size": 32, "patch_size": 2, "in_chans": 1, "embed_dim": 8, "num_classes": 3}
    args |= {"depths": (2, 2), "num_heads": (2, 2), "window_size": 4}
    model, x = create("swin_tiny_patch4_window7_224", **args).eval(), torch.randn(2, 1, 64, 64)
    model.set_input_size(img_size=64, window_size=8)
    pruned = prune(model, plan_of(model).delta(removed={"layers.1.blocks.0.attn": "drop"}))
    assert_moved(logits(pruned, x), logits(model, x))
    save_model(pruned, tmp_path / "new")
    assert torch.equal(logits(load_model(tmp_path / "new"), x), logits(pruned, x))


@pytest.mark.parametrize("arch", ["vit_tiny_patch16_224", "vit_small_patch16_dinov3"])
def test_patches_that_timm_drops_while_training_are_not_part_of_a_plan(arch: str) -> None:
    model = timm.create_model(arch, img_size=32, depth=1, patch_drop_rate=0.5)
    assert "patch_drop_rate" not in plan_of(model).arch_args


@every_variant
def test_a_model_of_timm_is_pruned_twice_and_saved(variant: str, tmp_path: Path) -> None:
    """Without vitcompress.create_model: name and arguments come from timm."""
    model, x = build(variant, prepared=False, dtype=torch.float32), images(variant, dtype=torch.float32)
    before = logits(model, x)
    first = next(name for name in family_of(model).blocks(model))
    once = prune(model, plan_of(model).delta(removed={f"{first}.attn": "drop"}))
    assert torch.equal(logits(model, x), before) and not hasattr(model, "plan"), "the model is not changed"
    twice = prune(once, once.plan.delta(kept=kept_channels(once, {"mlp"})))
    assert twice.plan.removed == {f"{first}.attn": "drop"} and twice.plan.kept
    for number, pruned in enumerate((model, once, twice)):
        save_model(pruned, tmp_path / str(number))
        again = load_model(tmp_path / str(number))
        assert torch.allclose(logits(again, x), logits(pruned, x), rtol=0, atol=1e-5 * float(before.abs().max()))
        assert input_config(again) == input_config(pruned)
    assert_moved(logits(twice, x), logits(once, x))


def test_heads_that_narrow_and_then_merge_to_the_width_of_timms_are_saved(tmp_path: Path) -> None:
    """Rebuilt from the composed plan, the attention is timm's own; after two steps it is a sliced one."""
    model, x = build("plain"), images("plain")
    halves = tuple(range(0, 16, 2))
    kept = {"blocks.0.qk": halves, "blocks.0.v": halves}
    once = prune(model, plan_of(model).delta(kept=kept))
    twice = prune(once, once.plan.delta(kept=dict.fromkeys(kept, tuple(range(8))), heads={"blocks.0.attn": 2}))
    save_model(twice, tmp_path / "saved")
    assert_same(logits(load_model(tmp_path / "saved"), x), logits(twice, x))
    assert_moved(logits(twice, x), logits(once, x))


@pytest.mark.parametrize("names", [{"tag": "of_another_timm"}, {"architecture": "of_another_timm"}])
def test_a_model_whose_name_timm_does_not_have_is_rejected(names: dict[str, str]) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    model.pretrained_cfg |= names
    with pytest.raises(InputError, match=r"the arguments of this .* are unknown: .*of_another_timm"):
        plan_of(model)


def test_a_model_with_classes_as_arguments_is_rejected() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, act_layer=nn.ReLU)
    with pytest.raises(InputError, match=r"act_layer got <class .*ReLU'>, expected timm's name of it, as in 'relu'"):
        plan_of(model)
    plan_of(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, act_layer="relu"))


def test_a_model_of_no_family_is_named_where_its_arguments_are_unknown() -> None:
    with pytest.raises(UnsupportedModelError, match=r"ResNet"):
        plan_of(timm.create_model("resnet18", num_classes=3))


def test_a_model_that_was_edited_in_place_has_no_plan() -> None:
    model = create_model(contract("plain").arch, contract("plain").arch_args)
    assert plan_of(model) == contract("plain").plan == model.plan
    assert not hasattr(apply_plan(model, contract("plain").plan), "plan")
    with pytest.raises(PlanError, match=r"cannot follow one for .* with other arguments \(.*\)"):
        prune(create_model(contract("plain").arch), contract("plain").plan)


# ------------------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("length", [0, 4, 8, 40, -1])
def test_truncated_safetensors(length: int, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_tensors(path, {"a": torch.zeros(100)})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(WeightsError, match="not a complete safetensors file"):
        load_tensors(path)


class Evil:
    def __reduce__(self) -> tuple:
        return os.system, ("touch owned",)


@pytest.mark.parametrize("content", [Evil(), {"state_dict": {"a": torch.zeros(2)}, "args": Evil()}])
def test_pickled_code_is_never_run(content: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, "weights.pth")
    with pytest.raises(WeightsError, match="would run code from the file"):
        load_tensors(Path("weights.pth"))
    assert not Path("owned").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_damaged_pytorch_files_raise_weights_errors(zipped: bool, tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.pth", tmp_path / "damaged.pth"
    torch.save({"a": torch.arange(10.0)}, whole, _use_new_zipfile_serialization=zipped)
    data, errors = whole.read_bytes(), 0
    step = max(1, len(data) // 100)
    for position in range(0, len(data), step):
        flipped = bytes([data[position] ^ 0x5A])
        for damaged in (data[:position], data[:position] + flipped + data[position + 1 :]):
            path.write_bytes(damaged)
            try:
                load_tensors(path)
            except WeightsError:
                errors += 1
    assert errors > 50
    for text in (b"", b"hello world", b"PK\x03\x04", b"version https://git-lfs.github.com/spec/v1\n"):
        path.write_bytes(text)
        with pytest.raises(WeightsError, match="damaged or not a PyTorch checkpoint"):
            load_tensors(path)


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"model": s}, lambda s: {"state_dict": s, "epoch": 3}])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_checkpoints_of_training_scripts_are_unwrapped(wrap, prefix: str, tmp_path: Path) -> None:
    torch.save(wrap({f"{prefix}{name}": torch.ones(2) for name in ("a.weight", "b")}), tmp_path / "w.pth")
    assert read_checkpoint(tmp_path / "w.pth")[0].keys() == {"a.weight", "b"}


@pytest.mark.parametrize("others", [("state_dict", "state_dict_ema"), ("model", "model_ema")])
def test_checkpoints_with_averaged_weights_and_the_options_of_their_script(others, tmp_path: Path) -> None:
    raw, averaged = others
    content = {raw: {"a": torch.zeros(2)}, averaged: {"module.a": torch.ones(2)}, "args": Namespace(lr=0.1)}
    torch.save(content, tmp_path / "last.pth.tar")
    tensors, part, _ = read_checkpoint(tmp_path / "last.pth.tar")
    assert tensors["a"].tolist() == [1, 1] and part == averaged
    torch.save({"a": torch.ones(2)}, tmp_path / "plain.pth")
    assert read_checkpoint(tmp_path / "plain.pth")[1] is None


def test_checkpoints_of_averaged_models_are_read(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    averaged = AveragedModel(layer).state_dict()
    torch.save({"model": {}, "model_ema": averaged}, tmp_path / "w.pth")
    save_tensors(tmp_path / "w.safetensors", averaged)
    for name in ("w.pth", "w.safetensors"):
        assert read_checkpoint(tmp_path / name)[0].keys() == {"weight", "bias"}


def test_options_of_a_script_that_would_run_code_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {"a": torch.zeros(2)}, "args": Namespace(evil=Evil())}, "weights.pth")
    with pytest.raises(WeightsError, match="would run code from the file"):
        load_tensors(Path("weights.pth"))
    assert not Path("owned").exists()


@pytest.mark.parametrize(
    "content",
    [
        [torch.zeros(1)],
        torch.zeros(2),
        {"a": 1},
        {0: torch.zeros(2)},
        {"model": {"a": "b"}},
        {"model": {0: torch.zeros(2), "a": torch.zeros(2)}},
    ],
)
def test_files_that_are_no_state_dict(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "w.pth")
    for read in (load_tensors, read_checkpoint):
        with pytest.raises(WeightsError, match="not a state dict of tensors"):
            read(tmp_path / "w.pth")


@pytest.mark.parametrize("name", ["missing.safetensors", "missing.pth", "."])
def test_missing_weights(name: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no weights at"):
        load_tensors(tmp_path / name)


def test_tensors_that_share_storage_are_written_apart(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    save_tensors(tmp_path / "t.safetensors", {"a": base, "b": base[2:], "c": base.reshape(2, 3).T})
    loaded = load_tensors(tmp_path / "t.safetensors")
    assert torch.equal(loaded["b"], base[2:])
    assert torch.equal(loaded["c"], base.reshape(2, 3).T)
