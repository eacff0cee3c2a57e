"""How a model is exported, whatever the format: one table of a recipe, one set of options on the command line."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

Precision = Literal["fp32", "tf32", "fp16", "bf16"]
Positive = Annotated[int, Ge(1)]
AUTO = "auto"


@dataclass(frozen=True)
class ExportOptions:
    """What an export may be told. An exporter names those that it uses, and refuses the rest when they are given.

    precision: of weights and arithmetic; `tf32` is fp32 with TF32 products, which `fp32` never uses.
    opset: of ONNX, also of the file that an engine is built from; None lets the exporter choose and record why.
    batch: (least, best, largest) number of images; an engine is tuned for the middle one.
    sm: GPU compute capabilities (89 is 8.9) that an engine is for; none lets the exporter choose and say which.
    islands: modules that stay in fp32 when the rest does not, by their names in the model; `auto` is the smallest
        set that a search finds, beside those that are named.
    uint8: the file takes bytes, (batch, height, width, channels) of 0 to 255, and normalises them itself.
    optimization_level: 0 (quick build) to 5 (quick engine); None leaves the builder's own.
    workspace: bytes that an engine may use beside its weights; None leaves the builder's own.
    timing_cache: file in which measured kernels are remembered from one build to the next.
    hardware_compatible: `none`, `ampere+` (any GPU from Ampere on) or `same` (any GPU of the same compute capability).
    version_compatible: the engine also runs in later versions of its runtime, which then runs code from the file.
    keep_onnx: leave the ONNX file that an engine was built from beside it.
    """

    precision: Precision = "fp32"
    opset: Positive | None = None
    batch: tuple[Positive, Positive, Positive] = (1, 256, 256)
    sm: tuple[Positive, ...] = ()
    islands: tuple[str, ...] = ()
    uint8: bool = False
    optimization_level: Annotated[int, Ge(0), Le(5)] | None = None
    workspace: Positive | None = None
    timing_cache: Path | None = None
    hardware_compatible: Literal["none", "ampere+", "same"] = "none"
    version_compatible: bool = False
    keep_onnx: bool = True

    def given(self) -> tuple[str, ...]:
        """The options that are not left as they are by default."""
        return tuple(name for name, default in DEFAULTS.items() if getattr(self, name) != default)

    def only(self, names: Collection[str]) -> "ExportOptions":
        """These options for an exporter that uses `names`: all others as they are by default."""
        return ExportOptions(**{name: getattr(self, name) for name in DEFAULTS if name in names})


DEFAULTS: dict[str, Any] = {option.name: option.default for option in fields(ExportOptions)}
