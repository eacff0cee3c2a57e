"""Runs that are killed, stopped, out of disk space, or run by several processes give the same result."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import whole_runs as world
from whole_runs import ENVIRONMENT, SMALL

from vitcompress.errors import OutputError
from vitcompress.io.files import read_json
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import load_tensors
from vitcompress.io.training_state import load_state
from vitcompress.models.checkpoint import load_model
from vitcompress.models.create import create_model
from vitcompress.pipeline.job import RunOptions
from vitcompress.pipeline.run import run_recipe
from vitcompress.verify.folder import verify_folder

# ------------------------------------------------------------------------------------------------------ SIGKILL, SIGINT


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of the script `whole_runs`: a run that was never stopped, a killed one, a limited one."""
    folder = tmp_path_factory.mktemp("runs")
    script = [sys.executable, world.__file__, str(folder)]
    done = subprocess.run(script, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_a_run_killed_many_times_equals_one_that_was_not(runs: Path) -> None:
    whole, resumed = runs / "whole", runs / "killed"
    compared = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    compared = [path for path in compared if "tensorboard" not in path.parts]
    timed = {"log.jsonl", "warnings.log", "bench.json", "report.json", "report.md", "verify.json"}
    timed |= {"manifest.json", "report.html", "state.safetensors"}
    compared = [path for path in compared if path.name not in timed]
    for path in compared:
        assert (whole / path).read_bytes() == (resumed / path).read_bytes(), path
    names = {path.name for path in compared}
    assert {"model.safetensors", "plan.json", "model.onnx", "search.json", "allocation.json", "accuracy.json"} <= names
    assert len([path for path in compared if "step-0-hetdpt" in path.parts]) >= 15
    assert not list(runs.rglob("*.part"))
    logs = [
        [{**json.loads(line), "seconds": 0} for line in (root / "run" / "log.jsonl").read_text().splitlines()]
        for root in (whole, resumed)
    ]
    assert logs[0] == logs[1]
    assert len(world.MOMENTS) > 10


def wait_for(folder: Path, pattern: str, process: subprocess.Popen[str]) -> None:
    """Wait until `folder` has a match of `pattern`, or the process has ended."""
    while not list(folder.glob(pattern)) and process.poll() is None:
        time.sleep(0.005)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "vitcompress", "recipe", *arguments]


@pytest.mark.slow
def test_ctrl_c_in_the_middle_and_the_same_command_continues(tmp_path: Path) -> None:
    world.recipe(tmp_path, text=SMALL)
    words = command("tiny.toml", "--out", "run", "--set", "dense.epochs=100000", "--set", "export.formats=[]")
    process = subprocess.Popen(
        words, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(tmp_path, "dense-*/state/state.safetensors", process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130 and out == ""
    assert err.splitlines()[-1] == "stopped; the same command continues" and "Traceback" not in err
    (file,) = tmp_path.glob("dense-*/state/state.safetensors")
    state = load_state(file.parent)
    assert state is not None
    reached = state.data["history"][-1]["epoch"]
    sets = ("dense.epochs=100000", "export.formats=[]")
    progress = StopAtFirstUpdate()
    with pytest.raises(KeyboardInterrupt):
        run_recipe(world.recipe(tmp_path, *sets), RunOptions(out=tmp_path / "run"), progress)
    assert progress.first.startswith(f"epoch {reached + 2}/100000")


class StopAtFirstUpdate(world.RecordedProgress):
    """Stops a training at its first update."""

    first = ""

    def update(self, label: str, done: int, total: int, text: str = "") -> None:
        self.first = text
        raise KeyboardInterrupt


class StopAtVerify(world.RecordedProgress):
    """Stops a run before its exported files are verified."""

    def stage(self, title: str) -> None:
        if title == "Verify":
            raise KeyboardInterrupt
        super().stage(title)


def test_a_stopped_run_that_was_verified_is_verified_on_its_images(tmp_path: Path) -> None:
    """`vitcompress verify` has no images of an unfinished run: it compares outputs on noise."""
    recipe, options = world.recipe(tmp_path, "bench.runtimes=[]", text=SMALL), RunOptions(out=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe, options, StopAtVerify())
    checks = verify_folder(tmp_path / "run").checks
    assert any(check.detail.endswith("on noise") for check in checks)
    checks = run_recipe(recipe, options).report["verify"]["checks"]
    assert any(check["name"].startswith("agreement.") for check in checks)
    assert not any(check["detail"].endswith("on noise") for check in checks)
    assert RunFolder(tmp_path / "run").recorded_outputs.is_file()


# ------------------------------------------------------------------------------------------------------------ full disk


@pytest.mark.slow
def test_files_that_cannot_be_written_are_reported_and_the_run_continues(runs: Path) -> None:
    folder = runs / "limited"
    messages = [(folder / f"{number}.txt").read_text() for number in (0, 1, 3, 4)]
    places = [text.removesuffix(" cannot be written: File too large").removeprefix(str(folder)) for text in messages]
    (dense,) = folder.glob("dense-*")
    assert places == ["/run/recipe.toml", f"/{dense.name}/state/state.safetensors", "/run/dense.onnx", "done"]
    whole = runs / "whole" / "run"
    for name in ("model.safetensors", "plan.json"):
        assert (folder / "run" / name).read_bytes() == (whole / name).read_bytes()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_reported_in_one_panel_and_the_run_continues(tiny_disk: Path) -> None:
    world.recipe(tiny_disk, text=SMALL)
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(2_000_000))
    with pytest.raises(OutputError, match=r"this run needs about 0\.7 MB"):
        (tiny_disk / "more").write_bytes(bytes(600_000))
        world.run(tiny_disk, *world.BARE)
    (tiny_disk / "more").unlink()
    words = command("tiny.toml", "--out", "run", "--set", "dense.epochs=10")
    words += ["--set", "export.formats=[]", "--set", 'bench.runtimes=["torch"]']
    # The disk fills up after the run has started.
    process = subprocess.Popen(
        words, cwd=tiny_disk, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(tiny_disk, "run/recipe.toml", process)
    fill(tiny_disk / "download")
    out, err = process.communicate()
    assert process.returncode == 2 and out == "", err
    assert "the disk is full" in err and "Traceback" not in err, err
    (tiny_disk / "download").unlink()
    ballast.unlink()
    world.run(tiny_disk, "dense.epochs=10", *world.BARE)  # the same recipe
    assert load_model(tiny_disk / "run").plan.removed


def fill(path: Path) -> None:
    """Write until the disk has no room left."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


# ---------------------------------------------------------------------------------------------------- several processes


@pytest.mark.slow
def test_two_processes_give_the_result_of_one(tmp_path: Path) -> None:
    """Weights agree to 1e-4 of the distance that training moved them.

    A gradient entry is a sum over 64 images x 5 tokens x 64 channels, in another order: a relative rounding error of
    about sqrt(20480) * 2**-24 = 1e-5, which 70 steps of SGD may make ten times larger.
    """
    text = re.sub(r"(epochs = 2\nbatch_size = 64\n)lr = \S+", r'\1optimizer = "sgd"\nlr = 0.05', world.RECIPE)
    for name in ("one", "two"):
        world.recipe(tmp_path / name, text=text)
    sets = [word for setting in world.BARE for word in ("--set", setting)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    two = [*torchrun, *command("tiny.toml", "--out", "run", "--json", *sets)[1:]]
    done = subprocess.run(two, cwd=tmp_path / "two", env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    start = done.stdout.index("{")  # torch 2.8 first prints lines of Gloo
    report = json.loads(done.stdout[start:])  # one report of two processes
    world.run(tmp_path / "one", *world.BARE)
    assert report["passed"] is True and len(list((tmp_path / "two").rglob("report.json"))) == 1
    one, other = tmp_path / "one", tmp_path / "two"
    steps = [read_json(root / "run/state/step-0-hetdpt/choice.json") for root in (one, other)]
    assert steps[0] == steps[1] and steps[0]["attention"] and steps[0]["activation"]
    assert (one / "run/plan.json").read_bytes() == (other / "run/plan.json").read_bytes()
    start = create_model(world.ARCH, {**world.ARGS, "num_classes": 10}).state_dict()
    for path in ("run/state/unfolded.safetensors", f"{next(one.glob('dense-*')).name}/model.safetensors"):
        first, second = (load_tensors(root / path) for root in (one, other))
        moved = sum(float((first[name] - start[name]).square().sum()) for name in first) ** 0.5
        apart = sum(float((first[name] - second[name]).square().sum()) for name in first) ** 0.5
        assert apart <= 1e-4 * moved, path
    tables = [sorted(root.glob("run/state/step-0-hetdpt/te_*.json")) for root in (one, other)]
    assert [path.name for path in tables[0]] == [path.name for path in tables[1]] and tables[0]
