"""What the command line asks of one run, and the recipe with that applied."""

from dataclasses import dataclass, replace
from pathlib import Path

from vitcompress.errors import InputError
from vitcompress.recipe import Recipe
from vitcompress.training.data import DataOptions


@dataclass(frozen=True)
class RunOptions:
    """What the command line adds to a recipe. None leaves the recipe's own setting."""

    out: Path | None = None
    export: tuple[str, ...] = ()
    data: str | None = None
    weights: str | None = None
    device: str | None = None
    structure_only: bool = False
    fresh: bool = False


def effective(recipe: Recipe, options: RunOptions) -> Recipe:
    """The recipe with the command line's options in it, as the run folder records it."""
    if options.weights == "train" and recipe.dense is None:
        raise InputError(
            "--weights train needs a [dense] table that says how to train, and the recipe has none",
            hint="give a checkpoint, hub or random",
        )
    weights = options.weights or ("random" if options.structure_only and recipe.model.weights == "train" else None)
    model = recipe.model if weights is None else replace(recipe.model, weights=weights)
    return replace(
        recipe,
        data=recipe.data if options.data is None else _data_at(recipe.data, options.data),
        model=model,
        dense=recipe.dense if model.weights == "train" else None,
        export=replace(recipe.export, formats=options.export) if options.export else recipe.export,
        run=replace(recipe.run, device=options.device) if options.device else recipe.run,
    )


def _data_at(table: DataOptions, path: str) -> DataOptions:
    """The images at `path`: those of a folder, unless the recipe names a data set of timm's, which is rooted there."""
    source = "imagefolder" if table.source == "digits" else table.source
    return replace(table, path=str(Path(path).resolve()), source=source)


def folder_of(recipe: Recipe, options: RunOptions) -> Path:
    return (options.out or Path("runs") / recipe.name).resolve()
