"""The depth methods on Swin, PVTv2 and gated FFNs: the same code, or a refusal with its reason."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from method_world import CLASSES, context
from test_depth_methods import DEPTH
from test_methods import OPTIONS
from torch import nn

from vitcompress import surgery
from vitcompress.errors import PlanError
from vitcompress.families import family_of
from vitcompress.io.tensors import load_tensors
from vitcompress.methods import METHODS, depth, nose
from vitcompress.methods.base import LEFT_WEIGHTS, Context
from vitcompress.methods.calibration import calibration_images
from vitcompress.methods.hetdpt import method as hetdpt
from vitcompress.models.create import create_model
from vitcompress.plan import Plan

GREY = {"in_chans": 1, "num_classes": CLASSES}
ARCHS: dict[str, tuple[str, dict[str, Any]]] = {
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 8, "patch_size": 1, "window_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 2]},
    ),
    "pvt": (
        "pvt_v2_b0",
        {
            "embed_dims": [16, 16],
            "depths": [2, 1],
            "num_heads": [2, 2],
            "sr_ratios": [2, 1],
            "mlp_ratios": [2, 2],
            "pretrained_cfg_overlay": {"input_size": [1, 8, 8]},
        },
    ),
    "eva": (
        "vit_small_patch16_dinov3",
        {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2, "mlp_ratio": 2.0},
    ),
    "swiglu": (
        "vit_giant_patch14_dinov2",
        {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2, "mlp_ratio": 4.0},
    ),
}
PVT_SENTENCE = r"PVTv2's MLP has a depth-wise 3x3 convolution and cannot be folded exactly"


def world(name: str, folder: Path) -> tuple[nn.Module, Context]:
    """A model of three blocks with random weights, and what a method is given with it."""
    arch, args = ARCHS[name]
    made = create_model(arch, {**args, **GREY}, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    given = {**args, **GREY}
    return made, context(folder, made, plan=Plan(arch, given))


def pixels() -> torch.Tensor:
    return torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", ["swin", "eva"])
@pytest.mark.parametrize("method", [name for name in DEPTH if name != "fixed"])
def test_every_depth_method_works_on_other_families(method: str, family: str, tmp_path: Path) -> None:
    made, around = world(family, tmp_path)
    found = METHODS[method].plan(made, around, OPTIONS[method])
    assert len(found.removed) == 2
    assert all(name.startswith(tuple(around.family.blocks(made))) for name in found.removed)
    with torch.no_grad():
        small = surgery.apply_to_copy(made, found)
        assert (small(pixels()) - made(pixels())).abs().max() > 1e-4
    assert METHODS[method].structure(made, family_of(made), around.plan, OPTIONS[method]).arch == found.arch


@pytest.mark.parametrize("method", DEPTH)
def test_pvt_keeps_its_activations(method: str, tmp_path: Path) -> None:
    """Whatever removes activations is refused with the reason, before anything is measured; NOSE is not."""
    made, around = world("pvt", tmp_path)
    ask = METHODS[method].structure
    if method == "nose":
        assert len(METHODS[method].plan(made, around, OPTIONS[method]).removed) == 2
        return
    for call in (
        lambda: ask(made, family_of(made), around.plan, OPTIONS[method]),
        lambda: METHODS[method].plan(made, around, OPTIONS[method]),
    ):
        with pytest.raises(PlanError, match=PVT_SENTENCE) as caught:
            call()
        assert caught.value.hint
    assert [path.name for path in tmp_path.iterdir() if path.name != "choice.json"] == []


@pytest.mark.parametrize("gated_ffn", ["mean_gate", "drop_gate", "drop_ffn"])
def test_hetdpt_on_gated_ffns(gated_ffn: Any, tmp_path: Path) -> None:
    made, around = world("swiglu", tmp_path)
    options: hetdpt.Options = replace(OPTIONS["hetdpt"], gated_ffn=gated_ffn)
    found = METHODS["hetdpt"].plan(made, around, options)
    (ffn,) = [name for name in found.removed if ".mlp" in name]
    assert (ffn.endswith(".mlp"), found.removed[ffn]) == (
        gated_ffn == "drop_ffn",
        {"drop_ffn": "drop"}.get(gated_ffn, gated_ffn),
    )
    assert (tmp_path / LEFT_WEIGHTS).is_file() == (gated_ffn == "mean_gate")
    small = surgery.apply_to_copy(made, found)
    folded = surgery.fold_linears(small, found).plan.folded
    assert (ffn.removesuffix(".act") in folded) == (gated_ffn != "drop_ffn")


def test_the_mean_of_a_gate_is_handed_over_with_the_weights(tmp_path: Path) -> None:
    """What is deployed multiplies the values with the mean of the gate over training images."""
    made, around = world("swiglu", tmp_path)
    options = depth.DepthOptions(pruned_layers=1)
    plan = depth.record_choice(made, around, {"activation": [1]}, options)
    means = depth.gate_means(made, around)["blocks.1.mlp"]
    gates: list[torch.Tensor] = []
    handle = made.blocks[1].mlp.act.register_forward_hook(lambda module, args, out: gates.append(out.flatten(0, 1)))
    with torch.no_grad():
        for seen, _ in calibration_images(around, depth.GATE_IMAGES):
            made(seen)
    handle.remove()
    measured = torch.cat(gates)
    # Two means of n float32 numbers, one summed in float64: apart by roundings of the sums' size.
    bound = len(measured) * 2.0**-24 * measured.abs().mean(0) + 2.0**-24
    assert bool(((means - measured.mean(0)).abs() <= bound).all())
    weights = load_tensors(tmp_path / LEFT_WEIGHTS)
    made.load_state_dict(weights, strict=True)
    small = surgery.apply_to_copy(made, plan)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(3))
    fresh, _ = world("swiglu", tmp_path)
    before = fresh.blocks[1].mlp
    with torch.no_grad():
        values = before.fc1(x)[..., 32:]
        expected = before.fc2(means * values)
        torch.testing.assert_close(small.blocks[1].mlp(x), expected, rtol=1e-4, atol=1e-5)
        assert (small.blocks[1].mlp(x) - before(x)).abs().max() > 1e-2


def test_fading_starts_from_the_gates_as_they_are(tmp_path: Path) -> None:
    made, around = world("swiglu", tmp_path)
    found = METHODS["activation_only"].plan(
        made, around, nose.ActivationOptions(pruned_layers=1, te=OPTIONS["nose"].te)
    )
    assert set(found.removed.values()) == {"mean_gate"}
    assert not (tmp_path / LEFT_WEIGHTS).exists()
