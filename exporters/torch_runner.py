"""Models in torch as runners: a run folder, a timm name, a module in memory."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitcompress.errors import DeviceError, InputError
from vitcompress.exporters.runner import Bindings, Bound, Queued, RunnerOptions, described, refuse_settings_of_others
from vitcompress.io import hardware
from vitcompress.models.create import input_config

TIMM = "timm:"  # what names of models to be built by timm begin with
TORCH_TYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SDPA = {
    "auto": None,
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}

COMPILED_AT_ONCE = 1024  # versions of one function that torch.compile may hold; torch's own limit is 8
RUNS_BEFORE_RECORDING = 3  # as torch's documentation of CUDA graphs advises


class TorchRunner:
    """A module in torch, in eval mode, on one device.

    Threads and TF32 are settings of the whole process: they are set before each call, so that runners with different
    settings can take turns, and restored by `close`.
    """

    def __init__(
        self, model: nn.Module, options: RunnerOptions | None = None, *, name: str, sha256: str | None = None
    ) -> None:
        self.name, self._sha256, self._options = name, sha256, options or RunnerOptions()
        refuse_settings_of_others(self._options, "torch", name)
        self._device = _torch_device(self._options)
        self._precision = self._options.precision or "fp32"
        _check_torch_options(self._options, self._device, self._precision)
        self.input = input_config(model)
        self._type = TORCH_TYPES[self._precision]
        self._classes = getattr(model, "num_classes", None)
        placed = model.eval().to(self._device, self._type)
        self._weight_bytes = sum(t.nbytes for part in (placed.parameters(), placed.buffers()) for t in part)
        self._held = ExitStack()
        self._call: Any = _compiled(placed, self._held) if self._options.compile else placed
        self._bindings = Bindings()
        self._restore = _process_settings()
        self._threads = self._options.threads or torch.get_num_threads()

    @property
    def input_size(self) -> tuple[int, int, int]:
        return self.input.size

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        self._set_process()
        with self._attention():
            out: Tensor = self._call(images.to(self._device, self._type))
        return out.float().cpu()

    def bind(self, images: Tensor) -> Bound:
        place: dict[str, Any] = {"device": self._device, "dtype": self._type}
        resident = images.to(**place)
        host = self._host(images)
        if self._options.cuda_graph:
            return self._queued(self._recorded(resident, host))
        taken = None if host is None else self._host(self(images))

        @torch.inference_mode()
        def step() -> None:
            self._set_process()
            with self._attention():
                out = self._call(resident if host is None else host.to(**place, non_blocking=True))
            if taken is not None:
                taken.copy_(out, non_blocking=True)  # no run waits for it, or for memory to be page-locked

        return self._queued(step)

    def _queued(self, step: Callable[[], None]) -> Bound:
        """`step` as a call that CUDA events can time, where it is queued on a GPU."""
        on_cuda = self._device.type == "cuda"
        return self._bindings.add(Queued(step, torch.cuda.current_stream(self._device)) if on_cuda else Bound(step))

    def _host(self, tensor: Tensor) -> Tensor | None:
        """Images or logits in page-locked memory of the host, where runs include the copies from and to it."""
        if not self._transfers:
            return None
        host = tensor.to("cpu", self._type)
        return host.pin_memory() if self._device.type == "cuda" else host

    @property
    def _transfers(self) -> bool:
        """Whether runs include the copies to and from the device; on the CPU there are none."""
        return self._options.transfers and self._device.type != "cpu"

    @torch.inference_mode()
    def _recorded(self, resident: Tensor, host: Tensor | None) -> Callable[[], None]:
        """One run as a CUDA graph. Its kernels are chosen and its memory is taken before it is recorded."""
        self._set_process()
        make_stream: Any = torch.cuda.Stream
        side = make_stream(self._device)  # also what is recorded on: a stream of this GPU, whichever is the current one
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side), self._attention():
            for _ in range(RUNS_BEFORE_RECORDING):
                self._call(resident)
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                out = self._call(resident)
        torch.cuda.current_stream(self._device).wait_stream(side)
        taken = self._host(out)

        @torch.inference_mode()
        def step() -> None:
            if host is not None:
                resident.copy_(host, non_blocking=True)
            graph.replay()
            if taken is not None:
                taken.copy_(out, non_blocking=True)

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
        return described(
            artifact=self.name,
            sha256=self._sha256,
            runtime="torch",
            runtime_version=torch.__version__,
            device=str(self._device),
            device_name=torch.cuda.get_device_name(self._device) if on_cuda else None,
            precision=self._precision,
            tf32=self._precision == "tf32",
            threads=self._threads,
            sdpa=self._options.sdpa,
            compile=self._options.compile,
            cuda_graph=self._options.cuda_graph,
            transfers=self._transfers,
            weights=self._options.weights if self.name.startswith(TIMM) else None,
            classes=self._classes,
            weight_bytes=self._weight_bytes,
        )

    def close(self) -> None:
        if self._call is None:
            return  # what others have set since then stays
        self._bindings.release()
        self._call = None
        self._held.close()
        threads, matmul, cudnn = self._restore
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


def _compiled(model: nn.Module, held: ExitStack) -> Callable[..., Any]:
    """`model` through torch.compile, for exactly the shapes that it is given, whichever came before.

    All models of a class share one cache. What does not fit into it would run uncompiled, without an error. held: on
    leaving it, the settings of torch that this changes are restored.
    """
    from torch._dynamo import config

    limits = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), COMPILED_AT_ONCE)
    patch: Any = config.patch
    held.enter_context(patch(**limits, fail_on_recompile_limit_hit=True))
    compiled: Callable[..., Any] = torch.compile(model, dynamic=False)
    return compiled


def _process_settings() -> tuple[int, bool, bool]:
    return torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def _torch_device(options: RunnerOptions) -> torch.device:
    try:
        device = torch.device(options.device or "cpu")
    except RuntimeError:
        raise DeviceError(f"device {options.device!r} is not known", hint="use cpu, cuda, cuda:N or mps") from None
    have = {"cpu": 1, "cuda": hardware.count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= have.get(device.type, 0):
        why = hardware.because() if device.type == "cuda" else ""
        raise DeviceError(
            f"device {options.device!r} was asked for, torch finds {have.get(device.type, 0)} of that kind here{why}",
            hint="use --device cpu, or run on a machine that has one",
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


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
    if precision == "tf32" and (device.type != "cuda" or not hardware.is_ampere(device.index)):
        raise DeviceError(f"tf32 was asked for, this {device} has none", hint="use fp32")
    if options.cuda_graph and device.type != "cuda":
        raise DeviceError(
            f"a CUDA graph was asked for, the device is {device}: only CUDA kernels can be recorded",
            hint="leave --cuda-graph out, or use --device cuda",
        )
