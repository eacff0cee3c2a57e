"""Gates on layers compute what surgery deploys."""

from collections.abc import Iterator
from copy import deepcopy
from itertools import chain, combinations

import pytest
import torch
from contracts import (
    BYPASSES,
    add_gates,
    assert_moved,
    assert_same,
    build,
    contract,
    gated,
    images,
    layers,
    logits,
)
from layer_plans import depth_plan
from torch import nn

from vitcompress.errors import InputError, PlanError
from vitcompress.families import Site, family_of
from vitcompress.families.gated_ffn import freeze_gates
from vitcompress.plan import Plan
from vitcompress.surgery import apply_plan, apply_to_copy
from vitcompress.surgery.gates import GatedModel

OUTPUT_ACTS = ["none", "gelu"]


def subsets(sites: list[Site]) -> Iterator[tuple[Site, ...]]:
    return chain.from_iterable(combinations(sites, count) for count in range(len(sites) + 1))


# -------------------------------------------------------------------------------------------------------- layer gates


@pytest.mark.parametrize("output_act", OUTPUT_ACTS)
@pytest.mark.parametrize("bypass", BYPASSES)
@pytest.mark.parametrize("variant", ["plain", "layer_scale", "dinov3", "distilled", "swin_padded", "pvt"])
def test_closed_gates_compute_what_surgery_deploys(variant: str, bypass: str, output_act: str) -> None:
    """For every subset of the layers of the first two blocks; the search model is the deployed model."""
    model, x = build(variant), images(variant)
    dense = logits(model, x)
    modes = {"attention_bypass": bypass, "both_pruned_output_act": output_act}
    open_model = gated(deepcopy(model), **modes)
    for removed in subsets([site for site in layers(model) if site.index < 2]):
        for site in open_model.sites:
            open_model.set_gate(site.name, 0.0 if site in removed else 1.0)
        blocks = {kind: [s.index for s in removed if s.kind == kind] for kind in ("attention", "activation")}
        plan = depth_plan(model, contract(variant).plan, blocks["attention"], blocks["activation"], **modes)
        deployed = apply_to_copy(model, plan)
        for training in (False, True):  # no drop path, no dropout: the same function in both modes
            assert_same(logits(open_model.train(training), x), logits(deployed.train(training), x))
        if removed:
            assert_moved(logits(deployed.eval(), x), dense)


@pytest.mark.parametrize("gated_ffn", ["mean_gate", "drop_gate", "drop_ffn"])
def test_closed_gates_of_gated_ffns_compute_what_surgery_deploys(gated_ffn: str) -> None:
    model, x = build("swiglu"), images("swiglu")
    dense = logits(model, x)
    open_model = gated(deepcopy(model), gated_ffn=gated_ffn)
    assert_same(logits(open_model, x), dense)
    for removed in subsets(layers(model)):
        for site in open_model.sites:
            open_model.set_gate(site.name, 0.0 if site in removed else 1.0)
        blocks = {kind: [s.index for s in removed if s.kind == kind] for kind in ("attention", "activation")}
        plan = depth_plan(
            model, contract("swiglu").plan, blocks["attention"], blocks["activation"], gated_ffn=gated_ffn
        )
        assert_same(logits(open_model, x), logits(apply_to_copy(model, plan), x))
        if removed:
            assert_moved(logits(open_model, x), dense)


@pytest.mark.parametrize("gate_last", [False, True])  # timm's default is True, SwiGLUPacked has False
def test_a_gate_closed_at_its_mean_is_what_frozen_weights_deploy(gate_last: bool) -> None:
    """The gate at a given mean, the frozen weights before removal, and after it: one function."""
    model, x = build("swiglu"), images("swiglu")
    model.blocks[1].mlp.gate_last = gate_last
    means = {"blocks.1.mlp": torch.linspace(-0.2, 1.0, 32, dtype=torch.float64)}
    open_model = add_gates(deepcopy(model), layers(model)[3:], means).double()
    open_model.set_gate("blocks.1.mlp.act", 0.0)
    expected = logits(open_model, x)
    without = logits(apply_to_copy(model, depth_plan(model, contract("swiglu").plan, [], [1])), x)
    freeze_gates(model, means)
    assert_same(logits(model, x), expected)
    assert_same(logits(apply_to_copy(model, depth_plan(model, contract("swiglu").plan, [], [1])), x), expected)
    assert_moved(without, expected)


@pytest.mark.parametrize("bypass", BYPASSES)
def test_gates_on_a_model_that_lost_layers_before(bypass: str) -> None:
    model, x = build("plain"), images("plain")
    base = contract("plain").plan
    apply_plan(model, depth_plan(model, base, [0], [1], attention_bypass=bypass))
    modes = {"attention_bypass": bypass, "both_pruned_output_act": "gelu"}
    open_model = gated(deepcopy(model), **modes)
    assert [site.name for site in open_model.sites] == ["blocks.0.mlp.act", "blocks.1.attn"]
    for removed in subsets(layers(model)):
        for site in open_model.sites:
            open_model.set_gate(site.name, 0.0 if site in removed else 1.0)
        blocks = {kind: [s.index for s in removed if s.kind == kind] for kind in ("attention", "activation")}
        deployed = apply_to_copy(model, depth_plan(model, base, blocks["attention"], blocks["activation"], **modes))
        assert_same(logits(open_model, x), logits(deployed, x))


def test_output_activation_only_where_every_layer_of_the_block_is_gone() -> None:
    model, x = build("plain"), images("plain")
    # attention and activation of block 0, attention of block 1
    with_act = add_gates(deepcopy(model), layers(model)[:3], both_pruned_output_act="gelu")
    without = add_gates(deepcopy(model), layers(model)[:3])
    for one in (with_act, without):
        one.set_gate("blocks.1.attn", 0.0)
        one.set_gate("blocks.0.attn", 0.0)
    assert_same(logits(with_act, x), logits(without, x))
    for one in (with_act, without):
        one.set_gate("blocks.0.mlp.act", 0.0)
    assert_moved(logits(with_act, x), logits(without, x))


def test_an_output_activation_waits_only_for_the_layers_that_the_plan_removes() -> None:
    model, x = build("plain"), images("plain")
    plan = contract("plain").plan.delta(removed={"blocks.1.attn": "drop"}, appended={"blocks.1": "gelu"})
    open_model = GatedModel(deepcopy(model), family_of(model), plan, {})
    assert_same(logits(open_model, x), logits(model, x))
    open_model.set_gate("blocks.1.attn", 0.0)
    assert_same(logits(open_model, x), logits(apply_to_copy(model, plan), x))
    assert_moved(logits(open_model, x), logits(model, x))


@pytest.mark.parametrize("bypass", BYPASSES)
@pytest.mark.parametrize("variant", ["plain", "layer_scale"])
def test_half_open_gates_interpolate(variant: str, bypass: str) -> None:
    """NOSE's dilution: (2 - g) x + g f(x) when it doubles, else x + g f(x) + (1 - g) replacement."""
    model, x = build(variant, depth=1), torch.randn(2, 5, 16, dtype=torch.float64)
    block = model.blocks[0]
    with torch.no_grad():
        normed = block.norm1(x)
        branch = block.ls1(block.attn(normed))
        stand = {"drop": torch.zeros_like(x), "norm_identity": block.ls1(normed), "double": x}[bypass]
        mixed = x + 0.3 * branch + 0.7 * stand
        hidden = block.mlp.fc1(block.norm2(mixed))
        act = 0.6 * nn.functional.gelu(hidden) + 0.4 * hidden
        expected = mixed + block.ls2(block.mlp.fc2(act))
    before = logits(block, x)
    open_model = gated(model, attention_bypass=bypass)
    assert torch.equal(logits(block, x), before)
    open_model.set_gate("blocks.0.attn", 0.3)
    open_model.set_gate("blocks.0.mlp.act", 0.6)
    assert_same(logits(block, x), expected)
    assert_moved(expected, before)


def test_saving_a_gated_model_keeps_scores_and_gates_apart_from_the_weights() -> None:
    model, x = build("plain"), images("plain")
    names = list(model.state_dict())
    one = gated(model)
    assert list(model.state_dict()) == names
    assert {f"model.{name}" for name in names} < set(one.state_dict())
    one.set_gate("blocks.1.mlp.act", 0.0)
    one.set_gate("blocks.0.attn", 0.3)  # in float32 another number
    with torch.no_grad():
        one.scores[2].fill_(3.0)
    other = gated(build("plain", seed=1))
    assert_moved(logits(other, x), logits(one, x))
    other.load_state_dict(one.state_dict(), strict=True)
    assert other.gate_values() == one.gate_values()
    assert other.scores_of() == one.scores_of()
    assert torch.equal(logits(other, x), logits(one, x))


@pytest.mark.parametrize("bypass", BYPASSES)
def test_a_deep_copy_has_gates_scores_and_hooks_of_its_own(bypass: str) -> None:
    model, x = build("plain"), images("plain")
    one = gated(model, attention_bypass=bypass, both_pruned_output_act="gelu")
    copy = deepcopy(one)
    before = logits(one, x)
    for site in copy.sites:
        copy.set_gate(site.name, 0.0)
    assert set(one.gate_values().values()) == {1.0}
    assert torch.equal(logits(one, x), before)
    assert_moved(logits(copy, x), before)
    copy(x).sum().backward()
    assert all(score.grad is None for score in one.scores)
    assert all(score.grad is not None for score in copy.scores)
    deployed = apply_to_copy(
        build("plain"),
        depth_plan(
            build("plain"),
            contract("plain").plan,
            [0, 1],
            [0, 1],
            attention_bypass=bypass,
            both_pruned_output_act="gelu",
        ),
    )
    assert_same(logits(copy, x), logits(deployed, x))


def test_a_gated_model_takes_over_the_mode_and_has_one_score_per_layer() -> None:
    model = build("distilled")
    one = add_gates(model, layers(model))
    assert not one.training
    assert {id(p) for p in one.parameters()} == {id(p) for p in (*one.scores, *one.model.parameters())}
    assert len(one.scores) == 4


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        (
            {"attention_bypass": "identity"},
            "attention_bypass   got 'identity', expected one of drop, norm_identity, double",
        ),
        ({"both_pruned_output_act": "relu"}, "both_pruned_output_act   got 'relu', expected one of none, gelu"),
    ],
)
def test_unknown_modes(modes: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        gated(build("plain"), **modes)


def test_layers_without_a_gate() -> None:
    model = build("plain")
    sites = family_of(model).sites(model)
    for site in (sites[2], sites[3], Site("blocks.7.attn", "attention", "blocks.7", 7, "blocks.7.drop_path1")):
        with pytest.raises(PlanError, match=rf"{site.name} cannot be gated; layers that can: blocks.0.attn"):
            GatedModel(model, family_of(model), Plan("", removed={site.name: "drop"}), {})
    open_model = gated(model)
    with pytest.raises(PlanError, match=r"blocks\.0\.mlp is not a gated layer; gated: blocks\.0\.attn"):
        open_model.set_gate("blocks.0.mlp", 0.0)
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(PlanError, match=r"must be in 0\.\.1"):
            open_model.set_gate("blocks.0.attn", value)


def test_no_output_activation_while_layers_fade_out() -> None:
    model, x = build("plain"), images("plain")
    with_act = add_gates(deepcopy(model), layers(model)[:2], both_pruned_output_act="gelu")
    without = add_gates(deepcopy(model), layers(model)[:2])
    for one in (with_act, without):
        for site in one.sites:
            one.set_gate(site.name, 0.5)
    assert torch.equal(with_act(x), without(x))
