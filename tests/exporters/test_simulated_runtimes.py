"""The tests for GPUs, run with a simulated TensorRT and a simulated CUDA provider of ONNX Runtime."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from on_simulated_gpu import ENVIRONMENT, HERE, needs_onnx_on_cuda, python

from vitcompress.io.signature import generate_key
from vitcompress.models.checkpoint import write_model
from vitcompress.models.create import create_model
from vitcompress.plan import Plan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU: run the tests marked gpu")


@needs_onnx_on_cuda
def test_the_tests_for_gpus_pass() -> None:
    """All tests of simulated libraries; engines are measured with all settings at once."""
    files = (HERE.parent / "exporters/test_engines_on_a_gpu.py", HERE.parent / "exporters/test_onnx_providers.py")
    excluded = "rtx or settings0 or settings1 or settings2 or timing_cache"  # the last one builds three times
    selection = f"trt and not ({excluded}) or CUDAExecutionProvider"
    output = python("-m", "pytest", "-n0", "-rA", "-m", "gpu", "-k", selection, *files)
    assert output.count("PASSED") == 10 and "SKIPPED" not in output


def test_an_engine_that_was_not_built_as_requested_is_neither_verified_nor_signed(tmp_path: Path) -> None:
    """The simulated library reports layers in fp16, whatever was requested."""
    arch, args = "vit_tiny_patch16_224", {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2}
    write_model(tmp_path / "run", create_model(arch, args), Plan(arch, args))
    generate_key(tmp_path / "key")
    words = ["export", tmp_path / "run", "--format", "trt", "--sign", tmp_path / "key", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "vitcompress", *words], env=ENVIRONMENT, capture_output=True, text=True
    )
    result = json.loads(done.stdout)
    assert done.returncode == 1 and [c["name"] for c in result["build"]["truth"] if c["verdict"] == "failed"]
    assert (result["verdict"], result["verified"]) == ("failed", False)
    assert all(check["verdict"] != "failed" for check in result["checks"])  # its outputs agree
    assert not list(tmp_path.glob("run/*.dsse"))
