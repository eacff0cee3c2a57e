"""Exporters by format. To add one: a file beside this one, and a line in `EXPORTERS`."""

from vitcompress.errors import InputError, did_you_mean
from vitcompress.exporters.base import Exporter
from vitcompress.exporters.onnx.export import ONNX
from vitcompress.exporters.openvino.export import OPENVINO
from vitcompress.exporters.tensorrt.export import TENSORRT, TENSORRT_RTX

EXPORTERS: dict[str, Exporter] = {exporter.name: exporter for exporter in (ONNX, OPENVINO, TENSORRT, TENSORRT_RTX)}


def available_exporter(name: str, *, hint: str) -> Exporter:
    """The exporter of the format `name`.

    Raises:
        InputError: there is no such format, or this machine cannot write it; `hint` says what to do then.
    """
    if name not in EXPORTERS:
        raise InputError(
            f"there is no export format {name!r}{did_you_mean(name, EXPORTERS)}",
            hint=f"the formats are {', '.join(EXPORTERS)}",
        )
    if reason := EXPORTERS[name].unavailable():
        raise InputError(f"{name} cannot be exported on this machine: {reason}", hint=hint)
    return EXPORTERS[name]
