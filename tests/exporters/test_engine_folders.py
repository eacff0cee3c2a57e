"""Run folders with an engine in them: what can be told of it without running it, and wrong wishes for one."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from vitcompress import checkpoint, models, surgery
from vitcompress.cli import main
from vitcompress.exporters import EXPORTERS
from vitcompress.plan import Plan
from vitcompress.verify import verify_folder

pytest.importorskip("tensorrt_rtx", reason="no such library for this platform")
TENSORRT_RTX = EXPORTERS["trt-rtx"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run folder with an engine in it that the command line has exported."""
    arch = "vit_tiny_patch16_224"
    args = {
        "img_size": 8,
        "patch_size": 4,
        "in_chans": 1,
        "embed_dim": 16,
        "depth": 2,
        "num_heads": 2,
        "num_classes": 3,
    }
    plan, made = Plan(arch, args, removed={"blocks.1.attn": "drop"}), tmp_path_factory.mktemp("run") / "run"
    checkpoint.save_model(made, surgery.applied(models.create(arch, args), plan), plan)
    words = ["export", str(made), "--format", "trt-rtx", "--precision", "fp16", "--sm", "89", "--batch", "1:2:4"]
    done = CliRunner().invoke(main, [*words, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["path"], found["verified"], found["build"]["sm"]) == ("model-fp16.rtx.engine", False, [89])
    if TENSORRT_RTX.cannot_run():
        assert found["verdict"] == "not_run" and "verify" in found["checks"][-1]["command"]
    return made


def test_what_can_be_told_of_an_engine_without_running_it_is_verified(folder: Path) -> None:
    found = {check.name: check for check in verify_folder(folder).checks}
    engine = "model-fp16.rtx.engine"
    expected = {f"{engine}.file", f"{engine}.source", f"{engine}.source.batch5", f"{engine}.source.plan"}
    assert {name for name in expected if found[name].verdict != "passed"} == set()


@pytest.mark.parametrize(
    ("damaged", "fails"),
    [
        ("model-fp16.rtx.engine", {"file"}),
        ("model-fp16.rtx.engine.json", {"file"}),
        ("model-fp16.rtx.engine.onnx.json", {"source.file"}),
    ],
)
def test_a_damaged_engine_fails_verification(damaged: str, fails: set[str], folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "run")
    if damaged.endswith(".engine.json"):
        (copy / damaged).unlink()
    elif damaged.endswith(".json"):
        known = json.loads((copy / damaged).read_text())
        (copy / damaged).write_text(json.dumps({**known, "files": dict.fromkeys(known["files"], "0" * 64)}))
    else:
        (copy / damaged).write_bytes((copy / damaged).read_bytes()[:-1])
    checks = verify_folder(copy).checks
    assert {c.name for c in checks if c.verdict == "failed"} == {f"model-fp16.rtx.engine.{name}" for name in fails}


@pytest.mark.skipif(TENSORRT_RTX.cannot_run() is None, reason="about machines that cannot run the engine")
def test_what_was_not_run_here_falls_short_where_it_is_required(folder: Path, tmp_path: Path) -> None:
    words = ["export", str(folder), "--format", "trt-rtx", "--sm", "89", "--batch", "1:2:4"]
    done = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "m.engine"), "--require-verified"])
    assert done.exit_code == 1 and "could not be checked here" in done.stderr and (tmp_path / "m.engine").is_file()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--format", "trt-rtx", "--sm", "90"], "data centres"),
        (["--format", "trt-rtx", "--sm", "ampere"], "no compute capability"),
        (["--format", "trt-rtx", "--batch", "8:4:16"], "not in order"),
        (["--format", "trt-rx"], "did you mean trt-rtx"),
        (["--format", "onnx", "--sm", "89"], "means nothing to the format onnx"),
    ],
)
def test_wrong_wishes_are_one_message_and_leave_nothing(words: list[str], says: str, folder: Path) -> None:
    before = sorted(folder.iterdir())
    done = CliRunner().invoke(main, ["export", str(folder), *words, "--json"])
    assert done.exit_code == 2 and says in json.loads(done.stdout)["error"] and sorted(folder.iterdir()) == before
