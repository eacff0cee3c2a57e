"""Folded == unfolded, for every combination of biases and LayerScales, and only where the product is cheaper."""

from copy import deepcopy

import pytest
import torch
from contracts import (
    assert_moved,
    assert_same,
    build,
    contract,
    every_variant,
    having,
    images,
    logits,
    sites_of,
)
from layer_plans import depth_plan
from torch import nn

from vitcompress.families import family_of
from vitcompress.families.base import scale_parameter
from vitcompress.surgery import apply_plan, apply_to_copy, fold_linears
from vitcompress.surgery.fold import fold_branch_bias, product


@every_variant
def test_folded_equals_unfolded(variant: str) -> None:
    model, x = build(variant), images(variant)
    activations = having(model, "activation", [0, 1])
    plan = depth_plan(model, contract(variant).plan, [0], activations, attention_bypass="norm_identity")
    unfolded = apply_to_copy(model, plan)
    folded = deepcopy(unfolded)
    folded_plan, _ = fold_linears(folded, plan)
    named = " ".join(model.state_dict())
    first, second = ("gamma_1", "gamma_2") if "gamma_1" in named else ("ls1", "ls2")
    scaled = {f"blocks.1.{first}", f"blocks.0.{second}", f"blocks.1.{second}"} if "gamma" in named else set()
    ffns = [site.name for site in sites_of(model, "ffn") if site.index in activations]
    assert len(ffns) == (0 if family_of(model).not_foldable(model) else 2)
    assert set(folded_plan.folded) == {*ffns, *scaled}
    assert all(isinstance(folded.get_submodule(name), nn.Linear) for name in ffns)
    assert_same(logits(folded, x), logits(unfolded, x))
    assert_moved(logits(folded, x), logits(model, x))
    assert fold_linears(folded, folded_plan)[1] == (), "folding again finds nothing"
    rebuilt = apply_to_copy(build(variant, seed=1), folded_plan)
    rebuilt.load_state_dict(folded.state_dict(), strict=True)
    assert torch.equal(logits(rebuilt, x), logits(folded, x))


def test_a_gate_without_activation_is_not_linear() -> None:
    """It multiplies all the same, until it is constant."""
    model, x = build("swiglu", act_layer="identity"), images("swiglu")
    base, kept, expected = contract("swiglu").plan, deepcopy(model), logits(model, x)
    assert not any(name.endswith("mlp") for name in fold_linears(kept, base)[0].folded)
    assert_same(logits(kept, x), expected)
    plan = depth_plan(model, base, [], [1])
    unfolded = apply_to_copy(model, plan)
    folded_plan, _ = fold_linears(folded := deepcopy(unfolded), plan)
    assert [name for name in folded_plan.folded if name.endswith("mlp")] == ["blocks.1.mlp"]
    assert_same(logits(folded, x), logits(unfolded, x))
    assert_moved(logits(folded, x), expected)


@pytest.mark.parametrize("variant", ["plain", "layer_scale", "no_proj_bias"])
def test_fold_records_are_the_true_counts(variant: str) -> None:
    model = build(variant)
    plan = depth_plan(model, contract(variant).plan, [], [0, 1])
    apply_plan(model, plan)
    before = sum(p.numel() for p in model.parameters())
    records = fold_linears(model, plan)[1]
    assert sum(r.params_before - r.params_after for r in records) == before - sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("first_bias", [True, False])
@pytest.mark.parametrize("second_bias", [True, False])
def test_the_product_of_two_linear_layers(first_bias: bool, second_bias: bool) -> None:
    """Within the bound of Higham, Accuracy and Stability of Numerical Algorithms, eq. 3.5, for both ways to compute."""
    torch.manual_seed(0)
    first = nn.Linear(6, 24, bias=first_bias, dtype=torch.float64)
    second = nn.Linear(24, 6, bias=second_bias, dtype=torch.float64)
    x = torch.randn(50, 6, dtype=torch.float64)
    weight, bias = product(first, second)
    assert (bias is None) == (not first_bias and not second_bias)
    terms = x.abs() @ first.weight.abs().T
    terms = (terms if first.bias is None else terms + first.bias.abs()) @ second.weight.abs().T
    terms = terms if second.bias is None else terms + second.bias.abs()
    roundings = (6 + 24 + 2) * 2.0**-53
    bound = 2 * roundings / (1 - roundings) * terms
    with torch.no_grad():
        product_output, expected = nn.functional.linear(x, weight, bias), second(first(x))
        without = nn.functional.linear(x, weight)
    assert bool(((product_output - expected).abs() <= bound).all())
    if bias is not None:
        assert_moved(without, expected)


@pytest.mark.parametrize(
    ("variant", "activations", "casts"), [("plain", [0, 1], 1), ("layer_scale", [], 1), ("layer_scale", [0, 1], 2)]
)
def test_weights_stored_in_float32_are_rounded_once_by_each_fold(
    variant: str, activations: list[int], casts: int
) -> None:
    """The product of the same weights in float64, cast once, is the stored layer bit for bit.

    A LayerScale after a folded FFN is a second fold: with it, three casts lie between the two layers.
    """
    model = build(variant, dtype=torch.float32)
    plan = depth_plan(model, contract(variant).plan, [], activations)
    exact = apply_plan(deepcopy(model), plan).double()
    assert fold_linears(apply_plan(model, plan), plan)[0].folded == fold_linears(exact, plan)[0].folded != ()
    cast = exact.float().state_dict()
    bound = 0.0 if casts == 1 else (casts + 1) * torch.finfo(torch.float32).eps / 2
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, cast[name], rtol=bound, atol=0.0)


@pytest.mark.parametrize(("ratio", "folds"), [(0.25, False), (0.5, False), (0.5625, True)])
def test_folded_only_where_the_product_is_cheaper(ratio: float, folds: bool) -> None:
    """h (D + D) > D D, that is a hidden width above D / 2 = 8."""
    model, x = build("plain", mlp_ratio=ratio), images("plain")
    plan = depth_plan(model, contract("plain", mlp_ratio=ratio).plan, [], [1])
    before = logits(apply_plan(model, plan), x)
    (record,) = fold_linears(model, plan)[1]
    assert record.folded is folds
    assert isinstance(model.blocks[1].mlp, nn.Linear) is folds
    assert ("the pair is cheaper" in record.reason) is not folds and "cheaper" in record.reason
    assert_same(logits(model, x), before)


def test_folding_keeps_modes_and_frozen_parameters() -> None:
    model = build("plain")
    plan = depth_plan(model, contract("plain").plan, [0], [0, 1])
    apply_plan(model, plan).blocks[1].mlp.requires_grad_(False)
    fold_linears(model, plan)
    assert not any(module.training for module in model.modules())
    assert {p.requires_grad for p in model.blocks[1].mlp.parameters()} == {False}
    assert {p.requires_grad for p in model.blocks[0].mlp.parameters()} == {True}


def test_a_folded_pair_is_trained_unless_both_layers_are_frozen() -> None:
    model = build("plain")
    plan = depth_plan(model, contract("plain").plan, [], [0])
    apply_plan(model, plan).blocks[0].mlp.fc2.requires_grad_(False)
    fold_linears(model, plan)
    assert {p.requires_grad for p in model.blocks[0].mlp.parameters()} == {True}


@pytest.mark.parametrize(("gamma", "moves"), [(1e-6, False), (0.0, False), (1.0, True)])
def test_a_constant_moves_only_where_the_bias_before_it_can_hold_it(gamma: float, moves: bool) -> None:
    model, x = build("layer_scale", dtype=torch.float16), images("layer_scale", dtype=torch.float16)
    branch, scale = sites_of(model, "attention")[1], scale_parameter(model, "blocks.0.ls2")
    scale.data.fill_(gamma)
    model.get_parameter(f"{branch.name}.proj.weight").data.zero_()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = logits(model, x)
    assert fold_branch_bias(model, family_of(model), branch) is moves
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()) is not moves
    assert (logits(model, x) - expected).abs().max() < 2.0**-6
