"""A model in the precision that it is deployed in: fp32, or half precision with explicit islands of fp32.

Islands are casts in the module itself, so every exporter and every runtime is told the same and nothing is guessed:
`norm` (all LayerNorms), `softmax` (all attention cores), `head` (the classifier), `ffn` (all FFNs), a module by its
path, or `PATH.softmax` for the core of one attention. In an island the weights stay fp32.

An attention core is q k^T, softmax and its product with v. It is widened as a whole, by casts of q, k and v, which is
the form that TensorRT fuses with accumulation in fp32; attentions that compute their scores themselves (Swin) have
the softmax alone in fp32.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitcompress.errors import InputError, PrecisionError, did_you_mean
from vitcompress.exporters.options import AUTO
from vitcompress.families import family_of
from vitcompress.plan import lies_in

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
KINDS = ("norm", "softmax", "head", "ffn")
SOFTMAX = ".softmax"


def in_precision(model: nn.Module, precision: str = "fp32", islands: Sequence[str] = ()) -> nn.Module:
    """A copy of `model` on the CPU and in eval mode, which stores and computes in `precision` (fp32, tf32, fp16, bf16).

    In half precision it takes and gives float32 all the same.

    Raises:
        InputError: an island that the model does not have, or islands in a model that is fp32 anyway.
        PrecisionError: a weight that half precision cannot hold.
    """
    copy = deepcopy(model).cpu().eval().float()
    if precision not in HALF:
        if islands:
            raise InputError(f"islands of fp32 were given, the rest is {precision} too", hint="leave islands out")
        return copy
    names = expanded(copy, islands)
    wide = [name for name in names if not name.endswith(SOFTMAX)]
    answering = set(heads(copy))
    _narrow(copy, HALF[precision], wide)
    for name in wide:
        _widen(copy.get_submodule(name), HALF[precision], answers=name in answering)
    for name in names:
        if name.endswith(SOFTMAX):
            attention = name.removesuffix(SOFTMAX)
            copy.set_submodule(attention, WideSoftmax(copy.get_submodule(attention)))
    return Float32Io(copy, HALF[precision]).eval()


def expanded(model: nn.Module, islands: Iterable[str]) -> tuple[str, ...]:
    """Every island by a name of its own, in the order of the model: modules, and `PATH.softmax` of attentions.

    What lies inside another island is not one of its own.

    Raises:
        InputError: an island that the model does not have.
    """
    known = _by_kind(model)
    cores = set(known["softmax"])
    modules = dict(model.named_modules())
    found: list[str] = []
    for island in islands:
        if island in known:
            found += known[island]
        elif island in cores or (island and island in modules):
            found.append(island)
        else:
            close = did_you_mean(island, [AUTO, *KINDS, *modules, *cores])
            raise InputError(
                f"the model has no part {island!r} to keep in fp32{close}",
                hint=f"give {', '.join((AUTO, *KINDS))}, a module (blocks.0.mlp), an attention (blocks.0.attn.softmax)",
            )
    order = {name: number for number, name in enumerate(modules)}
    outer = {name for name in found if not lies_in(name, set(found) - {name})}
    return tuple(sorted(outer, key=lambda name: (order.get(name.removesuffix(SOFTMAX), 0), name)))


def present(model: nn.Module, islands: Iterable[str]) -> tuple[str, ...]:
    """Those of `islands` that `model` has: what was pruned needs none."""
    kinds = _by_kind(model)
    known = {*kinds, *kinds["softmax"], *dict(model.named_modules())} - {""}
    return tuple(island for island in islands if island in known)


def in_short(model: nn.Module, islands: Iterable[str]) -> tuple[str, ...]:
    """Islands as `expanded` gives them, with the name of a kind in the place of all that are of it."""
    left = list(islands)
    whole = {kind: names for kind, names in _by_kind(model).items() if names and set(names) <= set(left)}
    covered = {name for names in whole.values() for name in names}
    return (*whole, *(name for name in left if name not in covered))


def _by_kind(model: nn.Module) -> dict[str, list[str]]:
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    family = family_of(model)
    spaces = family.spaces(model)  # also those of what is no site, as a pool
    ffns = (site.name for site in family.sites(model) if site.kind == "ffn")
    return {
        "norm": norms,
        "softmax": [f"{name}{SOFTMAX}" for name in dict.fromkeys(s.attention for s in spaces if s.attention)],
        "head": list(heads(model)),
        "ffn": list(dict.fromkeys((*ffns, *(space.name for space in spaces if space.kind == "mlp")))),
    }


def heads(model: nn.Module) -> Iterator[str]:
    """The classifier's layers: what gives the logits."""
    given: Callable[[], Any] | None = getattr(model, "get_classifier", None)
    layers = given() if given else ()
    found = layers if isinstance(layers, tuple) else (layers,)
    for name, module in model.named_modules():
        if any(module is layer for layer in found) and not isinstance(module, nn.Identity):
            yield name


def _narrow(model: nn.Module, dtype: torch.dtype, wide: Sequence[str]) -> None:
    """Everything but the islands in `dtype`."""
    for name, module in model.named_modules():
        if lies_in(name, wide):
            continue
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if tensor.is_floating_point():
                largest, tensor.data = float(tensor.detach().abs().max()), tensor.data.to(dtype)
                if not torch.isfinite(tensor).all():
                    kept = f"--islands {name} or auto, or " if name else ""
                    raise PrecisionError(
                        f"{f'{name}.{key}'.lstrip('.')} holds {largest:.6g}, half precision ends at "
                        f"{torch.finfo(dtype).max:.5g}",
                        hint=f"use {kept}--precision bf16 or fp32",
                    )


def _widen(module: nn.Module, low: torch.dtype, *, answers: bool) -> None:
    """Cast what the module is given to fp32 and, unless it gives the logits, what it gives back to `low`."""
    module.register_buffer("low", torch.zeros((), dtype=low), persistent=False)  # follows .float() and .double()
    module.register_forward_pre_hook(lambda module, args: tuple(_wide(arg) for arg in args))
    if not answers:
        module.register_forward_hook(lambda module, args, out: _back(out, module.low.dtype))


def _wide(value: Any) -> Any:
    """fp32 for half precision; float64, in which models are checked, stays."""
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF.values() else value


def _back(value: Any, low: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_back(part, low) for part in value)
    return value.to(low) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


class Float32Io(nn.Module):
    """A model in half precision that takes and gives float32."""

    kind: Tensor

    def __init__(self, model: nn.Module, low: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("kind", torch.zeros((), dtype=low), persistent=False)  # follows .double()

    def forward(self, x: Tensor) -> Tensor:
        """x: images, (batch, channels, height, width) -> logits, (batch, classes)."""
        out: Tensor = _wide(self.model(x.to(self.kind.dtype)))
        return out


class WideSoftmax(nn.Module):
    """An attention in half precision whose core computes in fp32."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What the attention takes and gives."""
        with _WideCores():
            out: Tensor = self.attention(x, *args, **kwargs)
        return out


class _WideCores(TorchFunctionMode):
    SOFTMAX = frozenset({Tensor.softmax, torch.softmax, F.softmax})

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention or func in self.SOFTMAX:
            low = args[0].dtype
            named = {key: _wide(value) for key, value in (kwargs or {}).items()}
            return func(*map(_wide, args), **named).to(low)
        return func(*args, **(kwargs or {}))
