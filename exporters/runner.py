"""The interface of all runtimes: options, and runners that can be called, described and timed."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from weakref import WeakSet

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor

from vitcompress.errors import ArtifactError, InputError
from vitcompress.exporters.calls import BoundCall
from vitcompress.exporters.sidecar import read_input
from vitcompress.exporters.uint8 import to_bytes
from vitcompress.io.text import format_range
from vitcompress.io.validation import UserPath
from vitcompress.models.create import InputConfig, check_images


@dataclass(frozen=True)
class RunnerOptions:
    """How an artifact is run.

    device: `cpu`, `cuda`, `cuda:1`, `mps`; None: a GPU for engines, the CPU for everything else.
    provider: full name of an execution provider of ONNX Runtime; None: the one of the device.
    precision: None: that of the file, fp32 in torch. `tf32`: fp32 with TF32 products on CUDA; `fp32` never uses TF32.
    threads: CPU threads of one call; None: the runtime's default.
    compile: use torch.compile, for what runs in torch.
    trust: open an engine without a matching sidecar.
    cuda_graph: replay bound calls from a recorded CUDA graph.
    transfers: bound calls include the copies of images and logits from and to the host.
    batch: (minimum, optimal, maximum) images, for providers that build an engine; None: default of `ExportOptions`.
    engine_cache: folder in which such providers store these engines, which contain executable code.
    """

    device: str | None = None
    provider: str | None = None
    precision: str | None = None
    threads: Annotated[int, Ge(1), Le(1024)] | None = None
    compile: bool = False
    trust: bool = False
    cuda_graph: bool = False
    transfers: bool = False
    batch: tuple[int, int, int] | None = None
    engine_cache: UserPath | None = None


# Keys of every runner's description, with the values for runtimes without such a property.
DESCRIPTION: dict[str, object] = {
    **dict.fromkeys(("artifact", "sha256", "runtime", "runtime_version", "device_name", "provider", "precision")),
    **dict.fromkeys(("threads", "graph_optimization")),
    **{"device": "cpu", "tf32": False, "compile": False, "cuda_graph": False, "transfers": False},
}
# Setting -> the only runtime that has it, and the artifacts that run there.
OWNED_SETTINGS = {
    "compile": ("torch", "run folders and timm models"),
    **dict.fromkeys(("provider", "engine_cache"), ("ONNX Runtime", "ONNX files")),
}


class Runner(ABC):
    """A model that can be run, described and timed.

    input: preprocessing of images; None if the artifact does not state it. input_size: (channels, height, width).
    takes_bytes: the file takes bytes with channels last and normalizes them itself. is_classifier: False if its outputs
    are features. batch_range: the smallest, best and largest batch of a file that was built for a range.
    """

    input: InputConfig | None
    input_size: tuple[int, int, int]
    takes_bytes = False
    is_classifier = True
    batch_range: Sequence[int] | None = None
    _sha256: str | None = None  # of its file

    def __init__(self, name: str, options: RunnerOptions, runtime: str) -> None:
        """Raises InputError for a setting that `runtime` does not have."""
        for setting, (owner, artifacts) in OWNED_SETTINGS.items():
            if owner != runtime and getattr(options, setting) != getattr(RunnerOptions, setting):
                message = f"{setting} is a setting of {owner}, but {name} runs in {runtime}"
                raise InputError(message, hint=f"omit it, or name only {artifacts}")
        self.name, self._options, self._threads = name, options, options.threads
        self._calls = WeakSet[BoundCall]()  # those that are still referenced elsewhere

    @abstractmethod
    def __call__(self, images: Tensor) -> Tensor:
        """Logits, (batch, classes), float32, on the CPU. images: what `prepare_input` takes, on any device."""

    def predict(self, images: Tensor) -> Tensor:
        """Logits of any number of images, in calls that the artifact takes.

        More images than its largest batch are several calls; copies of the last image complete its smallest batch.
        Raises InputError for a model of features.
        """
        if not self.is_classifier:
            hint = "evaluate a model with num_classes=2 or more"
            raise InputError(f"{self.name} has no classifier: its outputs are features, not logits", hint=hint)
        least, _, most = self.batch_range or (1, 0, len(images))
        logits = []
        for part in torch.split(images, most):
            copies = part[-1:].repeat(max(0, least - len(part)), 1, 1, 1)
            logits.append(self(torch.cat([part, copies]))[: len(part)])
        return torch.cat(logits)

    def bind(self, images: Tensor) -> BoundCall:
        """One forward pass of `images` as a call without arguments.

        The inputs are on the device already, unless transfers were requested. `close` frees the memory of the call,
        which then raises a VitcompressError.
        """
        call = self._bind(images)
        self._calls.add(call)
        return call

    @abstractmethod
    def _bind(self, images: Tensor) -> BoundCall: ...

    def describe(self) -> dict[str, Any]:
        """Everything that affects the speed or the accuracy of this runner, with all keys of `DESCRIPTION`."""
        return {**DESCRIPTION, "artifact": self.name, "sha256": self._sha256, **self._describe()}

    @abstractmethod
    def _describe(self) -> dict[str, object]: ...

    def close(self) -> None:
        """Free the memory of the runner and its bound calls, and restore changed settings. May be called twice."""
        for call in list(self._calls):
            call.release()

    def _set_input(self, shape: Iterable[int], labels: Mapping[str, object], *, takes_bytes: bool) -> None:
        """Set what images the file takes. shape: of one of them. labels: the file's decoded metadata."""
        first, second, third = shape
        self.takes_bytes, self.is_classifier = takes_bytes, labels.get("classes") != []
        self.input_size = (third, first, second) if takes_bytes else (first, second, third)
        self.input = read_input(self.name, labels, self.input_size)

    def _prepare(self, images: Tensor) -> np.ndarray:
        self._check_batch(len(images))
        if not self.takes_bytes or images.dtype != torch.uint8:
            check_images(images, self.input_size)
        return prepare_input(images, self.input, uint8=self.takes_bytes)

    def _check_batch(self, images: int) -> None:
        """Raise InputError for a batch outside the range that the file was built for."""
        low, _, high = self.batch_range or (0, 0, images)
        if not low <= images <= high:
            other = "use such a --batch, or export with another range (--batch MIN:OPT:MAX)"
            hint = f"use --batch {low}" if low == high else other
            raise InputError(f"{self.name} takes batches of {format_range(low, high)}, got {images}", hint=hint)


def prepare_input(images: Tensor, input: InputConfig | None, *, uint8: bool) -> np.ndarray:
    """Images as a file takes them: normalized float32, or with `uint8` bytes with channels last.

    images: (batch, channels, height, width), normalized; with `uint8` also bytes, (batch, height, width, channels).
    Raises ArtifactError if the file takes bytes and does not state their normalization.
    """
    images = images.detach().cpu()
    if not uint8:
        images = images.float()
    elif images.dtype != torch.uint8:
        if input is None:
            message = "the file takes bytes and does not state how it normalizes them"
            raise ArtifactError(message, hint="export it with vitcompress")
        images = to_bytes(images, input)
    return np.ascontiguousarray(images.numpy())
