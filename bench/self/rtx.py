"""TensorRT for RTX, DeiT-S in fp16: seconds of the build and bytes of the engine for each set of GPUs."""

from collections.abc import Iterator
from typing import Any

from vitcompress.bench.self.exporters import exported
from vitcompress.bench.self.parts import Options
from vitcompress.exporters import EXPORTERS

SETS: tuple[tuple[int, ...], ...] = ((80,), (86,), (89,), (120,), (80, 86, 89, 120))  # compute capabilities


def run(options: Options) -> Iterator[dict[str, Any]]:
    """One line per set, each built in a process of its own."""
    if reason := EXPORTERS["trt-rtx"].unavailable():
        yield {"what": "trt-rtx", "text": f"not measured: {reason}"}
        return
    for sm in SETS:
        yield exported(options.arch, "trt-rtx", {"precision": "fp16", "sm": list(sm), "batch": [1, 8, 64]})
