"""Models that answer, whatever they lie in: an ONNX file, a run folder, a timm name, a module in memory.

A runner never changes device, provider or precision by itself: what cannot run as asked is an error.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitcompress import checkpoint, models
from vitcompress.errors import ArtifactError, DeviceError, InputError
from vitcompress.exporters.onnx_session import Session
from vitcompress.models import InputConfig

TIMM = "timm:"
LATER = {".engine": "TensorRT engine", ".trt": "TensorRT engine", ".plan": "TensorRT engine", ".xml": "OpenVINO model"}
TORCH_TYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SDPA = {
    "auto": None,
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


@dataclass(frozen=True)
class RunnerOptions:
    """How an artifact is run.

    device: `cpu`, `cuda`, `cuda:1`, `mps`. provider: an ONNX Runtime execution provider by its full name; None takes
    the one of the device. precision: None takes that of the file, fp32 in torch; `tf32` is fp32 with TF32 products on
    CUDA, which `fp32` never uses. threads: CPU threads of one call; None leaves the runtime's default. compile and sdpa
    (`auto`, `math`, `flash`, `efficient`, `cudnn`) concern torch. weights: those of a `timm:` name (`random`, `hub`).
    """

    device: str = "cpu"
    provider: str | None = None
    precision: str | None = None
    threads: int | None = None
    compile: bool = False
    sdpa: str = "auto"
    weights: str = "random"


class Runner(Protocol):
    """A model that can be asked, described and timed. `runner(images)` gives float32 logits on the CPU."""

    name: str

    @property
    def input(self) -> InputConfig | None:
        """How images are brought to the model; None when the artifact does not say."""

    @property
    def input_size(self) -> tuple[int, int, int]:
        """(channels, height, width)"""

    @property
    def uses_events(self) -> bool:
        """Whether calls are queued on torch's current CUDA stream, so that CUDA events time them."""

    def __call__(self, images: Tensor) -> Tensor:
        """images: (batch, channels, height, width), normalised, on any device -> (batch, classes)."""

    def bind(self, images: Tensor) -> Callable[[], None]:
        """One forward pass of `images` as a call without arguments; inputs are already where the model computes."""

    def synchronize(self) -> None:
        """Wait until everything queued is done."""

    def describe(self) -> dict[str, Any]:
        """Everything that changes how fast or how exact this runner is."""

    def close(self) -> None:
        """Give back what the runner holds, and restore what it changed."""


def open_runner(artifact: str | Path, options: RunnerOptions | None = None, **settings: Any) -> Runner:
    """The runner of an .onnx file, a run folder or `timm:NAME`; `settings` are fields of RunnerOptions.

    Raises:
        ArtifactError: a file that is missing, damaged, or of a kind that is not run here.
        DeviceError: a device, provider or precision that this machine or this file does not have.
    """
    options = replace(options or RunnerOptions(), **settings)
    name, path = str(artifact), Path(artifact)
    if name.startswith(TIMM):
        return TorchRunner(models.create(name[len(TIMM) :], weights=options.weights), options, name=name)
    if path.suffix in LATER:
        raise ArtifactError(
            f"{path} is a {LATER[path.suffix]}, which this version cannot run",
            hint="give the .onnx file it was built from, a run folder or timm:NAME",
        )
    if path.is_dir():
        weights = path / checkpoint.WEIGHTS
        return TorchRunner(checkpoint.load(path), options, name=name, sha256=checkpoint.file_sha256(weights))
    if path.suffix == ".onnx":
        return OnnxRunner(path, options)
    if not path.exists():
        raise ArtifactError(f"there is nothing at {path}", hint="give an .onnx file, a run folder or timm:NAME")
    raise ArtifactError(f"{path} cannot be run", hint="give an .onnx file, a run folder or timm:NAME")


class OnnxRunner:
    """An ONNX file in ONNX Runtime, on exactly the execution provider that was asked for."""

    def __init__(self, path: Path, options: RunnerOptions) -> None:
        for setting, off in (("compile", False), ("sdpa", "auto")):
            if getattr(options, setting) != off:
                raise InputError(f"{setting} is a setting of torch; {path.name} runs in ONNX Runtime")
        self.name = str(path)
        self._session = Session(
            path,
            device=options.device,
            provider=options.provider,
            precision=options.precision,
            threads=options.threads,
        )
        self.input = self._input_config()

    def _input_config(self) -> InputConfig | None:
        known = self._session.metadata
        if not {"size", "mean", "std", "interpolation", "crop_pct", "crop_mode"} <= set(known):
            return None
        return InputConfig(
            self.input_size,
            tuple(known["mean"]),
            tuple(known["std"]),
            known["interpolation"],
            float(known["crop_pct"]),
            known["crop_mode"],
        )

    @property
    def input_size(self) -> tuple[int, int, int]:
        return self._session.input_size

    @property
    def uses_events(self) -> bool:
        return False  # the session has a stream of its own

    def __call__(self, images: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(self._session.run(images.detach().float().cpu().numpy())))

    def bind(self, images: Tensor) -> Callable[[], None]:
        return self._session.bind(images.detach().float().cpu().numpy())

    def synchronize(self) -> None:
        """Nothing: a call of the session returns when its outputs are there."""

    def describe(self) -> dict[str, Any]:
        return {"artifact": self.name, **self._session.describe()}

    def close(self) -> None:
        self._session.close()


class TorchRunner:
    """A module in torch, in eval mode, on one device.

    Threads and TF32 are settings of the whole process: they are set before each call, so that runners with different
    settings can take turns, and restored by `close`.
    """

    def __init__(
        self, model: nn.Module, options: RunnerOptions | None = None, *, name: str, sha256: str | None = None
    ) -> None:
        self.name, self._sha256, self._options = name, sha256, options or RunnerOptions()
        self._device = _torch_device(self._options)
        self._precision = self._options.precision or "fp32"
        _check_torch_options(self._options, self._device, self._precision)
        self.input = models.input_config(model)
        self._type = TORCH_TYPES[self._precision]
        self._model = model.eval().to(self._device, self._type)
        self._call = torch.compile(self._model) if self._options.compile else self._model
        self._restore = _process_settings()
        self._threads = self._options.threads or torch.get_num_threads()

    @property
    def input_size(self) -> tuple[int, int, int]:
        return self.input.size

    @property
    def uses_events(self) -> bool:
        return self._device.type == "cuda"

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        self._set_process()
        with self._attention():
            out: Tensor = self._call(images.to(self._device, self._type))
        return out.float().cpu()

    def bind(self, images: Tensor) -> Callable[[], None]:
        resident = images.to(self._device, self._type)

        @torch.inference_mode()
        def step() -> None:
            self._set_process()
            with self._attention():
                self._call(resident)

        return step

    def _set_process(self) -> None:
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        if self._device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self._precision == "tf32"

    def _attention(self) -> AbstractContextManager[Any]:
        backend = SDPA[self._options.sdpa]
        return nullcontext() if backend is None else sdpa_kernel(backend)

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()

    def describe(self) -> dict[str, Any]:
        on_cuda = self._device.type == "cuda"
        return {
            "artifact": self.name,
            "sha256": self._sha256,
            "runtime": "torch",
            "runtime_version": torch.__version__,
            "device": str(self._device),
            "device_name": torch.cuda.get_device_name(self._device) if on_cuda else None,
            "provider": None,
            "precision": self._precision,
            "tf32": self._precision == "tf32",
            "threads": self._threads,
            "sdpa": self._options.sdpa,
            "compile": self._options.compile,
            "channels_last": False,
            "cuda_graph": False,
            "graph_optimization": None,
            "weights": self._options.weights if self.name.startswith(TIMM) else None,
        }

    def close(self) -> None:
        threads, matmul, cudnn = self._restore
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


def _process_settings() -> tuple[int, bool, bool]:
    return torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def _torch_device(options: RunnerOptions) -> torch.device:
    if options.provider is not None:
        raise InputError(f"provider {options.provider!r} is a setting of ONNX Runtime, not of torch")
    try:
        device = torch.device(options.device)
    except RuntimeError:
        raise DeviceError(f"device {options.device!r} is not known", hint="use cpu, cuda, cuda:N or mps") from None
    have = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= have.get(device.type, 0):
        raise DeviceError(
            f"device {options.device!r} was asked for, torch finds {have.get(device.type, 0)} of that kind here",
            hint="use --device cpu, or run on a machine that has one",
        )
    return device


def _check_torch_options(options: RunnerOptions, device: torch.device, precision: str) -> None:
    choices: Sequence[tuple[str, str, Sequence[str]]] = (
        ("precision", precision, tuple(TORCH_TYPES)),
        ("sdpa", options.sdpa, tuple(SDPA)),
    )
    for name, value, allowed in choices:
        if value not in allowed:
            raise InputError(f"{name} {value!r} is not known", hint=f"use one of {', '.join(allowed)}")
    if options.threads is not None and options.threads < 1:
        raise InputError(f"threads must be 1 or more, got {options.threads}")
    if precision == "tf32" and device.type != "cuda":
        raise DeviceError(f"tf32 was asked for, {device.type} has none", hint="use fp32")
