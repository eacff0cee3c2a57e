"""The depth methods on Swin, PVTv2, DINOv3 and SwiGLU FFNs: the same code, or an error with the reason."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from method_rows import OPTIONS
from method_world import CLASSES, context
from test_depth_methods import DEPTH
from torch import nn

from vitcompress import surgery
from vitcompress.errors import PlanError
from vitcompress.families import family_of
from vitcompress.io.files import read_json
from vitcompress.io.tensors import load_tensors
from vitcompress.methods import depth, nose
from vitcompress.methods.base import LEFT_WEIGHTS, Context
from vitcompress.methods.calibration import calibration_images
from vitcompress.methods.hetdpt import method as hetdpt
from vitcompress.methods.hetdpt.collection import Collector
from vitcompress.methods.options import AllocationOptions, CollectionOptions
from vitcompress.methods.table import METHODS
from vitcompress.models.create import create_model
from vitcompress.plan import Plan
from vitcompress.training.distributed import Runtime

GRAY = {"in_chans": 1, "num_classes": CLASSES}
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


def world(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Context]:
    """A model of three blocks with random weights, and the context of a step."""
    arch, args = ARCHS[name]
    vit = create_model(arch, {**args, **GRAY}, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    vit, arguments = vit.to(dtype), {**args, **GRAY}
    return vit, context(folder, vit, plan=Plan(arch, arguments), runtime=Runtime(torch.device("cpu"), dtype=dtype))


def pixels() -> torch.Tensor:
    return torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", ["swin", "eva"])
@pytest.mark.parametrize("method", [name for name in DEPTH if name != "fixed"])
def test_every_depth_method_works_on_other_families(method: str, family: str, tmp_path: Path) -> None:
    vit, around = world(family, tmp_path)
    plan = METHODS[method].plan(vit, around, OPTIONS[method])
    assert len(plan.removed) == 2
    assert all(name.startswith(tuple(around.family.blocks(vit))) for name in plan.removed)
    with torch.no_grad():
        small = surgery.apply_to_copy(vit, plan)
        assert (small(pixels()) - vit(pixels())).abs().max() > 1e-4
    assert METHODS[method].structure(vit, family_of(vit), around.plan, OPTIONS[method]).arch == plan.arch


@pytest.mark.parametrize("method", DEPTH)
def test_pvt_keeps_its_activations(method: str, tmp_path: Path) -> None:
    """Methods that remove activations are rejected before anything is measured. NOSE is not."""
    vit, around = world("pvt", tmp_path)
    structure = METHODS[method].structure
    if method == "nose":
        assert len(METHODS[method].plan(vit, around, OPTIONS[method]).removed) == 2
        return
    for call in (
        lambda: structure(vit, family_of(vit), around.plan, OPTIONS[method]),
        lambda: METHODS[method].plan(vit, around, OPTIONS[method]),
    ):
        with pytest.raises(PlanError, match=PVT_SENTENCE) as caught:
            call()
        assert caught.value.hint
    assert [path.name for path in tmp_path.iterdir() if path.name != "choice.json"] == []


@pytest.mark.parametrize("gated_ffn", ["mean_gate", "drop_gate", "drop_ffn"])
def test_hetdpt_on_gated_ffns(gated_ffn: Any, tmp_path: Path) -> None:
    vit, around = world("swiglu", tmp_path)
    options: hetdpt.Options = replace(OPTIONS["hetdpt"], gated_ffn=gated_ffn)
    plan = METHODS["hetdpt"].plan(vit, around, options)
    (ffn,) = [name for name in plan.removed if ".mlp" in name]
    assert (ffn.endswith(".mlp"), plan.removed[ffn]) == (
        gated_ffn == "drop_ffn",
        {"drop_ffn": "drop"}.get(gated_ffn, gated_ffn),
    )
    assert (tmp_path / LEFT_WEIGHTS).is_file() == (gated_ffn == "mean_gate")
    small = surgery.apply_to_copy(vit, plan)
    folded = surgery.fold_linears(small, plan)[0].folded
    assert (ffn.removesuffix(".act") in folded) == (gated_ffn != "drop_ffn")


def means_of(vit: nn.Module, around: Context) -> dict[str, torch.Tensor]:
    activations = depth.layers(vit, around.family)["activation"]
    return depth.gate_means(vit, around, {site.name for site in activations}, depth.BypassOptions())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_of_a_gate_is_handed_over_with_the_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    """What is deployed multiplies the values with the mean of the gate over training images."""
    vit, around = world("swiglu", tmp_path, dtype)
    options = depth.DepthOptions(pruned_layers=1)
    plan = depth.record_choice(vit, around, {"activation": [1]}, options)
    means = means_of(vit, around)["blocks.1.mlp"]
    gates: list[torch.Tensor] = []
    handle = vit.blocks[1].mlp.act.register_forward_hook(lambda module, args, out: gates.append(out.flatten(0, 1)))
    with torch.no_grad():
        for seen, _ in calibration_images(around, depth.GATE_IMAGES):
            vit(seen)
    handle.remove()
    measured = torch.cat(gates)
    # Two means of n numbers of this type, one summed in float64: apart by roundings of the sums' size.
    half = torch.finfo(dtype).eps / 2
    bound = len(measured) * half * measured.abs().mean(0) + half
    assert bool(((means - measured.mean(0)).abs() <= bound).all())
    weights = load_tensors(tmp_path / LEFT_WEIGHTS)
    vit.load_state_dict(weights, strict=True)
    small = surgery.apply_to_copy(vit, plan)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(3)).to(dtype)
    fresh, _ = world("swiglu", tmp_path, dtype)
    before = fresh.blocks[1].mlp
    with torch.no_grad():
        values = before.fc1(x)[..., 32:]
        expected = before.fc2(means * values)
        torch.testing.assert_close(small.blocks[1].mlp(x), expected, rtol=1e-4, atol=1e-5)
        assert (small.blocks[1].mlp(x) - before(x)).abs().max() > 1e-2


def test_fading_starts_from_the_gates_as_they_are(tmp_path: Path) -> None:
    vit, around = world("swiglu", tmp_path)
    options = nose.ActivationOptions(pruned_layers=1, te=OPTIONS["nose"].te)
    plan = METHODS["activation_only"].plan(vit, replace(around, fades=True), options)
    assert set(plan.removed.values()) == {"mean_gate"}
    assert not (tmp_path / LEFT_WEIGHTS).exists()
    ((ffn, mean),) = depth.read_mean_gates(tmp_path).items()
    torch.testing.assert_close(mean, means_of(vit, around)[ffn], rtol=0, atol=0)
    again = replace(around, folder=tmp_path / "removed at once")
    assert METHODS["activation_only"].plan(vit, again, options) == plan
    left = load_tensors(again.folder / LEFT_WEIGHTS)
    frozen = depth.freeze_gates(deepcopy(vit), {ffn: mean}).state_dict()
    assert all(torch.equal(left[name], tensor) for name, tensor in frozen.items())


def test_every_round_of_the_collection_measures_gates_on_its_own_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fine-tuning changes them: means of the dense weights would be those of another function."""
    vit, around = world("swiglu", tmp_path)
    frozen = list[dict[str, torch.Tensor]]()
    original = depth.freeze_gates

    def record(model: nn.Module, means: dict[str, torch.Tensor]) -> nn.Module:
        if means:
            current = means_of(model, around)
            assert all(torch.equal(mean, current[ffn]) for ffn, mean in means.items())
            frozen.append(means)
        return original(model, means)

    monkeypatch.setattr(depth, "freeze_gates", record)
    fast = CollectionOptions(epochs=1, images_per_class=8, lr=1e-2, interleaved=0)
    Collector(vit, around, AllocationOptions(pruned_layers=2, te=OPTIONS["nose"].te, collection=fast)).run()
    second = next(iter(frozen[-1]))
    assert not torch.equal(frozen[-1][second], means_of(vit, around)[second])


def test_untrained_rounds_resume_with_the_same_gates(tmp_path: Path) -> None:
    """Without fine-tuning nothing is saved: the model of a round is rebuilt from all removals before it."""
    fast = CollectionOptions(epochs=0, interleaved=0)
    options = AllocationOptions(pruned_layers=2, te=OPTIONS["nose"].te, collection=fast)
    for name in ("whole", "resumed"):
        vit, around = world("swiglu", tmp_path / name)
        Collector(vit, around, options).run()
        (tmp_path / name / "activation_02.json").unlink()
        (tmp_path / name / "te_activation_02.json").unlink()
    vit, around = world("swiglu", tmp_path / "resumed")
    Collector(vit, around, options).run()
    vit, around = world("swiglu", tmp_path / "whole" / "again")
    Collector(vit, around, options).run()
    tables = [read_json(tmp_path / name / "te_activation_02.json") for name in ("resumed", "whole/again")]
    assert tables[0] == tables[1]


def test_an_untrained_round_starts_from_the_model_that_the_last_one_measured(tmp_path: Path) -> None:
    """The mean of a later gate is that behind the constant gates of earlier rounds, not that of the dense model."""
    vit, around = world("swiglu", tmp_path)
    collector = Collector(vit, around, AllocationOptions(collection=CollectionOptions(epochs=0)))
    first, second = ({"key": "", "attention": [], "activation": blocks} for blocks in ([0], [0, 1]))
    start, measured = collector._model([first, second]), collector._remove(collector._model([first]), second)
    for own, expected in zip(start.parameters(), measured.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=0)


def test_the_cost_of_a_split_is_that_of_the_layers_that_the_chains_removed(tmp_path: Path) -> None:
    """In Swin the attentions of early stages have more windows than the later ones."""
    swin, around = world("swin", tmp_path)
    options = AllocationOptions(pruned_layers=1, min_pruned_per_type=0)

    def cost(removed: list[int], attentions: int) -> float:
        records = [{"chain": "attention", "attention": removed, "activation": []}]
        return hetdpt.split_cost(swin, around, options, records, attentions, 0)

    assert cost([0], 1) == cost([1], 1) < cost([2], 1)
    assert cost([2], 2) == cost([2, 0], 2) != cost([0, 1], 2)
