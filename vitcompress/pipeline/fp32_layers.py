"""Search the smallest set of layers that a model in a low precision must compute in a higher one to keep its outputs.

Sets are tried in order of cost: no layers; those whose results the low precision cannot represent; with these the
head, the attention cores and the norms in all combinations; last also the FFNs, which do most of the arithmetic. The
first set that passes is reduced until no layer of it can be omitted, by delta debugging, which tries halves before
single layers (Zeller and Hildebrandt, Simplifying and isolating failure-inducing input, IEEE TSE 28(2), 2002).

A set passes if the outputs of the exported file agree with those of the model (`verify.outputs`): in the file's own
runtime if there is a GPU for it, otherwise in ONNX Runtime on the CPU with every result rounded, as a proxy.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from vitcompress.errors import CheckFailedError, PrecisionError
from vitcompress.exporters.base import Exported, Exporter, ModelInfo
from vitcompress.exporters.doctor import onnx_problem
from vitcompress.exporters.onnx.export import ONNX, export
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.precision import SOFTMAX, expand_layers, shorten_layers
from vitcompress.exporters.quantize.emulate import EightBitProducts
from vitcompress.exporters.quantize.graph import CORE, Quantization
from vitcompress.exporters.quantize.smooth import rescale
from vitcompress.exporters.ranges import Ranges, describe_overflows, find_overflows, required_layers
from vitcompress.exporters.tensorrt.export import RTX_DEFAULT, TENSORRT_RTX
from vitcompress.exporters.tensorrt.flavours import capability
from vitcompress.io.checks import Check
from vitcompress.io.progress import SILENT, Progress
from vitcompress.plan import is_within
from vitcompress.training.metrics import kl_divergence
from vitcompress.verify.outputs import Original, output_checks, rounded_checks

CHEAP, COSTLY = ("head", "softmax", "norm"), ("ffn",)  # kinds of layers
RANK_IMAGES = 16
MAX_TRIALS = 40  # the smallest set so far is then taken, and not called the smallest
GPU = "cuda"
NO_RANGES = Ranges({}, {})  # of precisions that represent whatever fp32 does
Layers = tuple[str, ...]


@dataclass(frozen=True)
class Evaluator:
    """Compares the outputs of a model with these layers in the high precision. proxy: not on the file's hardware."""

    title: str
    proxy: bool
    evaluate: Callable[[Layers], list[Check]]


@dataclass(frozen=True)
class Trial:
    """One set of layers, `islands` in options and sidecars. by: what evaluated it. figures: of the comparison."""

    islands: Layers
    verdict: str
    by: str
    reason: str
    figures: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerSearch:
    """The record `islands_search` of a sidecar: all trials, in order.

    `judge`: title of the evaluator. chosen: the result, None if no set passed. smallest: no layer of it can be omitted.
    costs: of each chosen layer that could be in eight bits: `divergence` (`rank_layers`), share of the `macs` of such
    layers, and `speed` of the file over one with the layer in eight bits, empty if this machine cannot run them.
    """

    judge: str
    proxy: bool
    images: int
    real: bool
    tries: tuple[Trial, ...]
    chosen: Layers | None
    smallest: bool
    costs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def best_evaluator(exporter: Exporter, original: Original, options: ExportOptions, about: ModelInfo) -> Evaluator:
    """The best evaluator on this machine for the files that `exporter` writes with `options`."""
    write: Callable[..., Exported]
    compare: Callable[[Path, Original], list[Check]]
    if _runs_on_gpu(exporter, options):
        title, proxy, suffix = f"{exporter.name} on {GPU}", False, exporter.suffix
        write, compare = exporter.export, partial(output_checks, device=GPU)
    else:
        suffix, write = ONNX.suffix, partial(export, form="float_bias" if "sm" in exporter.uses else "unsigned_input")
        options = replace(options.only(ONNX.uses), precision=options.eight_bits or options.precision)
        if options.eight_bits == "int8":
            title, proxy = "ONNX Runtime on the CPU", exporter is not ONNX
            compare = partial(output_checks, device="cpu")
        else:
            title, proxy = f"ONNX Runtime on the CPU, every result rounded to {options.precision}", True
            compare = rounded_checks

    def evaluate(layers: Layers) -> list[Check]:
        with TemporaryDirectory(prefix="vitcompress-") as folder:
            path = Path(folder) / f"candidate{suffix}"
            write(original.model, path, **about, options=replace(options, islands=layers))
            return compare(path, original)

    return Evaluator(title, proxy, evaluate)


def _runs_on_gpu(exporter: Exporter, options: ExportOptions) -> bool:
    """Whether a GPU of this machine can run what `exporter` writes with `options`."""
    if "sm" not in exporter.uses:
        return exporter is ONNX and onnx_problem(GPU) is None
    targets = options.sm or (RTX_DEFAULT if exporter is TENSORRT_RTX else ())
    return exporter.cannot_run() is None and (not targets or capability() in targets)


def search(
    original: Original,
    evaluator: Evaluator,
    precision: str,
    *,
    fixed: Layers = (),
    ranges: Ranges = NO_RANGES,
    ranked: Sequence[str] | None = None,
    progress: Progress = SILENT,
) -> LayerSearch:
    """Search the smallest set of layers, including `fixed`, that passes in fp32, with the others in `precision`.

    ranked: layers, the most sensitive first; the first 1, 2, 4, ... of them are tried instead of kinds of layers.
    ranges: of fp16; layers whose results overflow belong to every set (PrecisionError if none avoids that).
    """
    model = original.model
    trials = _Trials(model, evaluator, precision, ranges, progress)
    always = (*fixed, *required_layers(model, ranges, fixed))
    counts = [*(2**power for power in range(len(ranked or ()).bit_length())), len(ranked or ())]
    cheap = [kinds for size in range(len(CHEAP) + 1) for kinds in combinations(CHEAP, size)]
    by_cost = [*sorted(cheap, key=lambda kinds: len(expand_layers(model, kinds))), (*CHEAP, *COSTLY)]
    sets: Sequence[Sequence[str]] = by_cost if ranked is None else [ranked[:count] for count in counts]
    passed = next(filter(trials.passes, [fixed, *((*always, *layers) for layers in sets)]), None)
    if passed is not None:
        pinned = set(expand_layers(model, fixed if passed == fixed else always))
        rest = [name for name in expand_layers(model, passed) if name not in pinned]
        kept = minimize(rest, lambda part: trials.passes((*pinned, *part)))
        passed = shorten_layers(model, expand_layers(model, (*pinned, *kept)))
    tries, smallest = tuple(trials.done.values()), passed is not None and not trials.exhausted
    return LayerSearch(evaluator.title, evaluator.proxy, len(original.images), original.real, tries, passed, smallest)


@torch.no_grad()
def rank_layers(original: Original, settings: Quantization) -> dict[str, float]:
    """Linear layer or attention -> mean KL divergence of the outputs with it alone in eight bits, the largest first."""
    images, model = original.images[:RANK_IMAGES], rescale(original.model, settings.factors)
    exact, changes = model(images), dict[str, float]()
    for layer in dict.fromkeys(key.partition(CORE)[0] + SOFTMAX * (CORE in key) for key in settings.ranges):
        own = {key: size for key, size in settings.ranges.items() if is_within(key, (layer,))}
        with EightBitProducts(model, replace(settings, ranges=own)):
            changes[layer] = float(kl_divergence(exact, model(images)).mean())
    return dict(sorted(changes.items(), key=lambda item: -item[1]))


@dataclass
class _Trials:
    """Evaluated sets of layers. When the trials are exhausted, every new set counts as failed."""

    model: nn.Module
    evaluator: Evaluator
    precision: str
    ranges: Ranges
    progress: Progress
    done: dict[Layers, Trial] = field(default_factory=dict)
    exhausted: bool = False

    def passes(self, layers: Sequence[str]) -> bool:
        names = expand_layers(self.model, layers)
        if names not in self.done:
            if len(self.done) == MAX_TRIALS:
                self.exhausted = True
                return False
            trial = self.done[names] = self._evaluate(names)
            kept = f"{', '.join(trial.islands) or 'no layers'} in fp32"
            self.progress.note(f"{self.precision} with {kept}: {trial.verdict} ({trial.by}), {trial.reason}")
        return self.done[names].verdict == "passed"

    def _evaluate(self, names: Layers) -> Trial:
        short, by = shorten_layers(self.model, names), self.evaluator.title
        if overflows := find_overflows(self.model, self.ranges, names):
            return Trial(short, "failed", "range scan", describe_overflows(overflows))
        try:
            checks = self.evaluator.evaluate(names)
        except (CheckFailedError, PrecisionError) as error:  # such as a weight that the low precision cannot represent
            return Trial(short, "failed", by, error.message)
        values = {check.name.rpartition(".")[2]: check.value for check in checks if check.tolerance is not None}
        figures = {name: v if v is not None and math.isfinite(v) else None for name, v in values.items()}
        worst = next((check for check in checks if check.verdict != "passed"), checks[-1])
        reason = f"{worst.name.rpartition('.')[2]}: {worst.detail}"
        if worst.value is not None and worst.tolerance is not None:
            reason = f"{worst.name.rpartition('.')[2]} {worst.value:.2g}, at most {worst.tolerance:.2g} is allowed"
        failed = any(check.verdict == "failed" for check in checks)
        return Trial(short, "failed" if failed else worst.verdict, by, reason, figures)


def minimize(items: Sequence[str], passes: Callable[[Sequence[str]], bool]) -> list[str]:
    """A part of one or more of `items` that passes and of which no item can be omitted, if `items` pass (ddmin)."""
    left, parts = list(items), 2
    while len(left) >= 2:
        pieces = [left[len(left) * i // parts : len(left) * (i + 1) // parts] for i in range(parts)]
        rests = [[item for item in left if item not in piece] for piece in pieces] if parts > 2 else []
        if (piece := next(filter(passes, pieces), None)) is not None:
            left, parts = piece, 2
        elif (rest := next(filter(passes, rests), None)) is not None:
            left, parts = rest, max(parts - 1, 2)
        elif parts >= len(left):
            break
        else:
            parts = min(len(left), 2 * parts)
    return left
