"""Published parameters and MACs of every recipe against what the code counts, without any training.

Shares fix the totals of isomorphic pruning and HetDPT+ whatever the weights are: with the released rounding
(`round_to = 2`), and aligned and solved for the published MACs, which is what the recipes do. Recipes that deviate
from the published sizes give the reason.
"""

import functools

import pytest

from vitcompress import recipes
from vitcompress.pipeline.dry_run import Size, SizeComparison, compare_sizes, dry_run_recipe
from vitcompress.pipeline.job import RunOptions
from vitcompress.recipe.load import load_recipe
from vitcompress.recipe.schema import Recipe

ISOMORPHIC = ("deit_iso_4_2g", "deit_iso_2_6g", "deit_iso_1_2g", "deit_iso_0_6g")
HETDPT_PLUS = ("hetdpt_plus_3_7g", "hetdpt_plus_2_4g", "hetdpt_plus_1_1g")


@functools.cache
def shipped(name: str) -> SizeComparison:
    """The sizes of a recipe as it is shipped."""
    (record,) = compare_sizes([name])
    return record


def off(recipe: Recipe, macs: str) -> tuple[float, float]:
    """How far parameters and `macs` lie from the published ones, as shares of those."""
    counted = dry_run_recipe(recipe, RunOptions(structure_only=True)).cost["compressed"]
    published = recipe.published
    assert published is not None and published.params_m and published.macs_g
    return counted.params / (1e6 * published.params_m) - 1, getattr(counted, macs) / (1e9 * published.macs_g) - 1


def released(name: str, step: int) -> Recipe:
    return load_recipe(
        name, [f"step.{step}.{change}" for change in ("target=ratios", "amount=", "align=", "round_to=2")]
    )


@pytest.mark.parametrize("name", ISOMORPHIC)
def test_released_settings_of_isomorphic_pruning(name: str) -> None:
    params, macs = off(released(name, 0), "macs")
    assert abs(params) <= 0.02 and abs(macs) <= 0.02


@pytest.mark.parametrize("name", ISOMORPHIC)
def test_aligned_isomorphic_recipes_meet_the_published_macs(name: str) -> None:
    record = shipped(name)
    assert abs(record.params_m.off) <= 0.03 and abs(record.macs_g.off) <= 0.01 and not record.macs_linear


@pytest.mark.parametrize("name", HETDPT_PLUS)
def test_inferred_ratios_of_hetdpt_plus(name: str) -> None:
    """Counted as its table counts: without the products inside attention."""
    params, macs = off(released(name, 3), "macs_linear")
    assert abs(params) <= 0.02 and abs(macs) <= 0.03


@pytest.mark.parametrize("name", HETDPT_PLUS)
def test_aligned_hetdpt_plus_recipes_meet_the_published_macs(name: str) -> None:
    record = shipped(name)
    assert abs(record.params_m.off) <= 0.03 and abs(record.macs_g.off) <= 0.01 and record.macs_linear


@pytest.mark.parametrize("name", [name for name in recipes.names() if not name.startswith(("digits_", "tinted_"))])
def test_a_recipe_meets_what_was_published_or_says_why_not(name: str) -> None:
    record = shipped(name)
    assert (record.met is not False) == (not record.reason), record
    if record.reason:
        assert record.reason.endswith(".") and len(record.reason.split()) > 5


def test_dinov2_giant_is_deployed_without_its_layer_scales() -> None:
    """Two in each of 40 blocks, but the 15 that went with their branches, are folded: by so much less is counted."""
    record = shipped("dinov2_g_hetdpt").params_m
    unfolded = round(1e6 * record.counted) + (2 * 40 - 15) * 1536
    assert unfolded == 927118948 and round(unfolded / 1e6, 2) == record.published


def test_counted_sizes_are_those_of_the_outlook() -> None:
    record = shipped("nose_deit_s_3")
    cost = dry_run_recipe(load_recipe("nose_deit_s_3"), RunOptions(structure_only=True)).cost["compressed"]
    assert record.params_m == Size(None, cost.params / 1e6, None)
    assert record.macs_g.counted == cost.macs / 1e9 and record.met is None
