"""The smallest set of fp32 islands with which a model in half precision answers as it does in fp32.

Sets are tried in order of cost, fewest islands first: none; what the scan of ranges says that fp16 cannot hold; with it
the head, the attention cores and the norms in all combinations; last also the FFNs, which hold most of the arithmetic.
The first set that passes is narrowed down until no island of it can be left out: by delta debugging, which tries halves
before single ones (Zeller and Hildebrandt, Simplifying and isolating failure-inducing input, IEEE TSE 28(2), 2002).

Whether a set passes is the agreement gate's to say, asked of the file in its own runtime on a GPU where there is one,
else of the ONNX file (that beneath an engine, too) in ONNX Runtime with every result rounded: a proxy, and called so.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn

from vitcompress.errors import CheckFailedError, PrecisionError
from vitcompress.exporters.base import Export, Exporter
from vitcompress.exporters.doctor import device_problem
from vitcompress.exporters.onnx.export import ONNX, export
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.precision import expanded, in_short
from vitcompress.exporters.ranges import Ranges, needed_islands, outside, told
from vitcompress.exporters.tensorrt.export import TENSORRT_RTX
from vitcompress.exporters.tensorrt.flavours import RTX_DEFAULT, capability
from vitcompress.io.checks import Check
from vitcompress.io.progress import Progress
from vitcompress.models.create import InputConfig
from vitcompress.verify.outputs import file_checks, model_answers, rounded_checks, verdict

CHEAP, DEAR = ("head", "softmax", "norm"), ("ffn",)
SCAN = "range scan"
LIMIT = 40  # tries; the smallest set so far is taken then, and said not to be proven smallest
GPU = "cuda"


@dataclass(frozen=True)
class Judge:
    """What decides whether a set of islands is enough. proxy: it is not the hardware that the file is for."""

    title: str
    proxy: bool
    ask: Callable[[tuple[str, ...]], list[Check]]


@dataclass(frozen=True)
class Try:
    """One set of islands, and what came of it. figures: of the comparison of answers, by name."""

    islands: tuple[str, ...]
    verdict: str
    by: str
    reason: str
    figures: dict[str, float | None] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{', '.join(self.islands) or 'no island'}: {self.verdict} ({self.by}), {self.reason}"


@dataclass(frozen=True)
class Search:
    """All that was tried, in order. chosen: None where no set passed. smallest: no island of it can be left out."""

    judge: str
    proxy: bool
    images: int
    real: bool
    tries: tuple[Try, ...]
    chosen: tuple[str, ...] | None
    smallest: bool

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def judge_of(
    exporter: Exporter,
    model: nn.Module,
    images: Tensor,
    options: ExportOptions,
    input: InputConfig,
    *,
    real: bool = True,
) -> Judge:
    """The best judge that this machine has for what `exporter` writes with `options`.

    images: (count, channels, height, width), normalised. real: they are not noise.
    """
    on_gpu = _runs_on_gpu(exporter, options)
    write: Export = exporter.export if on_gpu else partial(export, lean=exporter is ONNX)
    options = options if on_gpu else options.only(ONNX.uses)
    expected = cache(partial(model_answers, model))

    def ask(islands: tuple[str, ...]) -> list[Check]:
        with TemporaryDirectory(prefix="vitcompress-") as folder:
            path = Path(folder) / f"candidate{exporter.suffix if on_gpu else ONNX.suffix}"
            write(model, path, input=input, options=replace(options, islands=islands))
            if on_gpu:
                return file_checks(model, path, images, real=real, device=GPU)
            return rounded_checks(expected, path, images, real=real)

    if on_gpu:
        return Judge(f"{exporter.name} on {GPU}", False, ask)
    return Judge(f"ONNX Runtime on the CPU, every result rounded to {options.precision}", True, ask)


def _runs_on_gpu(exporter: Exporter, options: ExportOptions) -> bool:
    """Whether what `exporter` writes with `options` can be asked on a GPU of this machine."""
    if exporter is ONNX:
        return device_problem(GPU) is None
    targets = options.sm or (RTX_DEFAULT if exporter is TENSORRT_RTX else ())
    return exporter.cannot_run() is None and (not targets or capability() in targets)


def search(
    model: nn.Module,
    judge: Judge,
    ranges: Ranges,
    images: Tensor,
    *,
    fixed: Sequence[str] = (),
    real: bool = True,
    progress: Progress | None = None,
) -> Search:
    """The smallest set of islands, `fixed` among them, that `judge` lets pass.

    ranges: of `model` where it is to be fp16, empty for bf16, which holds whatever fp32 does.
    """
    tries = _Tries(model, judge, ranges, progress or Progress())
    over = outside(model, ranges, tuple(fixed))
    always = (*fixed, *(needed_islands(model, Ranges(over, ranges.given)) or ()))
    sets = ((*always, *kinds) for kinds in _in_order_of_cost(model))
    passed = next((islands for islands in (tuple(fixed), *sets) if tries.passes(islands)), None)
    if passed is not None:
        pinned = set(expanded(model, fixed if passed == tuple(fixed) else always))
        rest = [name for name in expanded(model, passed) if name not in pinned]
        left = narrowed(rest, lambda part: tries.passes((*pinned, *part)))
        passed = in_short(model, expanded(model, (*pinned, *left)))
    about = (judge.title, judge.proxy, len(images), real)
    return Search(*about, tuple(tries.found.values()), passed, smallest=passed is not None and not tries.ran_out)


def _in_order_of_cost(model: nn.Module) -> list[tuple[str, ...]]:
    """Sets of kinds of islands: by their number, and those with FFNs behind all others."""
    cheap = [kinds for size in range(len(CHEAP) + 1) for kinds in combinations(CHEAP, size)]
    return [*sorted(cheap, key=lambda kinds: len(expanded(model, kinds))), (*CHEAP, *DEAR)]


class _Tries:
    """Sets of islands by name, each tried once. When no try is `left`, every new set counts as failed."""

    def __init__(self, model: nn.Module, judge: Judge, ranges: Ranges, progress: Progress) -> None:
        self.model, self.judge, self.ranges, self.progress = model, judge, ranges, progress
        self.found: dict[tuple[str, ...], Try] = {}
        self.left, self.ran_out = LIMIT, False

    def passes(self, islands: Sequence[str]) -> bool:
        names = expanded(self.model, islands)
        if names not in self.found:
            if not self.left:
                self.ran_out = True
                return False
            self.left -= 1
            self.found[names] = self._tried(names)
            self.progress.note(f"fp32 islands: {self.found[names]}")
        return self.found[names].verdict == "passed"

    def _tried(self, names: tuple[str, ...]) -> Try:
        short = in_short(self.model, names)
        if over := outside(self.model, self.ranges, names):
            return Try(short, "failed", SCAN, told(over))
        try:
            checks = self.judge.ask(names)
        except (CheckFailedError, PrecisionError) as error:  # such as a weight that half precision cannot hold
            return Try(short, "failed", self.judge.title, error.message)
        worst = next((check for check in checks if check.verdict != "passed"), checks[-1])
        figures = {check.name.rpartition(".")[2]: _finite(check.value) for check in checks if check.tolerance}
        reason = f"{worst.name.rpartition('.')[2]}: {worst.detail}"
        if worst.value is not None and worst.tolerance is not None:
            reason = f"{worst.name.rpartition('.')[2]} {worst.value:.2g}, at most {worst.tolerance:.2g} is allowed"
        return Try(short, verdict(checks), self.judge.title, reason, figures)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def narrowed(items: Sequence[str], passes: Callable[[Sequence[str]], bool]) -> list[str]:
    """A part of `items`, which together pass, that passes and of which none can be left out (ddmin of the paper)."""
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
