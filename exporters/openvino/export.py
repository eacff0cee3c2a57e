"""OpenVINO IR: `model.xml` with its weights in `model.bin`, converted from our ONNX file.

Weights stay uncompressed and apart, so that the file is the model to the last bit; what can be multiplied together,
OpenVINO multiplies when it loads the file. The precision is a hint for whoever runs the file, which changes the
arithmetic and not the weights: fp32, or bf16 and fp16 where the processor has them.
"""

import errno
import os
import shutil
from importlib import metadata, util
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

from torch import nn

from vitcompress.errors import InputError, first_line
from vitcompress.exporters.base import About, Exported, Exporter, recorded
from vitcompress.exporters.onnx import export as onnx_export
from vitcompress.exporters.openvino.library import core, load
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.sidecar import sidecar_path
from vitcompress.io.files import write
from vitcompress.io.progress import Progress

INFO = "vitcompress"  # where the IR keeps what its user must know
HINTS = ("fp32", "fp16", "bf16")
REASON = "decomposed attention, which OpenVINO fuses when it loads the file, at any widths of q/k and v"
SMALL = 2**16  # bytes left on a disk from which it is called full
REMEDY = "pip install 'vitcompress[openvino]'"


def unavailable() -> str | None:
    """Why OpenVINO cannot be used here, None when it can."""
    return None if util.find_spec("openvino") else f"openvino is not installed ({REMEDY})"


def export(
    model: nn.Module,
    path: Path,
    *,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
    **about: Unpack[About],
) -> Exported:
    """Write `model` to `path` (.xml), its weights beside it (.bin) and its sidecar; on failure nothing is left behind.

    It takes and gives what the ONNX file does; see `onnx_graph.export`. The metadata lie in the IR's `rt_info` too.

    Raises:
        InputError: options that are not offered, or a `path` that does not end in .xml.
        OutputError: the folder cannot be written.
    """
    options = options or ExportOptions()
    check(options)
    path = Path(path)
    if path.suffix != ".xml":
        raise InputError(f"an OpenVINO model is an .xml file, got {path.name}", hint="name it model.xml, say")
    with TemporaryDirectory(prefix="vitcompress-") as folder:
        stored = ExportOptions(opset=options.opset, uint8=options.uint8)
        source = onnx_export.export(
            model,
            Path(folder) / f"{path.stem}.onnx",
            options=stored,
            reason=REASON,
            **about,
        )
        known = {**source.metadata, "precision": f'"{options.precision}"'}
        files = _convert(source.path, path, known)
    return recorded(
        path,
        files,
        format="openvino",
        precision=options.precision,
        opset=source.opset,
        opset_reason=source.opset_reason,
        metadata=known,
        source={"name": source.path.name, "sha256": source.sha256},
        build={"runtime": "openvino", "runtime_version": metadata.version("openvino"), "weights": "fp32"},
    )


def check(options: ExportOptions) -> None:
    """Raise InputError for a precision that is no hint of OpenVINO's, or an opset that ONNX does not offer."""
    if options.precision not in HINTS:
        raise InputError(f"OpenVINO has no precision {options.precision!r} here", hint=f"use one of {', '.join(HINTS)}")
    onnx_export.check(ExportOptions(opset=options.opset))


def _convert(source: Path, path: Path, known: dict[str, str]) -> tuple[str, str]:
    """Convert beside `path`, then move the weights and the graph into place."""
    weights = path.with_suffix(".bin")

    def fill(beside: Path) -> None:
        with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", suffix=".part") as folder:
            made = Path(folder) / path.name
            converted: Any = core().read_model(str(source))  # convert_model would multiply LayerScales into biases
            for key, value in known.items():
                converted.set_rt_info(value, [INFO, key])
            _save(converted, made)
            sidecar_path(path).unlink(missing_ok=True)  # it describes the files that are about to go
            write(weights, made.with_suffix(".bin").replace)
            made.replace(beside)

    write(path, fill)
    return path.name, weights.name


def _save(converted: Any, path: Path) -> None:
    """Raises OSError where OpenVINO only says that a stream failed."""
    try:
        load().save_model(converted, str(path), compress_to_fp16=False)
    except RuntimeError as error:
        full = shutil.disk_usage(path.parent).free < SMALL
        number = errno.ENOSPC if full else errno.EIO
        raise OSError(number, os.strerror(number) if full else first_line(error)) from None


OPENVINO = Exporter(
    "openvino",
    ".xml",
    export,
    uses=frozenset({"precision", "opset", "uint8"}),
    refuse=check,
    unavailable=unavailable,
    cannot_run=unavailable,
)
