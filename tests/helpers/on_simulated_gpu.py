"""Run Python with a simulated GPU, in processes of their own, because parts of torch are replaced."""

import os
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest

needs_onnx_on_cuda = pytest.mark.skipif(
    "CUDAExecutionProvider" not in onnxruntime.get_available_providers(), reason="this ONNX Runtime is for the CPU only"
)
HERE = Path(__file__).parent
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(HERE / "simulated"), str(HERE), str(HERE.parents[1])]),
    "OMP_NUM_THREADS": "1",
}


def python(*words: str | Path) -> str:
    """The standard output of Python with the arguments `words`, which must succeed."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
