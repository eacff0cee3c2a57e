"""Planned sizes, by arithmetic, are those that surgery leaves, in every family."""

from dataclasses import replace

import pytest
from contracts import BYPASSES, contract, every_variant, sites_of, spaces_of
from layer_plans import depth_plan
from torch import nn

from vitcompress import surgery
from vitcompress.families import family_of
from vitcompress.models.create import create_on_meta
from vitcompress.plan import Plan
from vitcompress.surgery.shapes import planned_tensors
from vitcompress.verify.weights import shape_check


def outline(plan: Plan) -> nn.Module:
    return create_on_meta(plan.arch, plan.arch_args)


def narrow(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Half of the channels of every space, whole heads where it has heads."""
    return {name: tuple(range(space.size // 2)) for name, space in spaces_of(model).items()}


def half_heads(model: nn.Module) -> dict[str, int]:
    """Half of the heads of every attention, as `narrow` keeps."""
    return {space.attention: space.heads // 2 for space in spaces_of(model).values() if space.attention}


def depth(model: nn.Module, base: Plan, bypass: str = "drop") -> Plan:
    """One attention fewer, and where activations can go one of those."""
    acts = [] if family_of(model).not_foldable(model) else [1]
    return base.then(depth_plan(model, base, [0], acts, attention_bypass=bypass))


def folded(model: nn.Module, plan: Plan) -> Plan:
    """`plan` with every FFN and LayerScale folded that can be, cheaper or not."""
    without = [act.rpartition(".")[0] for act in plan.removed if act.endswith(".act")]
    pruned = surgery.apply_to_copy(model, plan)
    return replace(plan, folded=(*without, *family_of(pruned).scales(pruned)))


@every_variant
@pytest.mark.parametrize("bypass", BYPASSES)
def test_depth(variant: str, bypass: str) -> None:
    base = contract(variant).plan
    dense = outline(base)
    unfolded = depth(dense, base, bypass)
    for plan in (unfolded, folded(dense, unfolded)):
        check = shape_check(planned_tensors(dense, plan), surgery.apply_to_copy(dense, plan))
        assert check.verdict == "passed", check.detail
    changes = {row.change for row in planned_tensors(dense, plan)}
    assert "removed" in changes and ("folded" in changes) != bool(family_of(dense).not_foldable(dense))


@every_variant
def test_width(variant: str) -> None:
    base = contract(variant).plan
    dense = outline(base)
    plan = replace(base, kept=narrow(dense), heads=half_heads(dense))
    check = shape_check(planned_tensors(dense, plan), surgery.apply_to_copy(dense, plan))
    assert check.verdict == "passed", check.detail
    rows = {row.name: row for row in planned_tensors(dense, plan)}
    assert all(row.change == "sliced" for name, row in rows.items() if name.endswith("attn.qkv.weight"))


@every_variant
def test_both(variant: str) -> None:
    base = contract(variant).plan
    dense = outline(base)
    plan = depth(dense, base)
    left = surgery.apply_to_copy(dense, plan)
    plan = folded(dense, replace(plan, kept=narrow(left), heads=half_heads(left)))
    check = shape_check(planned_tensors(dense, plan), surgery.apply_to_copy(dense, plan))
    assert check.verdict == "passed", check.detail


@pytest.mark.parametrize("wrong", ["nothing was removed", "nothing was folded", "one channel more", "another tensor"])
def test_another_size_fails(wrong: str) -> None:
    base = contract("layer_scale").plan
    dense = outline(base)
    plan = folded(dense, replace(depth(dense, base), kept={"residual": tuple(range(8))}))
    others = {
        "nothing was removed": replace(plan, removed={}, folded=()),
        "nothing was folded": replace(plan, folded=()),
        "one channel more": replace(plan, kept={"residual": tuple(range(9))}),
        "another tensor": plan,
    }
    model = surgery.apply_to_copy(dense, others[wrong])
    if wrong == "another tensor":
        model.register_parameter("more", nn.Parameter(model.get_parameter("cls_token")))
    assert shape_check(planned_tensors(dense, plan), surgery.apply_to_copy(dense, plan)).verdict == "passed"
    check = shape_check(planned_tensors(dense, plan), model)
    assert check.verdict == "failed" and "planned" in check.detail


def test_the_parameter_of_a_removed_activation_is_gone() -> None:
    base = contract("plain", act_layer="prelu").plan
    dense = outline(base)
    plan = replace(base, removed={"blocks.0.mlp.act": "identity"})
    check = shape_check(planned_tensors(dense, plan), surgery.apply_to_copy(dense, plan))
    assert check.verdict == "passed", check.detail
    gone = [row.name for row in planned_tensors(dense, plan) if row.planned is None]
    assert gone == ["blocks.0.mlp.act.weight"]


def test_blocks_that_are_gone_leave_nothing() -> None:
    base = contract("plain").plan
    dense = outline(base)
    block = sites_of(dense, "block")[0].name
    rows = planned_tensors(dense, replace(base, removed={block: "drop"}))
    assert {row.name for row in rows if row.planned is None} == {
        name for name in dense.state_dict() if name.startswith(f"{block}.")
    }
