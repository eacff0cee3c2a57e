"""How a model is exported, whatever the format: one table of a recipe, one set of options on the command line."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any, Literal, cast, get_args

from annotated_types import Ge, Le
from pydantic import BeforeValidator

from vitcompress.io.validation import WHOLE, Doc, UserPath

Precision = Literal["fp32", "tf32", "fp16", "bf16", "int8", "int8+bf16", "fp8"]
Calibration = Literal["minmax", "percentile", "entropy", "mse"]
Positive = Annotated[int, Ge(1), Le(2**20), WHOLE]
AUTO = "auto"
EightBits = Literal["int8", "fp8"]
EIGHT_BITS = get_args(EightBits)
ONLY_EIGHT_BITS = ("weight_bits", "calibration", "calibration_method", "smooth")  # options of these precisions only


def _as_tuple(value: Any, length: int = 1) -> Any:
    """A single name or number is a list of `length` equal ones; in strict mode, pydantic takes tuples only."""
    return (value,) * length if isinstance(value, str | int) else tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class ExportOptions:
    """Options of all exporters. Each exporter names those that it uses, and rejects others that are set."""

    precision: Annotated[
        Precision, Doc("of weights and arithmetic; `tf32` is fp32 with TF32 products; `int8`, `fp8`: of linear layers")
    ] = "fp32"
    opset: Annotated[
        Positive | None,
        Doc("ONNX opset, also of the file that an engine is built from; None: the exporter chooses and records it"),
    ] = None
    batch: Annotated[
        tuple[Positive, Positive, Positive],
        BeforeValidator(partial(_as_tuple, length=3), tuple[Positive, Positive, Positive] | Positive),
        Doc("(minimum, optimal, maximum) number of images, or one for all; an engine is tuned for the second"),
    ] = (1, 256, 256)
    sm: Annotated[
        tuple[Positive, ...],
        BeforeValidator(_as_tuple, tuple[Positive, ...] | Positive),
        Doc("GPU compute capabilities (89 is 8.9) of an engine; empty: the exporter chooses and records them"),
    ] = ()
    islands: Annotated[
        tuple[str, ...],
        BeforeValidator(_as_tuple, tuple[str, ...] | str),
        Doc("names of modules that stay in fp32 at a lower precision; `auto` searches for a minimal set"),
    ] = ()
    weight_bits: Annotated[
        Literal[7, 8] | None,
        Doc("of weights in int8; None: 8 in engines, and in OpenVINO with VNNI; else 7, as sums may saturate"),
    ] = None
    calibration: Annotated[Positive, Doc("training images on which the ranges of int8 and fp8 are measured")] = 256
    calibration_method: Annotated[
        Calibration, Doc("how: largest magnitude, 99.99 % of all, least KL divergence, or least squared error")
    ] = "minmax"
    smooth: Annotated[bool, Doc("int8 and fp8: move scales of channels from LayerNorms into the next layers")] = False
    uint8: Annotated[
        bool, Doc("the file takes bytes, (batch, height, width, channels) of 0 to 255, and normalizes them itself")
    ] = False
    optimization_level: Annotated[int | None, Ge(0), Le(5), Doc("0: fast build, 5: fast engine; None: default")] = None
    workspace: Annotated[
        int | None, Ge(1), Le(2**50), Doc("bytes that an engine may use beside its weights; None: default")
    ] = None
    timing_cache: Annotated[UserPath | None, Doc("file that keeps measured kernel times for later builds")] = None
    hardware_compatible: Annotated[
        Literal["none", "ampere+", "same"],
        Doc("`none`, `ampere+` (any GPU from Ampere on) or `same` (any GPU of the same compute capability)"),
    ] = "none"
    version_compatible: Annotated[
        bool, Doc("the engine also runs in later versions of its runtime, which then runs code from the file")
    ] = False
    keep_onnx: Annotated[bool, Doc("keep the ONNX file that an engine was built from")] = True

    def changed(self) -> tuple[str, ...]:
        """Names of the options that differ from their defaults."""
        return tuple(name for name, default in DEFAULTS.items() if getattr(self, name) != default)

    @property
    def eight_bits(self) -> EightBits | None:
        """The precision of linear layers in eight bits; None in other precisions."""
        kind = self.precision.removesuffix("+bf16")
        return cast(EightBits, kind) if kind in EIGHT_BITS else None

    @property
    def label(self) -> str:
        """`-fp16-uint8`: what the name of a file states; empty for fp32 and images of floats."""
        return f"-{self.precision}" * (self.precision != "fp32") + "-uint8" * self.uint8

    def only(self, names: Collection[str]) -> "ExportOptions":
        """These options for an exporter that supports `names`, with the defaults for all others."""
        return ExportOptions(**{name: getattr(self, name) for name in DEFAULTS if name in names})


DEFAULTS: dict[str, Any] = {option.name: option.default for option in fields(ExportOptions)}
