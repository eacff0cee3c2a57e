"""Plans that do not fit are rejected with all reasons, before anything is edited; plans from block numbers."""

from dataclasses import replace

import pytest
import torch
from contracts import build, contract, images, logits
from layer_plans import depth_plan

from vitcompress.errors import InputError, PlanError
from vitcompress.families import family_of
from vitcompress.surgery import apply_plan

WRONG = {
    "unknown site": ({"removed": {"blocks.9.attn": "drop"}}, "removed.blocks.9.attn: the model has no such"),
    "misspelled site": ({"removed": {"blocks.1.atn": "drop"}}, "did you mean blocks.1.attn?"),
    "replacement of an attention": ({"removed": {"blocks.0.attn": "identity"}}, "attention allows drop, norm_identity"),
    "replacement of an activation": (
        {"removed": {"blocks.0.mlp.act": "drop"}},
        "activation allows identity, got 'drop'",
    ),
    "replacement of an FFN": ({"removed": {"blocks.0.mlp": "double"}}, "ffn allows drop, got 'double'"),
    "replacement of a block": ({"removed": {"blocks.0": "identity"}}, "block allows drop, got 'identity'"),
    "in a removed block": ({"removed": {"blocks.0": "drop", "blocks.0.attn": "drop"}}, "blocks.0.attn: it is inside"),
    "in a removed FFN": (
        {"removed": {"blocks.0.mlp": "drop", "blocks.0.mlp.act": "identity"}},
        "it is inside blocks.0.mlp",
    ),
    "output of no block": ({"appended": {"blocks.7": "gelu"}}, "appended.blocks.7: the model has no such block"),
    "output of a removed block": (
        {"appended": {"blocks.0": "gelu"}, "removed": {"blocks.0": "drop"}},
        "appended.blocks.0",
    ),
    "unknown output": ({"appended": {"blocks.0": "relu"}}, "got 'relu', allowed: gelu"),
    "unknown space": ({"kept": {"blocks.0.kq": (0,)}}, "kept.blocks.0.kq: the model has no such space"),
    "out of range": ({"kept": {"residual": (0, 16)}}, "kept.residual: expected one or more distinct channels in 0..15"),
    "negative": ({"kept": {"blocks.0.mlp": (-1,)}}, "kept.blocks.0.mlp: expected"),
    "twice": ({"kept": {"blocks.0.mlp": (3, 3)}}, "kept.blocks.0.mlp: expected"),
    "none left": ({"kept": {"blocks.0.mlp": ()}}, "kept.blocks.0.mlp: expected one or more"),
    "in a removed part": (
        {"kept": {"blocks.0.mlp": (0,)}, "removed": {"blocks.0": "drop"}},
        "kept.blocks.0.mlp: it is inside",
    ),
    "of a removed FFN": (
        {"kept": {"blocks.0.mlp": (0,)}, "removed": {"blocks.0.mlp": "drop"}},
        "kept.blocks.0.mlp: it is inside blocks.0.mlp, which is removed",
    ),
    "of a removed attention": (
        {"kept": {"blocks.0.v": (0, 4, 8, 12)}, "removed": {"blocks.0.attn": "drop"}},
        "kept.blocks.0.v: it is inside blocks.0.attn, which is removed",
    ),
    "does not divide": ({"kept": {"blocks.0.qk": (0, 1, 2)}}, "3 channels do not divide into 4 heads"),
    "no such heads": ({"heads": {"blocks.9.attn": 2}}, "heads.blocks.9.attn: the model has no such attention"),
    "heads alone": ({"heads": {"blocks.0.attn": 2}}, "neither its q/k nor its v channels are in kept"),
    "no head": ({"heads": {"blocks.0.attn": 0}, "kept": {"blocks.0.v": (0,)}}, "expected a whole number from 1"),
    "heads of removed": (
        {"heads": {"blocks.0.attn": 2}, "removed": {"blocks.0.attn": "drop"}},
        "the attention is removed",
    ),
    "heads of one half": (
        {"heads": {"blocks.0.attn": 3}, "kept": {"blocks.0.v": (0, 1, 2)}},
        "blocks.0.qk: 16 channels do",
    ),
    "fold of no module": ({"folded": ("blocks.9.mlp",)}, "folded.blocks.9.mlp: the model has no such FFN"),
    "fold of an attention": ({"folded": ("blocks.0.attn",)}, "folded.blocks.0.attn: the model has no such FFN"),
    "fold of no scale": ({"folded": ("blocks.0.ls1",)}, "folded.blocks.0.ls1: the model has no such FFN"),
    "fold of a live FFN": ({"folded": ("blocks.0.mlp",)}, "its activation blocks.0.mlp.act is not removed"),
    "fold of a removed FFN": ({"folded": ("blocks.0.mlp",), "removed": {"blocks.0.mlp": "drop"}}, "it is removed"),
    "folded twice": (
        {"folded": ("blocks.0.mlp",) * 2, "removed": {"blocks.0.mlp.act": "identity"}},
        "folded: a module is named twice",
    ),
    "format": ({"format": 2}, "format: got 2, this version reads 1"),
}


@pytest.mark.parametrize(("fields", "message"), WRONG.values(), ids=list(WRONG))
def test_a_plan_that_contradicts_the_model_or_itself(fields: dict, message: str) -> None:
    model, x = build("plain"), images("plain")
    before = logits(model, x)
    with pytest.raises(PlanError) as caught:
        apply_plan(model, replace(contract("plain").plan, **fields))
    assert message in caught.value.message
    assert caught.value.hint
    assert torch.equal(logits(model, x), before), "nothing is edited"


HALVES = tuple(head * 4 + channel for head in range(4) for channel in (0, 1))


@pytest.mark.parametrize(
    ("variant", "kept", "heads", "message"),
    [
        ("dinov3", None, 2, "whole heads only"),
        ("swin", None, 2, "cannot consist of channels of several"),
        ("dinov3", HALVES, 4, "whole heads only"),
        ("dinov3", (1, 0, *range(2, 16)), 4, "whole heads only"),
        ("dinov3", tuple(range(8)), 1, "whole heads only"),
        ("dinov3", HALVES, 2, "whole heads only"),
        ("beit", HALVES, 2, "cannot consist of channels of several"),
        ("swin", (0, 4, 1, 5), 2, "cannot consist of channels of several"),
    ],
)
def test_heads_with_positions_of_their_own_are_not_formed_from_others(
    variant: str, kept: tuple[int, ...] | None, heads: int, message: str
) -> None:
    model = build(variant)
    qk, v = (next(s for s in family_of(model).spaces(model) if s.kind == kind) for kind in ("qk", "v"))
    both = {v.name: tuple(range(8))} if kept is None else {qk.name: kept, v.name: kept}
    plan = contract(variant).plan.delta(kept=both, heads={qk.attention: heads})
    with pytest.raises(PlanError, match=f"kept.{qk.name}: .*{message}"):
        apply_plan(model, plan)


@pytest.mark.parametrize("kind", ["qk", "v", "sr"])
def test_no_channels_of_a_removed_attention_are_kept(kind: str) -> None:
    model = build("pvt")
    space = next(s for s in family_of(model).spaces(model) if s.kind == kind)
    site = f"{space.name.rpartition('.')[0]}.attn"
    plan = contract("pvt").plan.delta(kept={space.name: tuple(range(4))}, removed={site: "drop"})
    with pytest.raises(PlanError, match=f"kept.{space.name}: it is inside {site}, which is removed"):
        apply_plan(model, plan)


@pytest.mark.parametrize("variant", ["inner_norms", "pvt"])
def test_ffns_that_are_not_linear_cannot_be_folded(variant: str) -> None:
    model, plan = build(variant), contract(variant).plan
    ffn = next(site.name for site in family_of(model).sites(model) if site.kind == "ffn")
    for fields in ({"folded": (ffn,)}, {"removed": {f"{ffn}.act": "identity"}}):
        with pytest.raises(PlanError, match="has no such"):
            apply_plan(model, replace(plan, **fields))


def test_all_contradictions_are_reported_at_once() -> None:
    plan = replace(
        contract("plain").plan,
        removed={"blocks.9.attn": "drop", "blocks.0.attn": "identity"},
        appended={"blocks.5": "gelu"},
        kept={"residual": (99,), "nothing": (0,)},
        heads={"blocks.1.attn": 2},
        folded=("blocks.0.mlp",),
    )
    with pytest.raises(PlanError) as caught:
        apply_plan(build("plain"), plan)
    assert len(caught.value.message.splitlines()) == 1 + 7


def test_a_plan_may_be_applied_only_once() -> None:
    model = build("plain")
    plan = depth_plan(model, contract("plain").plan, [0], [])
    apply_plan(model, plan)
    with pytest.raises(PlanError, match="has no such attention"):
        apply_plan(model, plan)


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
    apply_plan(model, first)
    second = depth_plan(model, first, [1], [3, 2], attention_bypass="double", both_pruned_output_act="gelu")
    assert second.removed == {"blocks.1.attn": "double", "blocks.3.mlp.act": "identity", "blocks.2.mlp.act": "identity"}
    assert second.appended == {"blocks.1": "gelu", "blocks.3": "gelu"}
    assert depth_plan(model, first, [1], [3]).appended == {}


@pytest.mark.parametrize(
    ("attentions", "activations", "modes", "message"),
    [
        ([2], [], {}, "no attention to remove in block 2; blocks that have one: \\[0, 1\\]"),
        ([], [-1], {}, "no activation to remove in block -1"),
        ([0], [], {"attention_bypass": "zero"}, "got 'zero', expected one of drop, norm_identity, double"),
        ([0], [], {"both_pruned_output_act": "relu"}, "got 'relu', expected one of none, gelu"),
    ],
)
def test_invalid_depth_plans(attentions: list, activations: list, modes: dict, message: str) -> None:
    model = build("plain")
    with pytest.raises(InputError, match=message):
        depth_plan(model, contract("plain").plan, attentions, activations, **modes)
