"""The tests for GPUs, run where there is none: on stand-ins for TensorRT and the CUDA provider of ONNX Runtime."""

import pytest
import torch
from on_simulated_gpu import HERE, python

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU: run the tests marked gpu")


def test_the_tests_for_gpus_pass() -> None:
    """Those of what there is a stand-in for, engines measured with all settings at once."""
    files = (HERE.parent / "exporters/test_engines_on_a_gpu.py", HERE.parent / "exporters/test_onnx_providers.py")
    left_out = " or ".join(("rtx", "settings0", "settings1", "settings2", "kernels"))  # the last one builds three times
    those = f"trt and not ({left_out}) or CUDAExecutionProvider"
    said = python("-m", "pytest", "-n0", "-rA", "-m", "gpu", "-k", those, *files)
    assert said.count("PASSED") == 8 and "SKIPPED" not in said
