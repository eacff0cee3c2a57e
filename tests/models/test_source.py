"""What weights show about their model. The folder `transformers` contains tiny random models of that library (version
5.23) and, in outputs.json, what it computes for `images`.
"""

import json
import re
import shutil
from argparse import Namespace
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from safetensors.torch import load_file, save_file

from vitcompress.errors import InputError, WeightsError
from vitcompress.families import family_of
from vitcompress.methods.upvit import method as upvit
from vitcompress.models.checkpoint import load_model, save_model
from vitcompress.models.create import class_names_of, create_model, input_config, plan_of
from vitcompress.models.preprocessing import Preprocessing
from vitcompress.models.source import create_blank, create_named, load_class_names, resolve_model
from vitcompress.pipeline.api import prune

TRANSFORMERS = Path(__file__).parent / "transformers"
VIT, BEIT = "vit_tiny_patch16_224", "beit_base_patch16_224"
OWN = {"img_size": 24, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 3}
IMAGENET = [0.485, 0.456, 0.406]
# Architecture, arguments that the weights show, and those that they do not.
MODELS: dict[str, tuple[str, dict, dict]] = {
    "vit": (VIT, {k: v for k, v in OWN.items() if k != "num_heads"} | {"mlp_ratio": 2.5}, {"num_heads": 4}),
    "registers": (VIT, {"img_size": 48, "depth": 1, "reg_tokens": 2, "no_embed_class": True, "init_values": 1e-5}, {}),
    "pooled": (VIT, {"depth": 1, "global_pool": "avg", "class_token": False, "qkv_bias": False, "qk_norm": True}, {}),
    "distilled": ("deit_tiny_distilled_patch16_224", {"img_size": 32, "depth": 1}, {}),
    "attention_pooling": (VIT, {"img_size": 32, "depth": 1, "global_pool": "map"}, {}),
    "eva": ("eva02_tiny_patch14_224", {"img_size": 56, "depth": 1}, {}),
    "dinov3": ("vit_small_patch16_dinov3", {"depth": 1, "num_reg_tokens": 2}, {"img_size": 32}),
    "beit": ("beit_base_patch16_224", {"img_size": 48, "depth": 1, "embed_dim": 16, "num_heads": 4}, {}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"depths": [1, 2], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4},
        {"img_size": 64},
    ),
    "small_swin": ("swin_tiny_patch4_window7_224", {"img_size": 96, "depths": [1, 1, 1, 1], "embed_dim": 24}, {}),
    "pvt": (
        "pvt_v2_b0",
        {"depths": [1, 1, 1, 1], "embed_dims": [8, 8, 16, 16], "mlp_ratios": [2, 2, 2, 2], "sr_ratios": [4, 4, 2, 1]},
        {"num_heads": [1, 2, 4, 8]},
    ),
}


def saved(path: Path, arch: str = VIT, args: dict | None = None, options: Any = None, **more: Any) -> torch.nn.Module:
    """A model with the arguments `args`, whose training checkpoint is written to `path`."""
    torch.manual_seed(1)
    model = timm.create_model(arch, **{"num_classes": 3, **(OWN if args is None else args)}).eval()
    torch.save({"state_dict": model.state_dict(), "args": options, **more}, path)
    return model


@pytest.mark.parametrize("case", MODELS)
def test_weights_show_the_arguments_of_their_model(case: str, tmp_path: Path) -> None:
    arch, shown, hidden = MODELS[case]
    path = tmp_path / "own.pth.tar"
    model = saved(path, arch, {**shown, **hidden}, Namespace(model=arch, model_kwargs=hidden, drop=0.1))
    resolved = resolve_model(arch, {}, path)
    assert resolved.arch_args == {"num_classes": 3, **shown, **hidden}
    sources = {setting.name: setting.source for setting in resolved.settings}
    certain = shown.keys() - ({"img_size", "no_embed_class"} if case == "registers" else set())
    assert {sources[name] for name in {*certain, "num_classes"} & sources.keys()} == {"the weights"}
    assert {sources[name] for name in hidden if name in sources} <= {"the checkpoint's args"}
    x = torch.randn(1, *input_config(model).size)
    with torch.no_grad():
        assert torch.equal(create_model(arch, resolved.arch_args, path)(x), model(x))


@pytest.mark.parametrize(
    ("own", "options"),
    [
        ({"global_pool": "avgmax"}, {"gp": "avgmax"}),  # the shapes of `avg`
        ({"img_size": [16, 32]}, {"input_size": [3, 16, 32]}),  # 8 patches and a class token, as 9 patches of 24x24
    ],
)
def test_a_script_states_which_of_the_models_with_equal_shapes_it_trained(
    own: dict, options: dict, tmp_path: Path
) -> None:
    path = tmp_path / "own.pth"
    model = saved(path, args={**OWN, **own}, options=Namespace(model=VIT, model_kwargs={"num_heads": 4}, **options))
    resolved = resolve_model(VIT, {}, path)
    x = torch.randn(2, *input_config(model).size)
    with torch.no_grad():
        assert torch.equal(create_model(VIT, resolved.arch_args, path)(x), model(x))
    assert {s.name: s.source for s in resolved.settings}["patch_size"] == "the weights"


def test_a_recipe_may_repeat_what_a_script_states(tmp_path: Path) -> None:
    kwargs = {"proj_bias": False, "pos_embed": "learn", "fc_norm": True, "global_pool": "max", "num_heads": 4}
    model = saved(tmp_path / "own.pth", args={**OWN, **kwargs}, options={"model": VIT, "model_kwargs": kwargs})
    resolved = resolve_model(VIT, {**OWN, **kwargs}, tmp_path / "own.pth")
    x = torch.randn(2, *input_config(model).size)
    with torch.no_grad():
        assert torch.equal(create_model(VIT, resolved.arch_args, tmp_path / "own.pth")(x), model(x))
    with pytest.raises(WeightsError, match=r"global_pool is max in the checkpoint's args, avg in model\.args"):
        resolve_model(VIT, {**OWN, **kwargs, "global_pool": "avg"}, tmp_path / "own.pth")


def test_the_number_of_heads_is_assumed_if_nothing_states_it(tmp_path: Path) -> None:
    saved(tmp_path / "a.pth", args={**OWN, "embed_dim": 48, "num_heads": 4})
    settings = {s.name: s for s in resolve_model(VIT, {}, tmp_path / "a.pth").settings}
    assert settings["num_heads"].value == 3 and settings["num_heads"].source.startswith("assumed")
    saved(tmp_path / "b.pth")
    with pytest.raises(InputError, match=r"divisible|divided") as caught:
        resolve_model(VIT, {}, tmp_path / "b.pth")
    assert "--set model.args.num_heads=4 (Python: num_heads=4)" in str(caught.value.hint)
    dinov3 = "vit_small_patch16_dinov3"  # 16 channels are not 6 heads: timm builds it, but it rejects images
    saved(tmp_path / "c.pth", dinov3, {"embed_dim": 16, "depth": 1, "num_heads": 2, "img_size": 32})
    with pytest.raises(InputError, match="rejects images") as caught:
        resolve_model(dinov3, {"img_size": 32}, tmp_path / "c.pth")
    assert "--set model.args.num_heads=4" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("arch", "own", "heads"),
    [
        (VIT, {"embed_dim": 40, "depth": 1}, 5),
        ("pvt_v2_b0", {"depths": [1, 1], "embed_dims": [8, 16], "sr_ratios": [2, 1], "mlp_ratios": [2, 2]}, [2, 4]),
    ],
)
def test_a_number_of_heads_may_fit_only_the_sizes_of_the_weights(
    arch: str, own: dict, heads: object, tmp_path: Path
) -> None:
    """timm's width of this name, 192, is no multiple of 5, and pvt_v2_b0 has four stages."""
    saved(tmp_path / "a.pth", arch, {**own, "num_heads": heads})
    assert resolve_model(arch, {"num_heads": heads}, tmp_path / "a.pth").arch_args == {
        "num_classes": 3,
        **own,
        "num_heads": heads,
    }
    saved(tmp_path / "b.pth", arch, {**own, "num_heads": heads}, {"num_heads": heads})
    wrong = 7 if isinstance(heads, int) else [7, 7]
    with pytest.raises(WeightsError, match=r"num_heads is .* in the checkpoint's args, .*7.* in model\.args"):
        resolve_model(arch, {"num_heads": wrong}, tmp_path / "b.pth")


SWIN = "swin_tiny_patch4_window7_224"
DINOV3 = "vit_small_patch16_dinov3"
NARROW = {"embed_dim": 40, "depth": 1, "num_heads": 5}


@pytest.mark.parametrize(
    ("arch", "own", "recipe"),
    [
        # of the weights: patches that divide the images, the number of stages, the width
        (DINOV3, {"img_size": 56, "patch_size": 14, "embed_dim": 16, "depth": 1, "num_heads": 2}, ["img_size"]),
        ("pvt_v2_b0", {"depths": [1, 2], "embed_dims": [8, 16], "sr_ratios": [2, 1], "mlp_ratios": [2, 2]}, ["depths"]),
        (VIT, NARROW | {"init_values": 0.5}, ["init_values"]),  # which no weights show
        (VIT, {**OWN, "embed_dim": 48, "mlp_ratio": 2.66}, ["mlp_ratio"]),  # 127 hidden channels; timm's width has 510
    ],
)
def test_arguments_of_the_recipe_may_fit_only_the_other_sizes_of_the_weights(
    arch: str, own: dict, recipe: list[str], tmp_path: Path
) -> None:
    heads = {"num_heads": own.get("num_heads", [2, 4])}
    model = saved(tmp_path / "a.pth", arch, own | heads)
    requested = heads | {name: own[name] for name in recipe}
    resolved = resolve_model(arch, requested, tmp_path / "a.pth")
    assert resolved.arch_args.items() >= requested.items()
    loaded = create_model(arch, resolved.arch_args, tmp_path / "a.pth")
    x = torch.randn(2, *input_config(model).size)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    name, wrong = ("depths", [1, 3]) if "depths" in own else ("depth", 4)
    message = rf"contradicts the recipe: {name} is .* in the weights, {re.escape(str(wrong))} in model\.args$"
    with pytest.raises(WeightsError) as caught:
        resolve_model(arch, requested | {name: wrong}, tmp_path / "a.pth")
    assert re.search(message, caught.value.message)


@pytest.mark.parametrize("heads", [[2, 2, 4], [2]])
def test_heads_of_other_stages_than_those_of_the_weights_are_rejected(heads: list[int], tmp_path: Path) -> None:
    """timm ignores those of more stages, and cannot build a model with fewer."""
    saved(tmp_path / "a.pth", SWIN, {"img_size": 56, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]})
    with pytest.raises(WeightsError) as caught:
        resolve_model(SWIN, {"num_heads": heads}, tmp_path / "a.pth")
    assert f"num_heads is [2, 2] in the weights, {heads} in model.args" in caught.value.message


def test_the_reason_is_timms_where_no_model_has_the_arguments_of_the_recipe(tmp_path: Path) -> None:
    """Nothing is known then about what weights do not show as it is, such as initial values."""
    saved(tmp_path / "a.pth", args=OWN | {"init_values": 0.5})
    with pytest.raises(InputError, match=r"divisible|divided") as caught:
        resolve_model(VIT, {"num_heads": 5, "init_values": 0.5}, tmp_path / "a.pth")
    assert not isinstance(caught.value, WeightsError)


def test_a_window_is_that_of_the_weights_where_their_patches_give_a_larger_grid(tmp_path: Path) -> None:
    """timm cuts its window of 7 to the 6 patches of 4 pixels, but not to the 12 patches of these weights."""
    args = {"patch_size": 2, "window_size": 6, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2]}
    model = saved(tmp_path / "a.pth", SWIN, {"img_size": 24, **args})
    resolved = resolve_model(SWIN, {"img_size": 24}, tmp_path / "a.pth")
    assert resolved.arch_args == {"num_classes": 3, "img_size": 24, **args}
    x = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        assert torch.equal(create_model(SWIN, resolved.arch_args, tmp_path / "a.pth")(x), model(x))


@pytest.mark.parametrize(
    ("arch", "args", "hidden"),
    [
        (VIT, {"img_size": [16, 32], "embed_dim": 16, "depth": 1}, {"num_heads": 4}),
        (DINOV3, {"embed_dim": 16, "depth": 1}, {"num_heads": 2, "img_size": [16, 32]}),
        (BEIT, {"img_size": [16, 32], "embed_dim": 16, "depth": 1, "num_heads": 4}, {}),
        (SWIN, {"img_size": [48, 96], "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]}, {}),
    ],
)
def test_oblong_patches(arch: str, args: dict, hidden: dict, tmp_path: Path) -> None:
    """The grid is square."""
    model = saved(tmp_path / "a.pth", arch, args | hidden | {"patch_size": [4, 8]})
    resolved = resolve_model(arch, hidden, tmp_path / "a.pth")
    assert resolved.arch_args == {"num_classes": 3, "patch_size": [4, 8], **args, **hidden}
    x = torch.randn(2, *input_config(model).size)
    with torch.no_grad():
        assert torch.equal(create_model(arch, resolved.arch_args, tmp_path / "a.pth")(x), model(x))


def test_a_model_with_oblong_patches_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "a.pth", "vit_small_patch16_224", {"img_size": [16, 32], "patch_size": [8, 16], "depth": 1})
    with pytest.raises(WeightsError, match=r"patch_size \[8, 16\], img_size \[16, 32\]") as caught:
        resolve_model(VIT, {}, tmp_path / "a.pth")
    assert "vit_small_patch16_224" in str(caught.value.hint)


PVT = ("pvt_v2_b0", MODELS["pvt"][1] | MODELS["pvt"][2])


@pytest.mark.parametrize(
    ("stated", "size"),
    [({"img_size": 64}, (3, 64, 64)), ({"input_size": [3, 64, 96]}, (3, 64, 96)), ({"img_size": 224}, (3, 224, 224))],
)
def test_a_script_states_the_image_size_of_a_model_without_an_argument_for_it(
    stated: dict, size: tuple[int, ...], tmp_path: Path
) -> None:
    saved(tmp_path / "own.pth", *PVT, Namespace(model=PVT[0], model_kwargs=PVT[1], **stated))
    resolved = resolve_model(PVT[0], {}, tmp_path / "own.pth")
    model = create_model(resolved.arch, resolved.arch_args, tmp_path / "own.pth")
    assert input_config(model).size == size
    assert ("pretrained_cfg_overlay" in resolved.arch_args) == (size[-1] != 224)  # timm's default is no argument
    sources = {setting.name: setting.source for setting in resolved.settings}
    assert sources["img_size"].startswith("the checkpoint's args" if size[-1] != 224 else "timm's default")
    save_model(model, tmp_path / "saved")
    folder = resolve_model(PVT[0], {}, tmp_path / "saved")
    assert input_config(create_model(folder.arch, folder.arch_args, tmp_path / "saved")).size == size
    requested = {"pretrained_cfg_overlay": {"input_size": [3, 32, 32]}}
    other = resolve_model(PVT[0], requested, tmp_path / "own.pth")
    assert other.arch_args["pretrained_cfg_overlay"] == {"input_size": [3, 32, 32]}


def test_the_image_size_of_an_overlay_is_stated() -> None:
    """PVTv2 has no argument for it."""
    args = {"pretrained_cfg_overlay": {"input_size": [3, 64, 64]}}
    settings = {setting.name: setting for setting in resolve_model("pvt_v2_b0", args).settings}
    assert (settings["img_size"].value, settings["img_size"].source) == (64, "model.args")


@pytest.mark.parametrize(("size", "shown"), [([16, 32], [16, 32]), ([32, 16], [32, 16]), ([16, 16], 16)])
def test_both_sides_of_an_oblong_image_are_stated(size: list[int], shown: Any) -> None:
    settings = resolve_model(VIT, {"img_size": size, "patch_size": 8, "embed_dim": 16, "num_heads": 2}).settings
    assert {setting.name: setting.value for setting in settings}["img_size"] == shown


def test_arguments_of_the_recipe_are_stated_as_they_are() -> None:
    """The shapes of weights do not show the initial values of LayerScales, or where norms are."""
    args = {"init_values": 0.5, "fc_norm": False, "embed_dim": 16, "num_heads": 2}
    settings = {setting.name: setting for setting in resolve_model(VIT, args).settings}
    assert {name: settings[name].value for name in args} == args
    assert {settings[name].source for name in args} == {"model.args"}


@pytest.mark.parametrize(("size", "embedded"), [([48, 64], False), (None, True), (56, True)])
def test_positions_of_a_square_may_be_those_of_an_oblong_image(size: Any, embedded: bool, tmp_path: Path) -> None:
    """48 patches and a class token are as many as 49 patches: the square is an assumption, and no fact of an oblong."""
    model = saved(tmp_path / "own.pth", args=OWN | {"img_size": [48, 64]})
    own = {"num_heads": 4} | ({"img_size": size} if size else {})
    resolved = resolve_model(VIT, own, tmp_path / "own.pth")
    settings = {setting.name: setting for setting in resolved.settings}
    assert settings["no_embed_class"].value is embedded
    assert settings["img_size"].value == (size or 56)
    assert all(settings[name].source.startswith("assumed") == (size is None) for name in ("img_size", "no_embed_class"))
    built = create_model(VIT, resolved.arch_args, tmp_path / "own.pth")
    assert (built.no_embed_class, torch.equal(built.pos_embed, model.pos_embed)) == (embedded, True)


def test_a_norm_after_the_pooling_does_not_show_how_the_recipe_pools(tmp_path: Path) -> None:
    """With fc_norm, timm pools the class token into that norm, too: these are the arguments of its training."""
    args = OWN | {"fc_norm": True}
    model = saved(tmp_path / "own.pth", args=args)
    resolved = resolve_model(VIT, {"num_heads": 4, "fc_norm": True}, tmp_path / "own.pth")
    loaded = create_model(VIT, resolved.arch_args, tmp_path / "own.pth")
    assert torch.equal(loaded(x := torch.randn(1, 3, *model.patch_embed.img_size)), model(x))
    averages = resolve_model(VIT, {"num_heads": 4}, tmp_path / "own.pth")  # as all other models with this norm
    assert averages.arch_args["global_pool"] == "avg"


def test_the_folder_of_a_dense_model_states_all_that_the_model_depends_on(tmp_path: Path) -> None:
    overlay = {"mean": [0.1, 0.2, 0.3], "crop_pct": 0.8, "label_names": ["a", "b", "c"]}
    model = create_model(VIT, {**OWN, "img_size": [48, 64], "pretrained_cfg_overlay": overlay})
    save_model(model, tmp_path / "saved")
    for weights in (tmp_path / "saved", tmp_path / "saved/model.safetensors"):
        resolved = resolve_model("", {}, weights)
        loaded = create_model(resolved.arch, resolved.arch_args, weights)
        assert loaded.plan == model.plan and class_names_of(loaded) == ("a", "b", "c")
        assert {setting.name: setting.source for setting in resolved.settings}["num_heads"] == "plan.json"
        assert torch.equal(loaded(x := torch.randn(1, 3, 48, 64)), model(x))


def test_weights_of_a_compressed_model_are_no_dense_model(tmp_path: Path) -> None:
    """These have the shapes of a model of timm, which scales its products of q and k otherwise."""
    dense = create_model(VIT, OWN)
    goal = upvit.Options(target_args={"embed_dim": 8, "num_heads": 1})
    small = prune(dense, upvit.structure(dense, family_of(dense), plan_of(dense), goal))
    save_model(small, tmp_path / "saved")
    with pytest.raises(WeightsError, match=r"model\.safetensors is a compressed model"):
        resolve_model(VIT, {"num_heads": 1}, tmp_path / "saved")
    (tmp_path / "saved/model.safetensors").rename(tmp_path / "alone.safetensors")
    with pytest.raises(WeightsError, match=r"alone\.safetensors needs its plan\.json"):
        resolve_model(VIT, {"num_heads": 1}, tmp_path / "alone.safetensors")


def test_a_checkpoint_of_another_program_may_have_a_plan(tmp_path: Path) -> None:
    saved(tmp_path / "own.pth", plan="of the training")
    assert resolve_model(VIT, {"num_heads": 4}, tmp_path / "own.pth").arch_args["depth"] == OWN["depth"]


def test_pooling_is_that_of_the_model_not_of_its_shapes() -> None:
    settings = resolve_model(VIT, OWN | {"global_pool": "avgmax"}).settings
    assert {setting.name: setting.value for setting in settings}["global_pool"] == "avgmax"


def test_preprocessing_is_that_of_the_training(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    saved(
        path,
        options=Namespace(
            model=VIT, num_heads=4, mean=tuple(IMAGENET), std=None, crop_pct=1.0, best=np.float64(1), out=PosixPath("x")
        ),
    )
    user = Preprocessing(crop_pct=0.8, crop_mode="center")
    resolved = resolve_model(VIT, {}, path, preprocessing={"the user": user})
    assert resolved.arch_args["pretrained_cfg_overlay"] == {"mean": IMAGENET, "crop_pct": 0.8}
    sources = {setting.name: setting.source for setting in resolved.settings}
    assert [sources[name] for name in ("mean", "std", "crop_pct")] == [
        "the checkpoint's args",
        f"timm's default for {VIT}",
        "the user",
    ]
    own = {"pretrained_cfg_overlay": {"mean": [0.5, 0.5, 0.5]}}
    assert resolve_model(VIT, own, path).arch_args["pretrained_cfg_overlay"] == {"mean": [0.5] * 3, "crop_pct": 1.0}
    for name in ("deit_tiny_patch16_224", "deit_tiny_patch16_224.of_another_timm"):
        saved(path, options={"model": name, "num_heads": 4})  # trained with the mean of another name
        assert input_config(create_model(VIT, resolve_model(VIT, {}, path).arch_args)).mean == tuple(IMAGENET)


def test_a_recipe_without_files_keeps_its_plan() -> None:
    for args in ({"img_size": 32}, {"pretrained_cfg_overlay": {"crop_pct": 0.9}}):
        assert resolve_model(VIT, args, classes=5).arch_args == {**args, "num_classes": 5}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"num_heads": 8}, "num_heads is 4 in the checkpoint's args, 8 in model.args"),
        (
            {"patch_size": 4, "depth": 3},
            "depth is 2 in the weights, 3 in model.args; patch_size is 8 in the weights, 4",
        ),
    ],
)
def test_arguments_that_the_weights_contradict_are_rejected(args: dict, message: str, tmp_path: Path) -> None:
    saved(tmp_path / "a.pth", options={"num_heads": 4})
    with pytest.raises(WeightsError, match=message):
        resolve_model(VIT, args, tmp_path / "a.pth")


def test_a_requested_image_size_resamples(tmp_path: Path) -> None:
    saved(tmp_path / "a.pth", options={"num_heads": 4})
    resolved = resolve_model(VIT, {"img_size": 48}, tmp_path / "a.pth")
    assert resolved.arch_args["img_size"] == 48
    model = create_model(VIT, resolved.arch_args, tmp_path / "a.pth")
    assert model.get_parameter("pos_embed").shape == (1, 37, 16)
    same = create_model(VIT, resolve_model(VIT, {"img_size": [24, 24]}, tmp_path / "a.pth").arch_args)
    assert same.get_parameter("pos_embed").shape == (1, 10, 16)
    saved(tmp_path / "wide.pth", args={**OWN, "img_size": (24, 32)}, options={"num_heads": 4})
    with pytest.raises(WeightsError, match="would be resampled"):
        resolve_model(VIT, {}, tmp_path / "wide.pth")
    wide = create_model(VIT, resolve_model(VIT, {"img_size": [24, 32]}, tmp_path / "wide.pth").arch_args)
    assert wide.get_parameter("pos_embed").shape == (1, 13, 16)


def test_the_size_of_weights_from_the_hub_is_checked() -> None:
    for size in (48, [48, 48]):
        model = create_model(VIT, resolve_model(VIT, {"img_size": size, "depth": 1}, "hub").arch_args)
        assert model.get_parameter("pos_embed").shape == (1, 10, 192)
    assert "img_size" not in resolve_model(VIT, {"depth": 1}, "hub").arch_args
    overlay = {"pretrained_cfg_overlay": {"input_size": [3, 48, 48]}}
    with pytest.raises(WeightsError, match=r"the image size of hub is unknown: pos_embed .* would be resampled"):
        resolve_model(VIT, overlay, "hub")


@pytest.mark.parametrize(
    ("trained", "used", "message"),
    [
        (
            VIT,
            "deit_small_patch16_224",
            r"ViT \(embed_dim 192, depth 1, patch_size 16, img_size 224.*vit_tiny_patch16_224",
        ),
        ("deit_tiny_distilled_patch16_224", VIT, "distilled DeiT .*--model deit_tiny_distilled_patch16_224"),
        ("swin_tiny_patch4_window7_224", VIT, "Swin Transformer"),
        ("pvt_v2_b0", VIT, "PVTv2"),
        ("resnet18", VIT, "ResNet"),
        (VIT, "swin_tiny_patch4_window7_224", "ViT"),
    ],
)
def test_weights_of_another_architecture_are_named(trained: str, used: str, message: str, tmp_path: Path) -> None:
    saved(tmp_path / "a.pth", trained, {"depth": 1} if "16" in trained else {})
    with pytest.raises(WeightsError) as caught:
        resolve_model(used, {}, tmp_path / "a.pth")
    assert re.search(message, f"{caught.value.message} {caught.value.hint}")


@pytest.mark.parametrize("key", ["state_dict_ema", "model_state_dict", "model", "module"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module.", "model.", "net.backbone."])
def test_keys_and_prefixes_of_training_scripts(key: str, prefix: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "a.pth")
    state = {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({key: state, "arch": VIT, "args": {"num_heads": 4}}, tmp_path / "a.pth")
    loaded = create_named(VIT, tmp_path / "a.pth")
    x = torch.randn(1, 3, 24, 24)
    assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize("case", sorted(json.loads((TRANSFORMERS / "outputs.json").read_text())))
def test_models_of_transformers(case: str) -> None:
    folder = TRANSFORMERS / case
    arch = {
        "deit_distilled": "deit_tiny_distilled_patch16_224",
        "swin": "swin_tiny_patch4_window7_224",
        "dinov2_swiglu": "vit_giant_patch14_dinov2",
    }.get(case, "vit_small_patch14_dinov2" if "dinov2" in case else VIT)
    backbone = "dinov2" in case
    resolved = resolve_model(arch, {}, folder, classes=3 if backbone else None)
    if backbone:
        with pytest.raises(WeightsError, match=r"head\.bias") as caught:
            create_model(arch, resolved.arch_args, folder)
        assert "model.new_head = true" in str(caught.value.hint)
    model: Any = create_model(arch, resolved.arch_args, folder, new_head=backbone)
    size = input_config(model).size
    images = torch.linspace(0, 30, 2 * size[0] * size[1] * size[2]).sin().reshape(2, *size)
    with torch.no_grad():
        outputs = model.forward_features(images) if backbone else model(images)
    expected = torch.tensor(json.loads((TRANSFORMERS / "outputs.json").read_text())[case]).reshape(outputs.shape)
    # transformers' ViT and DeiT add 1e-12 to variances and timm 1e-6: relative to variances of 0.01 or more, 1e-4.
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    if case in ("vit", "deit"):
        assert resolved.class_names == ("cat", "dog", "owl") == class_names_of(model)
    if case == "vit":
        about = input_config(model)
        assert (about.mean, about.interpolation, about.crop_mode) == ((0.1, 0.2, 0.3), "bilinear", "squash")


@pytest.mark.parametrize("source", ["save_model", "timm", "transformers"])
def test_distilled_weights_without_a_classifier(source: str, tmp_path: Path) -> None:
    """Their distillation token became a register."""
    arch, path = "deit_tiny_distilled_patch16_224", tmp_path / "a.pth"
    model = create_model(arch, {**OWN, "num_classes": 0})
    if source == "save_model":
        save_model(model, path := tmp_path / "saved")
    elif source == "timm":
        torch.save(model.state_dict(), path)
    else:  # DeiTModel
        tensors = load_file(TRANSFORMERS / "deit_distilled/model.safetensors")
        torch.save({name: tensor for name, tensor in tensors.items() if "classifier" not in name}, path)
        folder = TRANSFORMERS / "deit_distilled"
        model = create_model(arch, {**resolve_model(arch, {}, folder).arch_args, "num_classes": 0}, folder)
    loaded: Any = create_named(f"{arch}?num_heads=4&num_classes=0", path)
    x = torch.randn(1, *input_config(model).size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    with pytest.raises(WeightsError, match="distilled DeiT"):
        resolve_model(VIT, {"num_heads": 4}, path)


@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_models_of_torchvision(kind: str, tmp_path: Path) -> None:
    """Their names of tensors were unknown."""
    torch.manual_seed(0)
    if kind == "vit":
        sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "hidden_dim": 192, "mlp_dim": 96}
        model: Any = torchvision.models.VisionTransformer(num_heads=3, num_classes=5, **sizes)
        arch, args = VIT, {}
    else:
        sizes = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 1, 2], "window_size": [4, 4]}
        model = torchvision.models.SwinTransformer(num_heads=[2, 4, 4], num_classes=5, **sizes)
        arch, args = "swin_tiny_patch4_window7_224", {"img_size": 64, "num_heads": [2, 4, 4]}
    for parameter in model.parameters():  # biases and classifier are zero at first
        torch.nn.init.normal_(parameter, std=0.1)
    torch.save({"model": model.state_dict()}, tmp_path / "a.pth")
    resolved = resolve_model(arch, args, tmp_path / "a.pth")
    loaded = create_model(arch, resolved.arch_args, tmp_path / "a.pth")
    images = torch.randn(2, *input_config(loaded).size)
    with torch.no_grad():
        expected, outputs = model.eval()(images), loaded(images)
    torch.testing.assert_close(outputs, expected)
    assert expected.std() > 1e-3


@pytest.mark.parametrize(
    ("changes", "mode", "share"),
    [
        ({"size": 8, "image_processor_type": None, "feature_extractor_type": "ViTFeatureExtractor"}, "squash", 1.0),
        (
            {"size": 10, "crop_size": 8, "do_center_crop": True, "image_processor_type": "DeiTImageProcessor"},
            "squash",
            0.8,
        ),
        (
            {"size": 10, "crop_size": 8, "do_center_crop": True, "image_processor_type": "BitImageProcessor"},
            "center",
            0.8,
        ),
        (
            {"size": {"shortest_edge": 10}, "crop_size": {"height": 8, "width": 8}, "do_center_crop": True},
            "center",
            0.8,
        ),
    ],
)
def test_a_number_as_size_is_that_of_its_image_processor(
    changes: dict, mode: str, share: float, tmp_path: Path
) -> None:
    """Published Swin and DeiT models state it so. Equal to transformers 5.24 on photographs."""
    about = input_config(create_named(VIT, with_processor(changes, tmp_path)))
    assert (about.crop_mode, about.crop_pct) == (mode, share)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({}, 1 / 255),
        ({"rescale_factor": 1 / 127.5}, 1 / 127.5),
        ({"do_rescale": False}, 1),
        ({"do_normalize": False}, 0),
    ],
)
def test_pixels_are_normalized_as_transformers_does(changes: dict, factor: float, tmp_path: Path) -> None:
    about = input_config(create_named(VIT, with_processor(changes, tmp_path)))
    pixels = torch.arange(256, dtype=torch.float64)
    mean, std = torch.tensor((about.mean, about.std), dtype=torch.float64)[:, :, None]
    own = torch.tensor([[0.1], [0.2], [0.3]], dtype=torch.float64)
    expected = (factor * pixels - own) / 0.4 if factor else (pixels / 255).expand(3, -1)
    torch.testing.assert_close((pixels / 255 - mean) / std, expected, rtol=1e-6, atol=1e-6)  # of their own, in float32


def with_processor(changes: dict, folder: Path) -> Path:
    """A copy of the ViT of transformers, with changes of the configuration of its image processor."""
    shutil.copytree(TRANSFORMERS / "vit", folder, dirs_exist_ok=True)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_a_number_among_the_weights_of_transformers_is_an_unknown_key(tmp_path: Path) -> None:
    path = shutil.copytree(TRANSFORMERS / "vit", tmp_path / "vit") / "model.safetensors"
    save_file(load_file(path) | {"vit.odd": torch.tensor(1.0)}, path)
    with pytest.raises(WeightsError, match="odd"):
        create_named(VIT, path.parent)


def test_other_models_of_transformers_are_named(tmp_path: Path) -> None:
    path = shutil.copytree(TRANSFORMERS / "swin", tmp_path / "swinv2") / "model.safetensors"
    save_file({name.replace("swin.", "swinv2."): tensor for name, tensor in load_file(path).items()}, path)
    config = path.with_name("config.json")
    config.write_text(config.read_text().replace('"model_type": "swin"', '"model_type": "swinv2"'))
    with pytest.raises(WeightsError, match=r"contains a model of transformers \(swinv2\)") as caught:
        create_named("swin_tiny_patch4_window7_224", path.parent)
    assert caught.value.hint and "dinov2" in caught.value.hint


def test_another_epsilon_of_norms_is_rejected(tmp_path: Path) -> None:
    path = shutil.copytree(TRANSFORMERS / "vit", tmp_path / "vit") / "config.json"
    path.write_text(path.read_text().replace('"layer_norm_eps": 1e-12', '"layer_norm_eps": 0.001'))
    with pytest.raises(WeightsError, match=r"layer_norm_eps 0\.001, timm's models have at most 1e-05"):
        create_named(VIT, path.parent)


def test_a_folder_in_timms_layout(tmp_path: Path) -> None:
    model = saved(tmp_path / "a.pth")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    cfg = {"mean": IMAGENET, "input_size": [3, 24, 24], "num_classes": 1000}
    config = {
        "architecture": VIT,
        "num_classes": 3,
        "model_args": OWN,
        "pretrained_cfg": cfg,
        "label_names": ["c", "a", "b"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    resolved = resolve_model(VIT, {}, tmp_path)
    overlay = {"mean": IMAGENET, "label_names": ["c", "a", "b"]}
    assert resolved.arch_args == {**OWN, "pretrained_cfg_overlay": overlay}
    with pytest.raises(WeightsError, match=r"num_heads is 4 in config\.json, 2 in model\.args"):
        resolve_model(VIT, {"num_heads": 2}, tmp_path)


@pytest.mark.parametrize("name", ["recipe.toml", "empty", "none.pth", "hf-hub:timm/none"])
def test_what_is_no_file_of_weights_is_rejected(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "recipe.toml").write_text("[model]\n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsError, match=name) as caught:
        resolve_model(VIT, {}, name if name.startswith("hf-hub") else tmp_path / name)
    assert "Hugging Face folder" in str(caught.value.hint)


def test_class_names_survive_saving(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("owl\ncat \ndog\n")
    (tmp_path / "names.json").write_text('["owl", "cat", "dog"]')
    names = load_class_names(tmp_path / "names.txt")
    assert names == load_class_names(tmp_path / "names.json") == ("owl", "cat", "dog")
    for table in ({"cat": 1, "owl": 0, "dog": 2}, {"1": "cat", "0": "owl", "2": "dog"}):  # class_to_idx, id2label
        (tmp_path / "names.json").write_text(json.dumps(table))
        assert load_class_names(tmp_path / "names.json") == names
    resolved = resolve_model(VIT, OWN, class_names=names)
    model: Any = create_model(VIT, resolved.arch_args)
    save_model(model, tmp_path / "kept")
    assert class_names_of(load_model(tmp_path / "kept")) == names
    save_model(model, tmp_path / "renamed", classes=["x", "y", "z"])
    assert class_names_of(load_model(tmp_path / "renamed")) == ("x", "y", "z")
    model.reset_classifier(2)
    save_model(model, tmp_path / "other")
    assert class_names_of(load_model(tmp_path / "other")) == ()
    with pytest.raises(InputError, match="3 class names, but the model has 2 classes\ngive one name"):
        save_model(model, tmp_path / "wrong", classes=names)
    with pytest.raises(InputError, match="2 class names, but the model has 3 classes"):
        resolve_model(VIT, OWN, class_names=names[:2])
    for text in ("", "a\n\nb\n", "[1, 2]", '{"a": 1, "b": 2}'):
        (tmp_path / "names.txt").write_text(text)
        with pytest.raises(InputError, match=r"names\.txt"):
            load_class_names(tmp_path / "names.txt")


def test_names_with_arguments() -> None:
    model: Any = create_named(f"{VIT}?img_size=32&depth=1&global_pool=avg&num_classes=4")
    assert (model.num_classes, len(model.blocks), model.global_pool) == (4, 1, "avg")


def test_weights_in_several_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"several files \(model\.safetensors\.index\.json\)"):
        resolve_model(VIT, {}, tmp_path)


@pytest.mark.parametrize("used", ["deit_tiny_patch16_224", "pit_ti_224"])
def test_the_architecture_of_distilled_weights_comes_before_their_classes(used: str, tmp_path: Path) -> None:
    saved(tmp_path / "a.pth", "deit_tiny_distilled_patch16_224", {"depth": 1, "num_classes": 5})
    with pytest.raises(WeightsError, match=r"another model, distilled DeiT \(embed_dim 192, depth 1"):
        create_model(used, {"num_classes": 3}, tmp_path / "a.pth")


@pytest.mark.parametrize(
    "stated", [{"class_to_idx": {"1": 0, "0": 2, "2": 1}}, {"id2label": {"2": "0", "0": "1", "1": "2"}}]
)
def test_names_of_classes_may_be_numbers(tmp_path: Path, stated: dict[str, Any]) -> None:
    saved(tmp_path / "a.pth", **stated)
    assert resolve_model(VIT, {"num_heads": 4}, tmp_path / "a.pth").class_names == ("1", "2", "0")


@pytest.mark.parametrize(
    "stated",
    [
        {"id2label": {"a": {"b": 1}, "c": [0]}},
        {"class_to_idx": {"cat": [], "dog": {}, "owl": 1}},
        {"img_size": [[8, 8], {"a": 1}]},
        {"img_size": [[24], [24]]},
        {"model_args": {"img_size": []}},
    ],
)
def test_tables_instead_of_numbers_in_a_checkpoint(tmp_path: Path, stated: dict[str, Any]) -> None:
    """They name no classes, and the shapes of the weights decide the size of the images."""
    model = saved(tmp_path / "a.pth")
    torch.save({"model": model.state_dict(), **stated}, tmp_path / "b.pth")
    resolved, plain = (resolve_model(VIT, {"num_heads": 4}, tmp_path / name) for name in ("b.pth", "a.pth"))
    assert resolved.class_names == () and resolved.arch_args == plain.arch_args


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("patch_embed.proj.weight", ()),
        ("patch_embed.proj.weight", (0, 3, 8, 8)),
        ("pos_embed", ()),
        ("head.weight", ()),
        ("register_tokens", (1, 2, 16)),
    ],
)
def test_tensors_of_other_shapes_are_of_another_model(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = saved(tmp_path / "a.pth").state_dict() | {name: torch.zeros(shape)}
    torch.save(tensors if name != "register_tokens" else {name: tensors[name]}, tmp_path / "a.pth")
    with pytest.raises((InputError, WeightsError), match=r"cannot build|of another model|have 1 classes"):
        create_named(VIT + "?num_heads=4", tmp_path / "a.pth", classes=3)


def test_an_architecture_is_built_once_for_all_recipes_of_it() -> None:
    assert create_blank("deit_tiny_patch16_224", {"depth": 1}) is create_blank("deit_tiny_patch16_224", {"depth": 1})
