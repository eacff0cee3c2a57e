"""Dense models: errors name the next step, and position embeddings follow the input size."""

from pathlib import Path

import pytest
import timm
import torch
from contracts import build, contract, difference, every_variant, images, logits
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed, resize_rel_pos_bias_table
from torch import nn

from vitcompress.errors import InputError, WeightsError
from vitcompress.models.create import SkipOnMeta, create_model, create_on_meta, input_config, randomize_constants

ARCH = "vit_tiny_patch16_224"
SMALL = contract("plain").arch_args


def saved(tmp_path: Path, variant: str = "plain", suffix: str = "safetensors", **args: object) -> tuple:
    model = build(variant, dtype=torch.float32, **args)
    path = tmp_path / f"weights.{suffix}"
    if suffix == "safetensors":
        save_file(model.state_dict(), path)
    else:
        torch.save({"model": model.state_dict()}, path)
    return model, path


def test_random_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, same, other = (create_model(ARCH, SMALL, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before), "the caller's random state stays"
    assert not one.training
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.patch_embed.proj.weight, other.patch_embed.proj.weight)


def test_constants_get_random_noise() -> None:
    args = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2, "init_values": 1e-5}
    model, same, plain = (create_model("vit_tiny_patch16_224", args) for _ in range(3))
    randomize_constants(model)
    randomize_constants(same)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    before = dict(plain.named_parameters())
    moved = {name for name, tensor in model.named_parameters() if not torch.equal(tensor, before[name])}
    assert {"blocks.0.attn.qkv.bias", "blocks.0.norm1.weight", "blocks.0.ls1.gamma", "head.bias"} <= moved
    assert not {"blocks.0.attn.qkv.weight", "pos_embed", "head.weight"} & moved
    assert all(len(tensor.unique()) > 1 for tensor in model.parameters())


def test_an_unknown_architecture_gives_the_nearest_name() -> None:
    message = r"timm has no model 'diet_small_patch16_224', did you mean deit_small_patch16_224\?"
    with pytest.raises(InputError, match=message) as caught:
        create_model("diet_small_patch16_224")
    assert "install the package that registers the model" in (caught.value.hint or "")
    with pytest.raises(InputError, match=r"timm has no model 'qqqqqqqqqqqqqqqq'\nsee timm"):
        create_model("qqqqqqqqqqqqqqqq")


@pytest.mark.parametrize(
    ("arch", "args"),
    [
        (ARCH, {"embed_dmi": 3}),
        (ARCH, {**SMALL, "num_heads": 3}),
        (ARCH, {**SMALL, "num_heads": 0}),
        (ARCH, {**SMALL, "global_pool": "best"}),
        (ARCH, {**SMALL, "img_size": "big"}),
        (ARCH, {**SMALL, "patch_size": 0}),
        (f"{ARCH}.no_such_tag", {}),
    ],
)
def test_arguments_that_timm_rejects(arch: str, args: dict) -> None:
    with pytest.raises(InputError, match="timm cannot build vit_tiny") as caught:
        create_model(arch, args)
    assert not isinstance(caught.value, WeightsError)
    assert "\n" not in caught.value.message and "model.args" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("arch", "args", "words", "hint"),
    [
        (ARCH, {"embed_dmi": 3}, "embed_dmi unknown key, did you mean embed_dim?", "model.args"),
        (ARCH, {**SMALL, "num_heads": 3}, "should be divisible by num_heads", "model.args"),
        (ARCH, {**SMALL, "num_heads": 0}, "ZeroDivisionError: .* in timm's `.*num_heads", "model.args"),
        (ARCH, {**SMALL, "act_layer": "nope"}, "KeyError: 'nope' in timm's `.*name", "model.args"),
        (ARCH, {**SMALL, "act_layer": nn.ReLU}, "act_layer got <class .*ReLU'>, expected timm's name", "model.args"),
        ("pvt_v2_b0", {"depths": [1]}, "AssertionError in timm's `assert.*num_stages", "model.args"),
    ],
)
def test_errors_of_timm_come_with_their_reason(arch: str, args: dict, words: str, hint: str) -> None:
    for create in (create_model, create_on_meta):
        with pytest.raises(InputError, match=words) as caught:
            create(arch, args)
        assert hint in str(caught.value.hint)


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@every_variant
def test_weights_from_a_file(variant: str, suffix: str, tmp_path: Path) -> None:
    model, path = saved(tmp_path, variant, suffix)
    row, x = contract(variant), images(variant, dtype=torch.float32)
    loaded = create_model(row.arch, row.arch_args, path)
    assert torch.equal(logits(loaded, x), logits(model, x))
    assert not torch.equal(logits(create_model(row.arch, row.arch_args), x), logits(model, x))


@pytest.mark.parametrize("variant", ["beit", "packed_biases", "split_swiglu"])
def test_weights_with_timms_names_load_into_a_prepared_model(variant: str, tmp_path: Path) -> None:
    model, path = saved(tmp_path, variant, prepared=False)
    row, x = contract(variant), images(variant, dtype=torch.float32)
    loaded = create_model(row.arch, row.arch_args, path)
    assert list(loaded.state_dict()) != list(model.state_dict())
    assert difference(logits(loaded, x), logits(model, x)) < 1e-5
    save_file({**model.state_dict(), "another": torch.zeros(1)}, path)
    with pytest.raises(WeightsError, match=r"another model.*: 1 unknown \(another"):
        create_model(row.arch, row.arch_args, path)


@pytest.mark.parametrize("variant", ["plain", "distilled", "registers", "deit3", "no_class_token"])
def test_position_embeddings_are_resampled_to_the_input_size(variant: str, tmp_path: Path) -> None:
    """From a model for 224 to one for 8 x 12; prefix tokens keep their embeddings."""
    model, path = saved(tmp_path, variant, img_size=224, patch_size=16)
    row = contract(variant, img_size=[32, 48], patch_size=16)
    loaded = create_model(row.arch, row.arch_args, path)
    prefix = 0 if model.no_embed_class else model.num_prefix_tokens
    expected = resample_abs_pos_embed(model.pos_embed, (2, 3), (14, 14), num_prefix_tokens=prefix)
    assert torch.equal(loaded.pos_embed, expected)
    assert torch.equal(loaded.pos_embed[:, :prefix], model.pos_embed[:, :prefix])
    assert logits(loaded, torch.randn(2, 3, 32, 48)).shape == (2, 5)
    assert input_config(loaded).size == (3, 32, 48)


def test_relative_position_tables_are_resampled_to_the_window(tmp_path: Path) -> None:
    """From windows of 4 to windows of 2: 49 relative positions become 9."""
    model, path = saved(tmp_path, "swin")
    row = contract("swin", window_size=2)
    loaded = create_model(row.arch, row.arch_args, path)
    table = "layers.0.blocks.1.attn.relative_position_bias_table"
    before = model.get_parameter(table)
    expected = resize_rel_pos_bias_table(before, (2, 2), (9, 4))
    assert before.shape == (49, 4)
    assert torch.equal(loaded.get_parameter(table), expected)
    other = "layers.0.blocks.1.attn.qkv.weight"
    assert torch.equal(loaded.get_parameter(other), model.get_parameter(other))


def test_layer_scales_of_original_deit3_checkpoints_are_renamed(tmp_path: Path) -> None:
    model, _ = saved(tmp_path, "deit3")
    old = {
        name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): t
        for name, t in model.state_dict().items()
    }
    assert set(old) != set(model.state_dict())
    torch.save({"model": old}, tmp_path / "old.pth")
    row = contract("deit3")
    loaded = create_model(row.arch, row.arch_args, tmp_path / "old.pth")
    x = images("deit3", dtype=torch.float32)
    assert torch.equal(logits(loaded, x), logits(model, x))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"depth": 3}, "12 unknown \\(blocks.2"),
        ({"depth": 1}, "12 tensors missing \\(blocks.1"),
        ({"embed_dim": 32}, "with another shape"),
        ({"init_values": 0.1}, "4 unknown \\(blocks.0.ls1.gamma"),
    ],
)
def test_weights_of_another_architecture(args: dict, message: str, tmp_path: Path) -> None:
    _, path = saved(tmp_path, **args)
    with pytest.raises(WeightsError, match=f"contains the weights of another model.*: .*{message}") as caught:
        create_model(ARCH, SMALL, path)
    assert caught.value.hint


def test_weights_of_something_else_altogether(tmp_path: Path) -> None:
    torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "resnet.pth")
    with pytest.raises(WeightsError, match="contains the weights of another model"):
        create_model(ARCH, SMALL, tmp_path / "resnet.pth")
    with pytest.raises(WeightsError, match="no weights at"):
        create_model(ARCH, SMALL, tmp_path / "none.pth")


@pytest.mark.parametrize("variant", ["plain", "distilled"])
def test_another_class_count_needs_a_new_head(variant: str, tmp_path: Path) -> None:
    model, path = saved(tmp_path, variant, num_classes=9)
    row = contract(variant)
    with pytest.raises(WeightsError, match="have 9 classes, the data has 5") as caught:
        create_model(row.arch, row.arch_args, path)
    assert "new_head" in (caught.value.hint or "") and "reset_classifier" in (caught.value.hint or "")
    loaded = create_model(row.arch, row.arch_args, path, new_head=True)
    assert loaded.head.weight.shape == (5, 16)
    body = {name: tensor for name, tensor in loaded.state_dict().items() if not name.startswith("head")}
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in body.items())
    fitting = create_model(row.arch, {**row.arch_args, "num_classes": 9}, path, new_head=True)
    assert torch.equal(fitting.head.weight, model.head.weight), "a head that fits is kept"


@pytest.mark.parametrize("variant", ["plain", "distilled", "swin"])
def test_a_model_without_classifier_takes_weights_with_one(variant: str, tmp_path: Path) -> None:
    model, path = saved(tmp_path, variant)
    row = contract(variant)
    loaded = create_model(row.arch, {**row.arch_args, "num_classes": 0}, path).state_dict()
    assert loaded and all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.items())
    assert {name.partition(".")[0] for name in model.state_dict().keys() - loaded.keys()} <= {"head", "head_dist"}


def test_weights_without_a_classifier_name_the_way_to_a_new_one(tmp_path: Path) -> None:
    _, path = saved(tmp_path, num_classes=0)
    with pytest.raises(WeightsError, match="2 tensors missing") as caught:
        create_model(ARCH, SMALL, path)
    assert "model.new_head = true" in str(caught.value.hint) and "num_classes=0" in str(caught.value.hint)


def test_a_model_beside_other_entries_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    """As PyTorch Lightning saves a module with a loss that has weights."""
    model, path = saved(tmp_path, suffix="pth")
    state = {f"net.backbone.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": state | {"criterion.weight": torch.ones(5)}}, path)
    with pytest.raises(WeightsError, match="contains the weights of another model") as caught:
        create_model(ARCH, SMALL, path)
    assert "save the entries of net.backbone alone" in str(caught.value.hint)


def test_the_input_is_what_the_model_was_built_for() -> None:
    config = input_config(create_model(ARCH, {**SMALL, "img_size": [8, 12], "in_chans": 1}))
    assert config.size == (1, 8, 12)
    assert (config.mean, config.std) == ((0.5,), (0.5,))
    deit = input_config(create_model("deit_tiny_patch16_224", SMALL))
    assert len(set(deit.mean)) == 3
    gray = input_config(create_model("deit_tiny_patch16_224", {**SMALL, "in_chans": 1}))
    assert gray.mean == pytest.approx((sum(deit.mean) / 3,))
    assert gray.interpolation == "bicubic"


def test_float16_files_give_float32_models(tmp_path: Path) -> None:
    model, _ = saved(tmp_path)
    save_file({name: tensor.half() for name, tensor in model.state_dict().items()}, tmp_path / "half.safetensors")
    loaded = create_model(ARCH, SMALL, tmp_path / "half.safetensors")
    x = images("plain", dtype=torch.float32)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert 0 < difference(logits(loaded, x), logits(model, x)) < 0.05


def test_functions_are_skipped_however_their_tensor_is_passed() -> None:
    scores = torch.empty(2, 3, device="meta")
    with SkipOnMeta({"softmax"}):
        assert torch.softmax(scores, dim=1) is scores and torch.softmax(dim=1, input=scores) is scores
