"""CUDA devices that torch can use, and versions of installed packages."""

from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata

import torch

from vitcompress.errors import first_line


def count_gpus() -> int:
    """How many there are; 0 where CUDA does not start."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cuda_problem() -> str | None:
    """Why CUDA does not start on GPUs that are there; None where it does, or where there are none."""
    if torch.cuda.is_available() or not torch.cuda.device_count():
        return None
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # the latter of a build without CUDA
        return first_line(error)
    return None


def is_ampere(index: int) -> bool:
    """Whether a GPU is of Ampere or later, the first to compute in bf16 and TF32: in others torch emulates bf16, and
    leaves TF32 out without a word.
    """
    return torch.version.hip is not None or torch.cuda.get_device_capability(index) >= (8, 0)


def cuda_reason() -> str:
    """`: REASON`, to end a sentence about a missing GPU with; nothing where there is no `problem`."""
    found = cuda_problem()
    return f": {found}" if found else ""


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those of `packages` (names of distributions) that are installed."""
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
