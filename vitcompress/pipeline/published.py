"""Compare the published sizes of recipes with counted ones, on shapes alone: no weights, no data, no training."""

from collections.abc import Iterable
from typing import Any

import torch

from vitcompress.io.progress import Progress
from vitcompress.pipeline.dry_run import final_cost
from vitcompress.pipeline.job import RunOptions, apply_options, create_job
from vitcompress.recipe.load import load_recipe
from vitcompress.recipe.schema import Published, Recipe
from vitcompress.training.distributed import Runtime

CLOSE = 0.005  # allowed relative difference, if the printed digits differ


def compare_sizes(names: Iterable[str], progress: Progress | None = None) -> list[dict[str, Any]]:
    """One record per recipe that reproduces published figures.

    params_m, macs_g: {published, counted, off}, in millions and G; off: relative difference; None if not published.
    macs_linear: published and counted MACs exclude the products inside attention. met: whether all figures agree in
    their printed digits or to 0.5 %; None if neither was published. reason: why they differ.
    """
    recipes = [recipe for recipe in map(load_recipe, names) if recipe.published is not None]
    records = []
    for number, recipe in enumerate(recipes):
        assert recipe.published is not None
        records.append(_compare(recipe, recipe.published))
        if progress is not None:
            progress.update("count", number + 1, len(recipes), recipe.name)
    return records


def _compare(recipe: Recipe, published: Published) -> dict[str, Any]:
    options = RunOptions(structure_only=True)
    job = create_job(apply_options(recipe, options), options, Runtime(torch.device("cpu")), Progress())
    cost = final_cost(job)
    macs = cost.macs_linear if published.macs_linear else cost.macs
    pairs = {"params_m": (published.params_m, cost.params / 1e6), "macs_g": (published.macs_g, macs / 1e9)}
    checks = [_agree(figure, counted) for figure, counted in pairs.values() if figure is not None]
    return {
        "recipe": recipe.name,
        **{
            key: {"published": figure, "counted": counted, "off": None if figure is None else counted / figure - 1}
            for key, (figure, counted) in pairs.items()
        },
        "macs_linear": published.macs_linear,
        "met": all(checks) if checks else None,
        "reason": published.deviation,
    }


def _agree(published: float, counted: float) -> bool:
    digits = len(str(published).partition(".")[2])
    return round(counted, digits) == published or abs(counted / published - 1) <= CLOSE
