"""Tensors by name: safetensors, and PyTorch checkpoints read without executing pickled code."""

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

# What libraries raise for unsuitable data or arguments.
LIBRARY_ERRORS = (TypeError, ValueError, AssertionError, RuntimeError, LookupError, AttributeError, ArithmeticError)
# torch.load raises almost any exception for a damaged file.
DAMAGED = (*LIBRARY_ERRORS, pickle.UnpicklingError, struct.error, OSError, EOFError, MemoryError)

# Keys of the weights in checkpoints of training scripts, in timm's order: averaged weights first.
PARTS = ("state_dict_ema", "model_ema", "state_dict", "model")
# Name prefixes of compiled and distributed models, in either order.
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
    """Weights by name from a safetensors file or a PyTorch checkpoint (read with `weights_only=True`).

    From a checkpoint of a training script, loads the first of PARTS and strips the prefixes WRAPPERS. Raises
    WeightsError for a file that is missing, truncated, of another format, or contains pickled code.
    """
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"no weights at {path}", hint="use a .safetensors, .pth or .pt file")
    if path.suffix != ".safetensors":
        return _load_pytorch(path)
    try:
        with safe_open(path, framework="pt") as file:
            # Cloned: a view would change with the file, and its alignment changes the rounding of torch's kernels.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        message = f"{path} is not a complete safetensors file: {error}"
        raise WeightsError(message, hint="copy or download it again") from None


def checkpoint_part(path: Path) -> str | None:
    """The key of PARTS that `load_tensors` loads from a checkpoint; None for a file of weights only."""
    return None if path.suffix == ".safetensors" else _part(_read_pytorch(path))


def _load_pytorch(path: Path) -> dict[str, Tensor]:
    data = _read_pytorch(path)
    part = _part(data)
    tensors = data if part is None else data[part]
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise WeightsError(f"{path} is not a state dict of tensors", hint="save model.state_dict()")
    for wrapper in WRAPPERS:
        tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
    return tensors


def _read_pytorch(path: Path) -> Any:
    """The content of a PyTorch checkpoint: tensors, plain data and `argparse.Namespace` (options of a script)."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except DAMAGED as error:
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            message = f"{path} contains more than tensors: loading it would run code from the file"
            raise WeightsError(message, hint="save only its state_dict(), preferably as .safetensors") from None
        raise WeightsError(f"{path} is not a complete PyTorch checkpoint", hint="copy or download it again") from None


def _part(data: Any) -> str | None:
    return next((key for key in PARTS if isinstance(data, dict) and isinstance(data.get(key), dict)), None)
