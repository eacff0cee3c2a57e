"""UP-ViT's exact scores compared with one forward pass per candidate; and its proxy score.

The baseline evaluates the same number of candidates at once and computes the logits of the complete model once.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitcompress.bench.artifacts import synthetic_images
from vitcompress.bench.self.parts import Line, Options
from vitcompress.families import family_of
from vitcompress.methods.upvit.importance import Component, Importance, components, divergence
from vitcompress.methods.upvit.proxy import estimates
from vitcompress.models.create import create_model, input_config
from vitcompress.surgery.masks import delete_channels

FEWER, CHEAPER = 1.9, 100.0  # aims
SHARE = 8  # one of this many channels of each component is scored, so ratios are those of all channels
DIRECTIONS = 2  # of the proxy
AT_ONCE = 16
Scores = Callable[[Component, Any, Sequence[int]], Tensor]


def run(options: Options) -> Iterator[Line]:
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
    work = {"what": "exact scores: work", "text": text, "ratio": theirs / ours, "evaluations": [ours, theirs]}
    yield work | common

    ours, theirs = (sum(seconds) for seconds in zip(*times, strict=True))
    text = f"{theirs / ours:.2f} times faster than one pass per candidate ({ours:.1f} s against {theirs:.1f} s)"
    speed = {"what": "exact scores: time", "text": text, "ratio": theirs / ours, "seconds_by_component": times}
    yield speed | common

    began = time.perf_counter()
    estimates(model, parts, loader, directions=DIRECTIONS)
    seconds, all_scores = time.perf_counter() - began, SHARE * ours
    ratio = all_scores / seconds
    text = f"{ratio:.0f} times cheaper than exact scores ({seconds:.1f} s against {all_scores:.0f} s)"
    proxy = {"what": "Gauss-Newton screen: time", "text": text, "ratio": ratio, "directions": DIRECTIONS}
    yield proxy | {"aim": [CHEAPER, None]}


def each_alone(model: nn.Module, loader: Any) -> Scores:
    """Scores by deleting each channel from the complete model, many candidates at once."""
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
    """A counter of images times blocks; a shortened block counts as the share of the MACs that it computes."""
    count, model, shapes = [0.0], importance.model, dict[str, torch.Size]()

    def count_calls(module: nn.Module, share: float) -> None:
        def add(module: nn.Module, args: Any, out: Tensor) -> None:
            count[0] += share * len(out)

        module.register_forward_hook(add)

    def remember_shape(path: str) -> Callable[..., None]:
        return lambda module, args: shapes.update({path: args[0].shape})

    handles = [model.get_submodule(path).register_forward_pre_hook(remember_shape(path)) for path in importance.blocks]
    model(image)
    for path, handle in zip(importance.blocks, handles, strict=True):
        handle.remove()
        count_calls(model.get_submodule(path), 1.0)
    for path, short in importance.answer.items():
        count_calls(short, _macs(short, shapes[path]) / _macs(model.get_submodule(path), shapes[path]))
    return count


def _macs(module: nn.Module, shape: Sequence[int]) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        deepcopy(module).to("meta")(torch.empty(tuple(shape), device="meta"))
    return int(counter.get_total_flops()) // 2
