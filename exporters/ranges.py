"""How large the numbers inside a model become on real images, and where half precision could not hold them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from vitcompress.errors import PrecisionError
from vitcompress.exporters.precision import SOFTMAX, expanded, heads
from vitcompress.families import family_of
from vitcompress.models.cost import frozen
from vitcompress.plan import lies_in

LARGEST = torch.finfo(torch.float16).max
PART = 16  # images at a time


@dataclass(frozen=True)
class Ranges:
    """Module by path -> the largest magnitude of any weight of it or result inside it (`inside`), and of what it gives.

    A module's `inside` counts its own weights and the operations that it does itself, not those of its children.
    """

    inside: Mapping[str, float]
    given: Mapping[str, float]

    def overflowing(self) -> dict[str, float]:
        """The modules with a result that fp16 cannot hold (or NaN), and that result."""
        return {name: value for name, value in self.inside.items() if not value <= LARGEST}


@torch.no_grad()
def scan(model: nn.Module, images: Tensor) -> Ranges:
    """The ranges of `model` in fp32 on normalised `images`, (count, channels, height, width)."""
    seen = _Largest()
    hooks = [
        module.register_forward_hook(lambda _, args, out, name=name: seen.gives(name, out))
        for name, module in model.named_modules()
    ]
    try:
        # Attention as the operations that it consists of.
        with frozen(model), sdpa_kernel(SDPBackend.MATH), seen.tracker, seen:
            for part in torch.split(images, PART):
                model(part)
    finally:
        for hook in hooks:
            hook.remove()
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            _raise_to(seen.inside, name, float(parameter.abs().max()))
    return Ranges(seen.inside, seen.given)


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, the largest magnitude that every module computes is kept."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = ModuleTracker()
        self.inside: dict[str, float] = {}
        self.given: dict[str, float] = {}
        self.looking = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and not self.looking and not func.is_view:
            _raise_to(self.inside, self._module(), self._size(out))
        return out

    def gives(self, name: str, out: Any) -> None:
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                _raise_to(self.given, name, self._size(tensor))

    def _module(self) -> str:
        """The innermost module at work: its path without the model's own name."""
        longest = max(self.tracker.parents - {"Global"}, key=lambda path: path.count("."), default="")
        return str(longest).partition(".")[2]

    def _size(self, tensor: Tensor) -> float:
        self.looking = True
        try:
            return float(tensor.detach().abs().max()) if tensor.numel() else 0.0
        finally:
            self.looking = False


def _raise_to(known: dict[str, float], name: str, value: float) -> None:
    before = known.get(name, 0.0)
    if before == before and not value <= before:  # NaN counts as larger than anything
        known[name] = value


def needed_islands(model: nn.Module, ranges: Ranges) -> tuple[str, ...] | None:
    """The smallest parts of `model` that must stay in fp32 for nothing to overflow; None where no part is enough.

    That is the module itself or, where what it gives is too large as well, the first one around it that gives numbers
    within fp16; what a classifier gives stays in fp32 with it. Where the residual stream itself is too large, only
    another precision helps.
    """
    answering = set(heads(model))
    attentions = {space.attention for space in family_of(model).spaces(model) if space.attention}
    found = set()
    for name in ranges.overflowing():
        if name in attentions and ranges.given.get(name, 0.0) <= LARGEST:
            found.add(f"{name}{SOFTMAX}")
            continue
        while name and name not in answering and not ranges.given.get(name, 0.0) <= LARGEST:
            name = name.rpartition(".")[0]
        if not name:
            return None
        found.add(name)
    return tuple(sorted(found))


def check_half(
    model: nn.Module, images: Tensor, islands: tuple[str, ...] = (), *, offer_islands: bool = True
) -> Ranges:
    """Scan `model`, and refuse fp16 where a result outside `islands` would overflow.

    offer_islands: name those that would help, for formats that have them.

    Raises:
        PrecisionError: naming the layer, the number that it reaches and what to do.
    """
    found = scan(model, images)
    if over := outside(model, found, islands):
        needed = needed_islands(model, Ranges(over, found.given)) if offer_islands else None
        raise too_large(over, (*islands, *needed) if needed else ())
    return found


def check_islands_help(model: nn.Module, found: Ranges, islands: tuple[str, ...] = ()) -> None:
    """Raise PrecisionError where no islands beside `islands` keep fp16 from overflowing, so that none need be tried."""
    over = outside(model, found, islands)
    if over and needed_islands(model, Ranges(over, found.given)) is None:
        raise too_large(over)


def too_large(over: Mapping[str, float], islands: tuple[str, ...] = ()) -> PrecisionError:
    """The error that says what would overflow, and that `islands`, where there are any, would help."""
    remedy = f"--islands {','.join(sorted(set(islands)))} or auto, or " if islands else ""
    return PrecisionError(told(over), hint=f"use {remedy}--precision bf16 or fp32")


def outside(model: nn.Module, found: Ranges, islands: tuple[str, ...] = ()) -> dict[str, float]:
    """The modules outside `islands` that would overflow in fp16, and what they reach."""
    kept = expanded(model, islands)
    return {name: value for name, value in found.overflowing().items() if not _kept(name, kept)}


def told(over: Mapping[str, float]) -> str:
    """The worst of what would overflow, in words."""
    worst = max(over, key=lambda name: over[name])
    return (
        f"{worst or 'the model'} reaches {over[worst]:.6g} on these images, half precision ends at {LARGEST:.0f} "
        f"({len(over)} such {'layer' if len(over) == 1 else 'layers'})"
    )


def _kept(name: str, islands: tuple[str, ...]) -> bool:
    cores = {island.removesuffix(SOFTMAX) for island in islands if island.endswith(SOFTMAX)}
    return name in cores or lies_in(name, islands)
