"""How a report describes the choice of each step."""

from dataclasses import replace
from typing import Any

import pytest
from method_rows import OPTIONS

from vitcompress.methods.base import ARBITRARY, SPREAD
from vitcompress.methods.table import METHODS
from vitcompress.pipeline.report import describe_choice, describe_measured_models
from vitcompress.recipe.load import load_recipe
from vitcompress.recipe.schema import Recipe, Step

DIGITS = "vit_tiny_patch16_224"


def with_step(name: str, **options: Any) -> Recipe:
    """A recipe with other options in its last step."""
    recipe = load_recipe(name)
    *before, last = recipe.steps
    return replace(recipe, steps=(*before, Step(last.method, replace(last.options, **options))))


@pytest.mark.parametrize(
    ("recipe", "on"),
    [
        ("digits_hetdpt", f"short trainings of copies of the dense {DIGITS}"),
        ("digits_no_step1", f"short trainings of copies of the dense {DIGITS}"),
        ("digits_no_step2", f"short trainings of copies of the dense {DIGITS}"),
        ("digits_nose", f"the dense {DIGITS}"),
        ("digits_te_static", f"the dense {DIGITS}"),
        ("digits_up", f"the dense {DIGITS}"),
        ("digits_isomorphic", f"the dense {DIGITS}"),
        (
            "digits_sero",
            f"the dense {DIGITS} while it trained under masks; the next step starts from these weights",
        ),
    ],
)
def test_a_search_names_the_model_that_it_measured(recipe: str, on: str) -> None:
    loaded = load_recipe(recipe)
    assert (describe_choice(loaded, searched=True), describe_measured_models(loaded)) == ("search", on)
    widths = loaded.steps[-1].method in ("upvit", "isomorphic", "sero")
    assert describe_choice(loaded, searched=False) == (ARBITRARY if widths else SPREAD)


def test_each_of_several_steps_names_the_model_that_it_measured() -> None:
    recipe = load_recipe("hetdpt_plus_2_4g")
    assert [step.method for step in recipe.steps] == ["hetdpt", "recover", "fold", "isomorphic"]
    assert describe_choice(recipe, searched=True) == "hetdpt: published, isomorphic: search"
    assert describe_choice(recipe, searched=False) == f"hetdpt: published, isomorphic: {ARBITRARY}"
    assert describe_measured_models(recipe) == f"isomorphic: {recipe.model.name} after step 3"
    both = load_recipe("digits_hetdpt_plus")
    hetdpt, isomorphic = (describe_measured_models(both) or "").split("; ")
    assert hetdpt == f"hetdpt: short trainings of copies of the dense {DIGITS}"
    assert isomorphic == f"isomorphic: {DIGITS} after step {len(both.steps) - 1}"


@pytest.mark.parametrize(
    ("recipe", "by", "unscored"),
    [
        (load_recipe("deit_b_hetdpt"), "published", "published"),
        (load_recipe("digits_random"), "chance", "chance"),
        (with_step("digits_random", pick="last"), "the last ones", "the last ones"),
        (with_step("digits_isomorphic", criterion="random"), "chance", "chance"),
        (with_step("digits_sero", criterion="random"), "chance", ARBITRARY),
        (with_step("digits_up", score="random"), "chance for channels", ARBITRARY),
    ],
    ids=["published", "random", "last", "isomorphic", "sero", "upvit"],
)
def test_what_was_not_searched_for_was_chosen_on_nothing(recipe: Recipe, by: str, unscored: str) -> None:
    assert (describe_choice(recipe, searched=True), describe_choice(recipe, searched=False)) == (by, unscored)
    assert describe_measured_models(recipe) is None


def test_listed_examples_stand_for_a_search() -> None:
    loaded = with_step("digits_hetdpt", example_attention=(1,), example_activation=(2,))
    assert (describe_choice(loaded, searched=True), describe_choice(loaded, searched=False)) == (
        "search",
        "an example in the recipe",
    )


def test_steps_that_choose_nothing_are_not_named() -> None:
    silent = {name for name, method in METHODS.items() if method.describe(OPTIONS[name]).choice is None}
    assert silent == {"fold", "recover"}
