"""Tensors by name: safetensors, and PyTorch checkpoints read without running what they hold."""

import pickle
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitcompress.checkpoint.files import write
from vitcompress.errors import WeightsError

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


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write safetensors; tensors that share storage are written apart."""
    plain: dict[str, Tensor] = {}
    stored: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        plain[name] = own.clone() if own.untyped_storage().data_ptr() in stored else own
        stored.add(own.untyped_storage().data_ptr())
    write(path, lambda beside: save_file(plain, beside, metadata=dict(metadata or {})))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Weights by name from safetensors, or from a PyTorch checkpoint read with `weights_only=True`.

    Checkpoints of training scripts are unwrapped (`model`, `state_dict`, `module.` prefixes).

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


def _load_pytorch(path: Path) -> dict[str, Tensor]:
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except DAMAGED as error:
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            raise WeightsError(
                f"{path} holds more than tensors: loading it would run code from the file",
                hint="save its state_dict() alone, best as .safetensors",
            ) from None
        raise WeightsError(f"{path} is not a whole PyTorch checkpoint", hint="copy or download it again") from None
    for key in ("state_dict", "model"):
        if isinstance(data, dict) and isinstance(data.get(key), dict):
            data = data[key]
            break
    if not isinstance(data, dict) or not all(isinstance(value, Tensor) for value in data.values()):
        raise WeightsError(f"{path} is not a state dict of tensors", hint="save model.state_dict()")
    return {name.removeprefix("module."): tensor for name, tensor in data.items()}
