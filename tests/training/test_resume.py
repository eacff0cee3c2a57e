"""A killed training ends, bit for bit, where an uninterrupted one ends; nothing on disk is ever half-written."""

import copy
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import killed_training as killed
import pytest
import torch
from tiny_training import CPU, DEVICES, OPTIONS, fit, same, stripes, vit, weights

from vitcompress.errors import InputError, OutputError
from vitcompress.io.tensors import load_tensors
from vitcompress.io.training_state import load_state
from vitcompress.training.distributed import Amp, Runtime
from vitcompress.training.log import RunLog
from vitcompress.training.options import Augmentation


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    script, environment = Path(killed.__file__), {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("case", killed.CASES)
def test_killed_and_resumed_is_never_killed(killed_runs: Path, case: str) -> None:
    whole, resumed = (load_tensors(killed_runs / f"{name}.safetensors") for name in ("whole", case))
    assert same(whole, resumed)
    start = vit().state_dict()
    assert not same({name: whole[f"model.{name}"] for name in start}, start)
    logs = [
        [{k: v for k, v in record.items() if k != "seconds"} for record in RunLog(killed_runs / name, "").records()]
        for name in ("whole", case)
    ]
    assert logs[0] == logs[1] and [record["epoch"] for record in logs[0]] == [0, 1, 2, 3]
    assert {record["stage"] for record in logs[0]} == {"search"}


def test_a_finished_training_is_only_loaded(tmp_path: Path) -> None:
    model, again = vit(), vit(seed=1)
    calls: list[int] = []
    first = fit(model, tmp_path)
    second = fit(again, tmp_path, after_epoch=calls.append)
    assert first == second and calls == [] and same(weights(model), weights(again))


@pytest.mark.parametrize("amp", ["none", "bf16", "fp16"])
@pytest.mark.parametrize("device", DEVICES)
def test_ctrl_c_loses_the_epoch_and_nothing_else(device: str, amp: Amp, tmp_path: Path) -> None:
    def stop(epoch: int) -> None:
        if epoch == 1:
            raise KeyboardInterrupt

    options, whole, broken = dataclasses.replace(OPTIONS, epochs=3, drop_path=0.2), vit(), vit()
    runtime = Runtime(torch.device(device), amp)
    fit(whole, tmp_path / "whole", options, runtime=runtime)
    with pytest.raises(KeyboardInterrupt):
        fit(broken, tmp_path / "broken", options, after_epoch=stop, runtime=runtime)
    state = load_state(tmp_path / "broken")
    assert state is not None and len(state.data["history"]) == 1
    resumed = vit(seed=5)
    fit(resumed, tmp_path / "broken", options, runtime=runtime)
    assert same(weights(whole), weights(resumed))


def test_averages_in_bf16_resume_too(tmp_path: Path) -> None:
    """They are rounded at random."""
    options, runtime = dataclasses.replace(OPTIONS, epochs=4, ema=0.9), Runtime(CPU.device, dtype=torch.bfloat16)

    def fit_until(last: int, folder: str) -> dict[str, torch.Tensor]:
        def stop(epoch: int) -> None:
            if epoch == last:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fit(vit().bfloat16(), tmp_path / folder, options, after_epoch=stop, runtime=runtime)
        state = load_state(tmp_path / folder)
        assert state is not None and len(state.data["history"]) == last
        return state.part("ema")

    whole, started = fit_until(3, "whole"), fit_until(1, "resumed")
    assert whole and not same(whole, started) and same(whole, fit_until(3, "resumed"))


def test_random_augmentation_in_worker_processes_resumes_too(tmp_path: Path) -> None:
    def stop(epoch: int) -> None:
        if epoch == 1:
            raise KeyboardInterrupt

    augmentation = Augmentation(no_aug=False, scale=(0.3, 1.0), reprob=0.5, repeats=2)
    options = dataclasses.replace(OPTIONS, augmentation=augmentation)
    runtime, whole, resumed = Runtime(torch.device("cpu"), workers=1), vit(), vit()
    fit(whole, tmp_path / "whole", options, runtime=runtime)
    with pytest.raises(KeyboardInterrupt):
        fit(vit(), tmp_path / "broken", options, runtime=runtime, after_epoch=stop)
    fit(resumed, tmp_path / "broken", options, runtime=runtime)
    assert same(weights(whole), weights(resumed))


def test_a_folder_of_another_training_is_rejected(tmp_path: Path) -> None:
    fit(vit(), tmp_path)
    with pytest.raises(OutputError, match="other settings"):
        fit(vit(), tmp_path, dataclasses.replace(OPTIONS, lr=2e-2))


def test_a_folder_of_other_images_is_rejected(tmp_path: Path) -> None:
    images = stripes()
    images.digest = "of then"
    fit(vit(), tmp_path, images=images)
    images.digest = "of now"
    with pytest.raises(OutputError, match="other settings, images or teacher"):
        fit(vit(), tmp_path, images=images)


def test_a_folder_of_another_teacher_is_rejected(tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, distillation="soft")
    fit(vit(), tmp_path, options, teacher=vit(seed=1))
    fit(vit(), tmp_path, options, teacher=vit(seed=1))
    with pytest.raises(OutputError, match="images or teacher"):
        fit(vit(), tmp_path, options, teacher=vit(seed=2))


def test_states_hold_plain_data_only(tmp_path: Path) -> None:
    fit(vit(), tmp_path)
    files = sorted(path.name for path in tmp_path.rglob("*") if path.is_file() and "tensorboard" not in path.parts)
    assert files == ["log.jsonl", "state.safetensors"]


def test_only_a_run_has_its_log_beside_its_state(tmp_path: Path) -> None:
    """`vc.finetune` wrote outside of its folder if it was in one called `state`."""
    paths = {name: tmp_path / name for name in ("state/deep/ft", "state", "run/state/ft", "dense-0/state")}
    assert [RunLog(path, "x").path for path in paths.values()] == [path / "log.jsonl" for path in paths.values()]
    assert RunLog(paths["state/deep/ft"], "x").stage == RunLog(paths["state"], "x").stage == "x"
    for folder, name in (("run", "recipe.toml"), ("dense-0", "settings.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).touch()
    logs = [(log.path, log.stage) for log in (RunLog(path, "x") for path in paths.values())]
    assert logs[2:] == [(tmp_path / "run" / "log.jsonl", "ft"), (tmp_path / "dense-0" / "log.jsonl", "x")]
    control = RunLog(tmp_path / "run" / "state" / "control" / "state", "control")
    assert (control.path.parent, control.stage) == (tmp_path / "run" / "state" / "control", "control")


def test_the_log_is_repaired_from_the_state(tmp_path: Path) -> None:
    log = RunLog(tmp_path, "mine")
    RunLog(tmp_path, "other").append({"epoch": 0})
    log.append({"epoch": 0})
    with log.path.open("a") as file:
        file.write('{"stage": "mine", "ep')  # torn by a kill
    log.sync([{"epoch": 0}, {"epoch": 1}])
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert lines == [{"stage": "other", "epoch": 0}, {"stage": "mine", "epoch": 0}, {"stage": "mine", "epoch": 1}]


def test_optimizers_with_other_state_resume_too(tmp_path: Path) -> None:
    def stop(epoch: int) -> None:
        if epoch == 1:
            raise KeyboardInterrupt

    for name in ("sgd", "lamb", "adam", "nadamw"):
        options = dataclasses.replace(OPTIONS, epochs=3, optimizer=name, lr=1e-3)
        whole, resumed = vit(), vit()
        fit(whole, tmp_path / name / "whole", options)
        with pytest.raises(KeyboardInterrupt):
            fit(copy.deepcopy(resumed), tmp_path / name / "broken", options, after_epoch=stop)
        fit(resumed, tmp_path / name / "broken", options)
        assert same(weights(whole), weights(resumed)), name
    with pytest.raises(InputError, match="optimizer 'adamx' cannot be created"):
        fit(vit(), tmp_path / "x", dataclasses.replace(OPTIONS, optimizer="adamx"))


@pytest.mark.parametrize("name", ["adahessian", "adafactorbv", "kron"])
def test_optimizers_that_cannot_step_or_be_saved_are_rejected_before_the_training(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"optimizer '{name}' is not supported"):
        fit(vit(), tmp_path, dataclasses.replace(OPTIONS, optimizer=name))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("decay_all", [False, True])
def test_a_frozen_model_is_rejected(decay_all: bool, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no parameter of the model requires gradients"):
        fit(vit().requires_grad_(False), tmp_path, dataclasses.replace(OPTIONS, decay_all=decay_all))
