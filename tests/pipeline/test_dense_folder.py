"""The folder of a dense model is found by a version with more options, but not for another training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vitcompress import recipes
from vitcompress.errors import OutputError, RecipeError
from vitcompress.io.files import write_json
from vitcompress.io.progress import SILENT
from vitcompress.io.run_folder import RunFolder
from vitcompress.pipeline.dense import create_dense
from vitcompress.pipeline.folder import claim_folder, dense_folder, dense_folder_of_run
from vitcompress.pipeline.job import RunOptions, create_job
from vitcompress.recipe.load import dense_key, dense_settings, load_recipe, load_recipe_of_run
from vitcompress.recipe.schema import Recipe
from vitcompress.training.distributed import Runtime


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("digits_hetdpt")


@pytest.fixture
def older(tmp_path: Path, recipe: Recipe) -> Path:
    """The folder of a model that an earlier version trained, which did not have all options."""
    folder = tmp_path / "dense-0123456789ab"
    folder.mkdir()
    write_json(RunFolder(folder).settings, dense_settings(recipe))
    RunFolder(folder).manifest.touch()
    edit_settings(
        folder, lambda table: (table["dense"].pop("patch_weight"), table["dense"]["augmentation"].pop("remode"))
    )
    return folder


def edit_settings(folder: Path, change: Any) -> None:
    path = RunFolder(folder).settings
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings))


def test_a_new_folder_is_named_by_the_key(tmp_path: Path, recipe: Recipe) -> None:
    assert dense_folder(recipe, tmp_path / "run") == tmp_path / f"dense-{dense_key(recipe)}"
    hub = replace(recipe, model=replace(recipe.model, weights="hub"))
    assert dense_folder(hub, tmp_path / "run") == tmp_path / "run" / "state" / "dense"


def test_a_model_of_a_version_with_fewer_options_is_used(tmp_path: Path, recipe: Recipe, older: Path) -> None:
    assert dense_folder(recipe, tmp_path / "run") == older
    own = tmp_path / f"dense-{dense_key(recipe)}"
    own.mkdir()
    assert dense_folder(recipe, tmp_path / "run") == own


def test_a_training_that_another_version_began_is_not_continued(tmp_path: Path, recipe: Recipe, older: Path) -> None:
    RunFolder(older).manifest.unlink()
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
    """Every option is recorded, including those that are None."""
    recorded = json.loads(RunFolder(older).settings.read_text())["dense"]
    assert recipe.dense and option in recorded and recorded[option] != value
    now = replace(recipe, dense=replace(recipe.dense, **{option: value}))
    assert dense_folder(now, tmp_path / "run") != older
    edit_settings(older, lambda table: table["dense"].update({option: value}))
    assert dense_folder(now, tmp_path / "run") == older != dense_folder(recipe, tmp_path / "run")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 3}', "[[1]]"])
def test_unreadable_settings_are_ignored(tmp_path: Path, recipe: Recipe, older: Path, text: str) -> None:
    RunFolder(older).settings.write_text(text)
    assert dense_folder(recipe, tmp_path / "run").name == f"dense-{dense_key(recipe)}"


def test_a_removed_option_means_another_training(tmp_path: Path, recipe: Recipe, older: Path) -> None:
    edit_settings(older, lambda table: table["dense"].update(removed=1))
    assert dense_folder(recipe, tmp_path / "run") != older


def test_the_folder_of_a_run_does_not_depend_on_its_methods(tmp_path: Path, recipe: Recipe) -> None:
    """Its method may be of a package that is not installed, or have options of another version."""
    run = tmp_path / "run"
    run.mkdir()
    text = recipes.text(recipe.name)
    assert dense_folder_of_run(run) == RunFolder(run).dense
    for step in ('method = "of_another_package"', 'method = "hetdpt"\nremoved_option = 1'):
        (run / "recipe.toml").write_text(text.replace('method = "hetdpt"', step))
        with pytest.raises(RecipeError):
            load_recipe(str(run / "recipe.toml"))
        assert dense_folder_of_run(run) == tmp_path / f"dense-{dense_key(recipe)}"
        assert load_recipe_of_run(run / "recipe.toml").data == recipe.data


def test_several_processes_do_not_wait_for_the_dense_model_of_another_run(tmp_path: Path, recipe: Recipe) -> None:
    """The first would wait for the lock, and the others for the first, but not for as long."""
    about = create_job(recipe, RunOptions(tmp_path / "run"), Runtime(torch.device("cpu"), world_size=2), SILENT, None)
    with claim_folder(about.dense_folder), pytest.raises(OutputError, match="another process is working in"):
        create_dense(about)
