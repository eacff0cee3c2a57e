"""Simulate a GPU for torch and ONNX Runtime in every process that has this folder in its PYTHONPATH."""

import simulated_gpu
import simulated_provider

simulated_gpu.install()
simulated_provider.install()
