"""Convert a model to the precision that it is deployed in: fp32, or half precision with explicit fp32 layers.

fp32 layers are casts in the module itself, so that every exporter and every runtime gets the same model. They are named
by `--islands`: `norm` (all LayerNorms), `softmax` (all attention cores), `head` (the classifier), `ffn` (all FFNs), the
path of a module, or `PATH.softmax` for the core of one attention. Their weights stay in fp32.

An attention core is q k^T, softmax, and the product with v, in fp32 as a whole, which is the form that TensorRT fuses.
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
from vitcompress.plan import is_within

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
SOFTMAX = ".softmax"


def in_fp32(model: nn.Module) -> nn.Module:
    """`model`, or a copy of it in fp32 if a parameter has another type."""
    return model if {p.dtype for p in model.parameters()} == {torch.float32} else deepcopy(model).float()


def convert_precision(model: nn.Module, precision: str, islands: Sequence[str] = ()) -> nn.Module:
    """A copy of `model` on the CPU in eval mode that stores and computes in `precision` (fp32, tf32, fp16, bf16).

    Its inputs and outputs are float32 in every precision. islands: in half precision. Raises InputError for an fp32
    layer that the model does not have, PrecisionError for a weight that half precision cannot represent.
    """
    copy = deepcopy(model).cpu().eval().float()
    if precision not in HALF:
        return copy
    names, classifier = expand_layers(copy, islands), set(classifier_layers(copy))
    _narrow(copy, HALF[precision], [name for name in names if not name.endswith(SOFTMAX)])
    for name in names:
        module = copy.get_submodule(name.removesuffix(SOFTMAX))
        if name.endswith(SOFTMAX):
            module.__class__ = _with_wide_core(type(module))  # keeps the names of its tensors
        else:
            _widen(module, HALF[precision], is_classifier=name in classifier)
    copy.register_buffer("input_type", torch.zeros((), dtype=HALF[precision]), persistent=False)  # follows .double()
    copy.register_forward_pre_hook(lambda module, args: (args[0].to(module.input_type.dtype),), prepend=True)
    copy.register_forward_hook(lambda module, args, out: _to_fp32(out))
    return copy


def expand_layers(model: nn.Module, islands: Iterable[str]) -> tuple[str, ...]:
    """The names of all fp32 layers, in the order of the model: modules, and `PATH.softmax` of attentions.

    Layers inside another one are omitted. Raises InputError for an fp32 layer that the model does not have.
    """
    kinds, modules = _layers_by_kind(model), dict(model.named_modules())
    lists = {name: [f"{name}.{n}" for n in m._modules] for name, m in modules.items() if isinstance(m, nn.ModuleList)}
    names = [*kinds, *modules, *kinds["softmax"]]
    layers: list[str] = []
    for island in islands:
        if not island or island not in names:
            message = f"the model has no layer {island!r} to keep in fp32{did_you_mean(island, [AUTO, *names])}"
            hint = f"use {', '.join((AUTO, *kinds))}, a module (blocks.0.mlp), an attention (blocks.0.attn.softmax)"
            raise InputError(message, hint=hint)
        layers += {**lists, **kinds}.get(island, [island])  # a list has no forward pass of its own
    order = {name: number for number, name in enumerate(modules)}
    outer = {name for name in layers if not is_within(name, set(layers) - {name})}
    return tuple(sorted(outer, key=lambda name: (order.get(name.removesuffix(SOFTMAX), 0), name)))


def present_layers(model: nn.Module, islands: Iterable[str]) -> tuple[str, ...]:
    """Those of `islands` that `model` has; pruned layers are omitted."""
    kinds = _layers_by_kind(model)
    known = {*kinds, *kinds["softmax"], *dict(model.named_modules())} - {""}
    return tuple(island for island in islands if island in known)


def shorten_layers(model: nn.Module, islands: Iterable[str]) -> tuple[str, ...]:
    """fp32 layers as `expand_layers` returns them, with the name of a kind instead of all layers of this kind."""
    names = list(islands)
    whole = {kind: layers for kind, layers in _layers_by_kind(model).items() if layers and set(layers) <= set(names)}
    covered = {name for layers in whole.values() for name in layers}
    return (*whole, *(name for name in names if name not in covered))


def _layers_by_kind(model: nn.Module) -> dict[str, list[str]]:
    family = family_of(model)
    spaces = family.spaces(model)  # includes those that are no site, such as an attention pool
    ffns = (site.name for site in family.sites(model) if site.kind == "ffn")
    return {
        "norm": [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)],
        "softmax": [f"{name}{SOFTMAX}" for name in dict.fromkeys(s.attention for s in spaces if s.attention)],
        "head": list(classifier_layers(model)),
        "ffn": list(dict.fromkeys((*ffns, *(space.name for space in spaces if space.kind == "mlp")))),
    }


def classifier_layers(model: nn.Module) -> Iterator[str]:
    """Names of the layers that output the logits."""
    layers: Any = getattr(model, "get_classifier", tuple)()
    layers = layers if isinstance(layers, tuple) else (layers,)
    for name, module in model.named_modules():
        if any(module is layer for layer in layers) and not isinstance(module, nn.Identity):
            yield name


def _narrow(model: nn.Module, dtype: torch.dtype, wide: Sequence[str]) -> None:
    """Convert everything but the layers `wide` to `dtype`."""
    for name, module in model.named_modules():
        if is_within(name, wide):
            continue
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if tensor.is_floating_point():
                values, tensor.data = tensor.data, tensor.data.to(dtype)
                if not torch.isfinite(tensor).all():
                    layers = f"--islands {name} or auto, or " if name else ""
                    limit = f"the largest in half precision is {torch.finfo(dtype).max:.5g}"
                    message = f"{f'{name}.{key}'.lstrip('.')} has the value {float(values.abs().max()):.6g}, {limit}"
                    raise PrecisionError(message, hint=f"use {layers}--precision bf16 or fp32")


def _widen(module: nn.Module, low: torch.dtype, *, is_classifier: bool) -> None:
    """Cast the inputs of a module to fp32 and, unless it outputs the logits, its outputs to `low`."""
    module.register_buffer("low", torch.zeros((), dtype=low), persistent=False)  # follows .float() and .double()
    module.register_forward_pre_hook(lambda module, args: tuple(_to_fp32(arg) for arg in args))
    if not is_classifier:
        module.register_forward_hook(lambda module, args, out: _from_fp32(out, module.low.dtype))


def _to_fp32(value: Any) -> Any:
    """fp32 instead of half precision; float64, in which models are checked, stays."""
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF.values() else value


def _from_fp32(value: Any, low: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_from_fp32(part, low) for part in value)
    return value.to(low) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


class _WideCores(TorchFunctionMode):
    """While active, the cores of attentions in half precision compute in fp32."""

    PRODUCTS = frozenset({Tensor.matmul, Tensor.__matmul__, torch.matmul})  # of attentions without a fused core (Swin)
    CORES = PRODUCTS | {F.scaled_dot_product_attention, Tensor.softmax, torch.softmax, F.softmax}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.CORES:
            return func(*args, **(kwargs or {}))
        wide = func(*map(_to_fp32, args), **{key: _to_fp32(value) for key, value in (kwargs or {}).items()})
        if func not in self.PRODUCTS:
            return wide.to(args[0].dtype)
        return wide if args[0].dtype == args[1].dtype else wide.to(args[1].dtype)  # scores stay in fp32


def _with_wide_core(attention: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a class of attentions in half precision, whose cores compute in fp32."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _WideCores():
            return attention.forward(self, *args, **kwargs)

    return type(attention.__name__, (attention,), {"forward": forward})
