"""Studies: ordinary runs side by side, continued when killed, measured together, compared."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tiny_study import TINY
from whole_runs import ENVIRONMENT, RecordedProgress

from vitcompress import cli
from vitcompress.bench import machine
from vitcompress.bench.plots.study import accuracy_figure
from vitcompress.bench.report import run as reports
from vitcompress.bench.report.measurements import pairs
from vitcompress.errors import ArtifactError, CheckFailedError, InputError, OutputError, VitcompressError
from vitcompress.exporters.base import Exported
from vitcompress.exporters.runtimes import open_runner
from vitcompress.exporters.sidecar import read_sidecar
from vitcompress.io.checks import Check
from vitcompress.io.files import file_sha256, read_json, write_json
from vitcompress.io.manifest import find_changes, read_manifest, record_changes
from vitcompress.io.run_folder import RunFolder
from vitcompress.models.checkpoint import load_model
from vitcompress.models.create import input_config
from vitcompress.pipeline.export_folder import ExportOutcome
from vitcompress.pipeline.folder import claim_folder
from vitcompress.pipeline.study import results
from vitcompress.pipeline.study import run as study_run
from vitcompress.pipeline.study.run import StudyOptions, run_study
from vitcompress.pipeline.study.spec import load_study
from vitcompress.training.data import open_test
from vitcompress.training.distributed import Runtime
from vitcompress.training.loaders import EvalLoader
from vitcompress.training.options import DataOptions
from vitcompress.verify.files import quarantine, reject_export

CPU = Runtime(torch.device("cpu"))
LONGER = ("epochs=8", "base.dense.epochs=5")  # after one epoch, outputs are too small to be compared in int8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a study."""
    path = tmp_path_factory.mktemp("studies") / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="module")
def whole(tiny: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a study that was never stopped, and its results."""
    folder = tiny.parent / "whole"
    return folder, run_study(load_study(str(tiny)), StudyOptions(folder, seeds=1))


def test_every_run_is_an_ordinary_run_folder(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, result = whole
    for run in result["runs"]:
        report = reports.read_report(folder / run["run"])
        assert report["verify"]["passed"] and report["accuracy"]["compressed"]["correct"] == run["correct"]
        assert report["cost"]["compressed"]["macs"] == run["macs"]
    assert len(list(folder.glob("dense-*"))) == 1  # trained once, shared
    assert result["rows"][0]["macs_ratio"] == 1 > result["rows"][1]["macs_ratio"] > 0.3
    assert result["rows"][0]["params"] == result["dense"]["cost"]["params"]


def test_the_control_differs_from_the_dense_model_by_its_training_alone(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = whole
    (dense,) = folder.glob("dense-*")
    control = folder / "control-seed0"
    assert read_json(control / "plan.json") == read_json(dense / "plan.json")
    assert (control / "model.safetensors").read_bytes() != (dense / "model.safetensors").read_bytes()


def test_speed_is_measured_in_one_go_and_once(
    tiny: Path, whole: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, result = whole
    assert [row["artifact"] for row in result["speed"]["rows"]] == ["dense", "control-seed0", "random_2-seed0"]
    assert {row["threads"] for row in result["speed"]["rows"]} == {1}
    files = [folder / row["artifact"] / "model.onnx" for row in result["speed"]["rows"][1:]]
    for file in (*folder.glob("dense-*/model.onnx"), *files):
        assert read_sidecar(file)["verified"] and file.parent.joinpath("verify.json").is_file()
    assert result["runs"][1]["speedup"]["median"] == result["speed"]["ratios"][1]["median"]
    assert str(folder) not in (folder / "study.json").read_text()
    one = run_study(load_study(str(tiny), rows=["random_2"]), StudyOptions(folder, seeds=1))
    assert one["speed"] == result["speed"] and one["runs"] == result["runs"][1:], "the rows were measured together"
    assert one["rows"] == [{**result["rows"][1], "against": []}] and not one["pairs"], "a baseline among these rows"
    progress = RecordedProgress()
    monkeypatch.setattr(machine, "facts", lambda: {"cpu": "another"})  # nothing is trained or measured on it
    same = run_study(load_study(str(tiny)), StudyOptions(folder, seeds=1), progress)
    assert same == result and progress.labels == []
    monkeypatch.undo()
    fewer = run_study(load_study(str(tiny), ["speed.runs=2"]), StudyOptions(folder, seeds=1))
    assert [row["runs"] for row in fewer["speed"]["rows"]] != [row["runs"] for row in result["speed"]["rows"]]
    one = run_study(load_study(str(tiny), rows=["random_2"]), StudyOptions(folder, seeds=1, speed="again"))
    assert [row["artifact"] for row in one["speed"]["rows"]] == ["dense", "random_2-seed0", "control-seed0"]
    assert run_study(load_study(str(tiny)), StudyOptions(folder, seeds=1))["speed"] == one["speed"], "none is lost"
    again = run_study(load_study(str(tiny)), StudyOptions(folder, seeds=1, speed="again"))
    assert again["speed"] not in (one["speed"], result["speed"]) and again["pairs"] == result["pairs"]


def test_a_missing_file_is_exported_again_and_a_damaged_one_of_another_row_is_left_out(
    tiny: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = shutil.copytree(whole[0], tmp_path / "s")
    (folder / "control-seed0/model.onnx").unlink()
    (folder / "random_2-seed0/model.onnx").write_bytes(b"no model")
    one = run_study(load_study(str(tiny), rows=["control"]), StudyOptions(folder, seeds=1, speed="again"))
    assert [row["artifact"] for row in one["speed"]["rows"]] == ["dense", "control-seed0"]
    with pytest.raises(ArtifactError, match=r"random_2-seed0 is not as it was written: model\.onnx"):
        run_study(load_study(str(tiny)), StudyOptions(folder, seeds=1))


def test_files_of_a_study_are_alike_verified_and_recorded(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With own weights, the folder of the dense model is in the first run."""
    (weights,) = whole[0].glob("dense-*")
    text = re.sub(r"dense = \{.*\n", "", TINY).replace('"train"', f'"{weights}"').replace("epochs = 2", "epochs = 1", 1)
    (tmp_path / "own.toml").write_text(text.replace("formats = []", "formats = [], opset = 21, uint8 = true"))
    study, options = load_study(str(tmp_path / "own.toml"), rows=["control"]), StudyOptions(tmp_path / "s", seeds=1)
    run, calls = tmp_path / "s" / "control-seed0", list[Path]()

    def fail(folder: Path, exported: Exported) -> ExportOutcome:
        check = Check("agreement.model.onnx.flips", "failed", detail="3 images")
        calls.append(folder)
        return ExportOutcome(quarantine(exported.path), "failed", (check,))

    with monkeypatch.context() as patch:
        patch.setattr(results, "verify_export", fail)
        for _ in range(2):
            with pytest.raises(CheckFailedError, match=r"model\.onnx does not match .*\.flips: 3 images"):
                run_study(study, options)
    assert calls == [run / "state/dense"] * 2 and not (tmp_path / "s" / "study.json").exists()
    result = run_study(study, options)
    assert find_changes(run) == find_changes(run / "state/dense") == {}
    for file in (run / "model.onnx", run / "state/dense/model.onnx"):
        sidecar = read_sidecar(file)
        assert sidecar["opset"] == 21 and sidecar["metadata"]["input"] == '"uint8"' and sidecar["verified"]
    assert {row["input_type"] for row in result["speed"]["rows"]} == {"uint8"}


def test_reports_take_the_speeds_of_a_study(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, speeds = whole[0], read_json(whole[0] / "speed.json")
    run, other = str(folder / "random_2-seed0"), tmp_path / "other.json"
    done = CliRunner().invoke(cli.main, ["report", run, "--json", "--bench", str(folder / "speed.json")])
    (entry,) = json.loads(done.stdout)["runs"][run]["bench"]
    assert [ratio["median"] for _, _, ratio in pairs([entry])] == [speeds["ratios"][1]["median"]]
    other.write_text(json.dumps({**speeds, "rows": [{**row, "sha256": "0" * 64} for row in speeds["rows"]]}))
    done = CliRunner().invoke(cli.main, ["report", run, "--json", "--bench", str(other)])
    assert done.exit_code == 2 and "no measurement of the present files of" in json.loads(done.stdout)["error"]


def test_a_report_of_a_study_names_its_run_folders(whole: tuple[Path, dict[str, Any]]) -> None:
    done = CliRunner().invoke(cli.main, ["report", str(whole[0]), "--json"])
    hint = f"give the run folders in it, such as {whole[0] / 'control-seed0'}"
    assert (done.exit_code, json.loads(done.stdout)["hint"]) == (2, hint)


def test_mistakes_are_those_that_accuracy_counts(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, result = whole
    for run in result["runs"]:
        wrong = read_json(folder / run["run"] / "state" / "mistakes.json")
        assert len(wrong["compressed"]) == run["total"] - run["correct"]
        assert len(wrong["dense"]) == result["dense"]["seeds"][0]["total"] - result["dense"]["seeds"][0]["correct"]
    pair = result["pairs"][0]
    assert pair["only_row"] - pair["only_against"] == result["runs"][1]["correct"] - result["runs"][0]["correct"]


@pytest.mark.slow
def test_a_study_that_was_killed_gives_the_same_result(
    tiny: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """One process is killed by SIGKILL, as without memory, then the parent of two at work, which end too."""
    words = [sys.executable, "-m", "vitcompress", "study", str(tiny), "--out", str(tmp_path / "s"), "--seeds", "1"]
    words += ["--jobs", "2", "--speed", "later", "--json"]

    def start(is_ready: Callable[[int], bool]) -> subprocess.Popen[str]:
        process = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        while not is_ready(process.pid) and process.poll() is None:
            time.sleep(0.005)
        assert process.poll() is None
        return process

    process = start(lambda pid: bool(children(pid, "spawn_main")))  # no run is done yet
    os.kill(children(process.pid, "spawn_main")[0], signal.SIGKILL)
    message = json.loads(process.communicate()[0])["error"]
    assert (process.returncode, message) == (1, "the process of a run was killed, probably for lack of memory")
    assert not (tmp_path / "s" / "study.json").exists()
    process = start(lambda pid: any(tmp_path.glob("s/*/state/recovery")))
    workers = children(process.pid)
    assert len(workers) >= 2
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 60
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, workers))
    assert not (tmp_path / "s" / "study.json").exists()
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert "leaked" not in done.stderr  # semaphores of processes that were terminated after their last run
    result = json.loads(done.stdout)
    assert result["speed"] is None and result["rows"][0]["speedup"] is None
    without = [{**run, "speedup": None} for run in whole[1]["runs"]]
    assert result["runs"] == without and result["pairs"] == whole[1]["pairs"]
    for name in ("control-seed0", "random_2-seed0"):
        weights = [(root / name / "model.safetensors").read_bytes() for root in (whole[0], tmp_path / "s")]
        assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["parent", "terminal"])
def test_ctrl_c_stops_all_processes_of_a_study(
    tiny: Path, tmp_path: Path, send: Callable[[int, signal.Signals], None]
) -> None:
    """A terminal sends the signal to all processes of a command."""
    words = [sys.executable, "-m", "vitcompress", "study", str(tiny), "--out", str(tmp_path / "s"), "--jobs", "2"]
    words += ["--set", "epochs=200000", "--set", "base.dense.epochs=100000"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, env=ENVIRONMENT, start_new_session=True, **pipes)
    while not any(tmp_path.glob("s/*/state/state.safetensors")) and process.poll() is None:
        time.sleep(0.005)
    workers = children(process.pid, "spawn_main")
    send(process.pid, signal.SIGINT)
    try:
        _, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert (process.returncode, err.splitlines()[-1]) == (130, "stopped; the same command continues")
    assert len(workers) == 2 and not any(map(alive, workers))


def children(pid: int, word: str = "") -> list[int]:
    """The processes that `pid` has started, with `word` in their command lines."""
    command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(pid)]  # not cut off at 80 columns
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if word in line]


def alive(pid: int) -> bool:
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(listed.stdout.strip()) and not listed.stdout.strip().startswith("Z")


def test_a_failed_run_does_not_stop_the_others(tiny: Path, tmp_path: Path) -> None:
    loaded = load_study(str(tiny))
    first, second = loaded.rows
    broken = replace(first.recipe, dense=replace(first.recipe.dense, lr=1e30, clip_grad=None))  # type: ignore[arg-type]
    loaded = replace(loaded, rows=(replace(first, recipe=broken), second))
    with pytest.raises(VitcompressError, match=r"1 of 2 runs failed\n  .*control-seed0: .*(nan|inf)"):
        run_study(loaded, StudyOptions(tmp_path / "s", seeds=1, speed="later"))
    assert (tmp_path / "s" / "random_2-seed0" / "report.json").is_file()


def test_a_failed_run_names_its_next_step(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise InputError("this cannot work", hint="do something else")

    monkeypatch.setattr(study_run, "run_recipe", fail)
    with pytest.raises(VitcompressError, match="random_2-seed0: this cannot work; do something else"):
        run_study(load_study(str(tiny)), StudyOptions(tmp_path / "s", seeds=1, speed="later"))


def test_a_missing_dense_model_is_trained_again_with_its_run(
    tiny: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = shutil.copytree(whole[0], tmp_path / "s")
    for dense in folder.glob("dense-*"):
        shutil.rmtree(dense)
    options = StudyOptions(folder, seeds=1, speed="later")
    with pytest.raises(ArtifactError, match="the dense model of all rows is missing") as caught:
        run_study(load_study(str(tiny)), options)
    assert f"remove {folder / 'control-seed0'}" in (caught.value.hint or "")
    shutil.rmtree(folder / "control-seed0")
    assert len(run_study(load_study(str(tiny)), options)["rows"]) == 2


class FullMemory(RecordedProgress):
    """Requests more memory than any machine has in the first fine-tuning."""

    def stage(self, title: str) -> None:
        super().stage(title)
        if title == "Fine-tune the pruned model" and self.stages.count(title) == 1:
            torch.empty(2**60)


def test_a_run_without_enough_memory_does_not_stop_the_others(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(VitcompressError, match=r"1 of 2 runs failed\n  control-seed0: RuntimeError: .*memory") as error:
        run_study(load_study(str(tiny)), StudyOptions(tmp_path / "s", seeds=1, speed="later"), FullMemory())
    assert "torch.empty(2**60)" in error.value.__notes__[-1], "the traceback, which --debug prints"
    assert (tmp_path / "s" / "random_2-seed0" / "report.json").is_file()


@pytest.fixture(scope="module")
def int8(tiny: Path) -> tuple[Path, Path, dict[str, Any]]:
    """File, folder and results of a study with rows in fp32, int8, and trained in int8."""
    path, folder = tiny.parent / "int8.toml", tiny.parent / "int8"
    text = TINY.replace("formats = []", 'formats = ["onnx"]')
    row = text[text.rindex("[[row]]") :]
    for name, sets in ("int8", ["export.precision=int8"]), ("trained", ["export.precision=int8", "quantize.epochs=1"]):
        new = row.replace("random_2", name).replace("two layers at random", name).replace('"Control"', '"random"')
        text += new.replace('"random"\ntitle', f'"{name}"\ntitle').replace('curve = "random"', f'curve = "{name}"')
        text += f"set = {json.dumps([*sets, 'export.calibration=32'])}\n"
    path.write_text(text)
    return path, folder, run_study(load_study(str(path), LONGER), StudyOptions(folder, seeds=1))


def test_a_row_in_int8_has_the_accuracy_of_its_file(int8: tuple[Path, Path, dict[str, Any]]) -> None:
    _, folder, result = int8
    images = open_test(DataOptions("digits")).test
    for run, row in zip(result["runs"], result["rows"], strict=True):
        path = folder / run["run"]
        model, file = load_model(path).eval(), path / "model.onnx"
        pixels = torch.cat([x for x, _ in EvalLoader(images, input_config(model), 64, CPU)])
        with closing(open_runner(file)) as runner, torch.no_grad():
            served, own = runner(pixels).argmax(1), model(pixels).argmax(1)
        labels = torch.tensor(images.labels)
        right, ours = served == labels, own == labels
        assert run["correct"] == int(right.sum())
        only = int((ours & ~right).sum()), int((right & ~ours).sum())
        assert (run["flips"], row["only_model"], row["only_file"]) == (
            int((served != own).sum()),
            *only,
        )
        precision = "fp32" if row["row"] in ("control", "random_2") else "int8"
        assert read_sidecar(file)["precision"] == row["precision"] == precision
    same = [(folder / f"{name}-seed0" / "model.safetensors").read_bytes() for name in ("random_2", "int8", "trained")]
    assert same[0] == same[1] != same[2]
    assert "flips (p)" in (folder / "study.md").read_text()


def test_a_file_that_fails_is_a_failed_run(int8: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    path, whole, result = int8
    folder = shutil.copytree(whole, tmp_path / "s")
    run = folder / "int8-seed0"
    quarantine(run / "model.onnx")
    reject_export(run, "model.onnx", "agreement.model.onnx.flips: 3 images")
    with pytest.raises(
        VitcompressError, match=r"1 of 4 runs failed\n  int8-seed0: agreement.model.onnx.flips: 3 images"
    ) as caught:
        run_study(load_study(str(path), LONGER), StudyOptions(folder, seeds=1))
    assert "remove its folder" in str(caught.value.hint) and "--rows" in str(caught.value.hint)
    (run / "state" / "refused.json").unlink()
    with pytest.raises(VitcompressError, match=r"int8-seed0: model.onnx is missing"):
        run_study(load_study(str(path), LONGER), StudyOptions(folder, seeds=1))
    without = run_study(load_study(str(path), LONGER, rows=["trained"]), StudyOptions(folder, seeds=1))
    assert [row["row"] for row in without["rows"]] == ["trained"] and without["pairs"] == []
    assert without["runs"] == [{**one, "speedup": without["runs"][0]["speedup"]} for one in result["runs"][-1:]]


# ------------------------------------------------------------------------------------------------------------ bad input


def test_other_folders_are_rejected(tiny: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = whole
    other = tmp_path / "other.toml"
    other.write_text(TINY)
    with pytest.raises(OutputError, match="contains the study 'tiny', not 'other'"):
        run_study(load_study(str(other)), StudyOptions(folder, seeds=1))
    with pytest.raises(
        OutputError, match=r"contains a run of another recipe \(dense\.lr is 0\.002 there, 0\.003 here\)"
    ) as caught:
        run_study(load_study(str(tiny), ["base.dense.lr=3e-3"]), StudyOptions(folder, seeds=1))
    assert "of a study: remove it" in str(caught.value.hint)  # it has no --fresh
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(OutputError, match="not empty and not the folder of a study"):
        run_study(load_study(str(tiny)), StudyOptions(tmp_path / "full", seeds=1))
    with claim_folder(folder), pytest.raises(OutputError, match="another process is working in"):
        run_study(load_study(str(tiny)), StudyOptions(folder, seeds=1))


def test_a_relative_path_of_data_is_that_of_the_run_folders(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs record absolute paths: with another path, a study did not find its dense model or its earlier runs."""
    monkeypatch.chdir(tmp_path)
    study = load_study(str(tiny), ["base.data.source=imagefolder", "base.data.path=pictures"])
    assert {run.recipe.data.path for run in StudyOptions().runs(study)} == {str(tmp_path / "pictures")}


def test_a_setting_that_a_run_of_an_earlier_version_lacks_has_its_default(
    tiny: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = shutil.copytree(whole[0], tmp_path / "s")
    recipe = folder / "random_2-seed0" / "recipe.toml"
    text = recipe.read_text()
    recipe.write_text(text.replace('attention_bypass = "drop"\n', ""))
    assert recipe.read_text() != text
    again = run_study(load_study(str(tiny)), StudyOptions(folder, seeds=1))
    assert again["pairs"] == whole[1]["pairs"]
    recipe.write_text(text.replace('attention_bypass = "drop"', 'attention_bypass = "double"'))
    with pytest.raises(OutputError, match=r"attention_bypass is 'double' there, 'drop' here"):
        run_study(load_study(str(tiny)), StudyOptions(folder, seeds=1))


def test_tables_have_means_counts_and_verdicts(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, result = whole
    page = (folder / "study.md").read_text()
    correct = result["runs"][1]["correct"]
    assert f"{correct} of 540" in page and result["pairs"][0]["verdict"] in page and "McNemar" in page
    assert results.row_table(result).title == "tiny (seeds: 1, epochs of each run: 2)"
    assert (
        "flips" not in page and len(results.row_table(result).rows) == 3 and len(results.pair_table(result).rows) == 1
    )
    bare = {**result, "speed": None, "rows": [{**row, "speedup": None} for row in result["rows"]]}
    assert {row[-1] for row in results.row_table(bare).rows} == {"not measured"}
    page = results.markdown({**result, "study": "a_*b*\n# c", "summary": "<script> [d](javascript:1)"})
    assert page.startswith("# Study: a\\_\\*b\\* # c\n\n&lt;script&gt; \\[d\\](javascript:1)\n\n|")


def change_report(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    with record_changes(run):
        report = read_json(run / "report.json")
        change(report)
        write_json(run / "report.json", report)


def test_without_heldout_images_there_is_no_accuracy_before_recovery(
    tiny: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = shutil.copytree(whole[0], tmp_path / "s")
    change_report(folder / "random_2-seed0", lambda report: report.update(before_recovery=None))
    result = run_study(load_study(str(tiny)), StudyOptions(folder, seeds=1))
    assert [row["before_recovery"] is None for row in result["rows"]] == [False, True]
    dense, control, random = results.row_table(result).rows
    assert (dense[1], random[1]) == ("", "") and control[1].endswith("%")


def test_an_evaluation_of_the_same_file_keeps_its_flips(
    int8: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = shutil.copytree(int8[1], tmp_path / "s")
    runs = [folder / run["run"] for run in int8[2]["runs"]]
    before = [read_json(RunFolder(run).accuracy)["model.onnx"] for run in runs]
    assert any(entry["flips"] for entry in before)
    for run, entry in zip(runs, before, strict=True):
        assert CliRunner().invoke(cli.main, ["evaluate", str(run / "model.onnx")]).exit_code == 0
        assert read_json(RunFolder(run).accuracy)["model.onnx"] == entry | {"loss": pytest.approx(entry["loss"])}
    path = RunFolder(runs[0]).mistakes
    write_json(path, {**read_json(path), "model.onnx": []})  # of another runtime, with other flips
    assert CliRunner().invoke(cli.main, ["evaluate", str(runs[0] / "model.onnx")]).exit_code == 0
    assert "flips" not in read_json(RunFolder(runs[0]).accuracy)["model.onnx"]


def test_a_file_that_was_exported_again_must_be_evaluated(
    int8: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = shutil.copytree(int8[1], tmp_path / "s")
    study, path = load_study(str(int8[0]), LONGER, rows=["control"]), folder / "control-seed0/model.onnx"
    assert CliRunner().invoke(cli.main, ["export", str(path.parent), "--opset", "21"]).exit_code == 0
    with pytest.raises(ArtifactError, match=r"has no accuracy of the present model\.onnx") as caught:
        run_study(study, StudyOptions(folder, seeds=1))
    assert f"vitcompress evaluate {path}" in (caught.value.hint or "")
    assert CliRunner().invoke(cli.main, ["evaluate", str(path)]).exit_code == 0
    result = run_study(study, StudyOptions(folder, seeds=1))
    assert result["runs"] == [{**int8[2]["runs"][0], "flips": None, "speedup": result["runs"][0]["speedup"]}]
    rows = {row["artifact"]: row["sha256"] for row in result["speed"]["rows"]}
    assert rows["control-seed0"] == file_sha256(path) and rows == result["speed"]["models"], "measured again"


def test_a_row_without_counted_flips_has_none(int8: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    path, whole, before = int8
    folder = shutil.copytree(whole, tmp_path / "s")
    change_report(folder / "int8-seed0", lambda report: report["accuracy"]["model.onnx"].pop("flips"))
    result = run_study(load_study(str(path), LONGER), StudyOptions(folder, seeds=1))
    assert [row["flips"] is None for row in result["rows"]] == [False, False, True, False]
    assert [row["p_value"] for row in result["rows"]] == [row["p_value"] for row in before["rows"]]
    assert [row[-1] == "" for row in results.row_table(result).rows] == [True, False, False, True, False]


@pytest.mark.parametrize("name", ["of_study.json", "speed.json", "random_2-seed0/state/mistakes.json"])
def test_a_damaged_file_is_an_input_error(
    name: str, tiny: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = shutil.copytree(whole[0], tmp_path / "s")
    with record_changes(folder / "random_2-seed0"):
        (folder / name).write_text("[]")
    with pytest.raises(ArtifactError, match=f"{name} has other contents: input should be a valid dictionary"):
        run_study(load_study(str(tiny)), StudyOptions(folder, seeds=1))


@pytest.mark.parametrize("name", ["state/mistakes.json", "model.onnx"])
def test_a_changed_file_is_not_used(name: str, tiny: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path = shutil.copytree(whole[0], tmp_path / "s") / "random_2-seed0" / name
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(ArtifactError, match=f"is not as it was written: {name}: sha256 is"):
        run_study(load_study(str(tiny)), StudyOptions(tmp_path / "s", seeds=1, speed="later"))


def test_a_run_that_failed_a_check_has_no_results(
    tiny: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = shutil.copytree(whole[0], tmp_path / "s")
    change_report(folder / "random_2-seed0", lambda report: report["verify"].update(passed=False))
    with pytest.raises(CheckFailedError, match=r"a check of .*random_2-seed0 failed") as caught:
        run_study(load_study(str(tiny)), StudyOptions(folder, seeds=1))
    assert "--rows" in str(caught.value.hint)
    run_study(load_study(str(tiny), rows=["control"]), StudyOptions(folder, seeds=1))


def test_a_title_may_be_changed(tiny: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder = shutil.copytree(whole[0], tmp_path / "s")
    (tmp_path / tiny.name).write_text(TINY.replace("two layers at random", "random layers"))
    result = run_study(load_study(str(tmp_path / tiny.name)), StudyOptions(folder, seeds=1))
    assert result["pairs"] == whole[1]["pairs"] and result["rows"][1]["title"] == "random layers"


def test_a_missing_file_of_mistakes_is_named(tiny: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder = shutil.copytree(whole[0], tmp_path / "s")
    mistakes = RunFolder(folder / "random_2-seed0").mistakes
    with record_changes(folder / "random_2-seed0"):
        write_json(mistakes, {"dense": []})
    with pytest.raises(ArtifactError, match=f"{mistakes} has no entry compressed"):
        run_study(load_study(str(tiny)), StudyOptions(folder, seeds=1))
    with record_changes(folder / "random_2-seed0"):
        mistakes.unlink()
    with pytest.raises(ArtifactError, match=f"{mistakes} has no entry compressed") as caught:
        run_study(load_study(str(tiny)), StudyOptions(folder, seeds=1))
    assert f"remove {folder / 'random_2-seed0'}" in (caught.value.hint or "")


def test_a_study_that_was_killed_before_its_first_file_continues(
    tiny: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = shutil.copytree(whole[0], tmp_path / "s")
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / ".lock").touch()
    study = load_study(str(tiny), ["base.dense.lr=1e30"])
    with pytest.raises(VitcompressError, match="2 of 2 runs failed"):
        run_study(study, StudyOptions(folder, seeds=1))
    assert read_json(folder / "of_study.json") == {"study": "tiny"}


def test_a_run_that_was_killed_before_its_manifest_gets_it(
    tiny: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = shutil.copytree(whole[0], tmp_path / "s")
    (folder / "random_2-seed0" / "manifest.json").unlink()
    assert run_study(load_study(str(tiny)), StudyOptions(folder, seeds=1))["pairs"] == whole[1]["pairs"]
    assert read_manifest(folder / "random_2-seed0")


def test_plots_show_all_rows(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, result = whole
    assert sorted(path.name for path in folder.glob("pictures/*")) == ["accuracy.png", "random-layers.png"]
    figure = accuracy_figure(result)
    assert [axes.get_xlabel() for axes in figure.axes] == [
        "MACs, share of the dense model's",
        "times as fast as the dense model",
    ]
    for axes, key in zip(figure.axes, ("macs_ratio", "speedup"), strict=True):
        drawn = {tuple(line.get_xydata()[0]) for line in axes.get_lines() if len(line.get_xydata()) == 1}
        assert {(row[key], 100 * row["top1_mean"]) for row in result["rows"]} <= drawn
    assert len(accuracy_figure({**result, "speed": None}).axes) == 1
