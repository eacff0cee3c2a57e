"""A dry run ends as the run would begin: refused for what is missing, with a note on what it does not look at."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from command_line import begin, images, refused, tree
from tiny_study import TINY

from vitcompress import cli
from vitcompress.errors import WeightsError
from vitcompress.models.weights import check_hub

LATENCY = ["--set", "step.0.target=latency", "--set", "step.0.amount=0.5"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path / "home", monkeypatch)


def foreseen(code: int, *words: str) -> dict[str, Any]:
    """The JSON of a dry run that ends with `code`; nothing is written."""
    before = tree(Path())
    done = CliRunner().invoke(cli.main, [*words, "--dry-run", "--json"])
    assert done.exit_code == code, done.output
    assert tree(Path()) == before
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["--data", "nowhere"],
        ["--weights", "none.pth"],
        ["--weights", "hub"],  # 1000 classes
        ["--device", "cuda:99"],
        ["--out", "taken"],
        ["--set", "finetune.batch_size=5000"],
        ["--set", "finetune.teacher=deit_tiny_patch16_224"],  # from the hub, 1000 classes
        ["--set", "finetune.teacher=vit_tiny_patch16_224", "--set", "finetune.teacher_weights=none.pth"],
        pytest.param(["--export", "trt"], marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU")),
    ],
    ids=lambda words: " ".join(words),
)
def test_what_a_run_is_refused_for_ends_the_dry_run_alike(words: list[str]) -> None:
    Path("taken").mkdir()
    Path("taken", "thesis.txt").write_text("")
    arguments = ["recipe", "small.toml", *(["--set", "finetune.distillation=soft"] if "teacher" in words[-1] else [])]
    error = refused(*arguments, *words).splitlines()[0]
    found = foreseen(2, *arguments, *words)
    assert any(line.startswith(error) for line in found["missing"]), (error, found["missing"])


def test_what_is_fetched_or_not_looked_at_is_a_note() -> None:
    found = foreseen(0, "recipe", "small.toml", "--weights", "hub", "--set", "model.new_head=true")
    assert found["missing"] == [] and "fetched from timm's hub" in " ".join(found["notes"])
    assert foreseen(0, "recipe", "small.toml")["notes"] == []


def test_costs_can_be_asked_for_before_there_is_data() -> None:
    found = foreseen(0, "recipe", "deit_s_hetdpt")
    assert found["missing"] == [] and found["notes"][0] == "no data folder was given: give it with --data PATH"
    assert found["cost"]["compressed"]["params"] < found["cost"]["dense"]["params"]
    refused("recipe", "deit_s_hetdpt")


def test_a_latency_is_said_not_to_be_checked() -> None:
    (note,) = foreseen(0, "recipe", "digits_isomorphic", *LATENCY)["notes"]
    assert note.startswith("step 1 aims at 0.5 ms on onnxruntime, which is not checked")


def test_a_run_that_is_done_needs_nothing_more() -> None:
    images("pictures", each=10)
    words = ["recipe", "small.toml", "--data", "pictures", "--set", "bench.runtimes=[]", "--set", "export.formats=[]"]
    words += ["--set", "dense.batch_size=8", "--set", "finetune.batch_size=8"]
    assert CliRunner().invoke(cli.main, words).exit_code == 0
    shutil.rmtree("pictures")
    assert CliRunner().invoke(cli.main, words).exit_code == 0
    assert "all is done" in foreseen(0, *words)["notes"][0]
    assert "pictures" in foreseen(2, *words, "--fresh")["missing"][0]


def test_a_study_is_foreseen_alike() -> None:
    Path("tiny.toml").write_text(TINY)
    assert foreseen(0, "study", "tiny.toml")["missing"] == []
    words = ["study", "tiny.toml", "--set", "base.run.device=cuda:99"]
    found = foreseen(2, *words)
    assert found["missing"][0] in refused(*words)


def test_an_architecture_that_the_hub_has_no_weights_of_is_told_without_the_network() -> None:
    with pytest.raises(WeightsError, match="no weights of vit_small_patch16_18x2_224"):
        check_hub("vit_small_patch16_18x2_224", None, new_head=False)
    check_hub("deit_tiny_patch16_224", 1000, new_head=False)
