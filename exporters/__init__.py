"""Exporters by format. To add one: a file beside this one, and a line in `EXPORTERS`."""

from vitcompress.export_options import ExportOptions
from vitcompress.exporters.artifact import Exported, Exporter
from vitcompress.exporters.onnx_graph import ONNX

EXPORTERS: dict[str, Exporter] = {"onnx": ONNX}

__all__ = ["EXPORTERS", "ExportOptions", "Exported", "Exporter"]
