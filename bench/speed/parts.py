"""What all parts share: options, the published models, and the form of a line."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from vitcompress import models, surgery
from vitcompress.bench import timing
from vitcompress.plan import Plan

# Published layers: HetDPT, tables 1 and 8 (attention, activation), with the bypass of the released code.
PUBLISHED = {
    "deit_s_hetdpt": ("deit_small_distilled_patch16_224", (1, 7, 10, 11), (7, 8, 10, 11)),
    "deit_b_hetdpt": ("deit_base_distilled_patch16_224", (0, 3, 7, 8, 11), (2, 7, 8, 10, 11)),
}
BYPASS: dict[str, Any] = {"attention_bypass": "norm_identity", "both_pruned_output_act": "gelu"}


@dataclass(frozen=True)
class Options:
    """arch: model of the parts that need one only. folder: where files may be made. threads: of a runtime's call.

    given: batch and runs where they were asked for, for parts with a protocol of their own.
    """

    folder: Path
    arch: str = "deit_small_patch16_224"
    batch: int = 8
    runs: int = 20
    threads: int | None = None
    given: tuple[int | None, int | None] = (None, None)


class Part(Protocol):
    """One subject: yields a line per figure, as plain data with `what` and, where two are compared, `ratio`."""

    def __call__(self, options: Options) -> Iterator[dict[str, Any]]: ...


def compressed(name: str) -> tuple[nn.Module, nn.Module]:
    """Dense and folded model of a published configuration, with random weights."""
    arch, attentions, activations = PUBLISHED[name]
    dense, model = (models.create(arch) for _ in range(2))
    plan = surgery.depth_plan(model, Plan(arch), attentions, activations, **BYPASS)
    surgery.apply(model, plan)
    surgery.fold(model, plan)
    return dense, model


def line(what: str, a: timing.Samples, b: timing.Samples, aim: tuple[float, float] = (0.0, math.inf)) -> dict[str, Any]:
    """Time of `a` over time of `b` with its interval, the range aimed at (None: open), and every sample behind it."""
    found = asdict(timing.ratio(a, b))
    figures = {
        "ratio": found["median"],
        "ci95": [end if end < math.inf else None for end in found["ci95"]],
        "aim": [end if end < math.inf else None for end in aim],
    }
    samples = {s.name: s.blocks_ms for s in (a, b)}
    return {"what": what, **figures, "batch": a.batch, "verdict": found["verdict"], "samples_ms": samples}


def text(found: dict[str, Any]) -> str:
    """A line in words: what it brings as `text`, else the ratio with its interval."""
    if "text" in found:
        return f"{found['what']}: {found['text']}"
    low, high = found["ci95"]
    upper = "open" if high is None else f"{high:.3f}"
    said = f"{found['what']}: {found['ratio']:.3f} (95 % interval {low:.3f} to {upper})"
    if "speedup" in found:
        said += f", {found['speedup']:.3f} times as fast at a MACs ratio of {found['macs_ratio']:.3f}"
    return said
