"""Write your own exporter and runner: files in the ORT format of ONNX Runtime, which its small builds for devices read.

    python my_exporter.py

To use it in recipes and on the command line (`--export ort`), declare it in your package's pyproject.toml:

    [project.entry-points."vitcompress.exporters"]
    ort = "my_package.my_exporter:ORT"
"""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import onnxruntime
import torch
from torch import Tensor, nn

import vitcompress as vc
from vitcompress.errors import ArtifactError, DeviceError, InputError, first_line
from vitcompress.exporters.base import Exported, Exporter, describe_file, record_export, write_with_data
from vitcompress.exporters.calls import BoundCall
from vitcompress.exporters.onnx.export import ONNX
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.runner import Runner, RunnerOptions
from vitcompress.exporters.sidecar import check_sha256
from vitcompress.io.files import decode_json_values
from vitcompress.io.progress import SILENT, Progress


def export(
    model: nn.Module, path: Path, *, options: ExportOptions | None = None, progress: Progress = SILENT, **about
) -> Exported:
    options = options or ExportOptions()
    check_options(options)
    with TemporaryDirectory() as folder:
        source = ONNX.export(model, Path(folder) / "model.onnx", options=options, progress=progress, **about)
        names = write_with_data(path, partial(convert, source.path))  # a failed conversion leaves nothing behind
    build = {"runtime": "ort", "runtime_version": onnxruntime.__version__}
    fields = {"opset": source.opset, "opset_reason": source.opset_reason, "build": build}
    metadata = describe_file(model, options, about)
    return record_export(path, names, format="ort", precision=options.precision, metadata=metadata, **fields)


def convert(source: Path, target: Path) -> None:
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC  # for any processor
    settings.optimized_model_filepath = str(target)
    settings.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(str(source), settings, providers=["CPUExecutionProvider"])


def check_options(options: ExportOptions) -> None:
    if options.precision != "fp32":
        raise InputError(f"ort has no precision {options.precision!r}", hint="use fp32")


class OrtRunner(Runner):
    """What cannot run as requested is an error: another device, a damaged file, a file that its sidecar contradicts."""

    def __init__(self, path: Path, options: RunnerOptions) -> None:
        super().__init__(str(path), options, "the ORT format")
        if (options.device or "cpu") != "cpu":
            raise DeviceError(f"{path} runs on the CPU, but the device is {options.device}", hint="use --device cpu")
        if (options.precision or "fp32") != "fp32":
            raise DeviceError(f"{path} cannot run in {options.precision!r}", hint="use fp32")
        self._sha256 = check_sha256(path)
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = options.threads or 0  # 0: one for each core
        settings.add_session_config_entry("session.load_model_format", "ORT")
        try:
            self._session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        except Exception as error:  # noqa: BLE001 - ONNX Runtime's exceptions have no other common base class
            raise ArtifactError(f"{path} cannot be read: {first_line(error)}", hint="export it again") from None
        labels = decode_json_values(self._session.get_modelmeta().custom_metadata_map)
        self._set_input(self._session.get_inputs()[0].shape[1:], labels, takes_bytes=False)

    def __call__(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self._run(self._prepare(images))[0])

    def _run(self, data):
        return self._session.run(None, {self._session.get_inputs()[0].name: data})

    def _bind(self, images: Tensor) -> BoundCall:
        return BoundCall(partial(self._run, self._prepare(images)))

    def _describe(self) -> dict[str, object]:
        about = {"runtime": "ort", "runtime_version": onnxruntime.__version__}
        return {**about, "precision": "fp32", "threads": self._threads}


ORT = Exporter(
    "ort",
    ".ort",
    export,
    OrtRunner,
    uses=frozenset({"precision"}),
    check_options=check_options,
    unavailable=lambda: None,
    cannot_run=lambda: None,
)

if __name__ == "__main__":
    model = vc.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=10)
    file = vc.export(model, "my_model.ort", format=ORT)
    images = torch.randn(5, 3, 32, 32)
    for batch in (1, 2, 5):
        torch.testing.assert_close(OrtRunner(file, RunnerOptions())(images[:batch]), model(images[:batch]).detach())
    print(file, "agrees with the model")
