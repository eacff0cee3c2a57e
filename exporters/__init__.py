"""Exporters by format. To add one: a file beside this one, and a line in `EXPORTERS`."""

from vitcompress.exporters.artifact import Exporter
from vitcompress.exporters.onnx_graph import ONNX
from vitcompress.exporters.openvino_ir import OPENVINO
from vitcompress.exporters.tensorrt_engine import TENSORRT, TENSORRT_RTX

EXPORTERS: dict[str, Exporter] = {exporter.name: exporter for exporter in (ONNX, OPENVINO, TENSORRT, TENSORRT_RTX)}
