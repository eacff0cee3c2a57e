"""The dense model's folder is found again by a version with more options, and not with another training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vitcompress.models.checkpoint import PLAN
from vitcompress.pipeline.dense_folder import SETTINGS, dense_folder, record_settings
from vitcompress.recipe.load import dense_key, load_recipe
from vitcompress.recipe.schema import Recipe


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("digits_hetdpt")


@pytest.fixture
def older(tmp_path: Path, recipe: Recipe) -> Path:
    """The settings of a model that a version trained which did not know all options, under the name it gave it."""
    folder = tmp_path / "dense-0123456789ab"
    folder.mkdir()
    record_settings(recipe, folder)
    (folder / PLAN).touch()
    changed(folder, lambda found: (found["dense"].pop("patch_weight"), found["dense"]["augmentation"].pop("remode")))
    return folder


def changed(folder: Path, change: Any) -> None:
    """What lies in the settings of `folder`, after `change`."""
    found = json.loads((folder / SETTINGS).read_text())
    change(found)
    (folder / SETTINGS).write_text(json.dumps(found))


def test_the_folder_is_named_by_the_key_where_there_is_no_other(tmp_path: Path, recipe: Recipe) -> None:
    assert dense_folder(recipe, tmp_path / "run") == tmp_path / f"dense-{dense_key(recipe)}"
    given = replace(recipe, model=replace(recipe.model, weights="hub"))
    assert dense_folder(given, tmp_path / "run") == tmp_path / "run" / "state" / "dense"


def test_a_model_of_a_version_with_fewer_options_is_used(tmp_path: Path, recipe: Recipe, older: Path) -> None:
    assert dense_folder(recipe, tmp_path / "run") == older
    own = tmp_path / f"dense-{dense_key(recipe)}"
    own.mkdir()
    assert dense_folder(recipe, tmp_path / "run") == own


def test_a_training_that_another_version_began_is_not_continued(tmp_path: Path, recipe: Recipe, older: Path) -> None:
    (older / PLAN).unlink()
    assert dense_folder(recipe, tmp_path / "run") == tmp_path / f"dense-{dense_key(recipe)}"


def test_another_value_of_an_option_is_another_model(tmp_path: Path, recipe: Recipe, older: Path) -> None:
    assert recipe.dense is not None
    for dense in (replace(recipe.dense, patch_weight=0.5), replace(recipe.dense, epochs=1)):
        other = replace(recipe, dense=dense)
        assert dense_folder(other, tmp_path / "run") == tmp_path / f"dense-{dense_key(other)}"
    other = replace(recipe, run=replace(recipe.run, seed=1))
    assert dense_folder(other, tmp_path / "run") == tmp_path / f"dense-{dense_key(other)}"


@pytest.mark.parametrize(("option", "value"), [("warmup_epochs", 3), ("ema", 0.9), ("betas", (0.8, 0.9))])
def test_a_default_that_has_changed_since_is_another_training(
    tmp_path: Path, recipe: Recipe, older: Path, option: str, value: Any
) -> None:
    """The version wrote down what it did, also where that was nothing: None is not left out."""
    recorded = json.loads((older / SETTINGS).read_text())["dense"]
    assert recipe.dense and option in recorded and recorded[option] != value
    now = replace(recipe, dense=replace(recipe.dense, **{option: value}))
    assert dense_folder(now, tmp_path / "run") != older
    changed(older, lambda found: found["dense"].update({option: value}))
    assert dense_folder(now, tmp_path / "run") == older != dense_folder(recipe, tmp_path / "run")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 3}', "[[1]]"])
def test_what_is_no_record_of_this_version_is_left_alone(
    tmp_path: Path, recipe: Recipe, older: Path, text: str
) -> None:
    (older / SETTINGS).write_text(text)
    assert dense_folder(recipe, tmp_path / "run").name == f"dense-{dense_key(recipe)}"


def test_an_option_that_is_no_more_is_another_training(tmp_path: Path, recipe: Recipe, older: Path) -> None:
    changed(older, lambda found: found["dense"].update(forgotten=1))
    assert dense_folder(recipe, tmp_path / "run") != older
