"""Evaluate or train a model in torch as a file in eight bits computes it, or with random errors of the same size."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitcompress.exporters.quantize.graph import CORE, HALF_RANGE, INT32_STEP, LARGEST, WEIGHT, Quantization, step_size

PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)
FP8_BITS, FP8_EXPONENT = 4, -6  # significant bits, and exponent of the smallest normal number of E4M3


def round_values(x: Tensor, scale: Tensor | float, precision: str, generator: torch.Generator | None = None) -> Tensor:
    """`x` rounded to the numbers of `precision` times `scale`, which broadcasts.

    generator: clip, and instead of rounding add a random error of at most half the distance between two numbers.
    """
    values, largest = x / scale, LARGEST[precision]
    clipped = values.clamp(-largest - (precision == "int8"), largest)  # int8 has -128, too
    if generator is None:
        rounded = clipped.round() if precision == "int8" else clipped.to(torch.float8_e4m3fn).to(x.dtype)
        return (rounded.detach() + (clipped - clipped.detach())) * scale  # the gradient is that of clipping
    distance: Tensor | float = 1.0
    if precision == "fp8":
        distance = 2.0 ** (clipped.abs().log2().floor().clamp(min=FP8_EXPONENT) - FP8_BITS + 1)
    return (clipped + (torch.rand(x.shape, dtype=x.dtype, generator=generator) - 0.5) * distance) * scale


def weight_scale(weight: Tensor, settings: Quantization) -> Tensor:
    """The scale of a weight, (outputs, inputs): (outputs, 1) in int8, () in fp8."""
    if settings.precision == "fp8":
        return torch.as_tensor(step_size(weight.abs().max(), "fp8"))
    largest = LARGEST["int8"] if settings.weight_bits == 8 else 64.0
    return (weight.abs().amax(1, keepdim=True) / largest).clamp(torch.finfo(weight.dtype).tiny)


def stored_tensors(model: nn.Module, settings: Quantization) -> dict[str, Tensor]:
    """The parameters that a file stores in fp16, with their values in the file. Gradients pass the rounding."""
    named = {name: p for name, p in model.named_parameters() if name in settings.half and p.abs().max() <= HALF_RANGE}
    return {name: p + (p.half().to(p) - p).detach() for name, p in named.items()}


class EightBitProducts(TorchFunctionMode):
    """While active, the layers and attentions of `model` that `settings` names multiply as `round_values` states.

    These attentions compute as `exporters.onnx` writes them: two products, of which the first has the scaled q.
    """

    def __init__(self, model: nn.Module, settings: Quantization, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.settings, self.generator = settings, generator
        self.layers = {id(p): name.removesuffix(WEIGHT) for name, p in model.named_parameters(remove_duplicate=False)}
        cores = {key.partition(CORE)[0] for key in settings.ranges if CORE in key}
        self.attentions = {name: module for name, module in model.named_modules() if name in cores}
        self.products: Any = None  # in one of these attentions: an iterator over the keys of its products
        self.hooks = ExitStack()

    def __enter__(self) -> Any:
        for name, module in self.attentions.items():
            self.hooks.callback(module.register_forward_pre_hook(partial(self._expect, name)).remove)
            self.hooks.callback(module.register_forward_hook(partial(self._expect, "")).remove)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def _expect(self, attention: str, *args: Any) -> None:
        """The next products are those of `attention`; empty: of none."""
        self.products = (f"{attention}{CORE}{number}" for number in count()) if attention else None

    def __exit__(self, *error: Any) -> None:
        self.hooks.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        precision = self.settings.precision
        layer = self.layers.get(id(args[1]), "") if func is F.linear else ""
        if layer in self.settings.ranges:
            x, weight, *biases = args
            scale = step_size(self.settings.ranges[layer], precision)
            steps = weight_scale(weight.detach(), self.settings)
            if self.settings.form != "float_bias" and precision == "int8" and biases and biases[0] is not None:
                (bias,) = biases
                steps = steps.maximum((bias.abs() * INT32_STEP / scale).detach()[:, None])
                sizes = steps.squeeze(1) * scale  # of the steps of the products
                if self.generator is None:
                    biases = [bias + ((bias / sizes).round() * sizes - bias).detach()]
            x = round_values(x, scale, precision, self.generator)
            args = (x, round_values(weight, steps, precision, self.generator), *biases)
        elif self.products and func in (F.scaled_dot_product_attention, *PRODUCTS):
            return (self._multiply if func in PRODUCTS else self._attend)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _multiply(self, *operands: Tensor) -> Tensor:
        """The next product of the attention without a weight, in eight bits if it has ranges."""
        key, ranges, precision = next(self.products), self.settings.ranges, self.settings.precision
        if f"{key}.0" in ranges:
            pairs = zip(operands, [step_size(ranges[f"{key}.{side}"], precision) for side in (0, 1)], strict=True)
            operands = tuple(round_values(x, step, precision, self.generator) for x, step in pairs)
        return torch.matmul(*operands)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0, **more: Any) -> Any:
        scores = self._multiply(q * (more.get("scale") or q.shape[-1] ** -0.5), k.transpose(-2, -1))
        scores = scores if attn_mask is None else scores + attn_mask
        return self._multiply(F.dropout(scores.softmax(-1), dropout_p), v)


class QuantizedTraining(nn.Module):
    """`model`, whose linear layers multiply in eight bits as `settings` states.

    Gradients pass the rounding unchanged (straight-through, Bengio et al., 2013, https://arxiv.org/abs/1308.3432).
    learned: the ranges are trained, too (LSQ, Esser et al., 2020, https://arxiv.org/abs/1902.08153, eq. 3), in
    logarithms, so that they stay positive. Layers that read the same tensor have equal ranges, and train one.
    """

    def __init__(self, model: nn.Module, settings: Quantization, *, learned: bool) -> None:
        super().__init__()
        self.model, self.settings = model, settings
        sizes = list(dict.fromkeys(settings.ranges.values()))
        self.places = [sizes.index(size) for size in settings.ranges.values()]  # of the range of each layer
        self.log_ranges = nn.Parameter(torch.tensor(sizes).clamp(torch.finfo().tiny).log(), requires_grad=learned)

    def ranges(self) -> dict[str, Tensor]:
        """Layer -> largest magnitude of its input."""
        return dict(zip(self.settings.ranges, self.log_ranges.exp()[self.places], strict=True))

    def forward(self, x: Tensor) -> Any:
        """x: images, (batch, C, H, W) -> logits of `model`. Never in half precision, which files do not compute in."""
        ranges: Any = self.ranges()  # tensors, so that they are trained
        settings = replace(self.settings, ranges=ranges)
        with torch.autocast(x.device.type, enabled=False), EightBitProducts(self.model, settings):
            return functional_call(self.model, stored_tensors(self.model, settings), (x,))
