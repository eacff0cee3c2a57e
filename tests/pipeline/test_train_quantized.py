"""The folded model is trained in int8, and its file computes what it was trained to compute."""

import json
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from command_line import begin, expect_error
from whole_runs import ENVIRONMENT, SMALL

from vitcompress import cli
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.quantize.calibrate import calibrate
from vitcompress.exporters.runtimes import EXPORTERS
from vitcompress.exporters.sidecar import read_sidecar
from vitcompress.io import hardware
from vitcompress.io.files import read_json
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import load_tensors
from vitcompress.models.checkpoint import load_model, load_model_files, read_plan
from vitcompress.models.create import input_config
from vitcompress.pipeline.export_folder import export_folder
from vitcompress.recipe.load import load_recipe_of_run
from vitcompress.training.data import open_data
from vitcompress.training.metrics import random_images
from vitcompress.verify.outputs import Original, output_checks

TABLES = """
[quantize]
epochs = 1

[export]
precision = "int8"
calibration = 32
"""


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.main, list(arguments))
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("quantized")
    (folder / "recipe.toml").write_text(SMALL + TABLES)
    code, output = run("recipe", str(folder / "recipe.toml"), "--out", str(folder / "run"))
    assert code == 0, output
    return RunFolder(folder / "run")


def test_the_file_has_the_trained_weights_and_ranges(finished: RunFolder) -> None:
    before, after = load_tensors(finished.unquantized), load_tensors(finished.weights)
    assert any(not torch.equal(before[name], after[name]) for name in after) and before.keys() == after.keys()
    trained = read_json(finished.trained_ranges)["ranges"]
    path = finished.exported("model", ".onnx")
    labels = {entry.key: entry.value for entry in onnx.load(str(path)).metadata_props}
    written = json.loads(labels["quantization"])["ranges"]
    assert written == {name: pytest.approx(value) for name, value in trained.items()}
    calibrated = [read_json(file) for file in finished.ranges.glob("*.json")]
    assert written not in calibrated and any(written.keys() <= ranges.keys() for ranges in calibrated)


def test_ranges_are_measured_on_images_of_the_training_data(finished: RunFolder, tmp_path: Path) -> None:
    """By the training in int8, which begins with the folded weights, by the export of the run, and by a later one."""
    later = RunFolder(tmp_path / "run")
    shutil.copytree(finished.path, later.path)
    options = ("--precision", "int8", "--calibration", "24", "--out", str(tmp_path / "model.onnx"))
    assert run("export", str(later.path), *options)[0] == 0
    recipe = load_recipe_of_run(finished.recipe)
    data = open_data(recipe.data, recipe.run.seed)
    known = [read_json(file) for file in later.ranges.glob("*.json")]
    for weights, counts in ((finished.unquantized, (32,)), (finished.weights, (32, 24))):
        model = load_model_files(finished.plan, weights)
        plain = export(model, tmp_path / "plain.onnx", input=input_config(model)).path
        for count, (source, same) in product(counts, ((data.train, True), (data.heldout, False), (data.test, False))):
            images = random_images(source, input_config(model), count, recipe.run.seed)
            ranges = {name: pytest.approx(value, rel=1e-4) for name, value in calibrate(plain, images, "int8").items()}
            assert (ranges in known) is same


@pytest.mark.skipif(EXPORTERS["openvino"].unavailable() is not None, reason="OpenVINO is not installed")
@pytest.mark.parametrize(("bits", "expected"), [(None, 7), (8, 8)])
def test_all_formats_have_the_weight_bits_of_the_training(
    bits: Literal[8] | None, expected: int, finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default of OpenVINO is 8 on a processor with VNNI, but the weights were trained with 7."""
    monkeypatch.setattr(hardware, "slow_reason", lambda precision: "")
    options = ExportOptions(precision="int8", calibration=32, weight_bits=bits)
    exported = export_folder(finished.path, "openvino", options=options, out=tmp_path / "model.xml")
    assert json.loads(exported.metadata["quantization"])["weight_bits"] == expected
    wide = export_folder(finished.path, "openvino", out=tmp_path / "wide.xml")
    assert "quantization" not in wide.metadata


def test_a_read_only_folder_is_exported_elsewhere(finished: RunFolder, tmp_path: Path) -> None:
    """Root may write read-only folders, so that the folder of the ranges is a file here."""
    later = RunFolder(tmp_path / "run")
    shutil.copytree(finished.path, later.path)
    shutil.rmtree(later.ranges)
    later.ranges.touch()
    code, output = run("export", str(later.path), "--precision", "int8", "--out", str(tmp_path / "model.onnx"))
    assert code == 0 and "the ranges will be measured again" in " ".join(output.split()), output


def test_all_checks_pass_and_name_the_folded_model(finished: RunFolder) -> None:
    checks = {check["name"]: check["verdict"] for check in read_json(finished.verification)["checks"]}
    assert checks["agreement.model.onnx.emulation"] == checks["fold"] == "passed"
    assert run("verify", str(finished.path), "-q")[0] == 0


def test_a_finished_run_continues_with_the_trained_ranges(finished: RunFolder) -> None:
    before = finished.weights.read_bytes()
    finished.exported("model", ".onnx").unlink()
    code, output = run("export", str(finished.path), "--precision", "int8", "--calibration", "32")
    assert code == 0 and finished.weights.read_bytes() == before, output
    files = list(finished.path.glob("model*.onnx"))
    labels = {entry.key: entry.value for entry in onnx.load(str(files[0])).metadata_props}
    trained = read_json(finished.trained_ranges)["ranges"]
    assert json.loads(labels["quantization"])["ranges"] == {k: pytest.approx(v) for k, v in trained.items()}


@pytest.mark.slow
def test_a_process_of_another_host_needs_no_file_of_the_run(tmp_path: Path) -> None:
    """Only the first process has the run folder, as without a shared disk."""
    (tmp_path / "recipe.toml").write_text(SMALL + TABLES)
    for rank in "01":
        (tmp_path / rank).mkdir()
    text = "import os\nos.chdir(os.environ['RANK'])\nfrom vitcompress.cli import main\nmain()\n"
    (tmp_path / "host.py").write_text(text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "host.py"]
    words = ["recipe", str(tmp_path / "recipe.toml"), "--out", "run"]
    done = subprocess.run([*torchrun, *words], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert RunFolder(tmp_path / "0" / "run").trained_ranges.is_file() and not any((tmp_path / "1").iterdir())


def test_layers_that_were_trained_in_fp32_are_measured_for_an_export_in_int8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, folder = SMALL + TABLES + 'islands = ["blocks.0.attn", "blocks.2.attn"]\n', tmp_path / "run"
    (tmp_path / "recipe.toml").write_text(text)
    code, output = run("recipe", str(tmp_path / "recipe.toml"), "--out", str(folder))
    assert code == 0, output
    code, output = run("export", str(folder), "--precision", "int8", "--calibration", "32", "--out", "all.onnx")
    assert "blocks.2.attn" in read_plan(RunFolder(folder).plan).removed, "an island that is no longer there"
    trained = read_json(RunFolder(folder).trained_ranges)["ranges"]
    labels = {entry.key: entry.value for entry in onnx.load("all.onnx").metadata_props}
    ranges = json.loads(labels["quantization"])["ranges"]
    assert code == 0 and set(ranges) - set(trained) == {"blocks.0.attn.qkv", "blocks.0.attn.proj"}
    assert {name: ranges[name] for name in trained} == {name: pytest.approx(v) for name, v in trained.items()}


def test_a_file_with_other_ranges_fails(finished: RunFolder, tmp_path: Path) -> None:
    path = next(finished.path.glob("model*.onnx"))
    model, copy = onnx.load(str(path)), tmp_path / path.name
    scale = next(t for t in model.graph.initializer if t.name.endswith("_scale") and "weight" not in t.name)
    scale.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale) * np.float32(3), scale.name))
    onnx.save(model, str(copy))
    original = Original(load_model(finished.path), load_tensors(finished.recorded_outputs)["images"][:32])
    verdicts = [{c.name: c.verdict for c in output_checks(file, original)} for file in (path, copy)]
    assert [verdict[f"agreement.{path.name}.emulation"] for verdict in verdicts] == ["passed", "failed"]


@pytest.mark.skipif(EXPORTERS["openvino"].unavailable() is not None, reason="OpenVINO is not installed")
def test_a_model_is_trained_for_int8_with_bf16_elsewhere(tmp_path: Path) -> None:
    """After some epochs: beside the small logits of an untrained model, the roundings of bf16 are too large."""
    trained = SMALL.replace("epochs = 1", "epochs = 8")
    text = trained + TABLES.replace('"int8"', '"int8+bf16"\nformats = ["openvino"]')
    (tmp_path / "recipe.toml").write_text(text)
    code, output = run("recipe", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run"))
    assert code == 0, output
    files = RunFolder(tmp_path / "run")
    path = files.exported("model", ".xml")
    assert path.is_file(), output
    written = json.loads(read_sidecar(path)["metadata"]["quantization"])["ranges"]
    assert written == {name: pytest.approx(value) for name, value in read_json(files.trained_ranges)["ranges"].items()}
    verdicts = {c["verdict"] for c in read_json(files.verification)["checks"] if "model.xml" in c["name"]}
    assert verdicts <= {"passed", "not_run"} and verdicts


@pytest.mark.parametrize(
    "table",
    [
        "[quantize]\nepochs = 1\n",
        '[export]\nprecision = "int8"\n[quantize]\nranges = "fixed"\n',
        '[export]\nprecision = "int8"\nsmooth = true\n[quantize]\nepochs = 1\n',
    ],
)
def test_settings_without_effect(table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path / "home", monkeypatch)
    Path("changed.toml").write_text(SMALL + table)
    assert "quantize" in expect_error("recipe", "changed.toml", "--dry-run")
