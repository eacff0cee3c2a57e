"""A few runs of the kill campaign, and what it must notice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from whole_runs import ENVIRONMENT

ROOT = Path(__file__).parents[2]
# The campaign, and in the same process the check of a run with a damaged file and an unfinished one.
SCRIPT = """
import shutil, sys
from pathlib import Path
from tests.campaigns import kill
place, one = Path(sys.argv[1]), kill.Kill("random", 1, "SIGKILL", "change", 0.5)
words = ["--runs", "2", "--recipes", "random", "--work", str(place / "work"), "--out", str(place / "result.json")]
code = kill.main(words)
whole = kill.Whole(place / "work/random-1/whole", 0.0, 0.0, 0)
shutil.copytree(whole.place, place / "killed")
(place / "killed/run/.report.json.1.part").touch()
with (place / "killed/run/model.safetensors").open("r+b") as file:
    file.seek(-1, 2)
    last = file.read()
    file.seek(-1, 2)
    file.write(bytes([last[0] ^ 1]))
(place / "problems.txt").write_text("\\n".join(kill.problems(place / "killed", one, whole)))
sys.exit(code)
"""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder of `SCRIPT`, and how it ended."""
    folder = tmp_path_factory.mktemp("kill")
    script = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(folder)]
    return folder, subprocess.run(script, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_two_killed_runs_are_clean(campaign: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = campaign
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "2 of 2 clean", done.stdout + done.stderr
    result = json.loads((folder / "result.json").read_text())
    assert [one["exit_code"] != 0 and one["problems"] for one in result["results"]] == [[], []]


@pytest.mark.slow
def test_the_campaign_notices_changed_and_unfinished_files(
    campaign: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    noticed = (campaign[0] / "problems.txt").read_text()
    for problem in ("model.safetensors is not that of", "['run/.report.json.1.part']", "verify ended with exit code 1"):
        assert problem in noticed
