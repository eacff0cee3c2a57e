"""Device, precision and processes of a training.

A single process has a world of size one: the same code runs alone, under `torchrun`, and on several hosts. Every
process computes its share of each global batch, and sums run over all processes, so results do not depend on their
number, up to the order of floating-point additions and to what each process draws by itself: random transforms, noise,
and the branches that drop path leaves out.
"""

import contextlib
import functools
import hashlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from vitcompress.errors import DeviceError, first_line
from vitcompress.io.hardware import check_device

Amp = Literal["none", "fp16", "bf16"]
PATIENCE = timedelta(minutes=30)  # for other processes: one that is gone ends all of them
_AMP_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_GROUPS = itertools.count()  # the process groups of this process
_TORCH: Any = distributed  # its type hints lack stores


@dataclass(frozen=True)
class Runtime:
    """One process of a training.

    amp: precision of the autocast regions. workers: processes that load its images. joined: whether `start` joined the
    process group, which `stop` then leaves. dtype: of the images, as that of the weights.
    """

    device: torch.device
    amp: Amp = "none"
    rank: int = 0
    world_size: int = 1
    workers: int = 0
    joined: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def all_sum(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all ranks, in float64 where the device has it; equal on every rank."""
        place = tensor.device if self.world_size == 1 else self.device
        wide = tensor.detach().to(torch.float32 if place.type == "mps" else torch.float64, copy=True).to(place)
        if self.world_size > 1:
            distributed.all_reduce(wide)
        return wide.to(tensor.device)

    def broadcast(self, value: Any) -> Any:
        """The `value` of rank 0, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            distributed.barrier()

    def wrap(self, module: nn.Module) -> nn.Module:
        """`module` itself for one process, else its DistributedDataParallel, which averages gradients over ranks."""
        if self.world_size == 1:
            return module
        return DistributedDataParallel(module, [self.device.index] if self.device.type == "cuda" else None)

    def stop(self) -> None:
        """Leave the process group, unless the caller had joined it before. May be called twice."""
        if self.joined and distributed.is_initialized():
            distributed.destroy_process_group()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast region of `amp`."""
        return torch.autocast(self.device.type, _AMP_TYPES.get(self.amp), enabled=self.amp != "none")

    def no_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Disable the caller's autocast. Regions inside cache no converted weights: torch frees them only after it."""
        return torch.autocast(self.device.type, enabled=False, cache_enabled=False)


def start(device: str | torch.device = "auto", amp: Amp = "none", workers: int = 0) -> Runtime:
    """Create the runtime of this process; join the process group if `torchrun` started several.

    device: of `check_device`. Raises DeviceError if this machine lacks device or precision, or not all processes join.
    """
    chosen = check_device(device, amp)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0")) if world_size > 1 else 0  # other programs set RANK alone
    if distributed.is_initialized():
        rank, world_size, joined = distributed.get_rank(), distributed.get_world_size(), False
    elif joined := world_size > 1:
        try:
            store = _TORCH.PrefixStore(str(next(_GROUPS)), _store())  # without addresses of earlier groups
            backend = "nccl" if chosen.type == "cuda" else "gloo"
            distributed.init_process_group(backend, None, PATIENCE, world_size, rank, store)
        except (distributed.DistError, ValueError) as error:  # ValueError: no address
            message = f"{world_size} processes did not meet within {PATIENCE}: {first_line(error)}"
            raise DeviceError(message, hint="start all of them, with torchrun and the same --rdzv-endpoint") from None
    if world_size > 1 and chosen.type == "cuda":  # NCCL communicates on the current GPU
        torch.cuda.set_device(chosen)
    return Runtime(chosen, amp, rank, world_size, workers, joined)


@functools.cache
def _store() -> Any:
    """Where the processes find each other's addresses; rank 0 may host it, so it is not closed between two groups."""
    return next(_TORCH.rendezvous("env://", timeout=PATIENCE))[0]


@contextlib.contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Use `count` CPU threads in torch inside the block; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def derived_seed(*parts: object) -> int:
    """A 32-bit seed derived from `parts` alone."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")
