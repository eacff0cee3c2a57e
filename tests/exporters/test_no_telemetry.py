"""Runtimes that report to their makers what is imported, converted and run do not do so on our behalf."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitcompress.exporters import EXPORTERS

SETTINGS = {"CI", "TF_BUILD", "JENKINS_URL", "ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME"}  # keep them still, or elsewhere
FORMATS = {"onnx": "onnxruntime", "openvino": "openvino"}
OURS = """
import sys, torch
from pathlib import Path
from contracts import build
from vitcompress.exporters import EXPORTERS
from vitcompress.exporters.runtimes import open_runner
from vitcompress.models.create import input_config

model = build("plain").float()
for name in sys.argv[2:]:
    path = Path(sys.argv[1], f"model{EXPORTERS[name].suffix}")
    EXPORTERS[name].export(model, path, input=input_config(model))
    open_runner(path)(torch.zeros(1, 3, 8, 8))
"""


def left_in_the_home(home: Path, code: str, *arguments: str) -> list[str]:
    """The files that a process has left in its user's home, apart from torch's."""
    home.mkdir()
    kept = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    environment = {**kept, "HOME": str(home), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [str(path.relative_to(home)) for path in home.rglob("*") if path.is_file() and "torch" not in str(path)]


@pytest.mark.skipif(sys.platform != "linux", reason="where they write is known of Linux")
def test_no_identifier_is_made_and_nothing_is_kept_to_be_sent(tmp_path: Path) -> None:
    names = [name for name in FORMATS if EXPORTERS[name].unavailable() is None]
    if not left_in_the_home(tmp_path / "theirs", f"import {', '.join(FORMATS[name] for name in names)}"):
        pytest.skip("these versions tell nobody of being imported")
    assert left_in_the_home(tmp_path / "ours", OURS, str(tmp_path), *names) == []
