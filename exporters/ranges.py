"""Find overflow in fp16: the magnitudes inside a model on images. Ranges of int8 and fp8: `quantize.calibrate`."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.module_tracker import ModuleTracker

from vitcompress.errors import PrecisionError
from vitcompress.exporters.precision import SOFTMAX, classifier_layers, expand_layers
from vitcompress.families import family_of
from vitcompress.plan import is_within

LARGEST = torch.finfo(torch.float16).max
CHUNK = 16  # images at a time


@dataclass(frozen=True)
class Ranges:
    """Largest magnitudes by module path.

    inside: of the weights of a module and the results of its own operations, without those of its children.
    outputs: of what the module returns; a list of modules, which is not called, has none.
    """

    inside: Mapping[str, float]
    outputs: Mapping[str, float]


@torch.no_grad()
def scan_ranges(model: nn.Module, images: Tensor) -> Ranges:
    """The ranges of `model` in fp32 on normalized `images`, (count, channels, height, width)."""
    largest, copy = _Largest(), deepcopy(model).float().requires_grad_(False)  # see `copy_to_meta`
    for name, module in copy.named_modules():
        module.register_forward_hook(lambda _, args, out, name=name: largest.record_output(name, out))
    with SeparateOperations(), largest.tracker, largest:
        for chunk in torch.split(images, CHUNK):
            copy(chunk)
    for name, parameter in copy.named_parameters(remove_duplicate=False):
        _raise_to(largest.inside, name.rpartition(".")[0], parameter)
    return Ranges(largest.inside, largest.outputs)


class SeparateOperations(TorchFunctionMode):
    """While active, attention is separate operations, in this thread only. Masks must be numbers, not booleans."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return torch.ops.aten._scaled_dot_product_attention_math(*args, **(kwargs or {}))[0]
        return func(*args, **(kwargs or {}))


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the largest magnitude that every module computes while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = ModuleTracker()
        self.inside: dict[str, float] = {}
        self.outputs: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple) else out  # of a norm: the others are its statistics, in fp32
        if isinstance(first, Tensor) and first.is_floating_point() and not func.is_view:
            # The innermost active module, by its path without the model's own name.
            innermost = max(self.tracker.parents - {"Global"}, key=lambda path: path.count("."), default="")
            _raise_to(self.inside, str(innermost).partition(".")[2], first)
        return out

    def record_output(self, name: str, out: Any) -> None:
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                with _disable_current_modes():
                    _raise_to(self.outputs, name, tensor)


def _raise_to(values: dict[str, float], name: str, tensor: Tensor) -> None:
    """Raise a value to the largest magnitude of `tensor`."""
    value = max(map(abs, map(float, tensor.detach().aminmax()))) if tensor.numel() else 0.0
    before = values.get(name, 0.0)
    if before == before and not value <= before:  # NaN counts as larger than any number
        values[name] = value


def required_layers(model: nn.Module, ranges: Ranges, islands: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The smallest parts of `model` that must stay in fp32, beside `islands`, to avoid overflows.

    These are the modules that overflow or, if their outputs are too large as well, the first module around each whose
    outputs fit into fp16; the outputs of a classifier stay in fp32. Raises PrecisionError if no part is enough.
    """
    overflows = find_overflows(model, ranges, islands)
    classifier = set(classifier_layers(model))
    attentions = {space.attention for space in family_of(model).spaces(model) if space.attention}
    layers = set()
    for name in overflows:
        if name in attentions and ranges.outputs.get(name, 0.0) <= LARGEST:
            layers.add(f"{name}{SOFTMAX}")
            continue
        while name and name not in classifier and not ranges.outputs.get(name, float("inf")) <= LARGEST:
            name = name.rpartition(".")[0]
        if not name:
            raise _overflow_error(overflows, ())
        layers.add(name)
    return tuple(sorted(layers))


def find_overflows(model: nn.Module, ranges: Ranges, islands: tuple[str, ...] = ()) -> dict[str, float]:
    """Modules outside the fp32 layers `islands` -> largest result, where fp16 cannot represent it (or it is NaN)."""
    layers = expand_layers(model, islands)
    cores = {layer.removesuffix(SOFTMAX) for layer in layers if layer.endswith(SOFTMAX)}
    overflows = {name: value for name, value in ranges.inside.items() if not value <= LARGEST}
    return {name: value for name, value in overflows.items() if name not in cores and not is_within(name, layers)}


def describe_overflows(overflows: Mapping[str, float]) -> str:
    """The largest overflow and the number of overflows."""
    worst = max(overflows, key=lambda name: overflows[name])
    count = f"{len(overflows)} such {'layer' if len(overflows) == 1 else 'layers'}"
    limit = f"the largest number in half precision is {LARGEST:.0f} ({count})"
    return f"{worst or 'the model'} reaches {overflows[worst]:.6g} on these images, {limit}"


def check_fp16(model: nn.Module, images: Tensor, islands: tuple[str, ...] = (), *, offer_islands: bool = True) -> None:
    """Scan `model`. Raises PrecisionError if a result outside the fp32 layers `islands` would overflow in fp16.

    offer_islands: the error names the fp32 layers that would help, for formats that support them.
    """
    ranges = scan_ranges(model, images)
    if overflows := find_overflows(model, ranges, islands):
        layers = required_layers(model, ranges, islands) if offer_islands else ()
        raise _overflow_error(overflows, (*islands, *layers) if layers else ())


def _overflow_error(overflows: Mapping[str, float], islands: tuple[str, ...]) -> PrecisionError:
    """An error that offers the fp32 layers `islands`, if there are any."""
    layers = f"--islands {','.join(sorted(set(islands)))} or auto, or " if islands else ""
    return PrecisionError(describe_overflows(overflows), hint=f"use {layers}--precision bf16 or fp32")
