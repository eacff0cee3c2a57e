"""Every key that a recipe takes is listed, with what it takes and what it does, and nothing else is."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from command_line import begin, refused

from vitcompress import cli, recipes
from vitcompress.methods import METHODS
from vitcompress.recipe.keys import keys_of
from vitcompress.recipe.load import load_recipe

RECIPES = ("digits_hetdpt", "digits_hetdpt_plus", "digits_sero", "digits_up")


@pytest.mark.parametrize("method", METHODS)
def test_every_key_of_a_method_says_what_it_is(method: str) -> None:
    found = keys_of(method)
    assert [key.key for key in found if not key.about] == []
    assert len({key.key for key in found}) == len(found)


def test_methods_and_recipes_have_names_of_their_own() -> None:
    assert not set(METHODS) & {*recipes.names(), *recipes.study_names()}


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_listed_is_what_a_recipe_takes(name: str) -> None:
    """All of it, set to what it is, gives the same recipe; and none that is written out is left away."""
    recipe, found = load_recipe(name), keys_of(name)
    known = [key for key in found if key.value is not None and not isinstance(key.value, dict)]
    sets = [f"{key.key}={json.dumps(key.value, default=str)}" for key in known]
    assert load_recipe(name, sets) == recipe and len(known) > 60
    listed = {key.key for key in found}
    for number, step in enumerate(recipe.steps):
        assert {f"step.{number}.{field}" for field in vars(step.options)} <= {*listed, *_tables(listed)}
    for table in ("model", "data", "finetune", "export", "bench", "run"):
        assert {f"{table}.{field}" for field in vars(getattr(recipe, table))} <= {*listed, *_tables(listed)}


def _tables(keys: set[str]) -> set[str]:
    return {key.rpartition(".")[0] for key in keys}


def test_types_bounds_defaults_and_own_values_are_told() -> None:
    found = {key.key: key for key in keys_of("digits_sero")}
    sparsity, layout, lr = (found[f"step.0.{name}"] for name in ("sparsity", "layout", "lr"))
    assert sparsity.type == "number, more than 0, less than 1" and sparsity.required and sparsity.value
    assert layout.type == "one of ragged, uniform, tied, padded" and layout.default == "uniform"
    assert lr.about.startswith("of the exploration (peak") and "(peak" not in found["step.0.epochs"].about
    assert found["export.batch"].type == "list of 3: whole number, 1 or more"
    assert found["finetune.augmentation.mixup"].about == "alpha of the Beta distribution; 0: off"
    assert found["finetune.epochs"].value != found["finetune.epochs"].default


def test_a_misspelt_method_leads_to_the_method() -> None:
    assert "did you mean hetdpt" in refused("recipes", "keys", "hetdtp")
    assert "is a study" in refused("recipes", "keys", "digits")


def test_the_command_lists_them_and_an_unknown_key_leads_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path / "home", monkeypatch)
    done = CliRunner().invoke(cli.main, ["recipes", "keys", "small.toml"])
    assert done.exit_code == 0 and "finetune.epochs" in done.stdout and "passes over the training" in done.stdout
    listed = json.loads(CliRunner().invoke(cli.main, ["recipes", "keys", "random", "--json"]).stdout)
    assert listed[0]["key"].startswith("step.0.")
    said = refused("recipe", "small.toml", "--set", "step.0.prunedlayers=3")
    assert "unknown key" in said and "`vitcompress recipes keys random`" in said
    assert "keys" not in refused("recipe", "small.toml", "--set", "finetune.epochs=-1")
    assert "no recipe" in refused("recipes", "keys", "nosuch")
