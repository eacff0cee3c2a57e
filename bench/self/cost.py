"""What vitcompress itself costs: training steps with hooks, and scores of UP-ViT."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

import vitcompress as vc
from vitcompress.bench import timing
from vitcompress.bench.artifacts import synthetic_images
from vitcompress.bench.self.speed import Line, Options, time_ratio
from vitcompress.families import family_of
from vitcompress.methods.depth import depth_plan
from vitcompress.methods.options import CriterionPass, SeroOptions
from vitcompress.methods.sero.exploration import Exploration
from vitcompress.models.create import create_model, input_config
from vitcompress.plan import Plan
from vitcompress.recipe.load import load_recipe
from vitcompress.surgery.gates import GatedModel
from vitcompress.surgery.masks import mask_channels
from vitcompress.training.data import open_data

CRITERIA: tuple[CriterionPass, ...] = ("masked", "dense")
REFRESH, SPARSITY = 8, 0.5
MANY = 10**6  # steps of an epoch that does not end
TARGET = {"embed_dim": 32, "num_heads": 2}  # half of every width
SCREENS: dict[str, dict[str, Any]] = {
    "Gauss-Newton, 1 direction": {"score": "fisher", "directions": 1},
    "Gauss-Newton, 2 directions": {"score": "fisher"},
    "Gauss-Newton, all 9 directions": {"score": "fisher", "directions": 9},
    "Gauss-Newton, then exact on a quarter": {"score": "screened", "band": 0.25},
}


def time_gates(options: Options) -> Iterator[Line]:
    """Time of a training step with channel gates, and in HetDPT's score search, over that of the plain timm model."""
    plain, widths, searched = (create_model(options.arch).train() for _ in range(3))
    family = family_of(widths)
    masks = {space.name: torch.ones(space.size) for space in family.spaces(widths) if space.kind != "residual"}
    blocks = range(len(family.blocks(searched)))
    released = {"attention_bypass": "norm_identity", "both_pruned_output_act": "gelu"}  # code of HetDPT
    search = GatedModel(searched, family, depth_plan(searched, Plan(options.arch), blocks, blocks, **released))
    with mask_channels(widths, family, masks):
        models = {"plain": plain, "channel gates": widths, "score search": search}
        yield from _compare_steps({k: training(model, options) for k, model in models.items()}, options, options.runs)


def time_exploration(options: Options) -> Iterator[Line]:
    """Time of SERo's exploration steps over that of plain ones, in cycles from one refresh of the masks to the next."""
    steps = {"plain": training(create_model(options.arch).train(), options, REFRESH)}
    for criterion in CRITERIA:
        model = create_model(options.arch).train()
        settings = SeroOptions(sparsity=SPARSITY, refresh=REFRESH, criterion_pass=criterion)
        hooks = Exploration(model, family_of(model), settings, lambda epoch, step, steps: SPARSITY, seed=0)
        steps[f"exploration step, {criterion} criterion"] = training(model, options, REFRESH, hooks)
    yield from _compare_steps(steps, options, max(3, options.runs // 2))


def _compare_steps(steps: Mapping[str, Callable[[], None]], options: Options, runs: int) -> Iterator[Line]:
    """Time of each later step over that of the first, interleaved."""
    targets = [timing.Target(name, step) for name, step in steps.items()]
    base, *others = timing.measure(targets, timing.Protocol("steps", options.batch, warmup=1, runs=runs))
    yield from (time_ratio(samples.name, samples, base) for samples in others)


def training(
    model: nn.Module, options: Options, steps: int = 1, hooks: Exploration | None = None
) -> Callable[[], None]:
    """Optimizer steps as a call, in the order of `training.trainer`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    size = input_config(model).size
    images, targets = synthetic_images(size, options.batch, 0), torch.zeros(options.batch).long()

    def backward() -> None:
        nn.functional.cross_entropy(model(images), targets).backward()

    def run() -> None:
        for number in range(steps):
            optimizer.zero_grad(set_to_none=True)
            if hooks:
                hooks.before_step(0, number, MANY, backward)
                optimizer.zero_grad(set_to_none=True)
            backward()
            if hooks:
                hooks.before_update()
            optimizer.step()
            if hooks:
                hooks.after_update()

    return run


def run_proxies(options: Options) -> Iterator[Line]:
    """UP-ViT's proxy scores on a trained model: time, and removed channels in common with exact scores.

    Trains the model of `digits_up`, which has about 2000 channels, and uses ten images per unit of `runs` (20: 200 of
    the 1068 training images). Times include loading them, as in a real step.
    """
    recipe, images = load_recipe("digits_up"), 10 * options.runs
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
