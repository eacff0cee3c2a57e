"""The control: the dense model after as much training, to separate pruning from longer training."""

import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import whole_runs as world
from click.testing import CliRunner
from command_line import expect_error

from vitcompress import cli
from vitcompress.bench.report.compare import compare_runs
from vitcompress.bench.report.run import format_accuracy, paired_tests, summary_table
from vitcompress.errors import InputError
from vitcompress.io.files import file_sha256, read_json, write_json
from vitcompress.io.manifest import read_manifest
from vitcompress.io.run_folder import RunFolder
from vitcompress.pipeline.dry_run import dry_run_recipe
from vitcompress.pipeline.job import RunOptions
from vitcompress.pipeline.run import RunResult, run_recipe
from vitcompress.verify.folder import manifest_checks, report_checks

TWO = (*world.BARE, "finetune.epochs=2")  # epochs of the fine-tuning
MOMENTS = ("accuracy.json", "report.json", "report.md", "manifest.json")  # files that are about to be written


class Stopping(world.RecordedProgress):
    """Stops the run when the first epoch of the control has been saved."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.states = RunFolder(RunFolder(folder).control).state

    def update(self, label: str, done: int, total: int, text: str = "") -> None:
        if (self.states / "state.safetensors").exists():
            raise KeyboardInterrupt


def run(home: Path, name: str = "run", *, control: bool) -> tuple[RunResult, world.RecordedProgress]:
    return world.run(home, *TWO, name=name, text=world.SMALL, control=control)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """plain/run is finished and has no control. Nothing changes it."""
    folder = tmp_path_factory.mktemp("plain")
    run(folder, control=False)
    return folder


@pytest.fixture(scope="module")
def home(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """home/run has a control that was added to a finished run, home/whole one that was part of it."""
    return Path(shutil.copytree(plain, tmp_path_factory.mktemp("home"), dirs_exist_ok=True))


def evaluated(progress: world.RecordedProgress) -> list[str]:
    return [note.split(":")[0] for note in progress.notes if note.endswith(" correct")]


def verified(folder: Path) -> str:
    """The verdict on the counts in the report."""
    return next(check.verdict for check in report_checks(RunFolder(folder)))


def first_rows(report: Any) -> list[tuple[str, ...]]:
    return [row for row in summary_table(report).rows if row[0].startswith("accuracy")]


def test_a_control_is_added_to_a_finished_run_which_keeps_everything_else(home: Path) -> None:
    plain = read_json(home / "run" / "report.json")
    assert plain["extra_epochs"] == 2 and "control" not in plain["accuracy"]
    assert first_rows(plain)[0][0] == "accuracy, test images (compressed: 2 more epochs of training)"
    assert "1 more epoch of training" in first_rows({**plain, "extra_epochs": 1})[0][0]
    before = world.tree(home)

    result, progress = run(home, control=True)
    accuracy, (against_dense, against_control) = result.report["accuracy"], first_rows(result.report)
    assert [stage for stage in progress.stages if stage.startswith("Train")] == ["Train the control, the dense model"]
    changed = {name for name, time in world.tree(home).items() if before.get(name, time) != time}
    written = {"manifest.json", *(f"report.{kind}" for kind in ("json", "md", "html"))}
    written |= {"state/accuracy.json", "state/mistakes.json"}
    assert changed - {"run", "run/state", "run/state/.lock", "run/warnings.log"} == {f"run/{name}" for name in written}
    assert accuracy | {"control": 0, "control_mcnemar": 0} == plain["accuracy"] | {"control": 0, "control_mcnemar": 0}
    control, test = accuracy["control"], accuracy["control_mcnemar"]
    assert test["only_b"] - test["only_a"] == accuracy["compressed"]["correct"] - control["correct"]
    assert test["difference_ci95"][0] <= test["difference"] <= test["difference_ci95"][1]
    assert against_dense[0] == "accuracy, test images" and "95 %" in against_control[-1]
    assert against_control[0] == "accuracy, before: control (dense, 2 more epochs)"

    assert verified(home / "run") == "passed"
    shutil.copytree(home / "run", home / "edited")
    edited = read_json(home / "edited" / "report.json")
    edited["accuracy"]["control_mcnemar"]["only_a"] += 1
    write_json(home / "edited" / "report.json", edited)
    (home / "edited" / "manifest.json").unlink()
    assert verified(home / "edited") == "failed"

    cost = {"params": 2_000_000, "macs": 3_000_000, "macs_linear": 1}
    large = {"recipe": "large", "cost": {"dense": cost, "compressed": cost}}
    rows = compare_runs({"a/run": result.report, "b/run": large})["table"].rows
    assert [row[0] for row in rows] == ["dense A", "a/run", "a/run: control (dense, +2 epochs)", "dense B", "b/run"]
    assert all(" M" in row[column] for row in rows for column in (3, 4))  # one unit per column
    assert rows[2][2] == format_accuracy(control)
    other = {"accuracy": {**accuracy, "dense": {**accuracy["dense"], "images_digest": "of other test images"}}}
    rows = compare_runs({"run": result.report, "b": {**result.report, **other}})["table"].rows
    assert [row[0] for row in rows if row[0].startswith("dense")] == ["dense A", "dense B"]
    rows = compare_runs({"run": {**result.report, "extra_epochs": 1}})["table"].rows
    assert rows[2][0] == "run: control (dense, +1 epoch)"

    again, progress = run(home, control=True)  # with and without the option, nothing is left to do
    assert (again, progress.stages) == (result, []) and run(home, control=False)[0] == result


def test_adding_a_control_keeps_the_accuracy_of_files_that_the_recipe_does_not_export(
    plain: Path, tmp_path: Path
) -> None:
    """And evaluates the control alone, unless the test images are others by now."""
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    files = RunFolder(tmp_path / "run")
    for words in (["export", str(files.path)], ["evaluate", str(files.path / "model.onnx")]):
        assert CliRunner().invoke(cli.main, words).exit_code == 0
    before = read_json(files.report)["accuracy"]
    result, progress = run(tmp_path, control=True)
    after: Any = result.report["accuracy"]
    assert "model.onnx" in before and after == {**after, **before}
    assert evaluated(progress) == ["control"]
    assert "model.onnx" in read_json(files.mistakes) and verified(files.path) == "passed"

    for path in (files.manifest, files.report):
        path.unlink()
    accuracy = read_json(files.accuracy)
    write_json(files.accuracy, {k: {**v, "images_digest": "of others"} for k, v in accuracy.items() if "total" in v})
    result, progress = run(tmp_path, control=True)
    assert evaluated(progress) == ["dense", "compressed", "control"]
    assert result.report["accuracy"] == {k: v for k, v in accuracy.items() if k != "model.onnx"}


def test_a_control_is_trained_like_the_compressed_model_and_resumes(home: Path) -> None:
    """Stopped after its first epoch, and continued, it is the control of an uninterrupted run."""
    run(home, control=True)
    with pytest.raises(KeyboardInterrupt):
        recipe = world.recipe(home, *TWO, text=world.SMALL)
        run_recipe(recipe, RunOptions(out=home / "killed", control=True), Stopping(home / "killed"))
    assert not RunFolder(home / "killed" / "state" / "control").plan.is_file()
    result, progress = run(home, "killed", control=True)
    assert result.report["accuracy"] == read_json(home / "run" / "report.json")["accuracy"]
    files = [RunFolder(RunFolder(home / name).control) for name in ("run", "killed")]
    assert len({file_sha256(file.weights) for file in files}) == 1
    assert file_sha256(files[0].weights) != file_sha256(next(home.glob("dense-*")) / "model.safetensors")
    assert read_json(files[0].training)["epochs"] == 2
    assert [note for note in progress.notes if note.startswith("fine-tune: already done")]


def add_control_until(folder: Path, moment: str) -> None:
    """Add a control to a finished run, and kill the process just before the file `moment` is renamed into place."""

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.rename" and Path(args[1]).name == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    run(folder, control=True)


def add_controls_until(folder: Path) -> None:
    """`add_control_until` in `folder`/MOMENT for each of `MOMENTS`, in processes of their own."""
    for moment in MOMENTS:
        assert world.forked(add_control_until, folder / moment, moment) == -signal.SIGKILL, moment


@pytest.fixture(scope="module")
def killed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """killed/MOMENT/run is finished; the process that added a control to it was killed at that moment."""
    folder = tmp_path_factory.mktemp("killed")
    for moment in MOMENTS:
        shutil.copytree(plain, folder / moment)
    process = multiprocessing.get_context("spawn").Process(target=add_controls_until, args=(folder,))
    process.start()  # a fork of this process may be unable to train
    process.join()
    assert process.exitcode == 0
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_finished_run_to_which_a_control_was_added_in_two_attempts_is_intact(killed: Path, moment: str) -> None:
    folder = killed / moment
    result, _ = run(folder, control=True)
    assert result.passed and "control" in result.report["accuracy"]
    files = RunFolder(folder / "run")
    assert [check.verdict for check in manifest_checks(files)] == ["passed"]
    listed = (read_manifest(files.path) or {})["files"]
    assert {"log.jsonl", "report.json", "state/accuracy.json", "state/control/plan.json"} <= listed.keys()


def test_the_control_is_trained_for_the_epochs_of_all_steps(tmp_path: Path) -> None:
    steps = world.with_steps('method = "sero"\nsparsity = 0.5\nepochs = 3', 'method = "recover"\nepochs = 4')
    recipe = world.recipe(tmp_path, *TWO, text=steps)
    plan = dry_run_recipe(recipe, RunOptions(out=tmp_path / "run", control=True))
    (work,) = [work for work in plan.stages if work.stage == "train the control"]
    assert (work.rounds, work.epochs) == (1, 2 + 3 + 4) and not plan.missing
    with pytest.raises(InputError, match="--structure-only trains nothing"):
        dry_run_recipe(recipe, RunOptions(out=tmp_path / "run", control=True, structure_only=True))


@pytest.mark.parametrize(("limit", "code"), [("99.9", 0), ("0", 1), ("1", 1)])
def test_the_limit_of_the_loss_applies_to_the_dense_model_and_to_the_control(home: Path, limit: str, code: int) -> None:
    tests = dict(paired_tests(run(home, control=True)[0].report))
    assert list(tests) == ["the dense model", "the control"]
    done = CliRunner().invoke(cli.main, ["report", str(home / "run"), "--max-drop", limit])
    too_large = [-100 * test["difference_ci95"][0] > float(limit) for test in tests.values()]
    assert done.exit_code == code == any(too_large)
    text = " ".join(done.stderr.replace("│", " ").split())
    assert [f"against {other}: " in text for other in tests] == too_large
    assert (f"is {limit} point{'' if limit == '1' else 's'}" in text) == any(too_large)


def test_a_limit_without_accuracy_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "tiny.toml"
    world.run(tmp_path, *world.BARE, text=world.SMALL, structure_only=True)
    assert "was not measured" in expect_error("report", str(tmp_path / "run"), "--max-drop", "1")
    assert "--structure-only measures none" in expect_error(
        "recipe", str(recipe), "--structure-only", "--max-drop", "1", "--out", str(tmp_path / "other")
    )
    assert not (tmp_path / "other").exists()
    for wrong in ("-1", "100", "nan", "inf", "1%"):
        assert "--max-drop" in expect_error("report", str(tmp_path / "run"), "--max-drop", wrong)
