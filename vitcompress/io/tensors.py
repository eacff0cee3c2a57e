"""Tensors by name: safetensors, and PyTorch checkpoints read without running what they hold."""

import argparse
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitcompress.errors import WeightsError
from vitcompress.io.files import write_file

# What torch.load raises for damaged files: its reader trusts what it reads, so nearly anything.
DAMAGED = (
    pickle.UnpicklingError,
    RuntimeError,
    OSError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    MemoryError,
    struct.error,
)

# Where training scripts keep weights, in timm's order: averaged ones first, which are the ones they are used with.
PARTS = ("state_dict_ema", "model_ema", "state_dict", "model")
# In front of the names of a model that was trained by several processes, or compiled, in whichever order.
WRAPPERS = ("_orig_mod.", "module.", "_orig_mod.")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write safetensors; tensors that share storage are copied first."""
    plain: dict[str, Tensor] = {}
    stored: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        plain[name] = own.clone() if own.untyped_storage().data_ptr() in stored else own
        stored.add(own.untyped_storage().data_ptr())
    write_file(path, lambda beside: save_file(plain, beside, metadata=dict(metadata or {})))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Weights by name from safetensors, or from a PyTorch checkpoint read with `weights_only=True`.

    Checkpoints of training scripts are unwrapped: the first of PARTS that they hold, without the prefixes WRAPPERS.

    Raises:
        WeightsError: missing, truncated, of another format, or holding pickled code.
    """
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"no weights at {path}", hint="give a .safetensors, .pth or .pt file")
    return _load_safetensors(path) if path.suffix == ".safetensors" else _load_pytorch(path)


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            # Cloned: a view of the file would change with it, and its alignment makes torch's kernels round otherwise.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{path} is not a whole safetensors file: {error}", hint="copy or download it again"
        ) from None


def checkpoint_part(path: Path) -> str | None:
    """Which of PARTS `load_tensors` takes of a training script's checkpoint; None for a file of weights alone.

    Raises:
        WeightsError: as `load_tensors`.
    """
    return None if path.suffix == ".safetensors" else _part(_read_pytorch(path))


def _load_pytorch(path: Path) -> dict[str, Tensor]:
    data = _read_pytorch(path)
    part = _part(data)
    tensors = data if part is None else data[part]
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise WeightsError(f"{path} is not a state dict of tensors", hint="save model.state_dict()")
    return {_unwrapped(name): tensor for name, tensor in tensors.items()}


def _read_pytorch(path: Path) -> Any:
    """What a PyTorch checkpoint holds: tensors and plain data, and the options of a script, which are plain data."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except DAMAGED as error:
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            raise WeightsError(
                f"{path} holds more than tensors: loading it would run code from the file",
                hint="save its state_dict() alone, best as .safetensors",
            ) from None
        raise WeightsError(f"{path} is not a whole PyTorch checkpoint", hint="copy or download it again") from None


def _part(data: Any) -> str | None:
    return next((key for key in PARTS if isinstance(data, dict) and isinstance(data.get(key), dict)), None)


def _unwrapped(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper)
    return name
