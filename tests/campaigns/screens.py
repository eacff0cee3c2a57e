"""Measure UP-ViT's proxy scores: how much cheaper they are than exact ones, and how many removed channels they share.

    python -m tests.campaigns.screens --out bench/results/speed-screens-epyc-1-thread.json

Trains the model of `digits_up`, which has about 2000 channels, and scores them on 200 of the 1068 training images.
Times include loading them, as in a real step.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import vitcompress as vc
from vitcompress.bench import environment
from vitcompress.families import family_of
from vitcompress.io.files import write_json
from vitcompress.plan import Plan
from vitcompress.recipe.load import load_recipe
from vitcompress.training.data import open_data

TARGET = {"embed_dim": 32, "num_heads": 2}  # half of every width
SCREENS: dict[str, dict[str, Any]] = {
    "Gauss-Newton, 1 direction": {"score": "fisher", "directions": 1},
    "Gauss-Newton, 2 directions": {"score": "fisher"},
    "Gauss-Newton, all 9 directions": {"score": "fisher", "directions": 9},
    "Gauss-Newton, then exact on a quarter": {"score": "screened", "band": 0.25},
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--images", type=int, default=200, help="to score channels on")
    args, lines = parser.parse_args(arguments), list[dict[str, Any]]()
    for line in measure_proxies(args.images):
        sys.stdout.write(f"{line['what']}: {line['text']}\n")
        lines.append(line)
        write_json(args.out, {"figures": lines, "machine": environment.facts()})
    return 0


def measure_proxies(images: int) -> Iterator[dict[str, Any]]:
    """One result per score, with its time and the share of removed channels."""
    recipe = load_recipe("digits_up")
    data = open_data(recipe.data, recipe.run.seed)
    args: dict[str, Any] = {**recipe.model.args, "num_classes": len(data.classes)}
    model = vc.create_model(recipe.model.name, seed=recipe.run.seed, **args)
    vc.finetune(model, data.train, data.heldout, device="cpu", seed=recipe.run.seed, **asdict(recipe.dense))

    def time_plan(**settings: Any) -> tuple[float, Plan]:
        began = time.perf_counter()
        plan = vc.plan(model, "upvit", data.train, device="cpu", target_args=TARGET, images=images, **settings)
        return time.perf_counter() - began, plan

    seconds, exact = time_plan(score="exact")
    yield {"what": "exact scores", "text": f"{seconds:.1f} s for {images} images", "seconds": seconds, "images": images}
    sizes = {space.name: space.size for space in family_of(model).spaces(model)}
    for name, settings in SCREENS.items():
        own, proxy = time_plan(**settings)
        cheaper, common = seconds / own, share_in_common(sizes, exact, proxy)
        text = f"{cheaper:.1f} times cheaper, {100 * common:.1f} % of the removed channels in common with exact scores"
        figures = {"cheaper": cheaper, "in_common": common, "seconds": own, "images": images}
        yield {"what": f"screen: {name}", "text": text, **figures}


def share_in_common(sizes: Mapping[str, int], exact: Plan, other: Plan) -> float:
    """Share of the channels removed by `exact` that `other` removes too."""
    removed = [
        {(space, channel) for space, kept in plan.kept.items() for channel in {*range(sizes[space])} - {*kept}}
        for plan in (exact, other)
    ]
    return len(removed[0] & removed[1]) / len(removed[0])


if __name__ == "__main__":
    sys.exit(main())
