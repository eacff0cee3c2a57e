"""ONNX files: written by torch's exporter, run by ONNX Runtime."""
