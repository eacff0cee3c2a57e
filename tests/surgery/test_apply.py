"""Surgery does what it says and nothing else: masked == sliced, and timm's own interface stays."""

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
    sites_of,
    spaces_of,
    without_act,
)
from layer_plans import depth_plan
from torch import Tensor, nn
from torch.func import functional_call

from vitcompress.families import family_of, prepare_model
from vitcompress.families.attention import SlicedPool
from vitcompress.plan import Plan
from vitcompress.surgery import apply_plan, apply_to_copy, fold_linears
from vitcompress.surgery.masks import mask_channels


@every_variant
def test_the_identity_plan_gives_timms_model_bit_for_bit(variant: str) -> None:
    model, x = build(variant), images(variant)
    same = apply_to_copy(model, contract(variant).plan)
    assert [type(m) for m in same.modules()] == [type(m) for m in model.modules()]
    assert torch.equal(logits(same, x), logits(model, x))
    assert all(torch.equal(same.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


@every_variant
def test_weights_can_be_replaced_in_a_call(variant: str) -> None:
    """As tensors that are no parameters: the agreement check rounds the weights of pruned models in this way."""
    model, x = build(variant), images(variant)
    removed = {site.name: "drop" for site in sites_of(model, "attention")[:1]}
    pruned = apply_to_copy(model, replace(contract(variant).plan, removed=removed))
    doubled = {name: 2 * value.detach() for name, value in pruned.named_parameters()}
    replaced = functional_call(pruned, doubled, (x,)).detach()
    assert_moved(replaced, logits(pruned, x))
    pruned.load_state_dict({**pruned.state_dict(), **doubled})
    assert_same(logits(pruned, x), replaced)  # some versions of torch round products of parameters in another way


# -------------------------------------------------------------------------------------------------------------- slicing

SLICES = {
    "qk": ({"qk"}, False),
    "v": ({"v"}, False),
    "mlp": ({"mlp"}, False),
    "residual": ({"residual"}, False),
    "heads": ({"qk", "v"}, True),
    "sr": ({"sr"}, False),
    "all": ({"qk", "v", "mlp", "residual", "sr"}, True),
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
    if not plan.kept:
        pytest.skip("the family has no such space")
    with mask_channels(model, masks(model, plan.kept)):
        masked = logits(model, x)
    assert_moved(masked, logits(model, x))
    assert_same(logits(apply_to_copy(model, plan), x), masked)


def test_masked_equals_sliced_on_a_model_that_lost_layers_before() -> None:
    x = images("layer_scale")
    model = build("layer_scale", depth=4)
    plan = depth_plan(model, contract("layer_scale", depth=4).plan, [0, 2], [1, 2], attention_bypass="norm_identity")
    fold_linears(apply_plan(model, plan), plan)
    kept = kept_channels(model, {"qk", "v", "mlp", "residual"})
    with mask_channels(model, masks(model, kept)):
        masked = logits(model, x)
    assert_moved(masked, logits(model, x))
    assert_same(logits(apply_to_copy(model, replace(plan, removed={}, kept=kept)), x), masked)


def test_masked_equals_sliced_with_a_classifier_that_reads_every_channel_twice() -> None:
    """The average and the maximum of each, in Swin."""
    model, x = build("swin", global_pool="catavgmax"), images("swin")
    kept = kept_channels(model, {"residual"})
    with mask_channels(model, masks(model, kept)):
        masked = logits(model, x)
    assert_moved(masked, logits(model, x))
    sliced = apply_to_copy(model, contract("swin", global_pool="catavgmax").plan.delta(kept=kept))
    assert_same(logits(sliced, x), masked)
    assert sliced.head_hidden_size == sliced.head.fc.in_features == 2 * sliced.num_features


STAGED = ["swin", "swin_padded", "swin_dynamic", "swin_head_dim", "pvt", "pvt_linear"]


@pytest.mark.parametrize("variant", STAGED)
def test_a_block_without_its_ffn_computes_what_it_did_around_its_attention(variant: str) -> None:
    """Shift, padding and partition in Swin, the image size in PVTv2: as in the whole block with an FFN of zeros."""
    model, x = build(variant), images(variant)
    for number in (0, 1):
        ffn = sites_of(model, "ffn")[number].name
        silent = deepcopy(model)
        for parameter in silent.get_submodule(f"{ffn}.fc2").parameters():
            parameter.data.zero_()
        small = apply_to_copy(model, replace(contract(variant).plan, removed={ffn: "drop"}))
        assert_same(logits(small, x), logits(silent, x))
        assert_moved(logits(small, x), logits(model, x))


@pytest.mark.parametrize("variant", [*STAGED, "attention_pool"])
def test_masked_equals_sliced_on_rewired_blocks_and_again(variant: str) -> None:
    model, x = build(variant, depth=4), images(variant)
    blocks = list(family_of(model).blocks(model))
    removed = {f"{blocks[1]}.mlp": "drop", f"{blocks[2]}.attn": "norm_identity", f"{blocks[3]}.mlp": "drop"}
    apply_plan(model, replace(contract(variant, depth=4).plan, removed=removed))
    for whole_heads in (False, True, False):  # the last time sliced again
        plan = sliced_plan(model, variant, {"qk", "v", "mlp", "residual", "sr"}, whole_heads=whole_heads)
        with mask_channels(model, masks(model, plan.kept)):
            masked = logits(model, x)
        assert_moved(masked, logits(model, x))
        small = apply_to_copy(model, plan)
        assert_same(logits(small, x), masked)
        model = small if not whole_heads else model


def test_the_order_of_kept_channels_is_the_order_of_the_result() -> None:
    model = build("plain")
    order = (7, 3, 11, 0)
    narrow = apply_to_copy(model, replace(contract("plain").plan, kept={"blocks.1.mlp": order}))
    assert torch.equal(narrow.blocks[1].mlp.fc1.weight, model.blocks[1].mlp.fc1.weight[list(order)])
    assert torch.equal(narrow.blocks[1].mlp.fc2.weight, model.blocks[1].mlp.fc2.weight[:, list(order)])
    assert narrow.blocks[1].mlp.fc1.out_features == narrow.blocks[1].mlp.fc2.in_features == 4


def test_slicing_keeps_modes_and_frozen_parameters() -> None:
    model = build("plain", attn_drop_rate=0.5)
    x = images("plain")
    model.blocks[0].attn.qkv.weight.requires_grad_(False)
    sliced = apply_to_copy(model, sliced_plan(model, "plain", {"qk", "mlp"}, whole_heads=False))
    assert not any(module.training for module in sliced.modules())
    assert torch.equal(logits(sliced, x), logits(sliced, x)), "attention dropout must rest in eval mode"
    assert not torch.equal(logits(sliced.train(), x), logits(sliced, x))
    frozen = [name for name, parameter in sliced.named_parameters() if not parameter.requires_grad]
    assert frozen == ["blocks.0.attn.qkv.weight"]


def test_removing_layers_keeps_the_mode() -> None:
    """Also of Swin's attention, which is a new module in a block without its FFN."""
    for variant in ("plain", "swin", "pvt"):
        model, x = build(variant, attn_drop_rate=0.5), images(variant)
        plan = replace(contract(variant).plan, removed={sites_of(model, "ffn")[1].name: "drop"})
        pruned = apply_to_copy(model, plan)
        assert not any(module.training for module in pruned.modules()), variant
        assert torch.equal(logits(pruned, x), logits(pruned, x)), variant
        assert all(module.training for module in apply_to_copy(model.train(), plan).modules()), variant


@pytest.mark.parametrize("variant", ["plain", "layer_scale", "swiglu", "split_swiglu"])
def test_hooks_stay_on_modules_that_are_replaced(variant: str) -> None:
    """As of a user who collects features: on a rewired block, a sliced attention, and a folded FFN."""
    model, x, calls = build(variant, prepared=False), images(variant), list[str]()
    names = ("blocks.0", "blocks.0.attn", "blocks.0.mlp")
    for name in names:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda module, args, name=name: calls.append(f"before {name}"))
        module.register_forward_hook(lambda *args, name=name: calls.append(f"after {name}"), with_kwargs=True)
        module.register_full_backward_pre_hook(lambda *args, name=name: calls.append(f"gradient before {name}"))
        module.register_full_backward_hook(lambda *args, name=name: calls.append(f"gradient after {name}"))
    prepared = prepare_model(deepcopy(model))
    removed = without_act(sites_of(prepared, "activation")[0])
    plan = replace(contract(variant).plan, kept=kept_channels(prepared, {"v"}), removed=removed)
    pruned = apply_to_copy(model, replace(plan, appended={"blocks.0": "gelu"}))
    fold_linears(pruned, plan)
    kinds = {name: type(model.get_submodule(name)) for name in names}
    assert all(type(pruned.get_submodule(name)) is not kind for name, kind in kinds.items())
    logits(pruned, x)
    before, after = [[f"{when} {name}" for name in names] for when in ("before", "after")]
    assert calls == [before[0], before[1], after[1], before[2], after[2], after[0]]
    pruned(x).sum().backward()
    both = [f"gradient {when} {name}" for name in names for when in ("before", "after")]
    assert sorted(calls[12:]) == sorted(both) and calls[6:12] == calls[:6]


def test_attention_that_keeps_its_head_width_stays_timms_own() -> None:
    model = build("plain")
    kept = {f"blocks.0.{kind}": tuple(range(4, 12)) for kind in ("qk", "v")}
    sliced = apply_to_copy(model, replace(contract("plain").plan, kept=kept, heads={"blocks.0.attn": 2}))
    assert type(sliced.blocks[0].attn) is type(model.blocks[0].attn)
    assert (sliced.blocks[0].attn.num_heads, sliced.blocks[0].attn.attn_dim) == (2, 8)


def test_a_pool_stays_timms_own_where_its_heads_fill_the_stream() -> None:
    """Half the heads, half the stream: what timm builds with these sizes; and of other widths, it is another module."""
    model, x = build("attention_pool"), images("attention_pool")
    kept = {f"attn_pool.{kind}": tuple(range(4, 12)) for kind in ("qk", "v")}
    plan = replace(contract("attention_pool").plan, kept=kept, heads={"attn_pool": 2})
    assert type(apply_to_copy(model, plan).attn_pool) is SlicedPool
    sliced = apply_to_copy(model, replace(plan, kept={**kept, "residual": tuple(range(8))}))
    pool, like = sliced.attn_pool, type(model.attn_pool)(8, num_heads=2, mlp_ratio=4.0, norm_layer=nn.LayerNorm)
    assert type(pool) is type(like)
    names = ("num_heads", "head_dim", "latent_dim", "out_features", "scale")
    assert [getattr(pool, name) for name in names] == [getattr(like, name) for name in names]
    assert_moved(logits(sliced, x), logits(model, x))


# ------------------------------------------------------------------------------------------------------------- removing


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
    pruned = apply_to_copy(model, depth_plan(model, contract(variant).plan, [0, 1], [1], **modes))
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
    pruned = apply_to_copy(model, replace(contract("plain", depth=3).plan, removed=removed))
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
    assert torch.equal(apply_to_copy(model, plan).blocks[0](x), nn.functional.gelu(x))


def edited(variant: str) -> nn.Module:
    """Four blocks: one gone, one without attention, one folded where that can be, all sliced."""
    model = build(variant, depth=4)
    _, second, third, last = family_of(model).blocks(model)
    linear = {n: s for a in sites_of(model, "activation") if a.block == last for n, s in without_act(a).items()}
    plan = replace(
        contract(variant, depth=4).plan,
        removed={second: "drop", f"{third}.attn": "drop", **linear},
        kept={n: k for n, k in kept_channels(model, {"qk", "residual"}).items() if not n.startswith(second)},
        folded=(f"{last}.mlp",) if linear else (),
    )
    plan.kept.pop(f"{third}.qk", None)
    return apply_plan(model, plan)


@every_variant
def test_timms_interface_still_works(variant: str) -> None:
    model, x = edited(variant), images(variant)
    widths = [12, 24] if family_of(model).stages else [12, 12, 12]  # by stage, or by block
    features = model.forward_features(x)
    assert features.shape[1 if family_of(model).name == "pvt" else -1] == model.num_features == widths[-1]
    assert getattr(model, "embed_dim", widths[0]) == widths[0]
    assert model.head_hidden_size == widths[-1]
    final, stages = model.forward_intermediates(x, norm=False)
    assert_same(final, features)
    assert [stage.shape[1] for stage in stages] == widths
    assert [entry["num_chs"] for entry in model.feature_info] == widths
    assert_same(model.forward_head(features), logits(model, x))
    model.reset_classifier(7)
    assert logits(model.double(), x).shape == (3, 7)
    assert [site.index for site in sites_of(model, "block")] == [0, 2, 3]


UNTRACEABLE = {"dynamic_size", "swin_dynamic"}  # timm's own models


@pytest.mark.parametrize("variant", sorted({variant for _, variant in CONTRACTS} - UNTRACEABLE))
def test_torch_fx_traces_what_it_could_trace_before(variant: str) -> None:
    """torchvision's feature extractors and quantization in torch trace a model."""
    model, x = build(variant), images(variant)
    try:
        torch.fx.symbolic_trace(model)
    except TypeError as error:
        assert "'is_causal' must be bool, not Proxy" in str(error)
        pytest.skip("this version of torch traces no attention of timm")
    sliced = sliced_plan(model, variant, {"qk", "v", "mlp", "sr"}, whole_heads=False)
    attentions = dict.fromkeys(s.attention for s in spaces_of(model).values() if s.attention)
    for plan in (sliced, replace(sliced, padded=tuple(attentions))):
        pruned = apply_to_copy(model, plan)
        assert torch.equal(torch.fx.symbolic_trace(pruned)(x), pruned(x))
    removed = {site.name: "drop" for site in sites_of(model, "attention")[:1]}
    pruned = apply_to_copy(model, replace(contract(variant).plan, removed=removed))
    assert torch.equal(torch.fx.symbolic_trace(pruned)(x), pruned(x))


def test_an_attention_mask_reaches_sliced_attention_and_passes_by_removed_ones() -> None:
    model, x = edited("plain"), images("plain")
    tokens = model.forward_features(x).shape[1]
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    masked = model.forward_features(x, attn_mask=mask)
    assert_moved(masked, model.forward_features(x))
    assert_same(model.forward_features(x, is_causal=True), masked)


def test_a_mask_hides_tokens_from_a_sliced_pool() -> None:
    dense = build("attention_pool")
    model = apply_to_copy(dense, sliced_plan(dense, "attention_pool", {"qk", "v"}, whole_heads=False))
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    assert type(model.attn_pool) is SlicedPool
    assert_same(model.attn_pool(x, attn_mask=torch.arange(5)[None] < 3), model.attn_pool(x[:, :3]))


def test_the_bound_for_sameness_leaves_room_to_fail() -> None:
    assert SAME < 1e-10
    assert len(CONTRACTS) >= 12
