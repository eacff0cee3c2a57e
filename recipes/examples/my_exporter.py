"""Write your own exporter and runner: programs of torch.export, in files that end in `.pt2`.

    python my_exporter.py

To use it in recipes and on the command line (`--export pt2`), declare it in your package's pyproject.toml:

    [project.entry-points."vitcompress.exporters"]
    pt2 = "my_package.my_exporter:PT2"
"""

import json
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import vitcompress as vc
from vitcompress.errors import ArtifactError, DeviceError, InputError, first_line
from vitcompress.exporters.base import Exported, Exporter, describe_file, record_export, write_with_data
from vitcompress.exporters.calls import BoundCall
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.runner import Runner, RunnerOptions
from vitcompress.exporters.sidecar import check_sha256
from vitcompress.exporters.uint8 import build_deployed
from vitcompress.io.files import decode_json_values
from vitcompress.io.progress import SILENT, Progress

METADATA = "vitcompress.json"  # a file inside of the program's archive


def export(
    model: nn.Module, path: Path, *, options: ExportOptions | None = None, progress: Progress = SILENT, **about
) -> Exported:
    options = options or ExportOptions()
    check_options(options)
    module = build_deployed(model, about["input"], uint8=False)  # a copy on the CPU
    images, batch = torch.zeros(2, *about["input"].size), torch.export.Dim("batch", min=1, max=4096)
    with torch.no_grad():
        program = torch.export.export(module, (images,), dynamic_shapes=({0: batch},))
    metadata = describe_file(model, options, about)
    names = write_with_data(path, partial(torch.export.save, program, extra_files={METADATA: json.dumps(metadata)}))
    build = {"runtime": "pt2", "runtime_version": torch.__version__}
    fields = {"opset": 0, "opset_reason": "no ONNX", "metadata": metadata, "build": build}
    return record_export(path, names, format="pt2", precision=options.precision, **fields)


def check_options(options: ExportOptions) -> None:
    if options.precision != "fp32":
        raise InputError(f"pt2 has no precision {options.precision!r}", hint="use fp32")


class Pt2Runner(Runner):
    """What cannot run as requested is an error: another device, a damaged file, a file that its sidecar contradicts."""

    def __init__(self, path: Path, options: RunnerOptions) -> None:
        super().__init__(str(path), options, "pt2")
        if (options.device or "cpu") != "cpu":
            raise DeviceError(f"{path} runs on the CPU, but the device is {options.device}", hint="use --device cpu")
        if (options.precision or "fp32") != "fp32":
            raise DeviceError(f"{path} cannot run in {options.precision!r}", hint="use fp32")
        self._sha256 = check_sha256(path)
        extra = {METADATA: ""}
        try:
            self._module = torch.export.load(path, extra_files=extra).module()
            labels = decode_json_values(json.loads(extra[METADATA]))
        except Exception as error:  # noqa: BLE001 - torch raises many types
            raise ArtifactError(f"{path} cannot be read: {first_line(error)}", hint="export it again") from None
        self._set_input(labels["size"], labels, takes_bytes=False)
        if options.threads is not None:
            torch.set_num_threads(options.threads)

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        return self._module(torch.from_numpy(self._prepare(images)))

    def _bind(self, images: Tensor) -> BoundCall:
        return BoundCall(torch.inference_mode()(partial(self._module, torch.from_numpy(self._prepare(images)))))

    def _describe(self) -> dict[str, object]:
        about = {"runtime": "pt2", "runtime_version": torch.__version__}
        return {**about, "precision": "fp32", "threads": torch.get_num_threads()}


PT2 = Exporter(
    "pt2",
    ".pt2",
    export,
    Pt2Runner,
    uses=frozenset({"precision"}),
    check_options=check_options,
    unavailable=lambda: None,
    cannot_run=lambda: None,
)

if __name__ == "__main__":
    model = vc.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=10)
    file = vc.export(model, "my_model.pt2", format=PT2)
    images = torch.randn(5, 3, 32, 32)
    for batch in (1, 2, 5):
        torch.testing.assert_close(Pt2Runner(file, RunnerOptions())(images[:batch]), model(images[:batch]).detach())
    print(file, "agrees with the model")
