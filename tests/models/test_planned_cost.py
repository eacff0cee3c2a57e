"""The cost computed for a plan equals the cost counted on the sliced model, in every family."""

from dataclasses import replace
from typing import Any

import pytest
from contracts import build, contract, every_variant, kept_channels, spaces_of
from layer_plans import depth_plan

from vitcompress import surgery
from vitcompress.families import family_of
from vitcompress.methods.options import Alignment
from vitcompress.methods.table import METHODS
from vitcompress.models import cost as models_cost
from vitcompress.models.cost import count_cost, count_flops, planned_cost
from vitcompress.models.create import create_on_meta, input_config
from vitcompress.models.source import create_blank
from vitcompress.plan import Plan

KINDS = {"qk", "v", "mlp", "residual", "sr"}


@every_variant
@pytest.mark.parametrize("folds", [False, True], ids=["whole", "folded"])
def test_the_planned_cost_is_the_counted_cost(variant: str, folds: bool) -> None:
    base = contract(variant).plan
    model = create_on_meta(base.arch, base.arch_args)
    if folds:
        acts = [] if family_of(model).not_foldable(model) else [1]
        plan = base.then(depth_plan(model, base, [0], acts))
        model = surgery.apply_to_copy(model, plan)
        surgery.fold_linears(model, plan)
    size = input_config(model).size
    cost_of = planned_cost(model, size)
    assert cost_of is not None
    spaces = spaces_of(model)
    fewer = {space.attention: space.heads // 2 for space in spaces.values() if space.attention and not space.heads % 2}
    halves = {name: tuple(range(s.size // 2)) for name, s in spaces.items() if not s.attention or s.attention in fewer}
    plans = [replace(base, kept=kept_channels(model, KINDS)), replace(base, kept=halves, heads=fewer), base]
    costs = [cost_of(plan) for plan in plans]
    assert costs == [count_cost(surgery.apply_to_copy(model, plan), size) for plan in plans]
    half, full = costs[1:]
    assert costs[0].macs < full.macs and half.macs_linear < full.macs_linear and half.params < full.params


def test_padded_heads_have_no_planned_cost() -> None:
    model = build("plain")
    narrow = {name: tuple(range(0, s.size, 2)) for name, s in spaces_of(model).items() if s.kind == "qk"}
    names = tuple(space.attention for space in spaces_of(model).values() if space.kind == "qk")
    padded = surgery.apply_to_copy(model, Plan("any", kept=narrow, padded=names))
    assert planned_cost(padded, (3, 8, 8)) is None and planned_cost(model, (3, 8, 8)) is not None


def test_candidates_are_compared_without_counting_each(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, real = list[Any](), count_flops
    monkeypatch.setattr(models_cost, "count_flops", lambda *about: counted.append(about) or real(*about))
    base = contract("plain").plan
    model = create_on_meta(base.arch, base.arch_args)
    size = input_config(model).size
    aim = 0.7 * count_cost(model, size).params / 1e6
    options = METHODS["isomorphic"].options(target="params", amount=aim, align=Alignment(1, 1, 1))
    plan = METHODS["isomorphic"].structure(model, family_of(model), base, options)
    assert len(counted) == 2, "of the whole model, here and in the method"
    without = depth_plan(model, base, [], [0])
    METHODS["isomorphic"].structure(
        surgery.apply_to_copy(model, without), family_of(model), base.then(without), options
    )
    assert len(counted) > 12, "whether an FFN is folded depends on the widths"
    assert abs(count_cost(surgery.apply_to_copy(model, plan), size).params / 1e6 / aim - 1) < 0.05


def test_an_architecture_is_built_once_for_all_recipes_of_it() -> None:
    assert create_blank("deit_tiny_patch16_224", {"depth": 1}) is create_blank("deit_tiny_patch16_224", {"depth": 1})
