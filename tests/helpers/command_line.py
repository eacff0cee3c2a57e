"""The command line in a working folder with a recipe `small.toml` that runs in seconds."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from whole_runs import SMALL

from vitcompress import cli

# The recipe of whole_runs, with one runtime.
RECIPE = SMALL.replace("runs = 3", 'runs = 3\nruntimes = ["onnxruntime"]')


def begin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a new `folder` that holds small.toml."""
    folder.mkdir()
    (folder / "small.toml").write_text(RECIPE)
    monkeypatch.chdir(folder)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def expect_error(*arguments: str, code: int = 2) -> str:
    """Message and hint of a command that must fail with `code` and write nothing."""
    assert not Path("pyproject.toml").exists(), "other tests may write in the folder of the code"
    before = tree(Path())
    result = CliRunner().invoke(cli.main, [*arguments, "--json"])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.stderr and "bug in vitcompress" not in result.stdout
    assert tree(Path()) == before, "something was written"
    data = json.loads(result.stdout)
    return f"{data['error']}\n{data['hint'] or ''}"


def recipe_with(old: str, new: str) -> str:
    assert old in RECIPE
    Path("changed.toml").write_text(RECIPE.replace(old, new))
    return "changed.toml"


def images(folder: str, classes: int = 2, each: int = 6) -> None:
    for split in ("train", "val"):
        for label in range(classes):
            place = Path(folder, split, f"class{label}")
            place.mkdir(parents=True)
            for number in range(each):
                pixels = np.full((8, 8), 20 * number + label, np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")


def finish_run() -> Path:
    """Run small.toml without training."""
    result = CliRunner().invoke(cli.main, ["recipe", "small.toml", "--structure-only", "--out", "run", "--json"])
    assert result.exit_code == 0, result.output
    return Path("run")


def copy_run(small_run: Path) -> Path:
    """A finished run without training in the working folder: a copy of the fixture `small_run`."""
    return Path(shutil.copytree(small_run, "run"))
