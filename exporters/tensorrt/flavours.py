"""TensorRT comes as two libraries with one interface: TensorRT, and TensorRT for RTX, which builds without a GPU."""

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from vitcompress.errors import DeviceError, InputError, MissingExtraError
from vitcompress.io import hardware

DATA_CENTRE = (90, 100, 103, 107, 110)  # Hopper and Blackwell of data centres and robots: not for TensorRT for RTX
RTX_DEFAULT = (80, 86, 89, 120)  # Ampere, Ada and Blackwell: what TensorRT for RTX itself builds for
HEADER = 64  # bytes in front of an engine
MAGIC_BYTES, VERSION_BYTES = slice(0, 4), slice(24, 28)
TARGETS_BYTE, TARGETS = 32, (75, 80, 86, 89, 120, 121)  # TensorRT for RTX: one bit each, the lowest first


@dataclass(frozen=True)
class Flavour:
    """One of the two libraries. magic: how its engine files begin. oldest: first version that can do what is needed."""

    name: str
    title: str
    module: str
    extra: str
    suffix: str
    magic: bytes
    oldest: tuple[int, ...]

    def load(self) -> Any:
        """The library. Raises MissingExtraError where it is not installed, DeviceError for one that cannot be used."""
        try:
            library = importlib.import_module(self.module)
        except ModuleNotFoundError:
            raise MissingExtraError(self.module, self.extra, need=self.title) from None
        except (ImportError, OSError) as error:  # it is there, a shared library that it needs is not
            raise DeviceError(f"{self.title} cannot be loaded: {error}", hint=self.install) from None
        if numbers(str(library.__version__)) < self.oldest:
            oldest = ".".join(map(str, self.oldest))
            raise DeviceError(
                f"{self.title} {library.__version__} is too old, {oldest} or later is needed", hint=self.install
            )
        return library

    @property
    def install(self) -> str:
        return f"pip install 'vitcompress[{self.extra}]'"

    def missing(self) -> str | None:
        """Why the library cannot be used here, with the remedy; None when it can."""
        try:
            self.load()
        except InputError as error:
            return f"{error.message}: {error.hint}"
        return None

    def made(self, kind: str, log: Any) -> Any:
        """A `Builder` or `Runtime` of the library, which says to `log` what goes wrong.

        Raises DeviceError where it does not work with the driver or the GPU; it may want newer ones than torch does.
        """
        library = self.load()
        try:
            return getattr(library, kind)(log)
        except TypeError:  # the library gave none, of which its Python bindings say nothing else
            raise DeviceError(
                f"{self.title} {library.__version__} does not work with this driver or GPU: {log.last_error()}",
                hint="update the driver, or install a version for it (`nvidia-smi` shows the CUDA that it supports)",
            ) from None

    def refused(self, kind: str) -> str | None:
        """Why the library cannot make a `Builder` or a `Runtime` on the GPU that is here, None when it can."""
        try:
            self.made(kind, log_of(self.load()))
        except DeviceError as error:
            return f"{error.message}; {error.hint}"
        return None


TRT = Flavour("trt", "TensorRT", "tensorrt", "trt", ".engine", b"ftrt", (10, 12))
RTX = Flavour("trt-rtx", "TensorRT for RTX", "tensorrt_rtx", "rtx", ".rtx.engine", b"vtrt", (1, 0))
FLAVOURS = {flavour.name: flavour for flavour in (TRT, RTX)}


def numbers(version: str) -> tuple[int, ...]:
    """`10.14.1.48.post1` as (10, 14, 1, 48): the library's version, without that of its packaging."""
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def capability(index: int = 0) -> int | None:
    """Compute capability of a GPU here (8.9 is 89), None where there is none."""
    if index >= hardware.count():
        return None
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def buildable(library: Any) -> tuple[int, ...]:
    """Compute capabilities that TensorRT for RTX can build for."""
    names = library.ComputeCapability.__members__
    return tuple(sorted(int(name[2:]) for name in names if name.startswith("SM")))


def kind_of(data: bytes) -> Flavour | None:
    """Which library wrote an engine, by its first bytes: a hint, as the header is not documented."""
    return next((flavour for flavour in FLAVOURS.values() if data[MAGIC_BYTES] == flavour.magic), None)


def header_of(data: bytes) -> dict[str, Any]:
    """Library, version and compute capabilities of an engine by its first bytes, None for what they do not say."""
    kind = kind_of(data)
    if kind is None or len(data) < HEADER:
        return {"written_by": None, "version": None, "sm": None}
    bits = data[TARGETS_BYTE]
    targets = [target for number, target in enumerate(TARGETS) if bits >> number & 1]
    return {
        "written_by": kind.title,
        "version": ".".join(str(part) for part in data[VERSION_BYTES]),
        "sm": targets if kind is RTX else None,
    }


def log_of(library: Any) -> Any:
    """What the library says, kept instead of printed: `warnings` and `errors`, of which one line tells."""

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
            said = self.errors or self.warnings  # of a driver that is too old some versions only warn
            return said[-1].splitlines()[0] if said else "it gives no reason"

        def first_and_last_error(self) -> str:
            """The first is mostly the cause, the last what the library makes of it; often they are one."""
            lines = [error.splitlines()[0] for error in (*self.errors[:1], *self.errors[-1:])]
            return "; ".join(dict.fromkeys(lines)) or "it gives no reason"

    return Log()
