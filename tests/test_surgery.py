"""Surgery changes what it says and nothing else: masked == sliced, folded == unfolded, and timm's own interface stays."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from contracts import (
    CONTRACTS,
    SAME,
    assert_moved,
    assert_same,
    build,
    contract,
    every_variant,
    images,
    kept_channels,
    logits,
    masks,
    spaces_of,
)
from torch import Tensor, nn

from vitcompress.errors import PlanError
from vitcompress.families import family_of
from vitcompress.gates import channel_gates
from vitcompress.plan import Plan
from vitcompress.surgery import applied, apply, depth_plan, fold, product


@every_variant
def test_the_identity_plan_gives_timms_model_bit_for_bit(variant: str) -> None:
    model, x = build(variant), images(variant)
    same = applied(model, contract(variant).plan)
    assert [type(m) for m in same.modules()] == [type(m) for m in model.modules()]
    assert torch.equal(logits(same, x), logits(model, x))
    assert all(torch.equal(same.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


# ------------------------------------------------------------------------------------------------------------- slicing

SLICES = {
    "qk": ({"qk"}, False),
    "v": ({"v"}, False),
    "mlp": ({"mlp"}, False),
    "residual": ({"residual"}, False),
    "heads": ({"qk", "v"}, True),
    "all": ({"qk", "v", "mlp", "residual"}, True),
}


def sliced_plan(model: nn.Module, variant: str, kinds: set[str], *, whole_heads: bool) -> Plan:
    kept = kept_channels(model, kinds, whole_heads=whole_heads)
    heads = {space.attention: 2 for space in spaces_of(model).values() if whole_heads and space.attention}
    return replace(contract(variant).plan, kept=kept, heads=heads)


@pytest.mark.parametrize(("kinds", "whole_heads"), SLICES.values(), ids=list(SLICES))
@every_variant
def test_masked_equals_sliced(variant: str, kinds: set[str], whole_heads: bool) -> None:
    model, x = build(variant), images(variant)
    plan = sliced_plan(model, variant, kinds, whole_heads=whole_heads)
    with channel_gates(model, family_of(model), masks(model, plan.kept)):
        masked = logits(model, x)
    assert_moved(masked, logits(model, x))
    assert_same(logits(applied(model, plan), x), masked)


def test_masked_equals_sliced_on_a_model_that_lost_layers_before() -> None:
    x = images("layer_scale")
    model = build("layer_scale", depth=4)
    plan = depth_plan(model, contract("layer_scale", depth=4).plan, [0, 2], [1, 2], attention_bypass="norm_identity")
    fold(apply(model, plan), plan)
    kept = kept_channels(model, {"qk", "v", "mlp", "residual"})
    with channel_gates(model, family_of(model), masks(model, kept)):
        masked = logits(model, x)
    assert_moved(masked, logits(model, x))
    assert_same(logits(applied(model, replace(plan, removed={}, kept=kept)), x), masked)


def test_the_order_of_kept_channels_is_the_order_of_the_result() -> None:
    model = build("plain")
    order = (7, 3, 11, 0)
    narrow = applied(model, replace(contract("plain").plan, kept={"blocks.1.mlp": order}))
    assert torch.equal(narrow.blocks[1].mlp.fc1.weight, model.blocks[1].mlp.fc1.weight[list(order)])
    assert torch.equal(narrow.blocks[1].mlp.fc2.weight, model.blocks[1].mlp.fc2.weight[:, list(order)])
    assert narrow.blocks[1].mlp.fc1.out_features == narrow.blocks[1].mlp.fc2.in_features == 4


def test_slicing_keeps_modes_and_frozen_parameters() -> None:
    model = build("plain", attn_drop_rate=0.5)
    x = images("plain")
    model.blocks[0].attn.qkv.weight.requires_grad_(False)
    sliced = applied(model, sliced_plan(model, "plain", {"qk", "mlp"}, whole_heads=False))
    assert not any(module.training for module in sliced.modules())
    assert torch.equal(logits(sliced, x), logits(sliced, x)), "attention dropout must rest in eval mode"
    assert not torch.equal(logits(sliced.train(), x), logits(sliced, x))
    frozen = [name for name, parameter in sliced.named_parameters() if not parameter.requires_grad]
    assert frozen == ["blocks.0.attn.qkv.weight"]


def test_attention_that_keeps_its_head_width_stays_timms_own() -> None:
    model = build("plain")
    kept = {f"blocks.0.{kind}": tuple(range(4, 12)) for kind in ("qk", "v")}
    sliced = applied(model, replace(contract("plain").plan, kept=kept, heads={"blocks.0.attn": 2}))
    assert type(sliced.blocks[0].attn) is type(model.blocks[0].attn)
    assert (sliced.blocks[0].attn.num_heads, sliced.blocks[0].attn.attn_dim) == (2, 8)


# ------------------------------------------------------------------------------------------------------------ removing


@torch.no_grad()
def block_by_hand(block: nn.Module, x: Tensor, bypass: str, *, act: bool, gelu: bool) -> Tensor:
    """HetDPT's and NOSE's formulas for a block without its attention, and without its activation unless `act`."""
    if bypass == "double":
        x = 2 * x
    elif bypass == "norm_identity":
        x = x + block.ls1(block.norm1(x))
    hidden = block.mlp.fc1(block.norm2(x))
    x = x + block.ls2(block.mlp.fc2(block.mlp.act(hidden) if act else hidden))
    return nn.functional.gelu(x) if gelu else x


@pytest.mark.parametrize("output_act", ["none", "gelu"])
@pytest.mark.parametrize("bypass", ["drop", "norm_identity", "double"])
@pytest.mark.parametrize("variant", ["plain", "layer_scale", "no_proj_bias"])
def test_removed_layers_leave_the_published_formulas(variant: str, bypass: str, output_act: str) -> None:
    model, x = build(variant), torch.randn(2, 5, 16, dtype=torch.float64)
    modes = {"attention_bypass": bypass, "both_pruned_output_act": output_act}
    pruned = applied(model, depth_plan(model, contract(variant).plan, [0, 1], [1], **modes))
    for index, act in ((0, True), (1, False)):
        gelu = output_act == "gelu" and not act
        expected = block_by_hand(model.blocks[index], x, bypass, act=act, gelu=gelu)
        assert_same(logits(pruned.blocks[index], x), expected)
        assert_moved(logits(model.blocks[index], x), expected)


@pytest.mark.parametrize(
    ("removed", "left"),
    [
        ({"blocks.1": "drop"}, ["0", "2"]),
        ({"blocks.1.attn": "drop", "blocks.1.mlp": "drop"}, ["0", "2"]),
        ({"blocks.1.attn": "double", "blocks.1.mlp": "drop"}, ["0", "1", "2"]),
        ({"blocks.0": "drop", "blocks.1": "drop", "blocks.2": "drop"}, []),
    ],
)
def test_a_block_with_nothing_to_compute_disappears_and_the_others_keep_their_numbers(
    removed: dict[str, str], left: list[str]
) -> None:
    model, x = build("plain", depth=3), images("plain")
    pruned = applied(model, replace(contract("plain", depth=3).plan, removed=removed))
    assert [name for name, _ in pruned.blocks.named_children()] == left
    assert [entry["module"] for entry in pruned.feature_info] == [f"blocks.{name}" for name in left]
    assert_moved(logits(pruned, x), logits(model, x))
    if removed == {"blocks.1": "drop"}:
        shorter = deepcopy(model)
        del shorter.blocks[1]
        assert torch.equal(logits(pruned, x), logits(shorter, x))


def test_a_block_left_with_an_output_activation_stays() -> None:
    model = build("plain")
    plan = replace(
        contract("plain").plan,
        removed={"blocks.0.attn": "drop", "blocks.0.mlp": "drop"},
        appended={"blocks.0": "gelu"},
    )
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    assert torch.equal(applied(model, plan).blocks[0](x), nn.functional.gelu(x))


def edited(variant: str) -> nn.Module:
    """Four blocks: one gone, one without attention, one folded, all sliced."""
    model = build(variant, depth=4)
    plan = replace(
        contract(variant, depth=4).plan,
        removed={"blocks.1": "drop", "blocks.2.attn": "drop", "blocks.3.mlp.act": "identity"},
        kept={n: k for n, k in kept_channels(model, {"qk", "residual"}).items() if not n.startswith("blocks.1.")},
        folded=("blocks.3.mlp",),
    )
    return apply(model, plan)


@every_variant
def test_timms_interface_still_works(variant: str) -> None:
    model, x = edited(variant), images(variant)
    features = model.forward_features(x)
    assert features.shape[-1] == model.embed_dim == model.num_features == 12
    final, stages = model.forward_intermediates(x, norm=False)
    assert_same(final, features)
    assert [stage.shape[1] for stage in stages] == [12, 12, 12]
    assert [entry["num_chs"] for entry in model.feature_info] == [12, 12, 12]
    assert_same(model.forward_head(features), logits(model, x))
    model.reset_classifier(7)
    assert logits(model.double(), x).shape == (3, 7)
    assert [name for name, _ in model.blocks.named_children()] == ["0", "2", "3"]


def test_an_attention_mask_reaches_sliced_attention_and_passes_by_removed_ones() -> None:
    model, x = edited("plain"), images("plain")
    tokens = model.forward_features(x).shape[1]
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    masked = model.forward_features(x, attn_mask=mask)
    assert_moved(masked, model.forward_features(x))
    assert_same(model.forward_features(x, is_causal=True), masked)


# ------------------------------------------------------------------------------------------------------------- folding


@every_variant
def test_folded_equals_unfolded(variant: str) -> None:
    model, x = build(variant), images(variant)
    plan = depth_plan(model, contract(variant).plan, [0], [0, 1], attention_bypass="norm_identity")
    unfolded = applied(model, plan)
    folded = deepcopy(unfolded)
    folding = fold(folded, plan)
    scaled = ("blocks.1.ls1", "blocks.0.ls2", "blocks.1.ls2") if hasattr(model.blocks[0].ls1, "gamma") else ()
    assert set(folding.plan.folded) == {"blocks.0.mlp", "blocks.1.mlp", *scaled}
    assert isinstance(folded.blocks[0].mlp, nn.Linear)
    assert_same(logits(folded, x), logits(unfolded, x))
    assert_moved(logits(folded, x), logits(model, x))
    assert fold(folded, folding.plan).records == (), "folding again finds nothing"
    rebuilt = applied(build(variant, seed=1), folding.plan)
    rebuilt.load_state_dict(folded.state_dict(), strict=True)
    assert torch.equal(logits(rebuilt, x), logits(folded, x))


@pytest.mark.parametrize("variant", ["plain", "layer_scale", "no_proj_bias"])
def test_fold_records_are_the_true_counts(variant: str) -> None:
    model = build(variant)
    plan = depth_plan(model, contract(variant).plan, [], [0, 1])
    apply(model, plan)
    before = sum(p.numel() for p in model.parameters())
    records = fold(model, plan).records
    assert sum(r.params_before - r.params_after for r in records) == before - sum(p.numel() for p in model.parameters())
    ffn = next(r for r in records if r.module == "blocks.0.mlp")
    assert (ffn.macs_before, ffn.macs_after) == (2 * 16 * 32, 16 * 16)


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
        found, expected = nn.functional.linear(x, weight, bias), second(first(x))
        without = nn.functional.linear(x, weight)
    assert bool(((found - expected).abs() <= bound).all())
    if bias is not None:
        assert_moved(without, expected)


def test_weights_stored_in_float32_are_rounded_once() -> None:
    model = build("layer_scale", dtype=torch.float32)
    plan = depth_plan(model, contract("layer_scale").plan, [], [0, 1])
    records = fold(apply(model, plan), plan).records
    assert len(records) == 6
    assert all(0 < record.rounding <= torch.finfo(torch.float32).eps / 2 for record in records)


@pytest.mark.parametrize(("ratio", "folds"), [(0.25, False), (0.5, False), (0.5625, True)])
def test_folded_only_where_the_product_is_cheaper(ratio: float, folds: bool) -> None:
    """h (D + D) > D D, that is a hidden width above D / 2 = 8."""
    model, x = build("plain", mlp_ratio=ratio), images("plain")
    plan = depth_plan(model, contract("plain", mlp_ratio=ratio).plan, [], [1])
    before = logits(apply(model, plan), x)
    (record,) = fold(model, plan).records
    assert record.folded is folds
    assert isinstance(model.blocks[1].mlp, nn.Linear) is folds
    assert (record.macs_after < record.macs_before) is folds
    assert "cheaper" in record.reason
    assert_same(logits(model, x), before)


def test_folding_keeps_modes_and_frozen_parameters() -> None:
    model = build("plain")
    plan = depth_plan(model, contract("plain").plan, [0], [0, 1])
    apply(model, plan).blocks[1].mlp.requires_grad_(False)
    fold(model, plan)
    assert not any(module.training for module in model.modules())
    assert {p.requires_grad for p in model.blocks[1].mlp.parameters()} == {False}
    assert {p.requires_grad for p in model.blocks[0].mlp.parameters()} == {True}


# ------------------------------------------------------------------------------------------------------------ checking

WRONG = {
    "unknown site": ({"removed": {"blocks.9.attn": "drop"}}, "removed.blocks.9.attn: the model has no such"),
    "misspelled site": ({"removed": {"blocks.1.atn": "drop"}}, "did you mean blocks.1.attn?"),
    "stand-in of an attention": ({"removed": {"blocks.0.attn": "identity"}}, "attention allows drop, norm_identity"),
    "stand-in of an activation": ({"removed": {"blocks.0.mlp.act": "drop"}}, "activation allows identity, got 'drop'"),
    "stand-in of an FFN": ({"removed": {"blocks.0.mlp": "double"}}, "ffn allows drop, got 'double'"),
    "stand-in of a block": ({"removed": {"blocks.0": "identity"}}, "block allows drop, got 'identity'"),
    "in a removed block": ({"removed": {"blocks.0": "drop", "blocks.0.attn": "drop"}}, "blocks.0.attn: it lies in"),
    "in a removed FFN": ({"removed": {"blocks.0.mlp": "drop", "blocks.0.mlp.act": "identity"}}, "it lies in blocks.0.mlp"),
    "output of no block": ({"appended": {"blocks.7": "gelu"}}, "appended.blocks.7: the model has no such block"),
    "output of a removed block": ({"appended": {"blocks.0": "gelu"}, "removed": {"blocks.0": "drop"}}, "appended.blocks.0"),
    "unknown output": ({"appended": {"blocks.0": "relu"}}, "got 'relu', allowed: gelu"),
    "unknown space": ({"kept": {"blocks.0.kq": (0,)}}, "kept.blocks.0.kq: the model has no such space"),
    "out of range": ({"kept": {"residual": (0, 16)}}, "kept.residual: expected one or more distinct channels in 0..15"),
    "negative": ({"kept": {"blocks.0.mlp": (-1,)}}, "kept.blocks.0.mlp: expected"),
    "twice": ({"kept": {"blocks.0.mlp": (3, 3)}}, "kept.blocks.0.mlp: expected"),
    "none left": ({"kept": {"blocks.0.mlp": ()}}, "kept.blocks.0.mlp: expected one or more"),
    "in a removed part": ({"kept": {"blocks.0.mlp": (0,)}, "removed": {"blocks.0": "drop"}}, "kept.blocks.0.mlp: it lies"),
    "does not divide": ({"kept": {"blocks.0.qk": (0, 1, 2)}}, "3 channels do not divide into 4 heads"),
    "no such heads": ({"heads": {"blocks.9.attn": 2}}, "heads.blocks.9.attn: the model has no such attention"),
    "heads alone": ({"heads": {"blocks.0.attn": 2}}, "neither its q/k nor its v channels are in kept"),
    "no head": ({"heads": {"blocks.0.attn": 0}, "kept": {"blocks.0.v": (0,)}}, "expected a whole number from 1"),
    "heads of removed": ({"heads": {"blocks.0.attn": 2}, "removed": {"blocks.0.attn": "drop"}}, "the attention is removed"),
    "heads of one half": ({"heads": {"blocks.0.attn": 3}, "kept": {"blocks.0.v": (0, 1, 2)}}, "blocks.0.qk: 16 channels do"),
    "fold of no module": ({"folded": ("blocks.9.mlp",)}, "folded.blocks.9.mlp: the model has no such FFN"),
    "fold of an attention": ({"folded": ("blocks.0.attn",)}, "folded.blocks.0.attn: the model has no such FFN"),
    "fold of no scale": ({"folded": ("blocks.0.ls1",)}, "folded.blocks.0.ls1: the model has no such FFN"),
    "fold of a live FFN": ({"folded": ("blocks.0.mlp",)}, "its activation blocks.0.mlp.act is not removed"),
    "fold of a removed FFN": ({"folded": ("blocks.0.mlp",), "removed": {"blocks.0.mlp": "drop"}}, "it is removed"),
    "folded twice": (
        {"folded": ("blocks.0.mlp",) * 2, "removed": {"blocks.0.mlp.act": "identity"}},
        "folded.blocks.0.mlp: named 2 times",
    ),
    "format": ({"format": 2}, "format: got 2, this version reads 1"),
}


@pytest.mark.parametrize(("fields", "told"), WRONG.values(), ids=list(WRONG))
def test_a_plan_that_contradicts_the_model_or_itself(fields: dict, told: str) -> None:
    model, x = build("plain"), images("plain")
    before = logits(model, x)
    with pytest.raises(PlanError) as caught:
        apply(model, replace(contract("plain").plan, **fields))
    assert told in caught.value.message
    assert caught.value.hint
    assert torch.equal(logits(model, x), before), "nothing is edited"


def test_all_contradictions_are_told_at_once() -> None:
    plan = replace(
        contract("plain").plan,
        removed={"blocks.9.attn": "drop", "blocks.0.attn": "identity"},
        appended={"blocks.5": "gelu"},
        kept={"residual": (99,), "nothing": (0,)},
        heads={"blocks.1.attn": 2},
        folded=("blocks.0.mlp",),
    )
    with pytest.raises(PlanError) as caught:
        apply(build("plain"), plan)
    assert len(caught.value.message.splitlines()) == 1 + 7


def test_a_plan_may_be_applied_only_once() -> None:
    model = build("plain")
    plan = depth_plan(model, contract("plain").plan, [0], [])
    apply(model, plan)
    with pytest.raises(PlanError, match="has no such attention"):
        apply(model, plan)


# --------------------------------------------------------------------------------------------------------- depth plans


def test_depth_plans_are_deltas_that_append_where_a_block_has_lost_both() -> None:
    model = build("plain", depth=4)
    base = contract("plain", depth=4).plan
    first = depth_plan(model, base, [3, 0], [1, 0], both_pruned_output_act="gelu")
    assert first.removed == {
        "blocks.3.attn": "drop",
        "blocks.0.attn": "drop",
        "blocks.1.mlp.act": "identity",
        "blocks.0.mlp.act": "identity",
    }
    assert first.appended == {"blocks.0": "gelu"}
    apply(model, first)
    second = depth_plan(model, first, [1], [3, 2], attention_bypass="double", both_pruned_output_act="gelu")
    assert second.removed == {"blocks.1.attn": "double", "blocks.3.mlp.act": "identity", "blocks.2.mlp.act": "identity"}
    assert second.appended == {"blocks.1": "gelu", "blocks.3": "gelu"}
    assert depth_plan(model, first, [1], [3]).appended == {}


@pytest.mark.parametrize(
    ("attentions", "activations", "modes", "told"),
    [
        ([2], [], {}, "no attention to remove in block 2; blocks that have one: \\[0, 1\\]"),
        ([], [-1], {}, "no activation to remove in block -1"),
        ([0], [], {"attention_bypass": "zero"}, "attention_bypass must be one of drop, norm_identity, double"),
        ([0], [], {"both_pruned_output_act": "relu"}, "both_pruned_output_act must be one of gelu, none"),
    ],
)
def test_depth_plans_that_cannot_be(attentions: list, activations: list, modes: dict, told: str) -> None:
    model = build("plain")
    with pytest.raises(PlanError, match=told):
        depth_plan(model, contract("plain").plan, attentions, activations, **modes)


def test_the_bound_for_sameness_leaves_room_to_fail() -> None:
    assert SAME < 1e-10
    assert len(CONTRACTS) >= 12
