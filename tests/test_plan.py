"""Plans: lossless as JSON, validated as a whole, and composed with `then`."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from contracts import VARIANTS, assert_composed, build, contract, images
from hypothesis import given
from hypothesis import strategies as st

from vitcompress.errors import PlanError
from vitcompress.families import family_of
from vitcompress.plan import Plan, is_within, module_of
from vitcompress.surgery import apply_to_copy
from vitcompress.surgery.check import check_plan

WHOLE = Plan(
    "deit_tiny_patch16_224",
    {"img_size": (8, 12), "num_classes": 5},
    removed={"blocks.3.attn": "double", "blocks.1.mlp.act": "identity"},
    appended={"blocks.3": "gelu"},
    folded=("blocks.1.mlp", "blocks.1.ls2"),
    kept={"residual": (3, 1, 2), "blocks.0.mlp": (0,)},
    heads={"blocks.0.attn": 2},
    standard={"arch": "deit_tiny_patch16_224", "args": {"depth": 6}},
)


def test_a_plan_survives_json() -> None:
    again = Plan.from_json(WHOLE.to_json())
    assert again == WHOLE
    assert again.digest == WHOLE.digest
    assert again.kept["residual"] == (3, 1, 2), "the order of kept channels must not change"


def test_the_digest_depends_on_content_alone() -> None:
    reordered = replace(WHOLE, removed=dict(reversed(WHOLE.removed.items())))
    assert reordered.digest == WHOLE.digest
    for change in ({"folded": ()}, {"heads": {}}, {"kept": {"residual": (1, 2, 3)}}, {"appended": {}}):
        assert replace(WHOLE, **change).digest != WHOLE.digest


def test_arguments_must_be_json() -> None:
    with pytest.raises(PlanError, match="plain data"):
        Plan("deit_tiny_patch16_224", {"norm_layer": object()})
    with pytest.raises(PlanError, match="plain data"):
        Plan("deit_tiny_patch16_224", standard={"arch": "deit_tiny_patch16_224", "args": {"depth": np.float32(3)}})


@pytest.mark.parametrize("edits", [{"kept": {"blocks.0.v": (0.5,)}}, {"heads": {"blocks.0.attn": 2.5}}])
def test_numbers_of_channels_and_heads_must_be_integers(edits: Any) -> None:
    with pytest.raises(PlanError, match="kept and heads of whole numbers"):
        Plan("deit_tiny_patch16_224", **edits)


@pytest.mark.parametrize("key", ["arch_args", "removed", "appended", "kept", "heads", "standard", "folded", "padded"])
@pytest.mark.parametrize("value", [None, 1, [1]])
def test_tables_and_lists_of_another_type_are_rejected(key: str, value: Any) -> None:
    """They ended in errors of Python, some only when the plan was applied."""
    with pytest.raises(PlanError):
        check_plan(build("plain"), family_of(build("plain")), Plan("deit_tiny_patch16_224", **{key: value}))


@pytest.mark.parametrize("edits", [{"removed": {0: "drop"}}, {"kept": {0: (1,)}}, {"folded": [["blocks.0.mlp"]]}])
def test_names_of_another_type_are_not_in_the_model(edits: Any) -> None:
    with pytest.raises(PlanError, match="the model has no such"):
        check_plan(build("plain"), family_of(build("plain")), Plan("deit_tiny_patch16_224", **edits))


def test_a_plan_does_not_change_with_the_arguments_of_the_caller() -> None:
    removed, appended = {"blocks.0.attn": "drop"}, {"blocks.0": "gelu"}
    plan = Plan("any", removed=removed, appended=appended)
    before = plan.digest
    removed["blocks.1.attn"] = appended["blocks.1"] = "drop"
    assert plan.digest == before


def test_numbers_of_numpy_become_those_of_python() -> None:
    counted, plain = (
        Plan("any", {"depth": kind(2)}, kept={"blocks.0.v": (kind(0), kind(1))}, heads={"blocks.0.attn": kind(2)})
        for kind in (np.int64, int)
    )
    assert counted == plain and counted.digest == plain.digest


def test_lists_become_tuples() -> None:
    listed: Any = {"folded": ["blocks.0.mlp"], "padded": ["blocks.1.attn"]}
    plan = Plan("any", **listed)
    assert plan == Plan.from_json(plan.to_json()) and plan.folded == ("blocks.0.mlp",)


def test_all_problems_of_a_file_are_reported_at_once() -> None:
    data = json.loads(WHOLE.to_json())
    data["removed"] = {"blocks.0.attn": "dropp", "blocks.1.attn": ["drop"]}
    data["appended"] = {"blocks.0": "relu"}
    data["kept"] = {"a": [1, 1], "b": [-1], "c": "123", "d": [True], "e": []}
    data["heads"] = {"f": 0, "g": True, "h": 1.5}
    data["folded"] = ["blocks.1.mlp", "blocks.1.mlp"]
    data["standard"] = {"arch": "deit_tiny_patch16_224"}
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(data))
    named = [f"removed.blocks.{i}.attn" for i in (0, 1)] + ["appended.blocks.0", "named twice", "standard: "]
    named += [f"kept.{name}" for name in "abcde"] + [f"heads.{name}" for name in "fgh"]
    assert [name for name in named if name not in caught.value.message] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ({"arch": "x", "format": 1}, "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "expected an object, got list"),
        ("null", "expected an object"),
        ('{"arch": "x", "format": 2}', "format: got 2, this version reads 1"),
        ('{"arch": "x"}', "format: got None"),
        ('{"format": 1}', "arch: expected a timm model name"),
        ('{"arch": "x", "format": 1, "remvoed": {}}', "remvoed: unknown key, did you mean removed?"),
        ('{"arch": "x", "format": 1, "kept": []}', "kept: expected an object, got list"),
        ('{"arch": "x", "format": 1, "kept": null}', "kept: expected an object"),
        ('{"arch": "x", "format": 1, "folded": [1]}', "folded: expected a list"),
    ],
)
def test_damaged_files(text: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text)
    assert message in caught.value.message


def test_later_channels_are_indices_into_the_kept_ones() -> None:
    base = Plan("x")
    first = replace(base, kept={"residual": (9, 4, 7), "blocks.0.mlp": (1, 2)}, heads={"blocks.0.attn": 4})
    second = replace(base, kept={"residual": (2, 0), "blocks.0.v": (5,)}, heads={"blocks.0.attn": 2})
    both = first.then(second)
    assert both.kept == {"residual": (7, 9), "blocks.0.mlp": (1, 2), "blocks.0.v": (5,)}
    assert both.heads == {"blocks.0.attn": 2}


@given(st.permutations(range(9)), st.permutations(range(6)), st.permutations(range(4)))
def test_then_is_associative(one: list[int], two: list[int], three: list[int]) -> None:
    base = Plan("x")
    plans = [replace(base, kept={"s": tuple(k)}) for k in (one[:6], two[:4], three[:2])]
    left = plans[0].then(plans[1]).then(plans[2])
    assert left == plans[0].then(plans[1].then(plans[2]))
    assert left.kept["s"] == tuple(one[two[c]] for c in three[:2])


def test_edits_inside_a_module_that_is_removed_later_are_dropped() -> None:
    first = Plan(
        "x",
        removed={"blocks.1.attn": "drop", "blocks.1.mlp.act": "identity", "blocks.10.attn": "drop"},
        appended={"blocks.1": "gelu"},
        folded=("blocks.1.mlp", "blocks.10.mlp"),
        kept={"blocks.1.mlp": (0,), "residual": (0, 1)},
        heads={"blocks.1.attn": 1},
    )
    both = first.then(Plan("x", removed={"blocks.1": "drop"}))
    assert both == Plan(
        "x",
        removed={"blocks.1": "drop", "blocks.10.attn": "drop"},
        folded=("blocks.10.mlp",),
        kept={"residual": (0, 1)},
    )
    ffn = first.then(Plan("x", removed={"blocks.1.mlp": "drop"}))
    assert set(ffn.removed) == {"blocks.1.attn", "blocks.1.mlp", "blocks.10.attn"}
    assert ffn.appended == {"blocks.1": "gelu"}


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (Plan("y"), "a plan for y cannot follow one for x\n"),
        (Plan("x", {"depth": 3}), r"a plan for x cannot follow one for x with other arguments \(depth\)\n"),
        (Plan("x", removed={"blocks.1.attn": "drop"}), "names what the first removed: blocks.1.attn"),
        (Plan("x", removed={"blocks.2.attn": "drop"}), "names what the first removed: blocks.2.attn"),
        (Plan("x", kept={"blocks.2.mlp": (0,)}), "names what the first removed: blocks.2.mlp"),
        (Plan("x", appended={"blocks.2": "gelu"}), "names what the first removed: blocks.2"),
        (Plan("x", folded=("blocks.0.mlp",)), "folds what the first folded"),
        (Plan("x", kept={"residual": (3,)}), "counts beyond"),
        (Plan("x", kept={"residual": (-1,)}), "counts beyond"),
    ],
)
def test_plans_that_cannot_follow(later: Plan, message: str) -> None:
    first = Plan(
        "x",
        removed={"blocks.1.attn": "drop", "blocks.2": "drop"},
        folded=("blocks.0.mlp",),
        kept={"residual": (4, 5, 6)},
    )
    with pytest.raises(PlanError, match=message) as error:
        first.then(later)
    assert "it was computed for" in str(error.value.hint)


DROPPED = {"removed": {"blocks.0.attn": "drop", "blocks.1.mlp.act": "identity"}}
ONE_AFTER_THE_OTHER = {
    "depth, fold, residual (HetDPT+)": [
        DROPPED,
        {"folded": ("blocks.1.mlp", "blocks.1.ls1", "blocks.1.ls2", "blocks.0.ls2")},
        {"kept": {"residual": tuple(range(0, 16, 2)), "blocks.0.mlp": (5, 3, 1)}},
    ],
    "slice twice": [
        {"kept": {"residual": (15, *range(12)), "blocks.0.mlp": tuple(range(20, 0, -2))}},
        {"kept": {"residual": (0, 1, 2, 3, 5, 12), "blocks.0.mlp": (0, 1, 9)}},
    ],
    "heads, then widths": [
        {
            "kept": {"blocks.0.qk": tuple(range(8)), "blocks.0.v": tuple(range(4, 12))},
            "heads": {"blocks.0.attn": 2},
        },
        {"kept": {"blocks.0.qk": (0, 2, 4, 6)}},
    ],
    "attention, then its block": [DROPPED, {"removed": {"blocks.0": "drop"}}],
    "activation, then its FFN": [
        DROPPED,
        {"folded": ("blocks.1.mlp", "blocks.1.ls2")},
        {"removed": {"blocks.1.mlp": "drop"}},
    ],
    "folded scale, then its attention": [
        {"folded": ("blocks.0.ls1", "blocks.0.ls2")},
        {"removed": {"blocks.0.attn": "norm_identity"}},
    ],
    "sliced, then removed": [
        {"kept": {"blocks.0.qk": (0, 4, 8, 12), "blocks.0.v": (1, 5, 9, 13), "blocks.0.mlp": (1,)}},
        {"removed": {"blocks.0.attn": "double", "blocks.0.mlp": "drop"}},
    ],
    "one branch, then the other": [
        {"removed": {"blocks.0.attn": "drop"}, "appended": {"blocks.0": "gelu"}},
        {"removed": {"blocks.0.mlp": "drop"}},
    ],
}


@pytest.mark.parametrize("variant", ["plain", "no_proj_bias"])
@pytest.mark.parametrize("steps", ONE_AFTER_THE_OTHER.values(), ids=list(ONE_AFTER_THE_OTHER))
def test_plans_one_after_the_other_equal_their_composition(variant: str, steps: list[dict]) -> None:
    base, model = contract(variant).plan, build(variant)
    composed, step_by_step = base, model
    for step in steps:
        names = dict(step_by_step.named_modules())
        fields = dict(step)
        fields["folded"] = tuple(n for n in step.get("folded", ()) if "ls" not in n or hasattr(names[n], "gamma"))
        delta = replace(base, **fields)
        composed, step_by_step = composed.then(delta), apply_to_copy(step_by_step, delta)
    assert_composed(model, composed, step_by_step, images(variant))


def test_channels_of_a_removed_attention_are_dropped() -> None:
    first = Plan("x", kept={"blocks.1.qk": (0, 1), "blocks.1.v": (2,), "blocks.10.v": (1,)}, heads={"blocks.1.attn": 3})
    both = first.then(first.delta(removed={"blocks.1.attn": "drop"}))
    assert both == first.delta(removed={"blocks.1.attn": "drop"}, kept={"blocks.10.v": (1,)})
    with pytest.raises(PlanError, match=r"names what the first removed: blocks\.1\.v"):
        both.then(first.delta(kept={"blocks.1.v": (0,)}))


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_spaces_are_named_after_their_attention(variant: str) -> None:
    """`Plan.then` derives the attention of a space from the name of the space."""
    for space in family_of(model := build(variant)).spaces(model):
        assert space.attention == "" or is_within(module_of(space.name), [space.attention])
        assert space.kind != "sr" or any(site.name == module_of(space.name) for site in family_of(model).sites(model))
