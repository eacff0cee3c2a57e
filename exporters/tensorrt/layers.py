"""What a TensorRT engine computes with, according to its engine inspector.

A build requests a precision and fused attention; only the engine shows whether it has them. In the inspector output
tensors have one field `Format/Datatype` up to TensorRT 10, and `Format` and `Datatype` from 11 on.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from vitcompress.errors import ArtifactError
from vitcompress.exporters.base import unequal_widths
from vitcompress.exporters.precision import HALF
from vitcompress.io.checks import Check, limit_check
from vitcompress.io.text import few

# The first one that matches a text; integers and booleans are indices and shapes, not arithmetic.
TYPES = (
    ("bf16", re.compile(r"bfloat16|bf16", re.I)),
    ("fp16", re.compile(r"half|float16|fp16", re.I)),
    ("fp8", re.compile(r"fp8|float8|e4m3", re.I)),
    ("int8", re.compile(r"int8", re.I)),
    ("other", re.compile(r"int|bool", re.I)),
    ("fp32", re.compile(r"float|fp32", re.I)),
)
WIDTH = {"fp8": 1, "int8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
FUSED_ATTENTION = re.compile(r"_gem[mv]_mha|fmha|flash|fused_?(?:mha|attention)", re.I)
SOFTMAX = re.compile(r"softmax|SubExpSum", re.I)  # the latter in names of generated kernels
HEAVY_TYPES = re.compile(r"gemm|matrix_?multiply|convolution|fullyconnected", re.I)
HEAVY_NAMES = re.compile(r"gemm|xmma|cutlass|h16816|cublas|convolution|\b__myl_(?:bb\d+_\d+_)?Fc", re.I)
# A generated kernel with no other operators; older versions abbreviate operators to three letters.
CAST_KERNEL = re.compile(r"^_{2}myl_(?:bb\d+_\d+_)?(?:(?:Repl?)?Cast?|Move?)+(?:_|$)")
IDLE = re.compile(r"^(noop|constant|wait|signal|shape_call)$", re.I)  # takes no time on the GPU
OPAQUE = re.compile(r"^myelin$|^\{ForeignNode", re.I)  # many layers as one, without details
PRECISION, ATTENTION, COPIES_SHARE = "engine.precision", "engine.attention", "engine.copies"  # names of the checks
# Limits of our own, because no vendor publishes any. The first one leaves room for a patch embedding and a head in
# another precision, also in models of few blocks.
LEAST_IN_PRECISION = 0.9  # share of the heavy layers
MOST_COPIES = 0.15  # share of casts and reformats among all layers


@dataclass(frozen=True)
class Layer:
    """One layer. operands: precisions of its inputs and weights, None if the inspector does not state them."""

    name: str
    kind: str
    tactic: str
    metadata: str
    operands: tuple[str | None, ...]

    @property
    def fused_attention(self) -> bool:
        return bool(FUSED_ATTENTION.search(f"{self.name} {self.tactic} {self.kind}"))

    @property
    def heavy(self) -> bool:
        """Whether it multiplies matrices."""
        if self.copies:
            return False
        generated = self.kind in ("kgen", "fusion") and HEAVY_NAMES.search(f"{self.tactic} {self.name}")
        return self.fused_attention or bool(HEAVY_TYPES.search(self.kind) or generated)

    @property
    def copies(self) -> bool:
        return bool(re.search(r"reformat|^cast$", self.kind, re.I) or CAST_KERNEL.search(self.name))

    @property
    def opaque(self) -> bool:
        """Whether it consists of many layers that are not listed."""
        return bool(OPAQUE.search(self.kind) or OPAQUE.search(self.name))

    @property
    def softmax(self) -> bool:
        """Whether it is a separate softmax: attention that was not fused."""
        return not self.fused_attention and bool(SOFTMAX.search(f"{self.name} {self.kind} {self.metadata}"))

    @property
    def precision(self) -> str | None:
        """The widest precision that it multiplies, None if unknown."""
        widest = max((kind for kind in self.operands if kind in WIDTH), key=lambda kind: WIDTH[str(kind)], default=None)
        return "tf32" if widest == "fp32" and "tf32" in self.tactic.lower() else widest


def parse_layers(output: str) -> tuple[Layer, ...]:
    """The layers in the inspector's JSON output. Raises ArtifactError for another text, or names without details."""
    try:
        layers = json.loads(output)["Layers"]
        if any(isinstance(layer, str) for layer in layers):
            message = "the engine lists only the names of its layers"
            raise ArtifactError(message, hint="build it with detailed profiling verbosity")
        return tuple(_layer(layer) for layer in layers)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ArtifactError(f"not the output of an engine inspector: {type(error).__name__}: {error}") from None


def _layer(data: Mapping[str, Any]) -> Layer:
    """A layer of the inspector output. Inputs of one value are no operands: factors are fp32 in every precision."""
    keys, weights = ("Datatype", "DataType", "Format/Datatype", "Format"), data.get("Weights")
    sizes = ((tensor, tensor.get("Dimensions")) for tensor in data.get("Inputs", ()))
    several = (tensor for tensor, size in sizes if not (isinstance(size, list) and set(size) <= {1}))
    texts = [str(next((tensor[key] for key in keys if tensor.get(key)), "")) for tensor in several]
    texts += [str(weights.get("Type", ""))] if isinstance(weights, Mapping) else []
    kind, tactic, metadata = (str(data.get(key) or "") for key in ("LayerType", "TacticName", "Metadata"))
    known = ("" if text.startswith("N/A") else text for text in texts)
    precisions = (next((name for name, form in TYPES if form.search(text)), None) for text in known)
    return Layer(str(data["Name"]), kind, tactic, metadata, tuple(precisions))


def layer_checks(layers: Sequence[Layer], precision: str, attentions: int, products: int = 0) -> tuple[Check, ...]:
    """Does an engine compute as requested? attentions: their number in the model. products: those in eight bits."""
    working = [layer for layer in layers if not IDLE.search(layer.kind)]
    copies = sum(layer.copies for layer in working)
    share = copies / len(working) if working else 1.0
    copied = limit_check(COPIES_SHARE, share, MOST_COPIES, f"{copies} of {len(working)} layers only cast or reformat")
    return _check_precision(layers, precision, products), _check_attention(layers, precision, attentions), copied


def unavailable_checks(reason: str) -> tuple[Check, ...]:
    """The same checks as `not_run`, for an engine without inspector output."""
    return tuple(Check(name, "not_run", detail=reason) for name in (PRECISION, ATTENTION, COPIES_SHARE))


def _check_precision(layers: Sequence[Layer], requested: str, products: int) -> Check:
    """Share of the heavy layers in the requested precision, or of the `products` that the source quantizes.

    TF32 is only a permission: plain fp32 passes, too.
    """
    heavy = [layer for layer in layers if layer.heavy]
    known = [layer.precision for layer in heavy if layer.precision is not None]
    if opaque := sum(layer.opaque for layer in layers):
        return Check(PRECISION, "not_run", detail=f"{opaque} layers consist of many whose precision is not listed")
    if products:
        # Their biases and scales are wider, so that the widest operand says nothing.
        right, total = sum(requested in layer.operands for layer in heavy), products
        detail = f"{right} layers in {requested} for {products} products"
    elif not known or len(known) < LEAST_IN_PRECISION * len(heavy):
        reason = f"the precision of {len(heavy) - len(known)} of {len(heavy)} heavy layers is not listed"
        return Check(PRECISION, "not_run", detail=reason)
    else:
        allowed = (requested, "fp32") if requested == "tf32" else (requested,)
        right, total = sum(precision in allowed for precision in known), len(known)
        others = ", ".join(sorted(set(known) - set(allowed)))
        detail = f"{right} of {total} heavy layers in {requested}" + f", the others in {others}" * bool(others)
    share = right / total
    return Check(PRECISION, "passed" if share >= LEAST_IN_PRECISION else "failed", share, LEAST_IN_PRECISION, detail)


def _check_attention(layers: Sequence[Layer], precision: str, attentions: int) -> Check:
    """Number of fused attention kernels compared with the number of attentions."""
    fused = sum(layer.fused_attention for layer in layers)
    separate = sum(layer.softmax for layer in layers)
    detail = f"{fused} fused attention kernels and {separate} separate softmaxes for {attentions} attentions"
    if precision not in HALF:
        detail = f"{detail}; fused kernels exist for half precision only"
        return Check(ATTENTION, "not_run", detail=detail, applies=False)
    if fused < attentions and any(layer.opaque for layer in layers):
        return Check(ATTENTION, "not_run", detail=f"{detail}; some layers consist of many that are not listed")
    passed = fused >= attentions and (attentions == 0 or separate == 0)
    return Check(ATTENTION, "passed" if passed else "failed", float(fused), float(attentions), detail)


def unfused_warnings(model: nn.Module, precision: str) -> list[str]:
    """A warning if attentions of `model` cannot become one fused kernel; none in fp32, which has no fused kernels."""
    if precision not in HALF or not (names := list(unequal_widths(model))):
        return []
    return [
        f"{len(names)} attention{'s' * (len(names) > 1)} ({few(names)}) with heads whose q and k are not as wide as v, "
        "which TensorRT for RTX 1.7 does not fuse into one kernel; for engines prune with layout padded (SERo: --set "
        "step.0.layout=padded), or keep the width of heads (isomorphic, under a rotary embedding: --set "
        "step.0.keep_head_dim=1)"
    ]
