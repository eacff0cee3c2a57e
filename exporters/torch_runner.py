"""Run models in torch: a run folder, a timm name, a module in memory."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitcompress.errors import DeviceError, InputError
from vitcompress.exporters.calls import BoundCall, QueuedCall, add_transfers, record_graph
from vitcompress.exporters.runner import Runner, RunnerOptions
from vitcompress.io import hardware
from vitcompress.models.create import check_images, check_weights, image_size, input_config

TIMM = "timm:"  # prefix of names of models that timm builds
TORCH_TYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_TORCH: Any = torch.backends
# Parts with a setting `fp32_precision`, the interface since torch 2.9 ("mkldnn": set_float32_matmul_precision sets it).
FP32_PARTS = (
    (_TORCH.cuda.matmul, _TORCH.cudnn.conv, _TORCH.cudnn.rnn, _TORCH.mkldnn.matmul)
    if hasattr(_TORCH, "fp32_precision")
    else ()
)
COMPILED_VERSIONS = 1024  # of one function that torch.compile may keep; torch's own limit is 8
RUNS_BEFORE_RECORDING = 3  # as torch's documentation of CUDA graphs recommends


class TorchRunner(Runner):
    """A module in torch, in eval mode, on one device.

    Threads and TF32 are settings of the whole process: they are set before each call, so that runners with different
    settings can alternate, and restored by `close`.
    """

    def __init__(self, model: nn.Module, options: RunnerOptions, *, name: str, sha256: str | None = None) -> None:
        super().__init__(name, options, "torch")
        check_weights(model)
        self._sha256 = sha256
        self._device = hardware.check_device(self._options.device or "cpu")
        self._precision = self._options.precision or "fp32"
        check_options(self._options, self._device, self._precision)
        self._threads = self._options.threads or torch.get_num_threads()
        self.input = input_config(model)
        self.input_size, self._sizes = self.input.size, image_size(model)
        self._transfers = self._options.transfers and self._device.type != "cpu"  # on the CPU there are none
        self._type = TORCH_TYPES[self._precision]
        self._classes = getattr(model, "num_classes", None) or None
        self.is_classifier = getattr(model, "num_classes", None) != 0
        placed = model.eval().to(self._device, self._type)
        self._weight_bytes = sum(t.nbytes for part in (placed.parameters(), placed.buffers()) for t in part)
        self._settings = ExitStack()  # restores torch's settings
        self._call: Any = _compile(placed, self._settings) if self._options.compile else placed
        self._settings.callback(torch.set_num_threads, torch.get_num_threads())
        if self._device.type == "cuda":
            _save_tf32(self._settings)

    def __call__(self, images: Tensor) -> Tensor:
        check_images(images, self._sizes)
        return self._forward(images.to(self._device, self._type)).float().cpu()

    @torch.inference_mode()
    def _forward(self, images: Tensor) -> Tensor:
        with self._apply_settings():
            return cast(Tensor, self._call(images))

    def _bind(self, images: Tensor) -> BoundCall:
        resident = images.to(self._device, self._type)
        run = self._record(resident) if self._options.cuda_graph else partial(self._forward, resident)
        step = add_transfers(run, resident, run()) if self._transfers else run
        if self._device.type == "cuda":
            return QueuedCall(step, torch.cuda.current_stream(self._device), resident)
        return BoundCall(partial(_run_on_mps, step) if self._device.type == "mps" else step)

    @torch.inference_mode()
    def _record(self, resident: Tensor) -> Callable[[], Tensor]:
        """One run as a CUDA graph. Kernels are chosen and memory is allocated before it is recorded."""
        create_stream: Any = torch.cuda.Stream
        side = create_stream(self._device)  # recording uses it, too: a stream of this GPU, whichever is the current one
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side), self._apply_settings():
            for _ in range(RUNS_BEFORE_RECORDING):
                self._call(resident)
            replay = record_graph(partial(self._call, resident), side)
        torch.cuda.current_stream(self._device).wait_stream(side)
        return replay

    @contextmanager
    def _apply_settings(self) -> Iterator[None]:
        """Compute with the settings of this runner, and without the autocast of the caller."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads or 1)
        if self._device.type == "cuda":
            _set_tf32(on=self._precision == "tf32")
        with torch.autocast(self._device.type, enabled=False):
            yield

    def _describe(self) -> dict[str, object]:
        return {
            "runtime": "torch",
            "runtime_version": torch.__version__,
            "device": str(self._device),
            "device_name": torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else None,
            "precision": self._precision,
            "tf32": self._precision == "tf32",
            "threads": self._threads,
            "compile": self._options.compile,
            "cuda_graph": self._options.cuda_graph,
            "transfers": self._transfers,
            "classes": self._classes,
            "weight_bytes": self._weight_bytes,
        }

    def close(self) -> None:
        super().close()
        self._call = None
        self._settings.close()  # a second call finds it empty, so that later changes by others stay


def _save_tf32(settings: ExitStack) -> None:
    """Let `settings` restore what `_set_tf32` changes. What raises is set by the new interface and restored by it."""
    for part in FP32_PARTS:  # restored last
        settings.callback(setattr, part, "fp32_precision", part.fp32_precision)
    with suppress(RuntimeError):
        settings.callback(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
    with suppress(RuntimeError):  # it can be `medium`, unlike `allow_tf32`
        settings.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())


def _set_tf32(*, on: bool) -> None:
    """Set whether products on CUDA use TF32, in both interfaces: torch raises an error where they contradict."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on
    for part in FP32_PARTS:
        part.fp32_precision = "tf32" if on else "ieee"


def _run_on_mps(step: Callable[[], object]) -> None:
    step()
    torch.mps.synchronize()


def _compile(model: nn.Module, settings: ExitStack) -> Callable[..., Any]:
    """`model` through torch.compile, for exactly the shapes of each call. settings: restores torch's settings.

    All models of a class share one cache. What exceeds it would run uncompiled, without an error.
    """
    from torch._dynamo import config

    patch: Any = config.patch
    limits = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), COMPILED_VERSIONS)
    settings.enter_context(patch(**limits, fail_on_recompile_limit_hit=True))
    return torch.compile(model, dynamic=False)


def check_options(options: RunnerOptions, device: torch.device, precision: str) -> None:
    """Raise InputError for an option that torch lacks, DeviceError for one that it lacks on this device."""
    if precision not in TORCH_TYPES:
        raise InputError(f"torch has no precision {precision!r}", hint=f"use one of {', '.join(TORCH_TYPES)}")
    if precision == "tf32" and (device.type != "cuda" or not hardware.is_ampere(device.index)):
        raise DeviceError(f"the precision is tf32, which {device} does not have", hint="use fp32")
    if options.cuda_graph and device.type != "cuda":
        message = f"the device is {device}, but CUDA graphs can record CUDA kernels only"
        raise DeviceError(message, hint="omit --cuda-graph, or use --device cuda")
