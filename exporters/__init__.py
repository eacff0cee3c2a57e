"""Exporters by format. To add one: a file beside this one, and a line in `EXPORTERS`."""

from vitcompress.exporters.artifact import Exported, Exporter
from vitcompress.exporters.onnx_graph import ONNX

EXPORTERS: dict[str, Exporter] = {"onnx": ONNX}

__all__ = ["EXPORTERS", "Exported", "Exporter"]
