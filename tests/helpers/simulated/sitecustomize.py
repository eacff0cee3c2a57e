"""Makes every process that has this folder in its PYTHONPATH believe in a GPU, for torch and for ONNX Runtime."""

import simulated_gpu
import simulated_provider

simulated_gpu.install()
simulated_provider.install()
