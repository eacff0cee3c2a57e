"""Dense DeiT-T and DeiT-S: our ONNX file over timm's own export of the same model, and OpenVINO over our ONNX file."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress.bench import suite
from vitcompress.bench.artifacts import export_by_timm
from vitcompress.bench.self.parts import Options
from vitcompress.errors import VitcompressError
from vitcompress.exporters import EXPORTERS
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.runtimes import RunnerOptions, open_runner
from vitcompress.models.create import create_model, input_config

ARCHS = ("deit_tiny_patch16_224", "deit_small_patch16_224")
AIM = 1.0
OPENVINO_PRECISIONS = ("fp32", "bf16")


def run(options: Options) -> Iterator[dict[str, Any]]:
    """All files of a model take turns; timm's export is the base of every ratio."""
    for arch in ARCHS if options.arch == Options.arch else (options.arch,):
        model = create_model(arch)
        ways: dict[str, tuple[Path, str | None]] = {"timm's own ONNX": (options.folder / "timm.onnx", None)}
        export_by_timm(model, ways["timm's own ONNX"][0])
        ways["our ONNX"] = (options.folder / "ours.onnx", None)
        export(model, ways["our ONNX"][0], input=input_config(model))
        if reason := _openvino(model, options.folder / "ours.xml"):
            yield {"what": f"{arch}, OpenVINO", "text": f"not measured: {reason}"}
        else:
            ways |= {f"OpenVINO {name}": (options.folder / "ours.xml", name) for name in OPENVINO_PRECISIONS}
        yield from _measured(arch, ways, options)


def _openvino(model: nn.Module, path: Path) -> str | None:
    """Write the model for OpenVINO, or say why that cannot be done here."""
    exporter = EXPORTERS.get("openvino")
    reason = "there is no such exporter" if exporter is None else exporter.unavailable()
    if exporter is not None and reason is None:
        exporter.export(model, path, input=input_config(model))
    return reason


def _measured(arch: str, ways: dict[str, tuple[Path, str | None]], options: Options) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        runners = []
        for name, (path, precision) in ways.items():
            try:
                runner = open_runner(path, RunnerOptions(threads=options.threads, precision=precision))
            except VitcompressError as error:
                yield {"what": f"{arch}, {name}", "text": f"not measured: {error.message}"}
                continue
            stack.callback(runner.close)
            runner.name = name
            runners.append(runner)
        found = suite.compare(runners, suite.BenchOptions("paper", options.batch, 3, options.runs))
    for row, ratio in zip(found.rows[1:], found.ratios, strict=True):
        both = found.rows[0], row
        yield {
            "what": f"{arch}, {ratio['b']} over {ratio['a']}",
            "ratio": ratio["median"],
            "ci95": list(ratio["ci95"]),
            "aim": [AIM, None] if ratio["b"] == "our ONNX" else [None, None],
            "verdict": ratio["verdict"],
            "batch": options.batch,
            "threads": options.threads,
            "images_per_second": [one["images_per_second"] for one in both],
            "samples_ms": {one["artifact"]: one["samples_ms"] for one in both},
            "warnings": list(found.warnings),
        }
