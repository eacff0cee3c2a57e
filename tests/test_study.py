"""Studies: ordinary runs side by side, continued when killed, measured together, compared with care."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from whole_runs import ENVIRONMENT

from vitcompress import cli, recipes, study
from vitcompress.bench import report as reports
from vitcompress.bench import study_pictures
from vitcompress.checkpoint import read_json
from vitcompress.errors import OutputError, RecipeError, VitcompressError
from vitcompress.pipeline.folder import sole_user
from vitcompress.study import results
from vitcompress.study.design import epochs_before_recovery, load_study

TINY = """
summary = "two rows"
epochs = 2

[speed]
protocol = "paper"
batch = 2
warmup = 1
runs = 3

[base]
data = { source = "digits" }
dense = { epochs = 1, batch_size = 64, lr = 2e-3 }
finetune = { batch_size = 64, lr = 1e-3, distillation = "soft", teacher = "dense" }
bench = { runtimes = [] }
export = { formats = [] }
run = { device = "cpu", threads = 1 }

[base.model]
name = "vit_tiny_patch16_224"
args = { img_size = 8, patch_size = 4, in_chans = 1, embed_dim = 16, depth = 2, num_heads = 2 }
weights = "train"

[options.random]
attention = 1

[[row]]
name = "control"
curve = "Control"
title = "dense, trained on"
step = [{ method = "fold" }]

[[row]]
name = "random_2"
curve = "random"
against = ["Control"]
title = "two layers at random"
step = [{ method = "random", pruned_layers = 2 }]
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study's file."""
    path = tmp_path_factory.mktemp("studies") / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="module")
def whole(tiny: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a study that was never stopped, and what it found."""
    folder = tiny.parent / "whole"
    return folder, study.run(load_study(str(tiny)), study.StudyOptions(folder, seeds=1))


def test_every_run_is_an_ordinary_run_folder(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, found = whole
    for run in found["runs"]:
        report = reports.read(folder / run["run"])
        assert report["verify"]["passed"] and report["accuracy"]["compressed"]["correct"] == run["correct"]
        assert report["cost"]["compressed"]["macs"] == run["macs"]
    assert len(list(folder.glob("dense-*"))) == 1  # trained once, shared
    assert found["rows"][0]["macs_ratio"] == 1 > found["rows"][1]["macs_ratio"] > 0.3
    assert found["rows"][0]["params"] == found["dense"]["cost"]["params"]


def test_the_control_differs_from_the_dense_model_by_its_training_alone(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = whole
    (dense,) = folder.glob("dense-*")
    control = folder / "control-seed0"
    assert read_json(control / "plan.json") == read_json(dense / "plan.json")
    assert (control / "model.safetensors").read_bytes() != (dense / "model.safetensors").read_bytes()


def test_speed_is_measured_in_one_go_and_once(tiny: Path, whole: tuple[Path, dict[str, Any]]) -> None:
    folder, found = whole
    assert [row["artifact"] for row in found["speed"]["rows"]] == ["dense", "control-seed0", "random_2-seed0"]
    assert {row["threads"] for row in found["speed"]["rows"]} == {1}
    assert found["speed"]["correct"] == {run["run"]: run["correct"] for run in found["runs"]}
    assert all(run["passed"] for run in found["runs"])
    assert found["runs"][1]["speedup"]["median"] == found["speed"]["ratios"][1]["median"]
    assert str(folder) not in (folder / "study.json").read_text()
    same = study.run(load_study(str(tiny)), study.StudyOptions(folder, seeds=1))
    assert same == found
    fewer = study.run(load_study(str(tiny), ["speed.runs=2"]), study.StudyOptions(folder, seeds=1))
    assert [row["runs"] for row in fewer["speed"]["rows"]] != [row["runs"] for row in found["speed"]["rows"]]
    again = study.run(load_study(str(tiny)), study.StudyOptions(folder, seeds=1, speed="again"))
    assert again["speed"] != found["speed"] and again["pairs"] == found["pairs"]


def test_mistakes_are_those_that_accuracy_counts(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, found = whole
    for run in found["runs"]:
        wrong = read_json(folder / run["run"] / "state" / "mistakes.json")
        assert len(wrong["compressed"]) == run["total"] - run["correct"]
        assert len(wrong["dense"]) == found["dense"]["seeds"][0]["total"] - found["dense"]["seeds"][0]["correct"]
    pair = found["pairs"][0]
    assert pair["only_row"] - pair["only_against"] == found["runs"][1]["correct"] - found["runs"][0]["correct"]


@pytest.mark.slow
def test_killed_and_started_again_ends_where_one_left_alone_does(
    tiny: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Two processes at a time, killed by SIGKILL when the second run is under way; its workers end too."""
    words = [sys.executable, "-m", "vitcompress", "study", str(tiny), "--out", str(tmp_path / "s"), "--seeds", "1"]
    words += ["--jobs", "2", "--speed", "later", "--json"]
    process = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    while not list(tmp_path.glob("s/*/state/recovery")) and process.poll() is None:
        time.sleep(0.005)
    assert process.poll() is None
    workers = children(process.pid)
    assert len(workers) >= 2
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 60
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, workers))
    assert not (tmp_path / "s" / "study.json").exists()
    words[words.index("--jobs") + 1] = "1"
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["speed"] is None and found["rows"][0]["speedup"] is None
    without = [{**run, "speedup": None} for run in whole[1]["runs"]]
    assert found["runs"] == without and found["pairs"] == whole[1]["pairs"]
    for name in ("control-seed0", "random_2-seed0"):
        weights = [(root / name / "model.safetensors").read_bytes() for root in (whole[0], tmp_path / "s")]
        assert weights[0] == weights[1]


def children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in listed.stdout.split()]


def alive(pid: int) -> bool:
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(listed.stdout.strip()) and not listed.stdout.strip().startswith("Z")


def test_runs_that_fail_do_not_keep_the_others_from_ending(tiny: Path, tmp_path: Path) -> None:
    loaded = load_study(str(tiny))
    first, second = loaded.rows
    broken = replace(first.recipe, dense=replace(first.recipe.dense, lr=1e30, clip_grad=None))  # type: ignore[arg-type]
    loaded = replace(loaded, rows=(replace(first, recipe=broken), second))
    with pytest.raises(VitcompressError, match=r"1 of 2 runs failed\n  .*control-seed0: .*(nan|inf)"):
        study.run(loaded, study.StudyOptions(tmp_path / "s", seeds=1, speed="later"))
    assert (tmp_path / "s" / "random_2-seed0" / "report.json").is_file()


# ------------------------------------------------------------------------------------------------------------ bad input


def said(*arguments: str) -> str:
    done = CliRunner().invoke(cli.main, ["study", *arguments, "--json"])
    assert done.exit_code == 2, done.output
    return str(json.loads(done.stdout)["error"])


def test_wrong_arguments_are_told_and_nothing_is_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said("digit") == "there is no study called 'digit', and no such file; nearest: digits"
    assert said(str(tiny), "--seeds", "0") == "seeds must be 1 or more, got 0"
    assert said(str(tiny), "--jobs", "0") == "jobs must be 1 or more, got 0"
    assert said(str(tiny), "--rows", "contol") == "the study has no row 'contol', did you mean control?"
    assert "speed.protocol" in said(str(tiny), "--set", "speed.protocol=often")
    assert "row random_2: pruned_layers is 9" in said(str(tiny), "--set", "row.1.step.0.pruned_layers=9")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("epochs = 2\n", "epochs = 1\n"), "row control: 1 epochs in all leave 0 for the recovery"),
        (("epochs = 2\n", ""), "epochs"),
        (('name = "random_2"', 'name = "control"'), "row control: there are two of this name"),
        (('name = "random_2"', 'name = "Random 2"'), "row[1].name"),
        (('["Control"]', '["Contrl"]'), "got 'Contrl', expected the curve of a row, did you mean Control?"),
        (("[options.random]", "[options.randm]"), "options.randm   no such method, did you mean random?"),
        (("attention = 1", "atention = 1"), "row random_2: step[0].atention"),
        (('distillation = "soft"', 'epochs = 3, distillation = "soft"'), "base.finetune.epochs"),
    ],
)
def test_mistakes_in_the_file_are_told(tiny: Path, tmp_path: Path, change: tuple[str, str], words: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(TINY.replace(*change))
    with pytest.raises(RecipeError) as caught:
        load_study(str(path))
    assert words in caught.value.message and "of the study" in caught.value.message


def test_a_folder_of_something_else_is_left_alone(
    tiny: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = whole
    other = tmp_path / "other.toml"
    other.write_text(TINY)
    with pytest.raises(OutputError, match="holds the study 'tiny', not 'other'"):
        study.run(load_study(str(other)), study.StudyOptions(folder, seeds=1))
    with pytest.raises(OutputError, match=r"holds a run of another recipe \(dense\.lr is 0\.002 there, 0\.003 here\)"):
        study.run(load_study(str(tiny), ["base.dense.lr=3e-3"]), study.StudyOptions(folder, seeds=1))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(OutputError, match="not empty and not the folder of a study"):
        study.run(load_study(str(tiny)), study.StudyOptions(tmp_path / "full", seeds=1))
    with sole_user(folder), pytest.raises(OutputError, match="another process is working in"):
        study.run(load_study(str(tiny)), study.StudyOptions(folder, seeds=1))


def test_runs_that_do_not_know_a_setting_yet_have_its_default(
    tiny: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = shutil.copytree(whole[0], tmp_path / "s")
    recipe = folder / "random_2-seed0" / "recipe.toml"
    text = recipe.read_text()
    recipe.write_text(text.replace('attention_bypass = "drop"\n', ""))
    assert recipe.read_text() != text
    again = study.run(load_study(str(tiny)), study.StudyOptions(folder, seeds=1))
    assert again["pairs"] == whole[1]["pairs"]
    recipe.write_text(text.replace('attention_bypass = "drop"', 'attention_bypass = "double"'))
    with pytest.raises(OutputError, match=r"attention_bypass is 'double' there, 'drop' here"):
        study.run(load_study(str(tiny)), study.StudyOptions(folder, seeds=1))


def test_a_dry_run_says_what_rows_cost_and_writes_nothing(tiny: Path, tmp_path: Path) -> None:
    found = study.dry_run(load_study(str(tiny)), study.StudyOptions(tmp_path / "s", seeds=2))
    assert found["runs"] == 4 and [row["row"] for row in found["rows"]] == ["control", "random_2"]
    assert found["rows"][0]["macs_ratio"] == 1 > found["rows"][1]["macs_ratio"] and found["missing"] == []
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------ shipped


@pytest.mark.parametrize("name", recipes.study_names())
def test_shipped_studies_give_every_row_the_same_training(name: str) -> None:
    loaded = load_study(name)
    assert {epochs_before_recovery(r.recipe) + r.recipe.finetune.epochs for r in loaded.rows} == {loaded.epochs}
    assert len({replace(r.recipe.finetune, epochs=1) for r in loaded.rows if r.recipe.finetune}) == 1
    assert len({(r.recipe.dense, r.recipe.data) for r in loaded.rows}) == 1
    opening = [line.removeprefix("#").strip() for line in recipes.study_text(name).splitlines() if line.startswith("#")]
    assert any(line.startswith(f"vitcompress study {name}") for line in opening)
    assert any(not row.against for row in loaded.rows)  # something that all else is held against


def test_tables_say_means_counts_and_verdicts(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, found = whole
    page = (folder / "study.md").read_text()
    right = found["runs"][1]["correct"]
    assert f"{right} of 540" in page and found["pairs"][0]["verdict"] in page and "McNemar" in page
    assert len(results.table(found).rows) == 3 and len(results.pair_table(found).rows) == 1
    bare = {**found, "speed": None, "rows": [{**row, "speedup": None} for row in found["rows"]]}
    assert {row[-1] for row in results.table(bare).rows} == {"not measured"}


def test_pictures_show_what_was_found(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, found = whole
    assert sorted(path.name for path in folder.glob("pictures/*")) == ["accuracy.png", "random-layers.png"]
    figure = study_pictures.accuracy_figure(found)
    assert [axes.get_xlabel() for axes in figure.axes] == [
        "MACs, share of the dense model's",
        "times as fast as the dense model",
    ]
    for axes, key in zip(figure.axes, ("macs_ratio", "speedup"), strict=True):
        drawn = {tuple(line.get_xydata()[0]) for line in axes.get_lines() if len(line.get_xydata()) == 1}
        assert {(row[key], 100 * row["top1_mean"]) for row in found["rows"]} <= drawn
    assert len(study_pictures.accuracy_figure({**found, "speed": None}).axes) == 1
