"""Runtimes that report imports, conversions and runs to their vendors do not do so when used by vitcompress."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitcompress.exporters.runtimes import EXPORTERS

SETTINGS = {"CI", "TF_BUILD", "JENKINS_URL", "ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME"}  # disable or redirect telemetry
FORMATS = {"onnx": "onnxruntime", "openvino": "openvino"}
SCRIPT = """
import sys, torch
from pathlib import Path
from contracts import build
from vitcompress.exporters.runtimes import EXPORTERS
from vitcompress.exporters.runtimes import open_runner
from vitcompress.models.create import input_config

model = build("plain").float()
for name in sys.argv[2:]:
    path = Path(sys.argv[1], f"model{EXPORTERS[name].suffix}")
    EXPORTERS[name].export(model, path, input=input_config(model))
    open_runner(path)(torch.zeros(1, 3, 8, 8))
"""


def files_in_home(home: Path, code: str, *arguments: str) -> list[str]:
    """The files that a process writes to its user's home, except torch's."""
    home.mkdir()
    kept = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    environment = {**kept, "HOME": str(home), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [str(path.relative_to(home)) for path in home.rglob("*") if path.is_file() and "torch" not in str(path)]


@pytest.mark.skipif(sys.platform != "linux", reason="their files are known on Linux only")
def test_no_identifier_is_written_and_nothing_is_stored_for_sending(tmp_path: Path) -> None:
    names = [name for name in FORMATS if EXPORTERS[name].unavailable() is None]
    if not files_in_home(tmp_path / "theirs", f"import {', '.join(FORMATS[name] for name in names)}"):
        pytest.skip("these versions do not report imports")
    assert files_in_home(tmp_path / "ours", SCRIPT, str(tmp_path), *names) == []
