"""Files that a recipe exports in half precision or with bytes as input are scanned, verified and measured."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import whole_runs as world
from click.testing import CliRunner
from damage import add_unused_weight
from packages import write_package
from PIL import Image
from whole_runs import ARCH, ARGS, SMALL

from vitcompress import cli
from vitcompress.cli import main
from vitcompress.errors import InputError
from vitcompress.exporters.runtimes import EXPORTERS, open_runner
from vitcompress.exporters.sidecar import read_sidecar
from vitcompress.io.tensors import save_tensors
from vitcompress.models.checkpoint import load_model
from vitcompress.models.create import create_model, input_config
from vitcompress.pipeline.job import RunOptions
from vitcompress.pipeline.run import run_recipe
from vitcompress.recipe.load import load_recipe
from vitcompress.verify.files import rejected_exports
from vitcompress.verify.folder import verify_folder

HALF = SMALL + '[export]\nprecision = "fp16"\n'
GATE = ("flips", "kl", "cosine", "error")


def untrained(text: str) -> str:
    """A recipe that takes the weights it is given."""
    return re.sub(r"\[dense\].*?\n\n", "", text.replace('weights = "train"', "classes = 10"), flags=re.DOTALL)


STRUCTURE: dict[str, Any] = {"text": untrained(SMALL), "structure_only": True, "weights": "random"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, world.RecordedProgress]:
    """A whole run that takes bytes, in fp16 with searched fp32 layers."""
    return world.run(tmp_path_factory.mktemp("home"), text=f'{HALF}islands = "auto"\nuint8 = true\n')


@pytest.mark.slow
def test_both_files_are_searched_verified_and_measured(finished: tuple[Any, world.RecordedProgress]) -> None:
    result, progress = finished
    assert result.passed
    verdicts = {check["name"]: check for check in result.report["verify"]["checks"]}
    for name in ("dense.onnx", "model.onnx"):
        search = read_sidecar(result.folder / name)["islands_search"]
        assert search["chosen"] == [] and search["real"] and search["images"] == 64
        assert [note for note in progress.notes if note.startswith("fp16 with no layers in fp32: passed")]
        for kind in (*GATE, *(f"rounded.{kind}" for kind in GATE)):
            assert verdicts[f"agreement.{name}.{kind}"]["verdict"] == "passed"
        assert f"{name} keeps nothing in fp32" in (result.folder / "report.md").read_text()
    assert {"dense", "compressed", "model.onnx"} <= set(result.report["accuracy"])
    rows = result.report["bench"][0]["rows"]
    assert [(row["precision"], row["input_type"]) for row in rows] == [("fp16", "uint8")] * 2
    assert "| fp16 +uint8 |" in (result.folder / "report.md").read_text()


@pytest.mark.slow
def test_dense_files_are_compared_with_the_dense_model(
    finished: tuple[Any, world.RecordedProgress], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished[0].folder, folder)
    (folder / "manifest.json").unlink()  # would report the next line before anything else
    (folder / "dense.onnx").write_bytes((folder / "model.onnx").read_bytes())
    (home,) = finished[0].folder.parent.glob("dense-*")
    verification = verify_folder(folder, dense=home, adopt=True)
    failed = {check.name for check in verification.checks if check.verdict == "failed"}
    assert any(name.startswith("agreement.dense.onnx") for name in failed)
    assert not any(name.startswith("agreement.model.onnx") for name in failed)
    missing = [check for check in verify_folder(folder, adopt=True).checks if "agreement.dense" in check.name]
    assert [check.verdict for check in missing] == ["not_run"]


@pytest.mark.slow
def test_the_report_describes_the_layers_of_the_present_file(
    finished: tuple[Any, world.RecordedProgress], tmp_path: Path
) -> None:
    shutil.copytree(finished[0].folder, tmp_path / "run")
    export = ["export", str(tmp_path / "run"), "--precision", "fp16", "--uint8", "--out"]
    assert CliRunner().invoke(main, [*export, str(tmp_path / "run/model.onnx")]).exit_code == 0
    text = (tmp_path / "run/report.md").read_text()
    assert "dense.onnx keeps nothing in fp32" in text and "model.onnx keeps" not in text


@pytest.mark.slow
def test_the_lines_of_the_report_give_the_file_bytes(
    finished: tuple[Any, world.RecordedProgress], tmp_path: Path
) -> None:
    folder = finished[0].folder
    (code,) = re.findall(r"### model.onnx\n\n```python\n(.*?)```", (folder / "report.md").read_text(), re.DOTALL)
    assert "uint8" in code and "255" not in code
    pixels = np.random.default_rng(0).integers(0, 255, (8, 8), np.uint8).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    shutil.copy(folder / "model.onnx", tmp_path)
    code = code.replace("photo.jpg", "photo.png")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    model = load_model(folder)
    config = input_config(model)
    images = (torch.from_numpy(pixels).float()[None, None] / 255 - config.mean[0]) / config.std[0]
    expected = open_runner(folder / "model.onnx")(images).argmax(1)
    assert done.stdout.strip() == str(int(expected))
    assert int(model(images).argmax(1)) == int(expected)


# -------------------------------------------------------------------------------------------------- what falls short


def overflowing(path: Path, *, only_head: bool = False) -> str:
    """Weights of a model whose residual stream is too large for fp16, or whose head alone is."""
    model = create_model(ARCH, {**ARGS, "num_classes": 10})
    with torch.no_grad():
        if only_head:
            model.get_submodule("head").weight.mul_(1e6)
        else:
            model.get_submodule("patch_embed.proj").bias.add_(1e5)
    save_tensors(path, model.state_dict())
    return str(path)


@pytest.mark.skipif(EXPORTERS["openvino"].unavailable() is not None, reason="OpenVINO is not installed")
def test_a_trained_run_keeps_all_files_but_those_that_overflow_and_reports_these(tmp_path: Path) -> None:
    """OpenVINO has no fp32 layers, so its file in fp16 is rejected after the training; ONNX can have an fp32 head."""
    home = tmp_path / "tiny.toml"
    text = untrained(f'{HALF}islands = "head"\nformats = ["onnx", "openvino"]\n')
    home.write_text(text.replace("lr = 1e-3", "lr = 1e-9"))
    words = ["recipe", str(home), "--weights", overflowing(tmp_path / "large.safetensors", only_head=True)]
    done = CliRunner().invoke(cli.main, [*words, "--out", str(tmp_path / "run"), "--json"])
    assert done.exit_code == 1, done.output
    report = json.loads(done.stdout)
    assert set(report["files"]) == {"dense.onnx", "model.onnx"} and report["accuracy"]["model.onnx"]["total"]
    failed = {check["name"]: check["detail"] for check in report["verify"]["checks"] if check["verdict"] == "failed"}
    assert set(failed) == {"export.dense.xml", "export.model.xml"}, failed
    for file, detail in failed.items():
        assert re.search(r"^head reaches \S+ on these images, the largest number in half precision is 65504", detail)
        assert "use --precision bf16" in detail and f"| {file} | failed |" in (tmp_path / "run/report.md").read_text()


@pytest.mark.skipif(EXPORTERS["openvino"].unavailable() is not None, reason="OpenVINO is not installed")
def test_the_summary_of_the_checks_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(untrained(SMALL + '[export]\nformats = ["openvino"]\n'))
    progress, options = (
        world.RecordedProgress(),
        RunOptions(out=tmp_path / "run", structure_only=True),
    )
    run_recipe(load_recipe(str(tmp_path / "tiny.toml"), weights="random"), options, progress)
    (passed,) = (note for note in progress.notes if note.startswith("passed: "))
    assert "model.xml (2)" in passed and "model (" not in passed


@pytest.mark.parametrize("islands", ["[]", '"auto"'])
def test_a_file_that_overflows_is_omitted_and_the_run_continues(islands: str, tmp_path: Path) -> None:
    text = untrained(f"{HALF}islands = {islands}\n")
    options = {"structure_only": True, "weights": overflowing(tmp_path / "large.safetensors")}
    result, _ = world.run(tmp_path, text=text, **options)
    assert not result.passed and result.report["files"] == {}
    failed = {check["name"]: check for check in result.report["verify"]["checks"] if check["verdict"] == "failed"}
    assert set(failed) == {"export.dense.onnx", "export.model.onnx"}
    assert "65504" in failed["export.model.onnx"]["detail"] and "bf16" in failed["export.model.onnx"]["detail"]
    assert not list(result.folder.glob("*.onnx*"))
    assert [entry["rows"][0]["runtime"] for entry in result.report["bench"]] == ["torch"]
    again = verify_folder(result.folder)
    assert {check.name for check in again.checks if check.verdict == "failed"} == set(failed)


@pytest.fixture(scope="module")
def structure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without training."""
    return world.run(tmp_path_factory.mktemp("structure"), **STRUCTURE)[0].folder


def test_a_removed_file_is_exported_and_verified_again(structure: Path, tmp_path: Path) -> None:
    shutil.copytree(structure.parent, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "run"
    before = (folder / "model.onnx").read_bytes()
    for name in ("manifest.json", "report.json", "model.onnx"):  # its sidecar stays
        (folder / name).unlink()
    result, progress = world.run(tmp_path, **STRUCTURE)
    assert (folder / "model.onnx").read_bytes() == before and "model.onnx" in result.report["files"]
    assert [stage for stage in progress.stages if stage.startswith("Export")] == ["Export model.onnx"]
    assert read_sidecar(folder / "model.onnx")["verified"] is True


@pytest.fixture(scope="module")
def unmeasured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, world.RecordedProgress]:
    """A run without training that exports for OpenVINO and measures nothing."""
    sets = ('export.formats=["openvino"]', "bench.runtimes=[]")
    return world.run(tmp_path_factory.mktemp("unmeasured"), *sets, **STRUCTURE)


def measurements(done: tuple[Any, world.RecordedProgress]) -> tuple[list[str], int]:
    """The runtimes in the report, and the number of stages that measured."""
    result, progress = done
    runtimes = [entry["rows"][0]["runtime"] for entry in result.report["bench"] or ()]
    return runtimes, len([stage for stage in progress.stages if stage.startswith("Measure ")])


@pytest.mark.skipif(EXPORTERS["openvino"].unavailable() is not None, reason="OpenVINO is not installed")
@pytest.mark.parametrize("runtime", ["openvino", "torch"])
def test_models_are_measured_in_the_chosen_runtimes_only(
    runtime: str, unmeasured: tuple[Any, world.RecordedProgress], tmp_path: Path
) -> None:
    assert measurements(unmeasured) == ([], 0)
    shutil.copytree(unmeasured[0].folder.parent, tmp_path, dirs_exist_ok=True)
    recipe = tmp_path / "run" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("runtimes = []", f'runtimes = ["{runtime}"]'))
    for name in ("manifest.json", "report.json", "bench.json"):
        (tmp_path / "run" / name).unlink()
    sets = ('export.formats=["openvino"]', f'bench.runtimes=["{runtime}"]')
    assert measurements(world.run(tmp_path, *sets, **STRUCTURE)) == ([runtime], 1)


def test_unknown_runtimes_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="names 'onnx'") as caught:
        world.run(tmp_path, 'bench.runtimes=["torch", "onnx"]', **STRUCTURE)
    assert "torch, onnxruntime, openvino" in str(caught.value.hint)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stem", ["model", "dense"])
def test_a_file_with_an_unknown_weight_is_moved_away(stem: str, structure: Path, tmp_path: Path) -> None:
    shutil.copytree(structure.parent, tmp_path, dirs_exist_ok=True)
    folder, name = tmp_path / "run", f"{stem}.onnx"
    add_unused_weight(folder / name)
    for left in ("manifest.json", "verify.json", "report.json"):
        (folder / left).unlink()
    result, progress = world.run(tmp_path, **STRUCTURE)
    assert not result.passed and name not in result.report["files"]
    failed = {check["name"] for check in result.report["verify"]["checks"] if check["verdict"] == "failed"}
    assert f"weights.{name}" in failed and not any(one.startswith("agreement") for one in failed)
    assert (folder / "failed" / name).is_file() and not list(folder.glob(f"{name}*"))
    assert any(f"{name} does not match its model: moved to" in note and "left_over" in note for note in progress.notes)
    known = read_sidecar(folder / "failed" / name)
    assert (known["verified"], known["verification"]["verdict"]) == (False, "failed")
    assert "left_over" in rejected_exports(folder)[name]


def test_an_unknown_fp32_layer_is_rejected_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no layer 'blocks\.7'"):
        world.run(tmp_path, "export.islands=blocks.7", text=HALF)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("island", ["norm", "softmax"])
def test_an_fp32_layer_without_products_is_rejected_before_the_run(island: str, tmp_path: Path) -> None:
    sets = ("export.precision=int8", f"export.islands={island}")
    with pytest.raises(InputError, match=f"the island {island} has no effect in int8"):
        world.run(tmp_path, *sets, text=HALF)
    assert not (tmp_path / "run").exists()


def test_a_word_is_a_list_of_one(tmp_path: Path) -> None:
    recipe = world.recipe(tmp_path, "export.islands=auto", text=HALF)
    assert recipe.export.islands == ("auto",)
    assert json.dumps(world.recipe(tmp_path / "again", text=recipe.to_toml()).export.islands) == '["auto"]'


def test_a_format_of_another_package_works_in_recipes_and_studies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The package declares an entry point; on the command line, in a run and in a study."""
    tool = (
        "from dataclasses import replace\nfrom vitcompress.exporters.onnx.export import ONNX\n"
        'EXPORTER = replace(ONNX, name="mine", suffix=".mine")\n'
    )
    monkeypatch.syspath_prepend(write_package(tmp_path / "site", "exporters", "mine = tool:EXPORTER", tool=tool))
    (tmp_path / "small.toml").write_text(STRUCTURE["text"])
    words = ["recipe", str(tmp_path / "small.toml"), "--structure-only", "--weights", "random", "--out"]
    with pytest.raises(SystemExit) as ended:
        main([*words, str(tmp_path / "run"), "--export", "mine", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0, report
    assert set(report["files"]) == {"dense.mine", "model.mine"} and report["passed"]
    assert "onnxruntime" in report["bench"][0]["rows"][0]["runtime"]
    with pytest.raises(SystemExit) as ended:
        main([*words, str(tmp_path / "other"), "--set", "export.formats=[mnie]", "--json"])
    assert ended.value.code == 2 and not (tmp_path / "other").exists()
    with pytest.raises(SystemExit) as ended:
        main(["study", "digits", "--dry-run", "--rows", "hetdpt_5", "--set", 'base.export.formats=["mine"]', "--json"])
    assert ended.value.code == 0, capsys.readouterr()
