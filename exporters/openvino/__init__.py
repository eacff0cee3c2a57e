"""OpenVINO IR: converted from ONNX files, run on the CPU."""
