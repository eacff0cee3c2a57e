"""GPUs that cannot be used: NVML counts them, but torch fails at the first call."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from vitcompress.bench import environment, machine
from vitcompress.cli import main
from vitcompress.cli.common import _explain
from vitcompress.errors import DeviceError
from vitcompress.exporters.doctor import torch_problem
from vitcompress.exporters.onnx import providers
from vitcompress.exporters.runner import RunnerOptions
from vitcompress.exporters.tensorrt.flavours import RTX, capability
from vitcompress.exporters.torch_runner import TorchRunner
from vitcompress.io import hardware

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver"
USERS: dict[str, Callable[[], object]] = {
    "torch": lambda: TorchRunner(torch.nn.Identity(), RunnerOptions("cuda"), name="model"),
    "ONNX Runtime": lambda: providers.choose_provider("cuda", None),
    "training": lambda: hardware.check_device("cuda"),
}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch with a CUDA version newer than the driver: until CUDA starts, NVML counts the GPUs."""

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{OLD_DRIVER}\nAlternatively, go to: https://pytorch.org")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("init", "get_device_name", "get_device_capability", "get_device_properties", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, fail)


def test_no_gpu_is_counted_and_the_reason_is_known(old_driver: None) -> None:
    assert hardware.count_gpus() == 0 and hardware.cuda_reason() == f": {OLD_DRIVER}"
    assert capability() is None
    assert machine.facts()["gpus"] == [] and environment.facts()["gpu_settings"] == []


def test_without_a_gpu_there_is_no_problem() -> None:
    assert hardware.count_gpus() == 0 and hardware.cuda_reason() == ""


def test_doctor_reports_the_reason(old_driver: None) -> None:
    done = CliRunner().invoke(main, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    exports = {target["target"]: str(target["export"]) for target in report["targets"]}
    assert report["devices"]["cuda"] is None and OLD_DRIVER in exports["trt"]
    problems = {target["target"]: str(target["run"]) for target in report["targets"]}
    names = ["torch cuda", "onnxruntime CUDAExecutionProvider", *([] if RTX.problem() else ["trt-rtx"])]
    assert all(OLD_DRIVER in problems[name] for name in names), problems


@pytest.mark.parametrize("name", USERS)
def test_a_request_for_the_gpu_raises_the_reason(name: str, old_driver: None) -> None:
    with pytest.raises(DeviceError, match="driver on your system is too old"):
        USERS[name]()


def test_the_flags_are_those_of_instruction_sets_for_matrix_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
    for flags, expected in {
        "flags : fpu sse4_2 avx2 avx512_vnni avx_vnni f16c amx_int8": "amx_int8 avx2 avx512_vnni avx_vnni f16c",
        "Features : fp asimddp sve2 i8mm bf16 aes": "asimddp bf16 i8mm sve2",
    }.items():
        (tmp_path / "cpuinfo").write_text(flags)
        assert hardware.cpu_flags() == expected.split()


def test_a_device_is_tested() -> None:
    """Like a GPU without torch kernels, `meta` exists and cannot compute."""
    assert torch_problem("cpu") is None
    assert str(torch_problem("meta")).startswith("torch finds it and cannot compute on it: ")


def test_a_gpu_failure_is_not_reported_as_a_bug() -> None:
    error = torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device\nCUDA kernel")
    report = _explain(error)
    assert report.message.startswith("the GPU or its driver failed: CUDA error: no kernel image")
    assert "doctor" in str(report.hint) and "a bug" not in str(report.hint) and "CUDA kernel" not in report.message
    assert "a bug" in str(_explain(KeyError("gone")).hint)
