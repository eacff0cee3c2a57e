"""Two processes score, search and choose what one does."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed_methods import LR

from vitcompress.io.files import read_json

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "helpers" / "distributed_methods.py"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What one process and what two processes left."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    folder = tmp_path_factory.mktemp("worlds")
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folders = folder / "1", folder / "2"
    assert both(folders, "world.json") == (1, 2)
    return folders


def both(folders: tuple[Path, Path], name: str) -> tuple[Any, Any]:
    return read_json(folders[0] / name), read_json(folders[1] / name)


def test_entropy_sums_agree(folders: tuple[Path, Path]) -> None:
    """On the dense model: float64 sums over 30 images of terms of order 1 to 10, bootstrap included."""
    for name in ("te_activation_01.json", "te_attention_01.json"):
        one, two = both(folders, name)
        assert (one["images"], one["accuracy"], one["chosen"]) == (two["images"], two["accuracy"], two["chosen"])
        assert one["entropy"] == pytest.approx(two["entropy"], abs=1e-11)
        for a, b in zip(one["rows"], two["rows"], strict=True):
            assert a["transfer_entropy"] == pytest.approx(b["transfer_entropy"], abs=1e-11)
            assert a["deviation"] == pytest.approx(b["deviation"], abs=1e-11)


def test_scores_agree(folders: tuple[Path, Path]) -> None:
    """Scores are float32; AdamW moves them by about LR a step, 3 steps an epoch: a thousandth of that is allowed."""
    one, two = both(folders, "search_epochs.json")
    assert len(one) == len(two) == 4
    for a, b in zip(one, two, strict=True):
        allowed = 1e-3 * LR * 3 * (a["epoch"] + 1)
        assert a["scores"] == pytest.approx(b["scores"], abs=allowed)
        assert max(map(abs, a["scores"].values())) > 100 * allowed
        assert a["removed"] == b["removed"]


def test_chosen_layers_and_measured_rows_agree(folders: tuple[Path, Path]) -> None:
    one, two = both(folders, "choice.json")
    assert one == two
    assert len(one["attention"]) + len(one["activation"]) == 2
    names = sorted(path.name for path in folders[0].glob("*.json"))
    assert names == sorted(path.name for path in folders[1].glob("*.json"))
    for name in names:
        if name.startswith(("attention_", "activation_", "interleaved_")):
            one, two = both(folders, name)
            assert one == two


def test_gradients_add_up_to_the_same_widths(folders: tuple[Path, Path]) -> None:
    """Scores are sums of float32 products in another order, as gradients are; which channels stay is the same."""
    one, two = both(folders, "isomorphic/widths.json")
    for a, b in zip(one["rows"], two["rows"], strict=True):
        assert a.pop("scores") == pytest.approx(b.pop("scores"), rel=1e-3)
    assert one == two
