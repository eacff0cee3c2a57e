"""The published sizes of recipes, compared with those counted here on shapes: no weights, no data, no training."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vitcompress.io.progress import SILENT, Progress
from vitcompress.pipeline.dry_run import count_final_cost
from vitcompress.pipeline.job import RunOptions, apply_options, create_job
from vitcompress.recipe.load import load_recipe
from vitcompress.training import distributed

CLOSE = 0.005  # allowed relative difference of a published figure, if the printed digits differ


@dataclass(frozen=True)
class Size:
    """A published and a counted size. off: their relative difference; None if nothing was published."""

    published: float | None
    counted: float
    off: float | None


@dataclass(frozen=True)
class SizeComparison:
    """Published and counted sizes of a recipe, in millions of parameters and G MACs.

    macs_linear: published and counted MACs exclude the products inside attention. met: whether all figures agree in
    their printed digits or to 0.5 %; None if neither was published. reason: why they differ.
    """

    recipe: str
    params_m: Size
    macs_g: Size
    macs_linear: bool
    met: bool | None
    reason: str


def compare_sizes(names: Iterable[str], progress: Progress = SILENT) -> list[SizeComparison]:
    """Compare those of these recipes that reproduce published figures."""
    recipes = [(recipe, recipe.published) for recipe in map(load_recipe, names) if recipe.published is not None]
    options, runtime = RunOptions(structure_only=True), distributed.Runtime(torch.device("cpu"))
    comparisons = []
    for recipe, published in recipes:
        cost = count_final_cost(create_job(apply_options(recipe, options), options, runtime, SILENT, None))
        macs = cost.macs_linear if published.macs_linear else cost.macs
        pairs = ((published.params_m, cost.params / 1e6), (published.macs_g, macs / 1e9))
        params, macs_g = (Size(figure, counted, figure and counted / figure - 1) for figure, counted in pairs)
        agree = [
            round(counted, len(str(figure).partition(".")[2])) == figure or abs(counted / figure - 1) <= CLOSE
            for figure, counted in pairs
            if figure is not None
        ]
        met = all(agree) if agree else None
        comparisons.append(SizeComparison(recipe.name, params, macs_g, published.macs_linear, met, published.deviation))
        progress.update("count", len(comparisons), len(recipes), recipe.name)
    return comparisons
