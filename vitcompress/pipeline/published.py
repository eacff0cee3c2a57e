"""Published sizes of the recipes against counted ones, on shapes alone: no weights, no data, no training."""

from collections.abc import Iterable
from typing import Any

import torch

from vitcompress.io.progress import Progress
from vitcompress.pipeline.dry_run import compressed
from vitcompress.pipeline.job import RunOptions, effective, folder_of, job_for
from vitcompress.recipe.load import load_recipe
from vitcompress.recipe.schema import Recipe
from vitcompress.training import distributed

CLOSE = 0.005  # a share of the published figure, besides the digits that it is printed with


def compared(names: Iterable[str], progress: Progress | None = None) -> list[dict[str, Any]]:
    """One record per recipe that reproduces something.

    params_m, macs_g: {published, counted, off}: in millions and G, `off` as a share of the published figure; those
    that were not published are None. macs_linear: the published MACs, and so the counted ones here, leave out the
    products inside attention. met: whether all figures agree in their printed digits or to 0.5 %, None
    where neither was published. reason: why not.
    """
    recipes = [recipe for recipe in map(load_recipe, names) if recipe.published is not None]
    found = []
    for number, recipe in enumerate(recipes):
        found.append(_record(recipe))
        if progress is not None:
            progress.update("count", number + 1, len(recipes), recipe.name)
    return found


def _record(recipe: Recipe) -> dict[str, Any]:
    published = recipe.published
    assert published is not None
    options = RunOptions(structure_only=True)
    recipe = effective(recipe, options)
    nowhere = distributed.Runtime(torch.device("cpu"))
    job = job_for(recipe, folder_of(recipe, options), nowhere, Progress(), None, structure_only=True)
    cost = compressed(job)
    macs = cost.macs_linear if published.macs_linear else cost.macs
    figures = {
        "params_m": _figure(published.params_m, cost.params / 1e6),
        "macs_g": _figure(published.macs_g, macs / 1e9),
    }
    told = [figure for figure in figures.values() if figure["published"] is not None]
    return {
        "recipe": recipe.name,
        **figures,
        "macs_linear": published.macs_linear,
        "met": all(_met(figure["published"], figure["counted"]) for figure in told) if told else None,
        "reason": published.deviation,
    }


def _figure(published: float | None, counted: float) -> dict[str, Any]:
    off = None if published is None else counted / published - 1
    return {"published": published, "counted": counted, "off": off}


def _met(published: float, counted: float) -> bool:
    """Equal as printed, or to 0.5 %."""
    digits = len(str(published).partition(".")[2])
    return round(counted, digits) == published or abs(counted / published - 1) <= CLOSE
