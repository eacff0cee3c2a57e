"""GPUs that are there and cannot be used: NVML counts them, and torch fails at the first call."""

import json
from collections.abc import Callable

import pytest
import torch
from click.testing import CliRunner

from vitcompress.bench import environment, machine
from vitcompress.cli import main
from vitcompress.cli.common import _surprise
from vitcompress.errors import DeviceError
from vitcompress.exporters.doctor import torch_problem
from vitcompress.exporters.onnx import providers
from vitcompress.exporters.runner import RunnerOptions
from vitcompress.exporters.tensorrt.flavours import RTX, capability
from vitcompress.exporters.torch_runner import TorchRunner
from vitcompress.io import hardware
from vitcompress.training import distributed

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver"
ASKED: dict[str, Callable[[], object]] = {
    "torch": lambda: TorchRunner(torch.nn.Identity(), RunnerOptions("cuda"), name="model"),
    "ONNX Runtime": lambda: providers.chosen("cuda", None),
    "training": lambda: distributed.check_device("cuda", "none"),
}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch does where its CUDA is newer than the driver: the number of GPUs is NVML's until CUDA has started."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{OLD_DRIVER}\nAlternatively, go to: https://pytorch.org")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("init", "get_device_name", "get_device_capability", "get_device_properties", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, refuse)


def test_none_is_counted_and_the_reason_is_told(old_driver: None) -> None:
    assert hardware.count_gpus() == 0 and hardware.cuda_problem() == OLD_DRIVER
    assert capability() is None
    assert machine.facts()["gpus"] == [] and environment.facts()["gpu_settings"] == []


def test_where_there_is_no_gpu_nothing_is_wrong_with_one() -> None:
    assert hardware.count_gpus() == 0 and hardware.cuda_problem() is None and hardware.cuda_reason() == ""


def test_doctor_says_what_is_wrong(old_driver: None) -> None:
    done = CliRunner().invoke(main, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["devices"]["cuda"] is None and OLD_DRIVER in found["export"]["trt"]
    told = {target["target"]: str(target["run"]) for target in found["targets"]}
    names = ["torch cuda", "onnxruntime CUDAExecutionProvider", *([] if RTX.missing() else ["trt-rtx"])]
    assert all(OLD_DRIVER in told[name] for name in names), told


@pytest.mark.parametrize("name", ASKED)
def test_what_asks_for_the_gpu_is_told(name: str, old_driver: None) -> None:
    with pytest.raises(DeviceError, match="driver on your system is too old"):
        ASKED[name]()


def test_a_device_is_tried() -> None:
    """As a GPU that torch's kernels are not made for, `meta` is found and computes nothing."""
    assert torch_problem("cpu") is None
    assert str(torch_problem("meta")).startswith("torch finds it and cannot compute on it: ")


def test_a_gpu_that_fails_is_no_mistake_of_ours() -> None:
    error = torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device\nCUDA kernel")
    told = _surprise(error)
    assert told.message.startswith("the GPU or its driver failed: CUDA error: no kernel image")
    assert "doctor" in str(told.hint) and "a bug" not in str(told.hint) and "CUDA kernel" not in told.message
    assert "a bug" in str(_surprise(KeyError("gone")).hint)
