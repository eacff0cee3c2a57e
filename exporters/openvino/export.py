"""Export to OpenVINO IR: `model.xml` with its weights in `model.bin`, converted from our ONNX file.

Weights stay in fp32 and are not multiplied together, so that the file holds the model bit for bit. The precision is
that of the arithmetic: fp32, or bf16 and fp16 if the processor has them.
"""

import errno
import os
import shutil
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

from torch import nn

from vitcompress.errors import ArtifactError, InputError, first_line
from vitcompress.exporters.base import Contents, Exported, Exporter, ModelInfo, Stored, record_export, write_with_data
from vitcompress.exporters.onnx import export as onnx_export
from vitcompress.exporters.openvino import runner
from vitcompress.exporters.openvino.runner import HINTS, INFO, OpenVinoRunner, core, read_ir, read_metadata, unavailable
from vitcompress.exporters.options import ExportOptions
from vitcompress.io.progress import Progress

REASON = "decomposed attention, which OpenVINO fuses when it loads the file, at any widths of q/k and v"
FULL = 2**16  # a disk with fewer free bytes is reported as full
INDEX = ("i64", "i32", "boolean")
NESTED = ("If", "Loop", "TensorIterator")  # operations with graphs of their own


def export(
    model: nn.Module,
    path: Path,
    *,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
    **about: Unpack[ModelInfo],
) -> Exported:
    """Write `model` to `path` (.xml), its weights beside it (.bin) and its sidecar. On failure nothing is left behind.

    Inputs and outputs are those of the ONNX file; see `onnx.export`. The metadata are also in the IR's `rt_info`.

    Raises:
        InputError: unsupported options, or a `path` that does not end in .xml.
        OutputError: the folder cannot be written.
    """
    options = options or ExportOptions()
    check_options(options)
    path = Path(path)
    if path.suffix != ".xml":
        raise InputError(f"an OpenVINO model is an .xml file, got {path.name}", hint="use a name such as model.xml")
    with TemporaryDirectory(prefix="vitcompress-") as folder:
        onnx, stored = Path(folder) / f"{path.stem}.onnx", ExportOptions(opset=options.opset, uint8=options.uint8)
        source = onnx_export.export(model, onnx, options=stored, reason=REASON, **about)
        labels = {**source.metadata, "precision": f'"{options.precision}"'}
        files = write_with_data(path, partial(_convert, source.path, labels))
    build = {"runtime": "openvino", "runtime_version": metadata.version("openvino"), "weights": "fp32"}
    build["settings"] = {runner.HINT: HINTS[options.precision]}
    fields = {"format": "openvino", "precision": options.precision, "metadata": labels, "build": build}
    return record_export(path, files, source, **fields)


def check_options(options: ExportOptions) -> None:
    """Raise InputError for a precision that OpenVINO has no hint for, or an unsupported opset."""
    if options.precision not in HINTS:
        raise InputError(f"OpenVINO has no precision {options.precision!r}", hint=f"use one of {', '.join(HINTS)}")
    onnx_export.check_options(ExportOptions(opset=options.opset))


def _convert(source: Path, labels: dict[str, str], target: Path) -> None:
    """Raises OSError with a reason where OpenVINO only reports that a stream failed."""
    model: Any = core().read_model(str(source))  # convert_model would multiply LayerScales into biases
    for key, value in labels.items():
        model.set_rt_info(value, [INFO, key])
    try:
        runner.load().save_model(model, str(target), compress_to_fp16=False)
    except RuntimeError as error:
        full = shutil.disk_usage(target.parent).free < FULL
        number = errno.ENOSPC if full else errno.EIO
        raise OSError(number, os.strerror(number) if full else first_line(error)) from None


def read_contents(path: Path) -> Contents:
    """The constants of an IR, as OpenVINO reads them. Raises like `read_ir`, and ArtifactError for nested graphs."""
    model = read_ir(path)
    places, stored = set[int](), []
    for node in model.get_ops():
        if node.get_type_name() in NESTED:
            raise ArtifactError(
                f"{path} has the operation {node.get_type_name()}, whose constants cannot be listed",
                hint="export it with vitcompress",
            )
        if node.get_type_name() == "Constant":
            values, index = node.data, node.get_element_type().get_type_name() in INDEX
            place, size, name = values.ctypes.data, values.nbytes, node.get_friendly_name()
            own = 0 if place in places else size
            stored.append(Stored(name, tuple(values.shape), size, own, values.tobytes, index))
            places.add(place)
    size = path.stat().st_size + path.with_suffix(".bin").stat().st_size
    return Contents(tuple(stored), size, {**read_metadata(model), "precision": '"fp32"'})


OPENVINO = Exporter(
    "openvino",
    ".xml",
    export,
    OpenVinoRunner,
    uses=frozenset({"precision", "opset", "uint8"}),
    check_options=check_options,
    unavailable=unavailable,
    cannot_run=unavailable,
    contents=read_contents,
)
