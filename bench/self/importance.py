"""UP-ViT's exact scores against one forward pass per candidate: block evaluations and time; and the time of its screen.

The baseline is a fair one: as many candidates at once, and the answers of the whole model computed once.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitcompress.bench.artifacts import synthetic_images
from vitcompress.bench.self.parts import Options
from vitcompress.families import family_of
from vitcompress.methods.upvit.importance import Component, Importance, components, divergence
from vitcompress.methods.upvit.proxy import estimates
from vitcompress.models.create import create_model, input_config
from vitcompress.surgery.masks import delete_channels

FEWER, CHEAPER = 1.9, 100.0  # aims
ONE_OF = 8  # channels that are scored, the same share of each component, so that ratios are those of all channels
DIRECTIONS = 2  # of the estimate
AT_ONCE = 16
Scores = Callable[[Component, Any, Sequence[int]], Tensor]


def run(options: Options) -> Iterator[dict[str, Any]]:
    """Component by component in turns, one image. `--arch` says of which model."""
    model = create_model(options.arch).eval()
    own = components(family_of(model).spaces(model))
    loader: Any = [(synthetic_images(input_config(model).size, 1, 0), None)]
    exact = Importance(model, family_of(model), images_at_once=AT_ONCE)
    count = _counter(exact, input_config(model).size)
    ways: tuple[Scores, Scores] = (exact.scores, _each_alone(model, loader))
    times: list[list[float]] = []
    evaluated = [0.0, 0.0]
    for component in own:
        times.append([])
        for number, scores in enumerate(ways):
            before, began = count[0], time.perf_counter()
            scores(component, loader, range(0, component.size, ONE_OF))
            times[-1].append(time.perf_counter() - began)
            evaluated[number] += count[0] - before
    candidates = sum(component.size for component in own)
    about = {"arch": options.arch, "candidates": candidates, "scored_one_of": ONE_OF, "aim": [FEWER, None]}
    yield _evaluations(evaluated, len(own) * len(exact.blocks)) | about
    yield _times(times) | about
    yield _screen(model, own, loader, ONE_OF * sum(ours for ours, _ in times))


def _each_alone(model: nn.Module, loader: Any) -> Scores:
    """Scores by deleting each channel from the whole model, many candidates at once."""
    with torch.inference_mode():
        answers = [model(images) for images, _ in loader]

    @torch.inference_mode()
    def scores(component: Component, loader: Any, channels: Sequence[int]) -> Tensor:
        found = []
        for (images, _), logits in zip(loader, answers, strict=True):
            for some in torch.split(torch.tensor(channels), AT_ONCE // len(images)):
                gate = torch.ones(len(some), component.size)
                gate[torch.arange(len(some)), some] = 0.0
                with delete_channels(model, component.spaces, {space.name: gate for space in component.spaces}):
                    found.append(divergence(logits, model(images.repeat(len(some), 1, 1, 1))))
        return torch.cat(found)

    return scores


def _counter(importance: Importance, size: tuple[int, int, int]) -> list[float]:
    """A number that grows with each block an image passes through, a shortened block as the share that it computes."""
    count, model = [0.0], importance.model
    for path in importance.blocks:
        _count(model.get_submodule(path), 1.0, count)
    for path, short in importance.answer.items():
        tokens = _tokens(model, path, size)
        _count(short, _macs(short, tokens) / _macs(model.get_submodule(path), tokens), count)
    return count


def _count(module: nn.Module, share: float, count: list[float]) -> None:
    def add(module: nn.Module, args: Any, out: Tensor) -> None:
        count[0] += share * len(out)

    module.register_forward_hook(add)


@torch.inference_mode()
def _tokens(model: nn.Module, path: str, size: tuple[int, int, int]) -> tuple[int, ...]:
    """Shape of what one image gives the block at `path`."""
    seen: list[tuple[int, ...]] = []
    handle = model.get_submodule(path).register_forward_pre_hook(lambda m, args: seen.append(tuple(args[0].shape)))
    model(torch.zeros(1, *size))
    handle.remove()
    return seen[0]


def _macs(module: nn.Module, shape: tuple[int, ...]) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        deepcopy(module).to("meta")(torch.empty(shape, device="meta"))
    return int(counter.get_total_flops()) // 2


def _evaluations(evaluated: Sequence[float], once: int) -> dict[str, Any]:
    """once: evaluations of the plain passes, which a component needs once, however many of its channels are scored."""
    ours = ONE_OF * (evaluated[0] - once) + once
    theirs = ONE_OF * evaluated[1]
    said = f"{theirs / ours:.2f} times fewer blocks evaluated, {ours:.0f} an image against {theirs:.0f}"
    return {"what": "exact scores: work", "text": said, "ratio": theirs / ours, "evaluations": [ours, theirs]}


def _times(times: Sequence[Sequence[float]]) -> dict[str, Any]:
    ours, theirs = (sum(of) for of in zip(*times, strict=True))
    said = f"{theirs / ours:.2f} times faster than one pass per candidate ({ours:.1f} s against {theirs:.1f} s)"
    return {"what": "exact scores: time", "text": said, "ratio": theirs / ours, "seconds_by_component": times}


def _screen(model: nn.Module, own: Sequence[Component], loader: Any, exact_seconds: float) -> dict[str, Any]:
    """exact_seconds: of all channels, from those that were scored."""
    began = time.perf_counter()
    estimates(model, own, loader, directions=DIRECTIONS)
    seconds = time.perf_counter() - began
    ratio = exact_seconds / seconds
    said = f"{ratio:.0f} times cheaper than exact scores ({seconds:.1f} s against {exact_seconds:.0f} s)"
    return {
        "what": "Gauss-Newton screen: time",
        "text": said,
        "ratio": ratio,
        "directions": DIRECTIONS,
        "aim": [CHEAPER, None],
    }
