"""The tests for GPUs, run with a simulated TensorRT and a simulated CUDA provider of ONNX Runtime."""

import pytest
import torch
from on_simulated_gpu import HERE, needs_onnx_on_cuda, python

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU: run the tests marked gpu")


@needs_onnx_on_cuda
def test_the_tests_for_gpus_pass() -> None:
    """All tests of simulated libraries; engines are measured with all settings at once."""
    files = (HERE.parent / "exporters/test_engines_on_a_gpu.py", HERE.parent / "exporters/test_onnx_providers.py")
    excluded = "rtx or settings0 or settings1 or settings2 or timing_cache"  # the last one builds three times
    selection = f"trt and not ({excluded}) or CUDAExecutionProvider"
    output = python("-m", "pytest", "-n0", "-rA", "-m", "gpu", "-k", selection, *files)
    assert output.count("PASSED") == 10 and "SKIPPED" not in output
