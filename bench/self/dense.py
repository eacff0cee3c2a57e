"""Dense models in ONNX Runtime and OpenVINO."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from vitcompress.bench import suite
from vitcompress.bench.artifacts import export_by_timm
from vitcompress.bench.self.parts import Line, Options, speed_ratios
from vitcompress.errors import VitcompressError
from vitcompress.exporters import EXPORTERS
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.runtimes import Runner, RunnerOptions, open_runner
from vitcompress.models.create import create_model, input_config

ARCHS = ("deit_tiny_patch16_224", "deit_small_patch16_224")


def run(options: Options) -> Iterator[Line]:
    """Dense DeiT-T and DeiT-S: our ONNX file and OpenVINO over timm's own ONNX export of the same model."""
    openvino, folder = EXPORTERS["openvino"], options.folder
    for arch in ARCHS if options.arch == Options.arch else (options.arch,):
        model = create_model(arch)
        files: dict[str, tuple[Path, str | None]] = {
            "timm's own ONNX": (folder / "timm.onnx", None),
            "our ONNX": (folder / "ours.onnx", None),
        }
        export_by_timm(model, folder / "timm.onnx")
        export(model, folder / "ours.onnx", input=input_config(model))
        if reason := openvino.unavailable():
            yield {"what": f"{arch}, OpenVINO", "text": f"not measured: {reason}"}
        else:
            openvino.export(model, folder / "ours.xml", input=input_config(model))
            files |= {f"OpenVINO {precision}": (folder / "ours.xml", precision) for precision in ("fp32", "bf16")}
        with ExitStack() as stack:
            runners: list[Runner] = []
            for name, (path, precision) in files.items():
                try:
                    runner = open_runner(path, RunnerOptions(threads=options.threads, precision=precision))
                except VitcompressError as error:
                    yield {"what": f"{arch}, {name}", "text": f"not measured: {error.message}"}
                    continue
                stack.callback(runner.close)
                runner.name = name
                runners.append(runner)
            bench = suite.compare(runners, suite.BenchOptions("paper", options.batch, 3, options.runs))
        for ratio, line in zip(bench.ratios, speed_ratios(bench, options), strict=True):
            aim = [1.0, None] if ratio["b"] == "our ONNX" else [None, None]
            yield {"what": f"{arch}, {ratio['b']} over {ratio['a']}", **line, "aim": aim}
