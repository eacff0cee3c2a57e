"""Tensors by name: safetensors, and PyTorch checkpoints read without executing pickled code."""

import argparse
import pickle
import struct
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitcompress.errors import WeightsError
from vitcompress.io.files import decode_json_values, write_file

# What libraries raise for unsuitable data or arguments.
LIBRARY_ERRORS = (TypeError, ValueError, AssertionError, RuntimeError, LookupError, AttributeError, ArithmeticError)
# torch.load raises almost any exception for a damaged file.
DAMAGED = (*LIBRARY_ERRORS, pickle.UnpicklingError, struct.error, OSError, EOFError, MemoryError)

# Keys of the weights in checkpoints of training scripts, in timm's order: averaged weights first.
PARTS = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model", "module", "net")
# Classes of options and scores in checkpoints of training scripts, all of them plain data.
PLAIN_TYPES: list[Any] = [argparse.Namespace, PosixPath, np.float64(0).__reduce__()[0], np.dtype]
PLAIN_TYPES += [type(np.dtype(name)) for name in ("float32", "float64", "int64")]
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
ACCEPTED = "a checkpoint (.safetensors, .pth, .pt, .pth.tar, .bin), a Hugging Face folder, hf-hub:NAME, random or hub"


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write safetensors; tensors that share storage are copied first. The library orders several metadata at random."""
    plain: dict[str, Tensor] = {}
    stored: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        plain[name] = own.clone() if own.untyped_storage().data_ptr() in stored else own
        stored.add(own.untyped_storage().data_ptr())
    write_file(path, lambda beside: save_file(plain, beside, metadata=dict(metadata or {})))


def tensor_bytes(tensor: Tensor) -> bytes:
    """The values of a tensor in C order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def tensors_digest(tensors: Iterable[Tensor], settings: str = "") -> str:
    """A hash of settings and of the values of tensors, in their order."""
    key = sha256(settings.encode())
    for tensor in tensors:
        key.update(tensor_bytes(tensor))
    return key.hexdigest()[:32]


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that `save_tensors` wrote, with their names there. Raises as `read_checkpoint`."""
    return read_checkpoint(path, wrapped=False)[0]


def read_checkpoint(path: Path, *, wrapped: bool = True) -> tuple[dict[str, Tensor], str | None, dict[str, Any]]:
    """Weights by name, the key of PARTS that they are from, and everything else in the file.

    path: safetensors with metadata, or a PyTorch checkpoint (read with `weights_only=True`). From one of a training
    script, loads the first of PARTS. wrapped: remove prefixes that all names share, as of wrappers (`module.`). Raises
    WeightsError for a file that is missing, truncated, of another format, or contains pickled code.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise WeightsError(f"no weights at {path}: it {what}", hint=f"use {ACCEPTED}")
    part = None
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                # Cloned: a view would change with the file, and its alignment changes the rounding of torch's kernels.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
                content = decode_json_values(file.metadata() or {})
        except (SafetensorError, OSError) as error:
            message = f"{path} is not a complete safetensors file: {error}"
            raise WeightsError(message, hint="copy or download it again") from None
    else:
        content = _read_pytorch(path)
        part = next((key for key in PARTS if isinstance(content, dict) and isinstance(content.get(key), dict)), None)
        tensors = content if part is None else content[part]
        named = isinstance(tensors, dict) and all(isinstance(name, str) for name in tensors)
        if not named or not all(isinstance(value, Tensor) for value in tensors.values()):
            raise WeightsError(f"{path} is not a state dict of tensors", hint="save model.state_dict()")
        content = {} if part is None else {**content, part: None}
    tensors.pop("n_averaged", None)  # of torch.optim.swa_utils.AveragedModel
    for name, tensor in tensors.items():
        if tensor.dtype not in TYPES or tensor.layout != torch.strided or tensor.is_meta:
            about = f"{tensor.dtype}, {tensor.layout}, {tensor.device}".replace("torch.", "")
            raise WeightsError(f"{path} cannot be used: {name} is {about}", hint="save dense floats")
    while wrapped and len({name.partition(".")[0] for name in tensors}) == 1 and all("." in name for name in tensors):
        tensors = {name.partition(".")[2]: tensor for name, tensor in tensors.items()}
    return tensors, part, content


def check_finite(tensors: Mapping[str, Tensor], what: str | Path) -> None:
    """Raise WeightsError, which names `what` and the first tensor, if weights are NaN or infinite."""
    for name, tensor in tensors.items():
        if tensor.is_meta or (tensor := tensor.detach()).float().sum().isfinite():  # a sum is fast, and may overflow
            continue
        if count := int((~tensor.isfinite()).sum()):
            message = f"{what} has weights that are not finite: {count} of {tensor.numel()} in {name}"
            raise WeightsError(message, hint="use weights from before the training diverged")


def _read_pytorch(path: Path) -> Any:
    """The content of a PyTorch checkpoint: tensors, plain data and `argparse.Namespace` (options of a script)."""
    try:
        with torch.serialization.safe_globals(PLAIN_TYPES):
            return torch.load(path, map_location="cpu", weights_only=True)
    except DAMAGED as error:
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            message = f"{path} contains more than tensors: loading it would run code from the file"
            raise WeightsError(message, hint="save only its state_dict(), preferably as .safetensors") from None
        message = f"{path} is damaged or not a PyTorch checkpoint"
        raise WeightsError(message, hint=f"use {ACCEPTED}, or copy it again") from None
