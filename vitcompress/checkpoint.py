"""Files on disk: written beside their target and moved into place, plain data only (safetensors and JSON)."""

import contextlib
import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import stat
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vitcompress.errors import ArtifactError, OutputError, PlanError, WeightsError
from vitcompress.plan import Plan

PLAN, WEIGHTS = "plan.json", "model.safetensors"
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

# -------------------------------------------------------------------------------------------------------------- writing


def write(path: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write a file beside `path`, make it durable, and move it into place. On failure nothing is left.

    Raises:
        OutputError: the folder cannot be written or the disk is full.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.touch()
            mode = stat.S_IMODE(beside.stat().st_mode)  # what the umask gives; safetensors keeps files to the owner
            fill(beside)
            with beside.open("r+b") as file:  # Windows syncs only what it may write
                os.fsync(file.fileno())
            beside.chmod(mode)
            beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong in this block while `path` is written into an OutputError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise _output_error(path, error) from None


def _output_error(path: Path, error: Exception) -> OutputError:
    # What is being written lies in a folder that nobody will find again: the one around it is meant.
    shown = next((part.parent for part in path.parents if part.name.endswith(".part")), path)
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
    if full:
        return OutputError(
            f"the disk is full: {shown} could not be written",
            hint="free some space and run the same command again; it continues where it stopped",
        )
    from_system = re.search(r"([^:]+) \(os error \d+\)", str(error))  # safetensors tells where in its code, too
    reason = getattr(error, "strerror", None) or (from_system[1].strip() if from_system else str(error))
    return OutputError(f"{shown} cannot be written: {reason}", hint="choose another folder with --out")


def write_bytes(path: Path, data: bytes) -> None:
    write(path, lambda beside: beside.write_bytes(data))


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, data: Any) -> None:
    """Raises ValueError for NaN and infinity, which JSON does not have."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def differing(sidecar: Path) -> list[str]:
    """The files beside `sidecar` that are missing or not what it recorded under `files`, a sentence each."""
    data = read_json(sidecar)
    files = data.get("files") if isinstance(data, dict) else None
    if not isinstance(files, dict):
        return [f"{sidecar.name} does not say which files it describes"]
    wrong = []
    for name, recorded in files.items():
        path = sidecar.parent / name
        actual = file_sha256(path) if path.is_file() else "missing"
        if actual != recorded:
            wrong.append(f"{name}: sha256 is {actual[:12]}, {sidecar.name} says {str(recorded)[:12]}")
    return wrong


def read_json(path: Path) -> Any:
    """Raises ArtifactError when `path` is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} cannot be read as JSON: {error}") from None


# -------------------------------------------------------------------------------------------------------------- tensors


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write safetensors; tensors that share storage are written apart."""
    plain = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
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


# --------------------------------------------------------------------------------------------------------------- models


def save_model(folder: Path, model: nn.Module, plan: Plan) -> None:
    """Write plan.json and model.safetensors; `load` gives the model back."""
    save_tensors(folder / WEIGHTS, model.state_dict(), {"plan": plan.digest})
    write_text(folder / PLAN, plan.to_json())


def load(folder: str | Path, device: str | torch.device = "cpu") -> nn.Module:
    """The model of a run folder: `timm.create_model` + plan + strict weights, in eval mode.

    The result is a timm model: `forward_features`, `forward_intermediates` and `reset_classifier` work. Its plan is in
    `model.plan`.

    Raises:
        ArtifactError: not a run folder, or weights and plan of different runs.
        PlanError, WeightsError: a damaged part.
    """
    return load_parts(Path(folder) / PLAN, Path(folder) / WEIGHTS).to(device)


def load_parts(plan_path: Path, weights_path: Path) -> nn.Module:
    """`load` for a plan and weights that lie apart."""
    from vitcompress import models
    from vitcompress.surgery import apply

    if not plan_path.is_file() or not weights_path.is_file():
        missing = plan_path if not plan_path.is_file() else weights_path
        raise ArtifactError(
            f"{plan_path.parent} is not a finished run folder: {missing.name} is missing",
            hint="run the recipe to its end, or name another folder",
        )
    plan = _read_plan(plan_path)
    tensors = load_for(weights_path, plan)
    model = apply(models.create(plan.arch, plan.arch_args), plan)
    load_strictly(model, tensors, weights_path)
    model.plan = plan  # type: ignore[assignment]
    return model.eval()


def load_for(path: Path, plan: Plan) -> dict[str, Tensor]:
    """The safetensors at `path`, which say that they were saved for a model of `plan`, or say nothing of it.

    Raises:
        PlanError: they were saved for another plan.
        WeightsError: see `load_tensors`.
    """
    tensors = load_tensors(path)
    with safe_open(path, framework="pt") as file:
        made_for = (file.metadata() or {}).get("plan", plan.digest)
    if made_for != plan.digest:
        raise PlanError(
            f"{path.parent}: this is not the plan that {path.name} was saved with",
            hint="plan.json was edited or comes from another run; restore it",
        )
    return tensors


def load_strictly(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Give `model` the `tensors` of `path`. Raises WeightsError when they are not those of its plan."""
    try:
        model.load_state_dict(tensors, strict=True, assign=True)  # assigned, so in the type they were saved in
    except RuntimeError as error:
        raise WeightsError(f"{path} does not fit its plan: {_first_mismatch(error)}") from None


def _read_plan(path: Path) -> Plan:
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} cannot be read: {error}") from None


def _first_mismatch(error: RuntimeError) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return lines[1] if len(lines) > 1 else lines[0]


# --------------------------------------------------------------------------------------------------------- resume state


@dataclass(frozen=True)
class State:
    """What a part of the work had reached: finished `epoch`, tensors by name, and everything else as JSON data."""

    epoch: int
    tensors: dict[str, Tensor]
    data: Any


# Count of saves, then the epoch: a state of the same epoch saved again gets a folder of its own too, so that a whole
# one is there before the older one is touched.
_STATE = re.compile(r"state-(\d{6})-epoch-(\d{6})")


def save_state(folder: Path, epoch: int, tensors: Mapping[str, Tensor], data: Any) -> None:
    """Write a state as a new folder renamed into place, then drop older ones: killed anywhere, a whole state is left.

    Raises:
        OutputError: the folder cannot be written or the disk is full; the state saved before is still there.
    """
    number = max((number for number, _, _ in _states(folder)), default=0) + 1
    final = folder / f"state-{number:06d}-epoch-{epoch:06d}"
    beside = folder / f".{final.name}.part"
    shutil.rmtree(beside, ignore_errors=True)
    try:
        save_tensors(beside / "tensors.safetensors", tensors)
        write_json(beside / "data.json", data)
        with writing(folder):
            beside.rename(final)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    for old in (*folder.glob(".state-*.part"), *folder.glob("state-*")):
        if old != final:
            shutil.rmtree(old, ignore_errors=True)


def load_state(folder: Path) -> State | None:
    """The state saved last in `folder`, None when there is none."""
    found = _states(folder)
    if not found:
        return None
    _, epoch, path = max(found)
    return State(epoch, load_tensors(path / "tensors.safetensors"), read_json(path / "data.json"))


def _states(folder: Path) -> list[tuple[int, int, Path]]:
    matches = [(_STATE.fullmatch(path.name), path) for path in folder.glob("state-*")]
    return [(int(match[1]), int(match[2]), path) for match, path in matches if match]
