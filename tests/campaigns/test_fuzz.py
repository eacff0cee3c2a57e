"""A fuzzing campaign of 600 cases, in processes of its own. Longer ones are run by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the campaign forks processes and limits their memory")
def test_malformed_inputs_end_in_short_messages() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.campaigns.fuzz", "--cases", "600", "--jobs", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("600 of 600 clean\n"), f"{done.stdout}\n{done.stderr}"
