"""Slicing a model of 1.1 billion parameters (DINOv2-g) in a process of its own: seconds and peak memory."""

import sys
import time
from collections.abc import Iterator
from typing import Any

from vitcompress import surgery
from vitcompress.bench.self.exporters import alone, peak_gib, say
from vitcompress.bench.self.parts import Options
from vitcompress.families import family_of
from vitcompress.models.create import create_model
from vitcompress.plan import Plan

ARCH = "vit_giant_patch14_dinov2"


def run(options: Options) -> Iterator[dict[str, Any]]:
    """Half of every space: residual stream, q/k, v and FFN channels."""
    yield alone(__name__, ARCH)


def here(arch: str) -> dict[str, Any]:
    """Seconds and peak memory (GiB) of keeping the first half of every head and space of `arch` in this process."""
    model = create_model(arch)
    before, params = peak_gib(), _params(model)
    kept = {}
    for space in family_of(model).spaces(model):
        head = space.size // space.heads
        kept[space.name] = tuple(c for c in range(space.size) if c % head < head // 2)
    plan = Plan(arch, kept=kept)
    began = time.perf_counter()
    surgery.apply_plan(model, plan)
    seconds = time.perf_counter() - began
    peak, after = peak_gib(), _params(model)
    sizes = f"{params / 1e6:.0f} M to {after / 1e6:.0f} M parameters"
    said = f"{sizes} in {seconds:.1f} s, peak {peak:.2f} GiB ({before:.2f} before)"
    figures = {"seconds": seconds, "loaded_gib": before, "peak_gib": peak, "params": [params, after]}
    return {"what": f"slice {arch}", "text": said, **figures}


def _params(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    say(here(sys.argv[1]))
