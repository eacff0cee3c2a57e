"""A whole recipe: the files that it writes, and that nothing is done twice."""

import json
import shlex
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import whole_runs as world
from torch import nn
from whole_runs import LOGITS, SMALL, digits, logits, onnx_logits, tree

from vitcompress.io.files import read_json
from vitcompress.models.checkpoint import load_model
from vitcompress.models.cost import count_cost
from vitcompress.models.create import create_model, input_config
from vitcompress.pipeline.job import RunOptions
from vitcompress.pipeline.run import RunResult, run_recipe
from vitcompress.plan import Plan
from vitcompress.training.data import open_data
from vitcompress.training.metrics import random_images
from vitcompress.training.options import DataOptions
from vitcompress.verify.outputs import Original

# Keys of report.json, as bench/report.py explains them.
KEYS = {"recipe", "summary", "model", "plan", "plan_sha256", "cost", "accuracy", "before_recovery", "bench", "files"}
KEYS |= {"tables", "verify", "widths", "folding", "searched", "layers", "teacher", "published", "notes"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def finished(home: Path) -> tuple[RunResult, world.RecordedProgress]:
    """A whole run in home/run."""
    return world.run(home)


# ---------------------------------------------------------------------------------------------------------- a whole run


@pytest.mark.slow
def test_a_run_writes_all_files_of_a_run_folder(home: Path, finished: tuple[Any, Any]) -> None:
    folder = finished[0].folder
    assert folder == home / "run" and finished[0].passed
    files = {path.name for path in folder.iterdir()} - {"tensorboard", "warnings.log"}
    exported = {"dense.onnx", "dense.onnx.json", "model.onnx", "model.onnx.json"}
    reports = {
        "verify.json",
        "bench.json",
        "report.json",
        "report.md",
        "report.html",
        "manifest.json",
        "log.jsonl",
        "state",
    }
    assert files == {"recipe.toml", "plan.json", "model.safetensors"} | exported | reports
    assert read_json(folder / "verify.json")["passed"] is True
    stages = {json.loads(line)["stage"] for line in (folder / "log.jsonl").read_text().splitlines()}
    assert {"recovery", "step-0-hetdpt/search", "step-0-hetdpt/attention_01"} <= stages
    assert not [path for path in home.rglob("*") if path.name.endswith(".part")]
    again = world.recipe(home / "copy", text=(folder / "recipe.toml").read_text())
    assert again == world.recipe(home)


@pytest.mark.slow
def test_the_report_agrees_with_the_folder(finished: tuple[Any, Any]) -> None:
    folder, report = finished[0].folder, finished[0].report
    assert set(report) >= KEYS and report == read_json(folder / "report.json")
    plan = Plan.from_json((folder / "plan.json").read_text())
    assert report["plan"] == json.loads(plan.to_json()) and report["plan_sha256"] == plan.digest
    assert len(plan.removed) == 2 and len(report["model"]["classes"]) == 10
    dense, compressed = create_model(plan.arch, plan.arch_args), load_model(folder)
    for name, model in (("dense", dense), ("compressed", compressed)):
        assert report["cost"][name] == vars(count_cost(model, (1, 8, 8)))
    assert report["cost"]["compressed"]["macs"] < report["cost"]["dense"]["macs"]
    assert report["files"] == {name: (folder / name).stat().st_size for name in ("dense.onnx", "model.onnx")}
    assert [entry["rows"][0]["runtime"] for entry in report["bench"]] == ["onnxruntime", "torch"]
    for row in (row for entry in report["bench"] for row in entry["rows"]):
        assert (row["batch"], row["warmup"], row["runs"]) == (2, 1, 3) and sum(map(len, row["samples_ms"])) == 3
    assert (report["layers"], report["teacher"]) == ("search", "dense")
    assert "vit_tiny_patch16_224" in report["searched"] and report["verify"]["passed"]


@pytest.mark.slow
def test_accuracy_is_counted_on_the_test_images(finished: tuple[Any, Any]) -> None:
    folder, accuracy = finished[0].folder, finished[0].report["accuracy"]
    test = open_data(DataOptions(), 0).test
    model = load_model(folder)
    images = random_images(test, input_config(model), len(test), seed=0)
    right = int((logits(model, images).argmax(1) == torch.from_numpy(test.labels)).sum())
    assert accuracy["compressed"]["total"] == accuracy["dense"]["total"] == len(test) >= 500
    assert accuracy["compressed"]["correct"] == accuracy["model.onnx"]["correct"] == right > len(test) / 5
    gained = accuracy["mcnemar"]["only_b"] - accuracy["mcnemar"]["only_a"]
    assert gained == accuracy["compressed"]["correct"] - accuracy["dense"]["correct"]


@pytest.mark.slow
def test_the_loaded_model_is_the_exported_one(finished: tuple[Any, Any]) -> None:
    folder = finished[0].folder
    model = load_model(folder)
    images = digits(model)
    outputs = logits(model, images)
    scale = max(1.0, float(outputs.abs().max()))
    assert float((outputs - onnx_logits(folder / "model.onnx", images)).abs().max()) <= LOGITS * scale
    assert float((outputs - onnx_logits(folder / "dense.onnx", images)).abs().max()) > 100 * LOGITS * scale


# -------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.slow
def test_a_finished_run_is_not_repeated(home: Path, finished: tuple[Any, Any]) -> None:
    before = tree(home)
    result, progress = world.run(home)
    assert tree(home) == before and progress.stages == []
    assert result == finished[0] and [note for note in progress.notes if note.startswith("all is done")]


@pytest.mark.slow
def test_a_lost_report_is_written_again_without_training(home: Path, finished: tuple[Any, Any]) -> None:
    before = tree(home / "run")
    (home / "run" / "report.json").unlink()
    result, progress = world.run(home)
    assert result.report == finished[0].report and progress.stages == []
    changed = {name for name, when in tree(home / "run").items() if before.get(name) != when}
    changed -= {"state/.lock", "warnings.log"}  # of some versions of filelock, and of libraries that warn
    assert changed == {"report.json", "report.md", "report.html", "manifest.json"}


@pytest.mark.slow
def test_recipes_that_train_the_same_dense_model_share_it(home: Path, finished: tuple[Any, Any]) -> None:
    (folder,) = home.glob("dense-*")
    before = tree(folder)
    # SMALL trains its dense model for one epoch, the whole run for two; the rest of [dense] is the same.
    sets = (*world.BARE, "dense.epochs=2")
    other = world.recipe(home / "recipes", *sets, text=SMALL)
    progress = world.RecordedProgress()
    result = run_recipe(other, RunOptions(out=home / "second"), progress)
    assert [note for note in progress.notes if note.startswith("dense model: already done")]
    assert tree(folder) == before and list(home.glob("dense-*")) == [folder]
    assert result.report["layers"] == "chance" and result.report["searched"] is None
    assert result.report["files"] == {} and [e["rows"][0]["runtime"] for e in result.report["bench"]] == ["torch"]


@pytest.mark.parametrize("name", ["runs", "my runs", "it's mine"])
def test_commands_quote_the_name_of_the_folder(name: str, tmp_path: Path) -> None:
    """Once, also after the folder was moved."""
    before, after = tmp_path / name, tmp_path / "the other"
    command = Original(nn.Identity(), torch.zeros(1)).not_run("agreement", before / "model.engine", "").to_dict(before)
    assert command["command"] == "vitcompress verify DIR"
    result = RunResult(after, cast(Any, {"verify": {"checks": [command]}}))
    assert [shlex.split(check["command"] or "") for check in result.pending] == [["vitcompress", "verify", str(after)]]
