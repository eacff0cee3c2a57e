"""The work of methods: training steps with hooks compared with plain ones, and scores of UP-ViT with each other.

Exact scores take a pass per channel and the proxy a few for all of them, so its saving grows with the model.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import vitcompress as vc
from vitcompress.bench import timing
from vitcompress.bench.artifacts import synthetic_images
from vitcompress.bench.self.parts import Line, Options, time_ratio
from vitcompress.families import family_of
from vitcompress.methods.options import CriterionPass, SeroOptions
from vitcompress.methods.sero.exploration import Exploration
from vitcompress.methods.upvit.importance import Component, Importance, components, divergence
from vitcompress.methods.upvit.proxy import estimates
from vitcompress.models.create import create_model, input_config
from vitcompress.plan import Plan
from vitcompress.recipe.load import load_recipe
from vitcompress.surgery.gates import GatedModel
from vitcompress.surgery.masks import delete_channels, mask_channels
from vitcompress.training.data import open_data

GATES = {"channel gates": (0.0, 1.05), "score search": (0.0, 1.12)}  # aims
EXPLORATION: dict[CriterionPass, tuple[float, float]] = {"masked": (0.0, 1.08), "dense": (0.0, 1.20)}  # aims
REFRESH, SPARSITY = 8, 0.5
MANY = 10**6  # steps of an epoch that does not end
FEWER, CHEAPER = 1.9, 100.0  # aims
SHARE = 8  # one of this many channels of each component is scored, so ratios are those of all channels
DIRECTIONS = 2  # of the proxy
AT_ONCE = 16
RECIPE = "digits_up"
TARGET = {"embed_dim": 32, "num_heads": 2}  # half of every width
FISHER, QUARTER = {"score": "fisher"}, {"score": "screened", "band": 0.25}
SCREENS: dict[str, dict[str, str | float]] = {
    "Gauss-Newton, 1 direction": {**FISHER, "directions": 1},
    "Gauss-Newton, 2 directions": FISHER,
    "Gauss-Newton, 4 directions": {**FISHER, "directions": 4},
    "Gauss-Newton, all 9 directions": {**FISHER, "directions": 9},
    "Gauss-Newton, then exact on a quarter": QUARTER,
    "a quarter of the images, then exact on a quarter": {**QUARTER, "screen": "images"},
}
AIMS = {"aim_cheaper": CHEAPER, "aim_in_common": 0.95}


def time_gates(options: Options) -> Iterator[Line]:
    """Time of a training step with channel gates, and in HetDPT's score search, over that of the plain timm model."""
    plain, widths, searched = (create_model(options.arch).train() for _ in range(3))
    family = family_of(widths)
    masks = {space.name: torch.ones(space.size) for space in family.spaces(widths) if space.kind != "residual"}
    sites = [site for site in family.sites(searched) if site.kind in ("attention", "activation")]
    # bypasses of the released code of HetDPT
    search = GatedModel(searched, family, sites, attention_bypass="norm_identity", both_pruned_output_act="gelu")
    with mask_channels(widths, family, masks):
        models = {"plain": plain, "channel gates": widths, "score search": search}
        steps = {name: Step(model, options.batch) for name, model in models.items()}
        base, *others = _measure(steps, options, options.runs)
    for samples in others:
        yield time_ratio(samples.name, samples, base, GATES[samples.name])


def time_exploration(options: Options) -> Iterator[Line]:
    """Time of SERo's exploration steps over that of plain ones, in cycles from one refresh of the masks to the next."""
    cycles: dict[str, Callable[[], None]] = {}
    for criterion in (None, *EXPLORATION):
        cycles[criterion or "plain"] = Step(create_model(options.arch).train(), options.batch, criterion).cycle
    base, *others = _measure(cycles, options, max(3, options.runs // 2))
    for samples, (criterion, aim) in zip(others, EXPLORATION.items(), strict=True):
        yield time_ratio(f"exploration step, {criterion} criterion", samples, base, aim)


def _measure(steps: Mapping[str, Callable[[], None]], options: Options, runs: int) -> list[timing.Samples]:
    targets = [timing.Target(name, step) for name, step in steps.items()]
    return timing.measure(targets, timing.Protocol("steps", options.batch, warmup=1, runs=runs))


class Step:
    """One optimizer step of a training, with SERo's hooks unless `criterion` is None."""

    def __init__(self, model: nn.Module, batch: int, criterion: CriterionPass | None = None) -> None:
        self.model, self.number = model, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        self.images, self.targets = synthetic_images(input_config(model).size, batch, 0), torch.zeros(batch).long()
        self.hooks: Exploration | None = None
        if criterion is not None:
            settings = SeroOptions(sparsity=SPARSITY, refresh=REFRESH, criterion_pass=criterion)
            self.hooks = Exploration(model, family_of(model), settings, lambda epoch, step, steps: SPARSITY, seed=0)

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.hooks:
            self.hooks.before_step(0, self.number, MANY, self._backward)
            self.optimizer.zero_grad(set_to_none=True)
        self._backward()
        if self.hooks:
            self.hooks.before_update()
        self.optimizer.step()
        if self.hooks:
            self.hooks.after_update()
        self.number += 1

    def cycle(self) -> None:
        """All steps from one refresh of the masks to the next."""
        for _ in range(REFRESH):
            self()

    def _backward(self) -> None:
        logits = self.model(self.images)
        logits = torch.stack(logits).mean(0) if isinstance(logits, tuple) else logits  # two heads in training
        loss: Any = nn.functional.cross_entropy(logits, self.targets)
        loss.backward()


def run_exact(options: Options) -> Iterator[Line]:
    """UP-ViT's exact scores against one pass per candidate: block evaluations and time; and the time of its proxy."""
    model = create_model(options.arch).eval()
    parts = components(family_of(model).spaces(model))
    loader: Any = [(synthetic_images(input_config(model).size, 1, 0), None)]
    exact = Importance(model, family_of(model), images_at_once=AT_ONCE)
    count = _count_evaluations(exact, loader[0][0])
    times: list[list[float]] = []
    evaluations = [0.0, 0.0]
    for component in parts:
        times.append([])
        for number, scores in enumerate((exact.scores, each_alone(model, loader))):
            before, began = count[0], time.perf_counter()
            scores(component, loader, range(0, component.size, SHARE))
            times[-1].append(time.perf_counter() - began)
            evaluations[number] += count[0] - before
    candidates = sum(component.size for component in parts)
    common = {"arch": options.arch, "candidates": candidates, "scored_one_of": SHARE, "aim": [FEWER, None]}

    once = len(parts) * len(exact.blocks)  # the plain pass that a component needs for any number of channels
    ours, theirs = SHARE * (evaluations[0] - once) + once, SHARE * evaluations[1]
    text = f"{theirs / ours:.2f} times fewer blocks evaluated, {ours:.0f} per image against {theirs:.0f}"
    work = {"ratio": theirs / ours, "evaluations": [ours, theirs]}
    yield {"what": "exact scores: work", "text": text, **work, **common}

    ours, theirs = (sum(seconds) for seconds in zip(*times, strict=True))
    text = f"{theirs / ours:.2f} times faster than one pass per candidate ({ours:.1f} s against {theirs:.1f} s)"
    speed = {"ratio": theirs / ours, "seconds_by_component": times}
    yield {"what": "exact scores: time", "text": text, **speed, **common}

    began = time.perf_counter()
    estimates(model, parts, loader, directions=DIRECTIONS)
    own, all_scores = time.perf_counter() - began, SHARE * ours
    text = f"{all_scores / own:.0f} times cheaper than exact scores ({own:.1f} s against {all_scores:.0f} s)"
    proxy = {"ratio": all_scores / own, "directions": DIRECTIONS, "aim": [CHEAPER, None]}
    yield {"what": "Gauss-Newton screen: time", "text": text, **proxy}


def each_alone(model: nn.Module, loader: Any) -> Callable[[Component, Any, Sequence[int]], Tensor]:
    """Scores by deleting each channel from the complete model, many candidates at once.

    The logits of the complete model are computed once, as in UP-ViT's scores.
    """
    with torch.inference_mode():
        outputs = [model(images) for images, _ in loader]

    @torch.inference_mode()
    def scores(component: Component, loader: Any, channels: Sequence[int]) -> Tensor:
        parts = []
        for (images, _), logits in zip(loader, outputs, strict=True):
            for some in torch.split(torch.tensor(channels), AT_ONCE // len(images)):
                mask = torch.ones(len(some), component.size)
                mask[torch.arange(len(some)), some] = 0.0
                with delete_channels(model, component.spaces, {space.name: mask for space in component.spaces}):
                    parts.append(divergence(logits, model(images.repeat(len(some), 1, 1, 1))))
        return torch.cat(parts)

    return scores


@torch.inference_mode()
def _count_evaluations(importance: Importance, image: Tensor) -> list[float]:
    """A counter of images times blocks; the shortened last block counts as the share of the MACs that it computes."""
    count, inputs, blocks = [0.0], list[Tensor](), [importance.model.get_submodule(path) for path in importance.blocks]
    handle = blocks[-1].register_forward_pre_hook(lambda module, args: inputs.append(args[0].to("meta")))
    importance.model(image)
    handle.remove()
    shares = dict.fromkeys(blocks, 1.0)
    shares |= {short: _macs(short, inputs[0]) / _macs(blocks[-1], inputs[0]) for short in importance.answer.values()}

    def add(module: nn.Module, args: object, out: Tensor) -> None:
        count[0] += shares[module] * len(out)

    for module in shares:
        module.register_forward_hook(add)
    return count


def _macs(module: nn.Module, on_meta: Tensor) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        deepcopy(module).to("meta")(on_meta)
    return int(counter.get_total_flops()) // 2


def run_proxies(options: Options) -> Iterator[Line]:
    """UP-ViT's proxy scores on a trained model: time, and removed channels in common with exact scores.

    Trains the model of `digits_up`, which has about 2000 channels, and uses ten images per unit of `runs` (20: 200 of
    the 1068 training images). Times include loading them, as in a real step.
    """
    recipe, images = load_recipe(RECIPE), 10 * options.runs
    data = open_data(recipe.data, recipe.run.seed)
    args: dict[str, Any] = {**recipe.model.args, "num_classes": len(data.classes)}
    model = vc.create_model(recipe.model.name, seed=recipe.run.seed, **args)
    assert recipe.dense is not None
    vc.finetune(model, data.train, data.heldout, device="cpu", seed=recipe.run.seed, **asdict(recipe.dense))

    def time_plan(**settings: Any) -> tuple[float, Plan]:
        began = time.perf_counter()
        plan = vc.plan(model, "upvit", data.train, device="cpu", target_args=TARGET, images=images, **settings)
        return time.perf_counter() - began, plan

    seconds, exact = time_plan(score="exact")
    yield {"what": "exact scores", "text": f"{seconds:.1f} s for {images} images", "seconds": seconds, "images": images}
    sizes = {space.name: space.size for space in family_of(model).spaces(model)}
    for name, settings in SCREENS.items():
        more = {"screen_images": images // 4} if "screen" in settings else {}
        own, plan = time_plan(**settings, **more)
        cheaper, common = seconds / own, share_in_common(sizes, exact, plan)
        text = f"{cheaper:.1f} times cheaper, {100 * common:.1f} % of the removed channels in common with exact scores"
        figures = {"cheaper": cheaper, "in_common": common, **AIMS, "seconds": own, "images": images}
        yield {"what": f"screen: {name}", "text": text, **figures}


def share_in_common(sizes: Mapping[str, int], exact: Plan, other: Plan) -> float:
    """Share of the channels removed by `exact` that `other` removes too."""
    removed = [
        {(space, channel) for space, kept in plan.kept.items() for channel in {*range(sizes[space])} - {*kept}}
        for plan in (exact, other)
    ]
    return len(removed[0] & removed[1]) / len(removed[0])
