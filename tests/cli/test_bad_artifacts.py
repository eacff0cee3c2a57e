"""Machines, files and folders that a command cannot use, and Ctrl-C: one message and an exit code."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from command_line import begin, copy_run, expect_error, images
from whole_runs import ARCH

from vitcompress import cli
from vitcompress.cli.output import terminal
from vitcompress.errors import InputError
from vitcompress.models.checkpoint import load_model
from vitcompress.plan import Plan
from vitcompress.training import data
from vitcompress.verify.folder import verify_folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path / "home", monkeypatch)


@pytest.fixture
def folder(small_run: Path, home: None) -> Path:
    """A finished run without training, in the working folder."""
    return copy_run(small_run)


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "sklearn"] + ["sklearn"]:
        monkeypatch.setitem(sys.modules, name, None)
    data._built_in.cache_clear()
    message = expect_error("recipe", "small.toml")
    assert "scikit-learn" in message and "vitcompress[demo]" in message


def test_only_signing_needs_the_extra_for_signatures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"] + ["cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "vitcompress.io.signature", raising=False)
    Path("key").write_text("")
    message = expect_error("export", "run", "--sign", "key")
    assert "cryptography" in message and "vitcompress[sign]" in message
    result = CliRunner().invoke(cli.main, ["export", "run", "--json"])
    assert result.exit_code == 0, result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("command", [("recipe", "small.toml"), ("bench", f"timm:{ARCH}"), ("bench", "run/model.onnx")])
def test_a_missing_gpu(command: tuple[str, ...], folder: Path) -> None:
    message = expect_error(*command, "--device", "cuda")
    assert "cuda" in message.lower() and "cpu" in message.lower()


def test_an_unknown_device() -> None:
    assert "tpu" in expect_error("recipe", "small.toml", "--device", "tpu")


@pytest.mark.parametrize("command", [("bench",), ("evaluate", "--data", "digits")], ids=["bench", "evaluate"])
def test_an_onnx_file_that_is_not_one(command: tuple[str, ...]) -> None:
    Path("model.onnx").write_text("this is not a graph")
    assert "model.onnx" in expect_error(command[0], "model.onnx", *command[1:])
    Path("model.engine").write_text("neither is this")
    assert "engine" in expect_error(command[0], "model.engine", *command[1:])


def edited(folder: Path, **changes: Any) -> None:
    path = folder / "plan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"removed": {"blocks.0.attn": "droop"}}, "droop"),
        ({"remove": {}}, "did you mean removed?"),
        ({"removed": {"blocks.0.attn": "drop", "blocks.1.attn": "drop", "blocks.2.attn": "drop"}}, "plan"),
        ({"arch": "resnet18"}, "plan"),
        ({"format": 2}, "format"),
    ],
    ids=["replacement", "key", "other layers", "architecture", "format"],
)
def test_a_plan_edited_by_hand(changes: dict[str, Any], sentence: str, folder: Path) -> None:
    edited(folder, **changes)
    assert "plan.json" in expect_error("bench", "run")
    (folder / "manifest.json").unlink()
    for command in (("bench", "run"), ("evaluate", "run", "--data", "digits"), ("export", "run")):
        assert sentence in expect_error(*command), command
    with pytest.raises(InputError) as caught:
        verify_folder(folder, adopt=True)
    assert sentence in f"{caught.value.message} {caught.value.hint}" and not (folder / "verify.json").exists()


def test_an_evaluation_on_images_of_other_classes(folder: Path) -> None:
    images("pictures")
    message = expect_error("evaluate", str(folder), "--data", "pictures")
    assert "10 classes" in message and "the data has 2" in message


def test_a_folder_that_is_not_a_run_folder() -> None:
    Path("empty").mkdir()
    for command in ("verify", "export", "report", "bench"):
        assert "empty" in expect_error(command, "empty")


def test_ctrl_c_at_each_stage_and_the_same_command_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    announce = terminal.ConsoleProgress.stage

    def stage(self: terminal.ConsoleProgress, title: str) -> None:
        announce(self, title)
        if title not in seen:
            seen.append(title)
            raise KeyboardInterrupt

    monkeypatch.setattr(terminal.ConsoleProgress, "stage", stage)
    for _ in range(40):
        result = CliRunner().invoke(cli.main, ["recipe", "small.toml", "--out", "run"])
        if result.exit_code != 130:
            break
        assert result.stderr.splitlines()[-1] == "stopped; the same command continues" and result.stdout == ""
        assert "Traceback" not in result.stderr and "╭" not in result.stderr
        assert not [path for path in Path().rglob("*") if ".part" in path.name]
    assert result.exit_code == 0, result.output
    assert len(seen) >= 6, seen
    assert load_model("run").plan == Plan.from_json(Path("run/plan.json").read_text())


@pytest.mark.parametrize("command", ["verify", "export"])
def test_a_file_instead_of_its_run_folder(command: str, folder: Path) -> None:
    message = expect_error(command, str(folder / "model.onnx"))
    assert "is a file" in message and f"use its folder: {folder}" in message


@pytest.mark.parametrize("name", ["model.engine", "model.txt", "model"])
def test_a_name_for_another_format_is_rejected_before_anything_is_built(name: str, folder: Path) -> None:
    message = expect_error("export", str(folder), "--out", name)
    assert "end in .onnx" in message and "--out model.onnx" in message


def test_what_is_not_there_is_reported_before_what_the_data_lacks(folder: Path) -> None:
    assert "nofile.onnx" in expect_error("evaluate", "nofile.onnx")
    assert "none.json does not exist" in expect_error("evaluate", str(folder), "--bench", "none.json")


def test_a_model_of_timm_without_its_prefix() -> None:
    assert f" timm:{ARCH}" in expect_error("bench", ARCH)


@pytest.mark.parametrize("prefix", ["timm:", "timm-onnx:"])
def test_a_model_of_timm_that_takes_no_images(prefix: str) -> None:
    assert "timm has no model ''" in expect_error("bench", prefix)
    assert "rejects images of (3, 8, 8)" in expect_error("bench", f"{prefix}{ARCH}?img_size=8")
