"""The interface of every runtime: options, and a runner that can be called, described and timed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from vitcompress.errors import ArtifactError, InputError, VitcompressError
from vitcompress.exporters.uint8 import to_bytes
from vitcompress.io.text import span
from vitcompress.models.create import InputConfig


class Bound:
    """A pass as a call. step: makes it, and holds all that it needs."""

    def __init__(self, step: Callable[[], object]) -> None:
        self.step = step

    def __call__(self) -> None:
        self.step()

    def release(self) -> None:
        """Drop everything that it holds; a later call raises a VitcompressError."""
        self.step = _closed


def _closed() -> None:
    raise VitcompressError("the runner that this call was bound by is closed", hint="bind again, with an open one")


Kind = TypeVar("Kind", bound=Bound)


class Bindings:
    """The bound calls of one runner that are still referenced somewhere."""

    def __init__(self) -> None:
        self._known: WeakSet[Bound] = WeakSet()

    def add(self, call: Kind) -> Kind:
        self._known.add(call)
        return call

    def release(self) -> None:
        for call in list(self._known):
            call.release()


class Queued(Bound):
    """One pass as a call: `step` puts it on `stream` and does not wait for it. A `TimedCall` of runner.py.

    tensors: what it reads and what it writes, which must live as long as it does.
    """

    def __init__(self, step: Callable[[], object], stream: Any, tensors: tuple[torch.Tensor, ...] = ()) -> None:
        super().__init__(step)
        self.stream, self._tensors = stream, tensors

    def release(self) -> None:
        super().release()
        self._tensors = ()

    def __call__(self) -> None:
        with torch.cuda.stream(self.stream):
            self.step()

    def timed(self, runs: int) -> tuple[list[float], float]:
        """Milliseconds of each of `runs` passes, by CUDA events around it, and of all of them by the wall clock.

        The passes are queued without waiting between them, and waited for once, at the end. Events are recorded on the
        stream that the passes are on, and on its GPU, whichever is the current one.
        """
        event: Any = torch.cuda.Event
        marks = [event(enable_timing=True) for _ in range(runs + 1)]
        with torch.cuda.stream(self.stream):
            for mark in marks:
                mark.record()  # the first time an event is made, for which the GPU would wait
            self.stream.synchronize()
            began = time.perf_counter()
            marks[0].record()
            for mark in marks[1:]:
                self.step()
                mark.record()
            self.stream.synchronize()
            wall = 1000.0 * (time.perf_counter() - began)
        return [float(a.elapsed_time(b)) for a, b in pairwise(marks)], wall


# Settings that one runtime alone has, and what runs in it.
OWNED_SETTINGS = {
    "compile": ("torch", "run folders and timm models"),
    "sdpa": ("torch", "run folders and timm models"),
    "provider": ("ONNX Runtime", "ONNX files"),
}
# What every runner says of itself, and what it is where a runtime has nothing of the kind.
DESCRIPTION: dict[str, Any] = {
    "artifact": None,
    "sha256": None,
    "runtime": None,
    "runtime_version": None,
    "device": None,
    "device_name": None,
    "provider": None,
    "precision": None,
    "tf32": False,
    "threads": None,
    "sdpa": None,
    "compile": False,
    "channels_last": False,
    "cuda_graph": False,
    "transfers": False,
    "graph_optimization": None,
    "weights": None,
}


@dataclass(frozen=True)
class RunnerOptions:
    """How an artifact is run.

    device: `cpu`, `cuda`, `cuda:1`, `mps`; None is what the artifact is made for: a GPU for engines, else the CPU.
    provider: an ONNX Runtime execution provider by its full name; None takes the one of the device. precision: None
    takes that of the file, fp32 in torch; `tf32` is fp32 with TF32 products on CUDA, which `fp32` never uses. threads:
    CPU threads of one call; None leaves the runtime's default. compile and sdpa (`auto`, `math`, `flash`, `efficient`,
    `cudnn`) concern torch. weights: those of a `timm:` name (`random`, `hub`). trust: open an engine that no sidecar
    vouches for. cuda_graph: replay a bound run from a recorded CUDA graph. transfers: a bound run begins and ends
    with images and logits on the host. batch: (least, best, largest) number of images, for providers that build for a
    range first; None is that of `ExportOptions`. engine_cache: folder where these keep what they build, which is code.
    """

    device: str | None = None
    provider: str | None = None
    precision: str | None = None
    threads: int | None = None
    compile: bool = False
    sdpa: str = "auto"
    weights: str = "random"
    trust: bool = False
    cuda_graph: bool = False
    transfers: bool = False
    batch: tuple[int, int, int] | None = None
    engine_cache: Path | None = None


@runtime_checkable
class TimedCall(Protocol):
    """A bound call that can time itself: work that is queued on a GPU, or done in another process."""

    def __call__(self) -> None:
        """One run."""

    def timed(self, runs: int) -> tuple[list[float], float]:
        """Milliseconds of each of so many runs, by CUDA events, and of all of them together by the wall clock."""


class Runner(Protocol):
    """A model that can be asked, described and timed. `runner(images)` gives float32 logits on the CPU."""

    name: str

    @property
    def input(self) -> InputConfig | None:
        """How images are brought to the model; None when the artifact does not say."""

    @property
    def input_size(self) -> tuple[int, int, int]:
        """(channels, height, width)"""

    def __call__(self, images: Tensor) -> Tensor:
        """images: (batch, channels, height, width), normalised, or what `as_given` takes, on any device -> (batch,
        classes).
        """

    def bind(self, images: Tensor) -> Callable[[], object]:
        """One forward pass of `images` as a call without arguments.

        Inputs are already where the model computes, unless transfers were asked for. One that is a TimedCall times
        itself. The call ends with the runner: after `close` it holds nothing, and raises a VitcompressError.
        """

    def synchronize(self) -> None:
        """Wait until everything queued is done."""

    def describe(self) -> dict[str, Any]:
        """Everything that affects the speed or the accuracy of this runner; see `described`."""

    def close(self) -> None:
        """Free what the runner and its bound calls hold, and restore what it changed. A second call does nothing."""


def refuse_settings_of_others(options: RunnerOptions, runtime: str, name: str) -> None:
    """Raise InputError where `options` of the artifact `name` hold a setting that its `runtime` does not have."""
    for setting, (owner, runs) in OWNED_SETTINGS.items():
        if owner != runtime and getattr(options, setting) != getattr(RunnerOptions, setting):
            told = f"{setting} is a setting of {owner}, {name} runs in {runtime}"
            raise InputError(told, hint=f"leave it out, or give only {runs}")


def described(**known: Any) -> dict[str, Any]:
    """What `Runner.describe` returns: `known`, and each key of `DESCRIPTION` that is not in it."""
    return {**DESCRIPTION, **known}


def as_given(images: Tensor, input: InputConfig | None, *, uint8: bool) -> np.ndarray:
    """Normalised images, (batch, channels, height, width), as a file takes them: float32, or bytes with channels last.

    images: with `uint8` also the bytes themselves, (batch, height, width, channels), for a file that says nothing of
    them.

    Raises:
        ArtifactError: bytes are wanted, and the file does not say how they were normalised.
    """
    if uint8 and images.dtype == torch.uint8:
        return np.ascontiguousarray(images.detach().cpu().numpy())
    if not uint8:
        return np.ascontiguousarray(images.detach().float().cpu().numpy())
    if input is None:
        raise ArtifactError(
            "the file takes bytes and does not say how it normalises them", hint="export it with vitcompress"
        )
    made: np.ndarray = to_bytes(images.detach().cpu(), input).numpy()
    return made


def some_bytes(images: Tensor) -> np.ndarray:
    """Bytes with channels last, for a file that does not say what its bytes mean: enough to time it.

    images: (batch, channels, height, width), standard normal -> (batch, height, width, channels).
    """
    made: np.ndarray = (64 * images.cpu() + 128).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return made


def check_batch(name: str, allowed: Sequence[int], images: int) -> None:
    """Raise InputError for a batch outside the range (least, best, largest) that `name` was built for."""
    low, _, high = allowed
    if not low <= images <= high:
        raise InputError(
            f"{name} takes batches of {span(low, high)}, got {images}",
            hint=f"use --batch {low}"
            if low == high
            else "use such a --batch, or export with another range (--batch L:B:L)",
        )
