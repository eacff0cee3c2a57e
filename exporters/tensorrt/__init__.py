"""TensorRT and TensorRT for RTX engines: built from ONNX files, run in a process of their own."""
