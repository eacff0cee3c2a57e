"""What a TensorRT engine really computes with, read from its inspector's account of its layers.

A build asks for a precision and hopes for fused attention; only the engine tells whether it got them. The account comes
in two forms: up to TensorRT 10 tensors have one field `Format/Datatype`, from 11 on `Format` and `Datatype` are apart,
and `Bindings` has become `I/O Tensors`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitcompress.errors import ArtifactError
from vitcompress.exporters.precision import HALF
from vitcompress.io.checks import Check

# The first that a text matches; integers and booleans are indices and shapes, not arithmetic.
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
SOFTMAX = re.compile(r"softmax|SubExpSum", re.I)  # the latter is how generated kernels spell it
HEAVY_TYPES = re.compile(r"gemm|matrix_?multiply|convolution|fullyconnected", re.I)
HEAVY_NAMES = re.compile(r"gemm|xmma|cutlass|h16816|cublas|convolution|\b__myl_(?:bb\d+_\d+_)?Fc", re.I)
COPIES = re.compile(r"reformat|^cast$", re.I)
# A generated kernel that does nothing else; older versions spell operators with three letters.
CAST_KERNEL = re.compile(r"^_{2}myl_(?:bb\d+_\d+_)?(?:(?:Repl?)?Cast?|Move?)+(?:_|$)")
IDLE = re.compile(r"^(noop|constant|wait|signal|shape_call)$", re.I)  # takes no time on the GPU
OPAQUE = re.compile(r"^myelin$|^\{ForeignNode", re.I)  # many layers as one, of which the inspector says nothing
PRECISION, ATTENTION, COPIES_SHARE = "engine.precision", "engine.attention", "engine.copies"  # names of the checks


@dataclass(frozen=True)
class Limits:
    """What is still acceptable; ours, as no vendor gives any.

    precision: least share of the heavy layers in the requested precision (patch embedding and head may differ, and a
    model of few blocks has few others). copies: largest share of casts and reformats among all layers.
    """

    precision: float = 0.9
    copies: float = 0.15


@dataclass(frozen=True)
class Layer:
    """One layer. inputs, outputs: precisions of its tensors, None where the account leaves them open."""

    name: str
    kind: str
    tactic: str
    metadata: str
    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]
    weights: str | None

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
        return bool(COPIES.search(self.kind) or CAST_KERNEL.search(self.name))

    @property
    def idle(self) -> bool:
        """Whether it does nothing, such as a reformat that the next layer does on the way."""
        return bool(IDLE.search(self.kind))

    @property
    def opaque(self) -> bool:
        """Whether it stands for many layers that are not listed one by one."""
        return bool(OPAQUE.search(self.kind) or OPAQUE.search(self.name))

    @property
    def softmax(self) -> bool:
        """Whether it is a softmax of its own: attention that was not fused."""
        return not self.fused_attention and bool(SOFTMAX.search(f"{self.name} {self.kind} {self.metadata}"))

    @property
    def precision(self) -> str | None:
        """The widest of what it multiplies, None where the account leaves it open."""
        operands = [kind for kind in (*self.inputs, self.weights) if kind in WIDTH]
        found = max(operands, key=lambda kind: WIDTH[str(kind)], default=None)
        if found == "fp32" and "tf32" in self.tactic.lower():
            return "tf32"
        return found


def read(account: str) -> tuple[Layer, ...]:
    """The layers of an inspector's account (JSON).

    Raises:
        ArtifactError: not such an account, or one that gives names only, of an engine built without details.
    """
    try:
        layers = json.loads(account)["Layers"]
        if any(isinstance(layer, str) for layer in layers):
            raise ArtifactError(
                "the engine gives only the names of its layers", hint="build it with detailed profiling verbosity"
            )
        return tuple(_layer(layer) for layer in layers)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ArtifactError(f"not an account of an engine's layers: {type(error).__name__}: {error}") from None


def _layer(data: Mapping[str, Any]) -> Layer:
    weights = data.get("Weights")
    return Layer(
        str(data["Name"]),
        str(data.get("LayerType", "")),
        str(data.get("TacticName") or ""),
        str(data.get("Metadata") or ""),
        _types(data.get("Inputs", ())),
        _types(data.get("Outputs", ())),
        _named(str(weights.get("Type", ""))) if isinstance(weights, Mapping) else None,
    )


def _types(tensors: Iterable[Mapping[str, Any]]) -> tuple[str | None, ...]:
    return tuple(_type(tensor) for tensor in tensors if not _single(tensor))


def _single(tensor: Mapping[str, Any]) -> bool:
    """Whether a tensor is one value: a product's factors are fp32 whatever is multiplied."""
    sizes = tensor.get("Dimensions")
    return isinstance(sizes, list) and all(size == 1 for size in sizes)


def _type(tensor: Mapping[str, Any]) -> str | None:
    """The precision of a tensor, in either form of the account."""
    text = tensor.get("Datatype") or tensor.get("DataType") or tensor.get("Format/Datatype") or tensor.get("Format")
    return _named(str(text or ""))


def _named(text: str) -> str | None:
    return None if text.startswith("N/A") else next((name for name, form in TYPES if form.search(text)), None)


def truth(layers: Sequence[Layer], precision: str, attentions: int, limits: Limits | None = None) -> tuple[Check, ...]:
    """Does an engine compute as it was asked to?

    Args:
        precision: fp32, tf32, fp16 or bf16.
        attentions: how many are left in the model.
    """
    limits = limits or Limits()
    return tuple(_checks(layers, precision, attentions, limits))


def untold(reason: str) -> tuple[Check, ...]:
    """The same checks for an engine without an account of its layers: not run."""
    return tuple(Check(name, "not_run", detail=reason) for name in (PRECISION, ATTENTION, COPIES_SHARE))


def _checks(layers: Sequence[Layer], precision: str, attentions: int, limits: Limits) -> Iterator[Check]:
    yield _precision(layers, precision, limits)
    yield _attention(layers, precision, attentions)
    working = [layer for layer in layers if not layer.idle]
    copies = sum(layer.copies for layer in working)
    share = copies / len(working) if working else 1.0
    detail = f"{copies} of {len(working)} layers only cast or reformat"
    yield Check(COPIES_SHARE, "passed" if share <= limits.copies else "failed", share, limits.copies, detail)


def _precision(layers: Sequence[Layer], wanted: str, limits: Limits) -> Check:
    """Share of the heavy layers in the requested precision. TF32 is a permission: plain fp32 is no failure."""
    name, heavy = PRECISION, [layer for layer in layers if layer.heavy]
    known = [layer for layer in heavy if layer.precision is not None]
    if hidden := sum(layer.opaque for layer in layers):
        return Check(name, "not_run", detail=f"{hidden} layers stand for many whose precision is not given")
    if not known or len(known) < limits.precision * len(heavy):
        why = f"the precision of {len(heavy) - len(known)} of {len(heavy)} heavy layers is not given"
        return Check(name, "not_run", detail=why)
    allowed = (wanted, "fp32") if wanted == "tf32" else (wanted,)
    right = sum(layer.precision in allowed for layer in known)
    others = sorted({str(layer.precision) for layer in known if layer.precision not in allowed})
    detail = f"{right} of {len(known)} heavy layers in {wanted}"
    detail += f", the others in {', '.join(others)}" if others else ""
    share = right / len(known)
    return Check(name, "passed" if share >= limits.precision else "failed", share, limits.precision, detail)


def _attention(layers: Sequence[Layer], precision: str, attentions: int) -> Check:
    """Fused attention kernels against the attentions that the model has left."""
    name = ATTENTION
    fused = sum(layer.fused_attention for layer in layers)
    apart = sum(layer.softmax for layer in layers)
    detail = f"{fused} fused attention kernels and {apart} softmaxes apart from them, for {attentions} attentions"
    if precision not in HALF:  # there are fused kernels for half precision only
        return Check(name, "not_run", detail=f"{detail}; fused kernels are for half precision")
    if fused < attentions and any(layer.opaque for layer in layers):
        return Check(name, "not_run", detail=f"{detail}; some layers stand for many that are not listed")
    good = fused >= attentions and (attentions == 0 or apart == 0)
    return Check(name, "passed" if good else "failed", float(fused), float(attentions), detail)
