"""`recipes keys` lists all keys with type, default and description; the JSON Schema accepts every recipe."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from command_line import begin, expect_error
from packages import write_package

from vitcompress import cli, recipes
from vitcompress.errors import RecipeError
from vitcompress.methods.table import METHODS, find_method
from vitcompress.plan import is_within
from vitcompress.recipe.keys import keys_of, recipe_schema
from vitcompress.recipe.load import build_recipe, load_recipe

RECIPES = ("digits_hetdpt", "digits_hetdpt_plus", "digits_sero", "digits_up")


@pytest.mark.parametrize("method", METHODS)
def test_every_key_of_a_method_has_a_description(method: str) -> None:
    keys = keys_of(method)
    assert [key.key for key in keys if not key.about] == []
    assert len({key.key for key in keys}) == len(keys)


def test_no_recipe_is_named_like_a_method() -> None:
    assert not set(METHODS) & {*recipes.names(), *recipes.study_names()}


@pytest.mark.parametrize("name", RECIPES)
def test_the_list_is_complete_and_valid(name: str) -> None:
    """Setting every key to its own value gives the same recipe, and every option is listed."""
    recipe, keys = load_recipe(name), keys_of(name)
    unused = [
        f"step.{number}.{option}"
        for number, step in enumerate(recipe.steps)
        for option in find_method(step.method).describe(step.options).unused
    ]
    keys = [key for key in keys if not is_within(key.key, unused)]  # --set rejects options without effect
    known = [key for key in keys if key.value is not None and not isinstance(key.value, dict)]
    sets = [f"{key.key}={json.dumps(key.value, default=str)}" for key in known]
    assert load_recipe(name, sets) == recipe and len(known) > 60
    listed = {key.key for key in keys_of(name)}
    for number, step in enumerate(recipe.steps):
        assert {f"step.{number}.{field}" for field in vars(step.options)} <= {*listed, *_tables(listed)}
    for table in ("model", "data", "finetune", "export", "bench", "run"):
        assert {f"{table}.{field}" for field in vars(getattr(recipe, table))} <= {*listed, *_tables(listed)}


def _tables(keys: set[str]) -> set[str]:
    return {key.rpartition(".")[0] for key in keys}


def test_types_limits_defaults_and_values() -> None:
    keys = {key.key: key for key in keys_of("digits_sero")}
    sparsity, layout, lr = (keys[f"step.0.{name}"] for name in ("sparsity", "layout", "lr"))
    assert sparsity.type == "number, more than 0, less than 1" and sparsity.value
    assert layout.type == "one of ragged, uniform, tied, padded" and layout.default == "uniform"
    assert lr.about.startswith("of the exploration (peak") and "(peak" not in keys["step.0.epochs"].about
    assert keys["export.batch"].type == "list of 3: whole number, 1 or more, 1048576 or less"
    assert keys["run.threads"].type == "whole number, 1 or more, 1024 or less"
    assert keys["finetune.augmentation.mixup"].about == "alpha of the Beta distribution; 0: off"
    assert keys["finetune.epochs"].value != keys["finetune.epochs"].default


def test_a_misspelled_method_is_corrected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("hetdtp", "HetDPT+"):
        assert "did you mean hetdpt" in expect_error("recipes", "keys", name)
    assert "is a study" in expect_error("recipes", "keys", "digits")


def test_the_name_of_a_method_of_another_package_is_no_abbreviation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up` is upvit, unless a package declares a method of this name; names of built-in methods take precedence."""
    upvit, sero = keys_of("up", every=False), keys_of("sero", every=False)
    points = "\n".join(f"{name} = vitcompress.methods.sero.method:SERO" for name in ("up", "Nose", "fixed", "extra"))
    monkeypatch.syspath_prepend(write_package(tmp_path / "package", "methods", points))
    assert upvit == keys_of("upvit", every=False) == keys_of("UP-ViT", every=False) == keys_of("upv", every=False)
    assert keys_of("up", every=False) == keys_of("Nose", every=False) == keys_of("extra", every=False) == sero != upvit
    assert "pruned_layers" in {key.key.rpartition(".")[2] for key in keys_of("fixed") + keys_of("nose")}


def test_the_command_and_the_hint_at_an_unknown_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path / "home", monkeypatch)
    done = CliRunner().invoke(cli.main, ["recipes", "keys", "small.toml"])
    assert done.exit_code == 0 and "finetune.epochs" in done.stdout and "passes over the training" in done.stdout
    listed = json.loads(CliRunner().invoke(cli.main, ["recipes", "keys", "random", "--json"]).stdout)
    assert listed[0]["key"].startswith("step.0.")
    done = CliRunner().invoke(cli.main, ["recipes", "keys", "fold"])  # printed nothing
    assert done.exit_code == 0 and not done.stdout and "fold has no options" in done.stderr and "--all" in done.stderr
    message = expect_error("recipe", "small.toml", "--set", "step.0.prunedlayers=3")
    assert "unknown key" in message and "`vitcompress recipes keys random --all`" in message


def test_all_mistakes_in_steps_are_listed_with_a_command_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path / "home", monkeypatch)
    steps = [{"method": "isomorphik"}, 3, {"method": "random", "pruned_layers": 1}, {"method": "nose", "foo": 1}]
    with pytest.raises(RecipeError) as error:
        build_recipe("mine.toml", {"model": {"name": "vit_tiny_patch16_224"}, "step": steps})
    text = str(error.value)
    assert all(part in text for part in ("step.0.method", "step.1.method", "step.3.foo"))
    assert "`vitcompress recipes keys nose --all`" in str(error.value.hint)
    with pytest.raises(RecipeError) as error:
        build_recipe("mine.toml", {"model": {"name": "vit_tiny_patch16_224"}, "step": 3, "foo": 1})
    assert "at least one [[step]]" in str(error.value) and "recipes keys NAME" in str(error.value.hint)
    assert "keys" not in expect_error("recipe", "small.toml", "--set", "finetune.epochs=-1")
    assert "no recipe" in expect_error("recipes", "keys", "nosuch")
    assert "`vitcompress recipe PATH.toml` runs a file" in expect_error("recipes", "show", "nosuch")


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(schema := recipe_schema())
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", recipes.names())
def test_the_schema_accepts_every_recipe(name: str, validator: jsonschema.Draft202012Validator) -> None:
    for text in (recipes.text(name), load_recipe(name).to_toml()):
        validator.validate(tomllib.loads(text))


@pytest.mark.parametrize(
    "sets",
    [
        {"finetune": {"epochs": -1}},
        {"finetune": {"epoch": 1}},
        {"finetune": {"augmentation": {"remode": "gray"}}},
        {"fine": {}},
        {"step": []},
        {"step": [{"pruned_layers": 2}]},
        {"step": [{"method": "hetdtp", "pruned_layers": 2}]},
        {"step": [{"method": "hetdpt", "pruned_layers": 2, "sparsity": 0.5}]},
        {"model": {}},
    ],
)
def test_the_schema_rejects(sets: dict[str, Any], validator: jsonschema.Draft202012Validator) -> None:
    data = tomllib.loads(recipes.text("digits_hetdpt"))
    assert validator.is_valid(data | {"export": {"islands": "auto"}}) and not validator.is_valid(data | sets)


def test_the_schema_describes_keys_and_methods() -> None:
    schema = recipe_schema()
    assert schema["$defs"]["TrainOptions"]["properties"]["lr"]["description"] == "peak learning rate"
    steps = {step["properties"]["method"]["const"]: step for step in schema["properties"]["step"]["items"]["oneOf"]}
    assert set(METHODS) <= set(steps)
    assert steps["sero"]["properties"]["round_to"] == {
        "default": 8,
        "description": "channels of a head are multiples of this",
        "minimum": 1,
        "title": "Round To",
        "type": "integer",
    }
    assert not re.search(r"\bnull\b", json.dumps(schema))
