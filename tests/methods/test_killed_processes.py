"""Work that two processes share ends, killed on the way and started again, bit for bit where it ends without."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import killed_processes
import pytest

from vitcompress.io.files import read_json
from vitcompress.io.tensors import load_tensors

pytestmark = pytest.mark.slow
ENDS = {"training": "trained.safetensors", "exploration": "exploration.json", "scoring": "kept.json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    script = [sys.executable, killed_processes.__file__, str(folder)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


CASES = [(work.__name__, case) for work, cases in killed_processes.CASES.items() for case in cases]


@pytest.mark.parametrize(("work", "case"), CASES)
def test_killed_and_started_again_is_never_killed(folder: Path, work: str, case: str) -> None:
    whole, resumed = folder / work / "whole", folder / work / case
    begun = (folder / work / f"{case}.txt").read_text()
    assert ENDS[work] not in begun, "killed too late"
    assert ("state.safetensors" if work != "scoring" else ".json") in begun, "killed before anything was reached"
    names = [path.relative_to(whole) for path in whole.rglob("*") if path.suffix in (".json", ".safetensors")]
    assert {str(name) for name in names} >= {ENDS[work]}
    for name in names:
        if name.name == "state.safetensors":  # with seconds
            continue
        if name.suffix == ".safetensors":
            first, second = load_tensors(whole / name), load_tensors(resumed / name)
            assert first.keys() == second.keys()
            assert all(first[key].equal(second[key]) for key in first), name
        else:
            assert untimed(whole / name) == untimed(resumed / name), name


def untimed(path: Path) -> Any:
    data = read_json(path)
    return {key: value for key, value in data.items() if "seconds" not in key} if isinstance(data, dict) else data
