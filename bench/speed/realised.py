"""Speed-up of the HetDPT models on ONNX Runtime (CPU) over the ratio of their MACs, attention products counted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress import cost
from vitcompress.bench import suite
from vitcompress.bench.speed.parts import PUBLISHED, Options, compressed
from vitcompress.exporters.onnx_graph import export
from vitcompress.exporters.runtimes import RunnerOptions
from vitcompress.models import input_config

AIM = 0.97


def run(options: Options) -> Iterator[dict[str, Any]]:
    """One line per published configuration."""
    for name in PUBLISHED:
        yield realised(name, *compressed(name), options, AIM)


def realised(name: str, dense: nn.Module, model: nn.Module, options: Options, aim: float) -> dict[str, Any]:
    """Measured speed-up of `model` over the ratio of multiply-accumulates, both exported alike and taking turns."""
    size = input_config(dense).size
    macs = [cost.measure(m, size).macs for m in (dense, model)]
    paths = [options.folder / f"{name}-{kind}.onnx" for kind in ("dense", "model")]
    for path, module in zip(paths, (dense, model), strict=True):
        export(module, path, input=input_config(dense))
    wishes = suite.BenchOptions("paper", options.batch, 3, options.runs, RunnerOptions(threads=options.threads))
    found = suite.run(paths, wishes)
    ratio, of_macs = found.ratios[0], macs[0] / macs[1]
    figures = {
        "macs_ratio": of_macs,
        "speedup": ratio["median"],
        "speedup_ci95": ratio["ci95"],
        "images_per_second": [row["images_per_second"] for row in found.rows],
        "samples_ms": {Path(row["artifact"]).name: row["samples_ms"] for row in found.rows},
    }
    share = {"ratio": ratio["median"] / of_macs, "ci95": [end / of_macs for end in ratio["ci95"]], "aim": [aim, None]}
    about = {"batch": options.batch, "threads": options.threads, "warnings": list(found.warnings)}
    return {"what": f"realised {name}", **share, **figures, **about}
