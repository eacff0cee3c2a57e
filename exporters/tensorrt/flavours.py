"""The two TensorRT libraries, with one interface: TensorRT, and TensorRT for RTX, which builds without a GPU."""

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from vitcompress.errors import DeviceError, InputError, MissingExtraError
from vitcompress.io import hardware

HEADER = 64  # bytes at the start of an engine


@dataclass(frozen=True)
class Flavour:
    """One of the two libraries. magic: first bytes of its engines. oldest: oldest supported version."""

    name: str
    title: str
    module: str
    extra: str
    suffix: str
    magic: bytes
    oldest: tuple[int, ...]

    def load(self) -> Any:
        """The library. Raises MissingExtraError if it is not installed, DeviceError if it cannot be used."""
        try:
            library = importlib.import_module(self.module)
        except ModuleNotFoundError:
            raise MissingExtraError(self.module, self.extra, need=self.title) from None
        except (ImportError, OSError) as error:  # installed, but without a shared library that it needs
            raise DeviceError(f"{self.title} cannot be loaded: {error}", hint=self.install) from None
        if numbers(str(library.__version__)) < self.oldest:
            oldest = ".".join(map(str, self.oldest))
            message = f"{self.title} {library.__version__} is too old, {oldest} or later is required"
            raise DeviceError(message, hint=self.install)
        return library

    def supported_targets(self) -> tuple[int, ...]:
        """Compute capabilities that TensorRT for RTX can build for."""
        names = self.load().ComputeCapability.__members__
        return tuple(sorted(int(name[2:]) for name in names if name.startswith("SM")))

    @property
    def install(self) -> str:
        return f"pip install 'vitcompress[{self.extra}]'"

    def create(self, kind: str, log: Any) -> Any:
        """A `Builder` or `Runtime`, which reports errors to `log`. Raises DeviceError for another driver or GPU."""
        library = self.load()
        try:
            return getattr(library, kind)(log)
        except TypeError:  # the library returned a null pointer, which is all that its Python bindings report
            message = f"{self.title} {library.__version__} does not work with this driver or GPU: {log.last_error()}"
            hint = "update the driver, or install a version for it (`nvidia-smi` shows the CUDA that it supports)"
            raise DeviceError(message, hint=hint) from None

    def problem(self, kind: str | None = None) -> str | None:
        """Why the library, or its `Builder` or `Runtime` on the GPU of this machine, cannot be used; None if it can."""
        try:
            library = self.load()
            if kind is not None:
                self.create(kind, create_log(library))
        except InputError as error:
            return error.sentence()
        return None


TRT = Flavour("trt", "TensorRT", "tensorrt", "trt", ".engine", b"ftrt", (10, 12))
RTX = Flavour("trt-rtx", "TensorRT for RTX", "tensorrt_rtx", "rtx", ".rtx.engine", b"vtrt", (1, 4))
FLAVOURS = {flavour.name: flavour for flavour in (TRT, RTX)}


def numbers(version: str) -> tuple[int, ...]:
    """`10.14.1.48.post1` -> (10, 14, 1, 48): the library's version, without that of its packaging."""
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def capability(index: int = 0) -> int | None:
    """Compute capability of a GPU of this machine (8.9 is 89), None if there is none."""
    if index >= hardware.count_gpus():
        return None
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def create_log(library: Any) -> Any:
    """A logger that stores `warnings` and `errors` instead of printing them."""

    class Log(library.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            library.ILogger.__init__(self)
            self.warnings: list[str] = []
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity == library.ILogger.WARNING:
                self.warnings.append(message.strip())
            elif severity in (library.ILogger.ERROR, library.ILogger.INTERNAL_ERROR):
                self.errors.append(message.strip())

        def last_error(self) -> str:
            messages = self.errors or self.warnings  # some versions only warn about a driver that is too old
            return messages[-1].splitlines()[0] if messages else "no reason reported"

        def first_and_last_error(self) -> str:
            """The first error is mostly the cause, the last one its consequence; often they are the same."""
            lines = [error.splitlines()[0] for error in (*self.errors[:1], *self.errors[-1:])]
            return "; ".join(dict.fromkeys(lines)) or "no reason reported"

    return Log()
