"""Speed-up of the HetDPT models on ONNX Runtime (CPU) over the ratio of their MACs, attention products counted."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress import cost
from vitcompress.bench import suite
from vitcompress.bench.speed.parts import Options, structured
from vitcompress.exporters.onnx_graph import export
from vitcompress.exporters.runtimes import RunnerOptions
from vitcompress.models import input_config

AIM = 0.97
RECIPES = ("deit_s_hetdpt", "deit_b_hetdpt")


def run(options: Options) -> Iterator[dict[str, Any]]:
    """One line per published configuration."""
    for name in RECIPES:
        dense, model = structured(name)
        yield from realised(dense, {name: model}, options, AIM)


def realised(
    dense: nn.Module, smaller: Mapping[str, nn.Module], options: Options, aim: float
) -> Iterator[dict[str, Any]]:
    """Measured speed-up of each over the ratio of multiply-accumulates, all exported alike and taking turns."""
    size = input_config(dense).size
    macs, paths = {}, {}
    for name, model in {"dense": dense, **smaller}.items():
        macs[name], paths[name] = cost.measure(model, size).macs, options.folder / f"{name.replace(' ', '-')}.onnx"
        export(model, paths[name], input=input_config(dense))
    wishes = suite.BenchOptions("paper", options.batch, 3, options.runs, RunnerOptions(threads=options.threads))
    found = suite.run(list(paths.values()), wishes)
    warnings = [text.replace(f"{options.folder}/", "") for text in found.warnings]
    about = {"batch": options.batch, "threads": options.threads, "warnings": warnings}
    for name, row, ratio in zip(smaller, found.rows[1:], found.ratios, strict=True):
        of_macs = macs["dense"] / macs[name]
        interval = [None if end is None else end / of_macs for end in ratio["ci95"]]
        share = {"ratio": ratio["median"] / of_macs, "ci95": interval}
        both = found.rows[0], row
        figures = {
            "macs_ratio": of_macs,
            "speedup": ratio["median"],
            "speedup_ci95": ratio["ci95"],
            "images_per_second": [one["images_per_second"] for one in both],
            "samples_ms": {Path(one["artifact"]).name: one["samples_ms"] for one in both},
        }
        yield {"what": f"realised {name}", **share, "aim": [aim, None], **figures, **about}
    for path in paths.values():
        path.unlink()
