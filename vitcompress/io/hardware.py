"""CUDA devices that torch can use, and versions of installed packages."""

from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata

import torch

from vitcompress.errors import first_line


def count_gpus() -> int:
    """Number of CUDA devices; 0 if CUDA does not start."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cuda_reason() -> str:
    """`: REASON` to complete a message about a missing GPU; empty if CUDA starts, or if there is no GPU."""
    if torch.cuda.is_available() or not torch.cuda.device_count():
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        return f": {first_line(error)}"
    return ""


def is_ampere(index: int) -> bool:
    """Whether GPU `index` supports bf16 and TF32. On others torch emulates bf16 and silently ignores TF32."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(index) >= (8, 0)


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Version of each installed distribution of `packages`."""
    installed = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed
