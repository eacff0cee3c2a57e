"""UP-ViT's screens on a trained model: times cheaper than exact scores, and how much of what goes is the same.

The model is that of `digits_up`, trained here; exact scores delete every one of its channels. What a screen saves grows
with the model, as exact scores take a pass per channel and the estimate a few for all of them (see `importance`). Both
are timed as a whole step is, images included. On this model, of about 2000 channels, a hundred times cheaper is what
one or two directions are; measuring any share of the channels exactly costs that share.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitcompress.bench.self.parts import Options
from vitcompress.families import family_of
from vitcompress.io.progress import Progress
from vitcompress.methods.base import Context
from vitcompress.methods.upvit import method as upvit
from vitcompress.models.create import create_model, input_config
from vitcompress.plan import Plan
from vitcompress.recipe.load import load_recipe
from vitcompress.recipe.schema import Recipe
from vitcompress.training.data import Splits, open_data
from vitcompress.training.distributed import Runtime
from vitcompress.training.loop import train
from vitcompress.training.trainer import TrainingContext

RECIPE = "digits_up"
TARGET = {"embed_dim": 32, "num_heads": 2}  # half of every width
SCREENS: dict[str, dict[str, Any]] = {
    "Gauss-Newton, 1 direction": {"score": "fisher", "directions": 1},
    "Gauss-Newton, 2 directions": {"score": "fisher"},
    "Gauss-Newton, 4 directions": {"score": "fisher", "directions": 4},
    "Gauss-Newton, all 9 directions": {"score": "fisher", "directions": 9},
    "Gauss-Newton, then exact on a quarter": {"score": "screened", "band": 0.25},
    "a quarter of the images, then exact on a quarter": {"score": "screened", "band": 0.25, "screen": "images"},
}
CHEAPER, IN_COMMON = 100.0, 0.95  # aims


def run(options: Options) -> Iterator[dict[str, Any]]:
    """One line per screen, on ten times as many images as `runs` says (20: 200 of the 1068 training images)."""
    recipe, images = load_recipe(RECIPE), 10 * options.runs
    model, context = _trained(recipe, options.folder)
    seconds, exact = _planned(model, context, options.folder / "exact", images, {"score": "exact"})
    yield {"what": "exact scores", "text": f"{seconds:.1f} s for {images} images", "seconds": seconds, "images": images}
    sizes = {space.name: space.size for space in context.family.spaces(model)}
    for number, (name, how) in enumerate(SCREENS.items()):
        more = {"screen_images": images // 4} if how.get("screen") == "images" else {}
        own, found = _planned(model, context, options.folder / f"screen-{number}", images, how | more)
        yield _line(name, seconds / own, _common(sizes, exact, found)) | {"seconds": own, "images": images}


def _line(name: str, cheaper: float, common: float) -> dict[str, Any]:
    aims = {"aim_cheaper": CHEAPER, "aim_in_common": IN_COMMON}
    said = f"{cheaper:.1f} times cheaper, {100 * common:.1f} % of the removed channels in common with exact scores"
    return {"what": f"screen: {name}", "text": said, "cheaper": cheaper, "in_common": common, **aims}


def _trained(recipe: Recipe, folder: Path) -> tuple[nn.Module, Context]:
    """The recipe's dense model, trained as it says, and what a step of it would be given."""
    data: Splits = open_data(recipe.data, recipe.run.seed)
    args = dict(recipe.model.args) | {"num_classes": len(data.classes)}
    model = create_model(recipe.model.name, args, seed=recipe.run.seed)
    runtime, input = Runtime(torch.device("cpu")), input_config(model)
    assert recipe.dense is not None, recipe.name
    at = TrainingContext(input, runtime, folder / "dense", "dense", recipe.run.seed, Progress())
    train(model, data.train, data.heldout, recipe.dense, at)
    base = Plan(recipe.model.name, args)
    known = (base, family_of(model), data, input, runtime, folder, recipe.run.seed, Progress())
    return model, Context(*known, train=recipe.finetune)


def _planned(
    model: nn.Module, context: Context, folder: Path, images: int, how: Mapping[str, Any]
) -> tuple[float, Plan]:
    """Seconds that the whole choice takes, and what it chose."""
    folder.mkdir()
    options = upvit.Options(target_args=TARGET, images=images, **how)
    began = time.perf_counter()
    plan = upvit.plan(model, replace(context, folder=folder), options)
    return time.perf_counter() - began, plan


def _common(sizes: Mapping[str, int], exact: Plan, found: Plan) -> float:
    """Share of the channels that `exact` removes which `found` removes as well."""
    same = removed = 0
    for name, kept in exact.kept.items():
        gone = set(range(sizes[name])) - set(kept)
        same += len(gone - set(found.kept[name]))
        removed += len(gone)
    return same / removed
