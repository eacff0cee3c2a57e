"""Runs that train the dense model alike share its folder, and others do not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vitcompress import recipes
from vitcompress.errors import OutputError, RecipeError
from vitcompress.io.progress import SILENT
from vitcompress.io.run_folder import RunFolder
from vitcompress.pipeline.dense import create_dense
from vitcompress.pipeline.folder import claim_folder, dense_folder, dense_folder_of_run
from vitcompress.pipeline.job import RunOptions, create_job
from vitcompress.recipe.load import dense_key, load_recipe, load_recipe_of_run
from vitcompress.recipe.schema import Recipe
from vitcompress.training.distributed import Runtime


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("digits_hetdpt")


def test_a_new_folder_is_named_by_the_key(tmp_path: Path, recipe: Recipe) -> None:
    assert dense_folder(recipe, tmp_path / "run") == tmp_path / f"dense-{dense_key(recipe)}"
    hub = replace(recipe, model=replace(recipe.model, weights="hub"))
    assert dense_folder(hub, tmp_path / "run") == tmp_path / "run" / "state" / "dense"


def test_another_value_of_an_option_is_another_model(tmp_path: Path, recipe: Recipe) -> None:
    assert recipe.dense is not None
    for dense in (replace(recipe.dense, patch_weight=0.5), replace(recipe.dense, epochs=1)):
        other = replace(recipe, dense=dense)
        assert dense_folder(other, tmp_path / "run") != dense_folder(recipe, tmp_path / "run")
    other = replace(recipe, run=replace(recipe.run, seed=1))
    assert dense_folder(other, tmp_path / "run") != dense_folder(recipe, tmp_path / "run")


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
