"""Sites and spaces describe timm's models correctly, and unsupported models are rejected with the reason."""

import sys
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from contracts import (
    CONTRACTS,
    MOVED,
    assert_moved,
    assert_same,
    build,
    contract,
    difference,
    every_variant,
    images,
    kept_channels,
    logits,
    spaces_of,
)
from packages import write_package
from timm.layers import AttentionPoolLatent, GluMlp, LayerNorm2d, Mlp, RmsNorm, SwiGLU
from torch import Tensor, nn

from vitcompress import surgery
from vitcompress.errors import InputError, UnsupportedModelError
from vitcompress.families import FAMILIES, Axis, Space, family_of, prepare_model
from vitcompress.families.base import StagedFamily
from vitcompress.models.checkpoint import load_model, save_model
from vitcompress.models.create import create_model
from vitcompress.pipeline.api import prune
from vitcompress.plan import Plan
from vitcompress.surgery.check import check_maskable
from vitcompress.surgery.edit import segments_of, select_positions


def test_every_family_has_a_row() -> None:
    assert {family for family, _ in CONTRACTS} == set(FAMILIES)


@pytest.mark.parametrize(("family", "variant"), CONTRACTS)
def test_the_family_follows_from_the_structure(family: str, variant: str) -> None:
    assert family_of(build(variant)).name == family


@every_variant
def test_sites_are_in_forward_order_with_paths_that_exist(variant: str) -> None:
    model = build(variant)
    family = family_of(model)
    sites = family.sites(model)
    kinds = ("attention", "activation", "ffn", "block")
    kinds = tuple(kind for kind in kinds if kind != "activation" or not family.not_foldable(model))
    depth = len(family.blocks(model))
    assert depth == (3 if family.stages else 2)
    assert [(site.index, site.kind) for site in sites] == [(i, kind) for i in range(depth) for kind in kinds]
    for site in sites:
        assert model.get_submodule(site.name) is not None
        assert site.name.startswith(site.block)


@every_variant
def test_every_parameter_is_in_a_space(variant: str) -> None:
    """Except the class axis of the heads: an axis without a space could not be sliced."""
    model = build(variant)
    named = {(axis.tensor, axis.dim) for space in spaces_of(model).values() for axis in space.axes}
    for name, parameter in model.named_parameters():
        dims = {1: [0], 2: [0, 1], 3: [2], 4: [0, 1]}[parameter.ndim]
        for dim in dims:
            free = name.startswith("head") or (
                name == "patch_embed.proj.weight" and dim == 1
            )  # classes, image channels
            free = free or ("dwconv" in name and dim == 1)  # one input channel per group
            free = free or ("relative_position" in name and dim == 0)  # positions
            assert (name, dim) in named or free, (name, dim)


@every_variant
def test_axes_tile_their_tensors(variant: str) -> None:
    """All spaces along one dimension of one tensor cover it without gap or overlap."""
    model = build(variant)
    parts: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for space in spaces_of(model).values():
        for axis in space.axes:
            end = axis.offset + axis.copies * (space.heads if axis.per_head else space.size)
            parts.setdefault((axis.tensor, axis.dim), []).append((axis.offset, end))
    for (tensor, dim), ranges in parts.items():
        ranges.sort()
        assert ranges[0][0] == 0
        assert ranges[-1][1] == model.get_parameter(tensor).shape[dim]
        assert all(one[1] == other[0] for one, other in pairwise(ranges))


def permutation(space: Space, seed: int = 0) -> tuple[int, ...]:
    """Channels of each head in another order; every channel of the first head moves."""
    per = space.size // space.heads
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(per, generator=generator).roll(1).tolist() for _ in range(space.heads)]
    if orders[0] == sorted(orders[0]):
        orders[0] = orders[0][::-1]
    return tuple(h * per + c for h, order in enumerate(orders) for c in order)


def sliced_state(
    state: Mapping[str, Tensor], spaces: Iterable[Space], kept: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """`state` with every axis of every space in `kept` indexed, in the order of `kept`."""
    segments = segments_of(spaces, kept)
    return {name: select_positions(tensor, segments.get(name, {})) for name, tensor in state.items()}


@every_variant
def test_permuted_equals_unchanged_and_every_forgotten_axis_is_detected(variant: str) -> None:
    model, x = build(variant), images(variant)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = logits(model, x)
    for space in (space for space in spaces_of(model).values() if not space.whole_heads):
        order = {space.name: permutation(space)}
        model.load_state_dict(sliced_state(state, [space], order))
        assert_same(logits(model, x), expected)
        for number, axis in enumerate(space.axes):
            keys_alone = space.kind == "qk" and axis.tensor.endswith((".k.bias", ".kv.bias"))  # shifts all scores alike
            if axis.per_head or keys_alone:  # heads stay where they are
                continue
            forgotten = [space.axes[:number] + space.axes[number + 1 :]]
            if axis.copies > 1 and not axis.tensor.endswith("bias"):  # a bias of the keys shifts all scores alike
                forgotten.append((*forgotten[0], replace(axis, copies=1)))
            for axes in forgotten:
                if all(left.per_head for left in axes):  # nothing was permuted
                    continue
                model.load_state_dict(sliced_state(state, [replace(space, axes=axes)], order))
                assert difference(logits(model, x), expected) > MOVED, (space.name, axis)


@every_variant
def test_whole_heads_can_change_places_if_queries_and_values_move_together(variant: str) -> None:
    model, x = build(variant), images(variant)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = logits(model, x)
    first = next(iter(family_of(model).blocks(model)))
    qk, v = (spaces_of(model)[f"{first}.{kind}"] for kind in ("qk", "v"))
    width = qk.size // 4
    order = tuple(h * width + c for h in (2, 0, 3, 1) for c in range(width))
    model.load_state_dict(sliced_state(state, [qk, v], {qk.name: order, v.name: order}))
    assert_same(logits(model, x), expected)
    parts = [[qk]]
    if any(axis.per_head for axis in qk.axes):
        parts.append([replace(qk, axes=tuple(axis for axis in qk.axes if not axis.per_head)), v])
    for moved in parts:
        model.load_state_dict(sliced_state(state, moved, {space.name: order for space in moved}))
        assert_moved(logits(model, x), expected)


# ---------------------------------------------------------------------------------------------------- prepared models


@every_variant
def test_a_prepared_model_equals_timms(variant: str) -> None:
    model, x = build(variant, prepared=False), images(variant)
    prepared = prepare_model(deepcopy(model))
    assert_same(logits(prepared, x), logits(model, x))
    names = list(prepared.state_dict())
    assert list(prepare_model(prepared).state_dict()) == names, "preparing again changes nothing"
    renamed = ("beit", "beit_absolute", "packed_biases", "split_swiglu", "inner_norms_rotary")
    assert (names != list(model.state_dict())) == (variant in renamed)
    assert list(build(variant).state_dict()) == names


@pytest.mark.parametrize(
    ("variant", "frozen", "joined"),
    [
        ("inner_norms_rotary", "attn.q_proj", "attn.qkv"),
        ("packed_biases", "attn.q_bias", "attn.qkv"),
        ("split_swiglu", "mlp.fc1_g", "mlp.fc1"),
    ],
)
def test_joined_layers_are_trained_unless_all_of_them_are_frozen(variant: str, frozen: str, joined: str) -> None:
    model = build(variant, prepared=False)
    for name, parameter in model.blocks[0].named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    model.blocks[1].requires_grad_(False)
    prepare_model(model)
    assert all(parameter.requires_grad for parameter in model.blocks[0].get_submodule(joined).parameters())
    assert not any(parameter.requires_grad for parameter in model.blocks[1].parameters())


def test_a_plan_prepares_the_model_that_it_is_applied_to() -> None:
    model, x = build("beit", prepared=False), images("beit")
    plan = replace(contract("beit").plan, kept=kept_channels(model, {"qk", "v", "mlp"}))
    sliced = surgery.apply_to_copy(model, plan)
    assert_same(logits(sliced, x), logits(surgery.apply_to_copy(prepare_model(model), plan), x))


# ----------------------------------------------------------------------------------------------- families of a package


PACKAGE = """
import timm
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from vitcompress.families.vit import VitFamily

class OwnBlock(timm.models.vision_transformer.Block):
    pass

class Own(VisionTransformer):
    def __init__(self, **args):
        super().__init__(**args, block_fn=OwnBlock)

@timm.models.register_model
def own_vit(pretrained=False, pretrained_cfg=None, pretrained_cfg_overlay=None, cache_dir=None, **args):
    return Own(**args)

class OwnFamily(VitFamily):
    name, supported, model_type, block_type = "own", "Own", Own, OwnBlock

FAMILY = OwnFamily()
"""


def test_a_family_of_another_package_registers_its_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known to timm without an import by the user, also if another package is broken."""
    points = "a_missing = own_missing:FAMILY\nown = own_models:FAMILY"
    monkeypatch.syspath_prepend(write_package(tmp_path / "site", "families", points, own_models=PACKAGE))
    assert family_of(build("plain")).name == "vit" and "own_models" not in sys.modules, "read only if needed"
    try:
        small = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
        model = create_model("own_vit", small)
        assert family_of(model).name == "own"
        with pytest.raises(InputError, match="a_missing = own_missing:FAMILY does not load"):
            family_of(nn.Linear(1, 1))
    finally:
        sys.modules.pop("own_models", None)


def test_models_of_other_libraries_are_not_supported() -> None:
    with pytest.raises(UnsupportedModelError, match="it is of type Linear"):
        family_of(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        (Axis("blocks.0.attn.q_bias", 0), "no mask applies to blocks.0.attn.q_bias"),
        (Axis("blocks.0.norm1.weight", 0), "its norm is of type LayerNorm2d"),
        (Axis("blocks.0.extra.running_mean", 0), "no mask applies to blocks.0.extra.running_mean"),
    ],
)
def test_a_family_whose_channels_cannot_be_masked_is_rejected(axis: Axis, message: str) -> None:
    model = build("beit", prepared=False)
    model.blocks[0].norm1 = LayerNorm2d(16)
    model.blocks[0].extra = nn.BatchNorm2d(16)
    family = family_of(build("beit"))
    space = Space("blocks.0.qk", "qk", 16, (axis,), heads=4)
    with pytest.raises(UnsupportedModelError, match=message):
        check_maskable(model, family, [space])


STAGED = {"depths": (1, 1), "embed_dim": 16, "num_heads": (2, 2)}
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4}


@pytest.mark.parametrize(
    ("arch", "args", "reason"),
    [
        ("resnet18", {}, "it is of type ResNet"),
        ("swinv2_tiny_window8_256", STAGED, "it is of type SwinTransformerV2"),
        ("beit_base_patch16_224", {**SMALL, "swiglu_mlp": True}, "its FFN is of type SwiGLU"),
        ("beit_base_patch16_224", {**SMALL, "use_shared_rel_pos_bias": True}, "share one table of relative positions"),
        (
            "eva02_tiny_patch14_224",
            {**SMALL, "attn_type": "rope", "qkv_fused": False, "num_kv_heads": 2},
            "its q has more heads than k and v",
        ),
        ("swin_tiny_patch4_window7_224", {**STAGED, "norm_layer": RmsNorm}, "its norm is of type RmsNorm"),
        ("vit_tiny_patch16_224", {**SMALL, "global_pool": "prr"}, "its attention pool is of type AttentionPoolPrr"),
        ("vit_tiny_patch16_224", {**SMALL, "qk_norm": True}, "normalizes q or k"),
        ("vit_tiny_patch16_224", {**SMALL, "mlp_layer": partial(Mlp, use_conv=True)}, "its FFN is convolutional"),
        ("vit_tiny_patch16_224", {**SMALL, "norm_layer": "rmsnorm"}, "its norm is of type RmsNorm"),
        ("vit_tiny_patch16_224", {**SMALL, "embed_norm_layer": "rmsnorm"}, "its norm is of type RmsNorm"),
        ("vit_tiny_patch16_224", {**SMALL, "attn_layer": "diff"}, "its attention is of type DiffAttention"),
        ("vit_tiny_patch16_224", {**SMALL, "mlp_layer": SwiGLU}, "its FFN is of type SwiGLU"),
        ("vit_tiny_patch16_224", {**SMALL, "mlp_layer": GluMlp, "proj_bias": False}, "gated FFN has no biases"),
        ("vit_base_patch16_rpn_224", SMALL, "its blocks are of type ResPostBlock"),
        (
            "vit_tiny_r_s16_p8_224",
            {"img_size": 64, "embed_dim": 16, "depth": 1, "num_heads": 4},
            "its stem is of type HybridEmbed",
        ),
    ],
)
def test_other_models_are_rejected_with_the_reason(arch: str, args: dict, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        family_of(timm.create_model(arch, **args))
    assert caught.value.message.count("it is of") == reason.count("it is of"), "a reason of another family"
    first, *_, last = str(caught.value.hint).splitlines()
    assert first.endswith("or install the package that declares its family:") and "PVTv2" in last
    assert not str(caught.value.hint).endswith("...")


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"latent_len": 2}, "more than one latent"),
        ({"pool_type": "avg"}, "more than one latent"),
        ({"pos_embed": "abs", "feat_size": 4}, "adds positions"),
        ({"qk_norm": True}, "normalizes q or k"),
        ({"q_proj": False}, "no layer for q"),
        ({"out_features": 0}, "no MLP of two linear layers"),
        ({"latent_dim": 8}, "different widths"),
        ({"out_features": 8}, "different widths"),
        ({"norm_layer": RmsNorm}, "its norm is of type RmsNorm"),
    ],
)
def test_other_pools_are_rejected(args: dict, reason: str) -> None:
    model = build("attention_pool")
    model.attn_pool = AttentionPoolLatent(16, **{"num_heads": 4, "norm_layer": nn.LayerNorm, **args})
    with pytest.raises(UnsupportedModelError, match=reason):
        family_of(model)


@pytest.mark.parametrize("method", ["forward", "forward_features", "forward_head", "_pos_embed"])
def test_a_subclass_that_computes_something_else_is_rejected(method: str) -> None:
    model = build("plain")
    timms = type(model)
    model.__class__ = type("Own", (timms,), {"reset_classifier": lambda *_: None})
    assert family_of(model).name == "vit"

    def changed(self: nn.Module, *args: Any) -> Any:
        return getattr(timms, method)(self, *args) * 2

    changed.__qualname__ = f"Own.{method}"
    model.__class__ = type("Own", (timms,), {method: changed})
    with pytest.raises(UnsupportedModelError, match=rf"Own\.{method} is not timm's"):
        family_of(model)


@pytest.mark.parametrize("name", ["forward", "blocks.1.attn.forward", "forward_head", "pool", "_pos_embed"])
def test_an_object_with_a_method_of_its_own_is_rejected(name: str) -> None:
    """A loaded model would have the one of its class."""
    model = build("plain")
    path, _, method = name.rpartition(".")
    module = model.get_submodule(path)
    setattr(module, method, partial(getattr(type(module), method), module))
    with pytest.raises(UnsupportedModelError, match=f"its {name} was replaced; remove this attribute"):
        family_of(model)
    delattr(module, method)
    assert family_of(model).name == "vit"


def test_a_norm_without_weights_is_rejected() -> None:
    model = build("plain")
    model.blocks[1].norm2 = nn.LayerNorm(16, elementwise_affine=False)
    with pytest.raises(UnsupportedModelError, match="LayerNorm has no weights"):
        family_of(model)


def test_modules_with_shared_parameters_are_rejected() -> None:
    model = build("plain")
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    with pytest.raises(UnsupportedModelError, match="share parameters"):
        family_of(model)


@pytest.mark.parametrize(
    ("arch", "name", "args"),
    [
        (
            "swin_tiny_patch4_window7_224",
            "layers.0.blocks.1",
            {"window_size": 4, "depths": (2, 2), "num_heads": (2, 2)},
        ),
        ("beit_base_patch16_224", "blocks.1", {"patch_size": 8, "depth": 2, "num_heads": 2}),
    ],
    ids=["swin", "beit"],
)
@pytest.mark.parametrize("what", ["removed", "sliced"])
def test_changing_the_input_size_after_pruning_is_rejected(what: str, arch: str, name: str, args: dict) -> None:
    args = {"img_size": 32, "embed_dim": 16, "num_classes": 3, **args}
    only_an_ffn = Plan(arch, args, kept={f"{name}.mlp": (0, 1)})  # the windows are those of timm
    surgery.apply_plan(timm.create_model(arch, **args), only_an_ffn).set_input_size(img_size=(48, 32))
    changes = {"removed": {f"{name}.attn": "drop"}} if what == "removed" else {"kept": {f"{name}.qk": (0, 1, 8, 9)}}
    pruned = surgery.apply_plan(timm.create_model(arch, **args), Plan(arch, args, **changes)).eval()  # type: ignore[arg-type]
    before = logits(pruned, torch.ones(1, 3, 32, 32))
    with pytest.raises(UnsupportedModelError, match=r"input size .* cannot be changed"):
        deepcopy(pruned).set_input_size(img_size=(48, 32))
    with pytest.raises(UnsupportedModelError, match=r"input size .* cannot be changed"):
        pruned.set_input_size(img_size=(48, 32))
    assert torch.equal(logits(pruned, torch.ones(1, 3, 32, 32)), before), "nothing is changed"


@pytest.mark.parametrize("removed", [{"blocks.1.attn": "drop"}, {"blocks.0.attn": "norm_identity"}])
def test_weights_of_another_size_are_resampled_before_an_attention_is_removed(tmp_path: Path, removed: dict) -> None:
    args = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    timms = timm.create_model("beit_base_patch16_224", img_size=32, **args).eval()
    for parameter in timms.parameters():
        nn.init.normal_(parameter, std=0.3)
    torch.save(timms.state_dict(), tmp_path / "weights.pth")
    model = create_model("beit_base_patch16_224", {**args, "img_size": [48, 32]}, tmp_path / "weights.pth")
    timms.set_input_size(img_size=(48, 32))
    x = torch.rand(2, 3, 48, 32)
    assert_same(logits(model, x), logits(timms, x))
    pruned = prune(model, model.plan.delta(removed=removed))
    save_model(pruned, tmp_path / "run")
    assert torch.equal(logits(load_model(tmp_path / "run"), x), logits(pruned, x))
    assert_moved(logits(pruned, x), logits(model, x))


def test_an_incomplete_family_is_rejected_when_it_is_created() -> None:
    """Not later, in the middle of a run that slices."""

    class Incomplete(StagedFamily):
        def slice_attention(self, attn: Any, qk_dim: int, v_dim: int, num_heads: int) -> nn.Module:
            return attn

    with pytest.raises(TypeError, match=r"set_width.*stage_axes|stage_axes.*set_width"):
        Incomplete()  # type: ignore[abstract]
