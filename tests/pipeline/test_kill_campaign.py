"""A few runs of the kill campaign, and what it must notice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from whole_runs import ENVIRONMENT

ROOT = Path(__file__).parents[2]
DAMAGE = """
import shutil, sys
from pathlib import Path
from tests.campaigns import kill
place, one = Path(sys.argv[1]), kill.Kill("random", 1, "SIGKILL", "change", 0.5)
whole = kill.run_whole(place / "whole", "random", 1)
shutil.copytree(place / "whole", place / "killed")
(place / "killed/run/.report.json.1.part").touch()
with (place / "killed/run/model.safetensors").open("r+b") as file:
    file.seek(-1, 2)
    last = file.read()
    file.seek(-1, 2)
    file.write(bytes([last[0] ^ 1]))
print("\\n".join(kill.problems(place / "killed", one, whole)))
"""


@pytest.mark.slow
def test_two_killed_runs_are_clean(tmp_path: Path) -> None:
    words = ("--runs", "2", "--recipes", "random", "--out", str(tmp_path / "result.json"))
    script = [sys.executable, "-W", "ignore", "-m", "tests.campaigns.kill", *words]
    done = subprocess.run(script, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "2 of 2 clean", done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert [one["exit_code"] != 0 and one["problems"] for one in result["results"]] == [[], []]


@pytest.mark.slow
def test_the_campaign_notices_changed_and_unfinished_files(tmp_path: Path) -> None:
    script = [sys.executable, "-W", "ignore", "-c", DAMAGE, str(tmp_path)]
    done = subprocess.run(script, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    for problem in ("model.safetensors is not that of", "['run/.report.json.1.part']", "verify ended with exit code 1"):
        assert problem in done.stdout
