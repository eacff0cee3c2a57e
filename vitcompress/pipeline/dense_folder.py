"""Which folder holds the dense model of a recipe; recipes that train it alike share one."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitcompress.errors import ArtifactError, RecipeError
from vitcompress.io.files import read_json, write_json
from vitcompress.models.checkpoint import PLAN
from vitcompress.recipe.load import dense_key, recipe_of
from vitcompress.recipe.schema import Recipe
from vitcompress.verify.folder import DENSE

SETTINGS = "settings.json"


def dense_folder(recipe: Recipe, folder: Path) -> Path:
    """Where the dense model lives: shared by recipes that train it alike, else inside the run's `folder`.

    A new option gives the shared folder another name. A model that an earlier version trained does as well where what
    that version did not know yet has its default here: an option's default is what was done before there was the
    option. Every setting is recorded, so that another default of one that it knew is another training.
    """
    if recipe.model.weights != "train":
        return folder / DENSE
    own = folder.parent / f"dense-{dense_key(recipe)}"
    return own if own.exists() else next(_trained_alike(recipe, folder.parent), own)


def record_settings(recipe: Recipe, folder: Path) -> None:
    """Write down in a dense model's `folder` how it is trained."""
    write_json(folder / SETTINGS, _settings(recipe))


def _settings(recipe: Recipe) -> dict[str, Any]:
    """All that `dense_key` depends on, every setting spelled out: None too, as it may not always be the default."""
    data = {name: value for name, value in asdict(recipe.data).items() if name != "workers"}
    run = {"seed": recipe.run.seed, "amp": recipe.run.amp}
    return {"model": asdict(recipe.model), "data": data, "dense": recipe.dense and asdict(recipe.dense), "run": run}


def _trained_alike(recipe: Recipe, parent: Path) -> Iterator[Path]:
    """The folders in `parent` with a dense model that this recipe could have trained: whole ones, as a training that
    another version began is not to be continued with other options.
    """
    for path in sorted(parent.glob(f"dense-*/{SETTINGS}")):
        if not (path.parent / PLAN).is_file():
            continue
        try:
            found = recipe_of(str(path), {**dict(read_json(path)), "step": [{"method": "fold"}]})
        except (ArtifactError, RecipeError, TypeError, ValueError):  # of a version with other options, or broken
            continue
        if dense_key(found) == dense_key(recipe):
            yield path.parent
