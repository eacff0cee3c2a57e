"""Makes every process that has this folder in its PYTHONPATH believe in a GPU, for torch and for ONNX Runtime."""

import pretended_gpu
import pretended_provider

pretended_gpu.install()
pretended_provider.install()
