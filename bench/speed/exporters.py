"""Fold and export of DeiT-B in a process of its own: seconds and peak memory."""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitcompress import models, surgery
from vitcompress.bench.speed.parts import BYPASS, PUBLISHED, Options
from vitcompress.exporters.onnx_graph import export
from vitcompress.models import input_config
from vitcompress.plan import Plan


def run(options: Options) -> Iterator[dict[str, Any]]:
    """Each in a fresh process, so that its peak memory is its own."""
    yield alone(__name__, "deit_b_hetdpt")


def alone(module: str, argument: str) -> dict[str, Any]:
    """What `module`, run as a program of its own, says last (see `say`)."""
    command = [sys.executable, "-m", module, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def here(name: str) -> dict[str, Any]:
    """Seconds and peak memory (GiB) of folding and exporting a published configuration in this process."""
    arch, attentions, activations = PUBLISHED[name]
    model = models.create(arch)
    plan = surgery.depth_plan(model, Plan(arch), attentions, activations, **BYPASS)
    before = peak_gib()
    began = time.perf_counter()
    surgery.apply(model, plan)
    surgery.fold(model, plan)
    folded = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        size = export(model, Path(folder) / "model.onnx", input=input_config(model)).bytes
        exported = time.perf_counter()
    times = {"fold_seconds": folded - began, "export_seconds": exported - folded}
    memory = {"loaded_gib": before, "peak_gib": peak_gib()}
    said = f"{times['fold_seconds']:.1f} s + {times['export_seconds']:.1f} s, peak {memory['peak_gib']:.2f} GiB"
    return {"what": f"fold and export {name}", "text": said, **times, **memory, "file_bytes": size}


def peak_gib() -> float:
    """Most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def say(found: dict[str, Any]) -> None:
    """Hand `found` to the process that waits for it."""
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    say(here(sys.argv[1]))
