"""UP-ViT's proxy scores on a trained model.

The model is that of `digits_up`, trained here; exact scores delete every one of its about 2000 channels. The saving
grows with the model, as exact scores take a pass per channel and the proxy a few for all of them (see `importance`).
Times include loading the images, as in a real step.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import vitcompress as vc
from vitcompress.bench.self.parts import Line, Options
from vitcompress.families import family_of
from vitcompress.plan import Plan
from vitcompress.recipe.load import load_recipe
from vitcompress.training.data import open_data

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
AIMS = {"aim_cheaper": 100.0, "aim_in_common": 0.95}


def run(options: Options) -> Iterator[Line]:
    """UP-ViT's proxy scores on a trained model: time, and removed channels in common with exact scores.

    Uses ten images per unit of `runs` (20: 200 of the 1068 training images).
    """
    recipe, images = load_recipe(RECIPE), 10 * options.runs
    data = open_data(recipe.data, recipe.run.seed)
    args = {**recipe.model.args, "num_classes": len(data.classes)}
    model = vc.create_model(recipe.model.name, seed=recipe.run.seed, **args)
    assert recipe.dense is not None
    vc.finetune(model, data.train, data.heldout, device="cpu", seed=recipe.run.seed, **asdict(recipe.dense))

    def time_plan(settings: Mapping[str, Any]) -> tuple[float, Plan]:
        began = time.perf_counter()
        plan = vc.plan(model, "upvit", data.train, device="cpu", target_args=TARGET, images=images, **settings)
        return time.perf_counter() - began, plan

    seconds, exact = time_plan({"score": "exact"})
    yield {"what": "exact scores", "text": f"{seconds:.1f} s for {images} images", "seconds": seconds, "images": images}
    sizes = {space.name: space.size for space in family_of(model).spaces(model)}
    for name, settings in SCREENS.items():
        more = {"screen_images": images // 4} if settings.get("screen") == "images" else {}
        own, plan = time_plan(settings | more)
        cheaper, common = seconds / own, share_in_common(sizes, exact, plan)
        text = f"{cheaper:.1f} times cheaper, {100 * common:.1f} % of the removed channels in common with exact scores"
        figures = {"cheaper": cheaper, "in_common": common, **AIMS, "seconds": own, "images": images}
        yield {"what": f"screen: {name}", "text": text, **figures}


def share_in_common(sizes: Mapping[str, int], exact: Plan, other: Plan) -> float:
    """Share of the channels removed by `exact` that `other` removes too."""
    common = removed = 0
    for name, kept in exact.kept.items():
        gone = set(range(sizes[name])) - set(kept)
        common += len(gone - set(other.kept[name]))
        removed += len(gone)
    return common / removed
