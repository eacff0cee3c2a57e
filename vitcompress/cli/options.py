"""Parsing of option values, shell completion, and the groups of options that several commands share."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def completed(names: Callable[[], Iterable[str]]) -> Completion:
    """How a shell completes an argument that is one of `names()`, or a file."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(name) for name in names() if name.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="file")]

    return complete


def words(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """`onnx,trt` as a tuple."""
    return tuple(word.strip() for word in (value or "").split(",") if word.strip())


def capabilities(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    """`80,89` or `8.0,sm_89` as numbers."""
    found = []
    for word in words(ctx, param, value):
        digits = word.lower().removeprefix("sm").removeprefix("_").replace(".", "")
        if not digits.isdecimal():
            raise click.BadParameter(f"{word!r} is no compute capability; expected numbers, as in 80,89")
        found.append(int(digits))
    return tuple(found)


def batch_range(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """`1:8:256` as three numbers; `8` is 8:8:8."""
    if value is None:
        return None
    parts = value.split(":")
    if len(parts) not in (1, 3) or not all(part.isdecimal() and int(part) for part in parts):
        raise click.BadParameter(f"got {value!r}, expected least:best:largest, as in 1:256:256, or one number")
    return tuple(int(part) for part in parts) * (3 // len(parts))


def numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """`1,8,64` as numbers, none below 1."""
    found = words(ctx, param, value)
    if any(not word.isdecimal() or not int(word) for word in found):
        raise click.BadParameter(f"got {value!r}, expected numbers of 1 or more, as in 1,8,64")
    return tuple(map(int, found)) or None


def values(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    """`0.485,0.456,0.406` as numbers."""
    try:
        return tuple(map(float, words(ctx, param, value))) or None
    except ValueError:
        raise click.BadParameter(f"got {value!r}, expected numbers, as in 0.485,0.456,0.406") from None


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """`512M` as bytes."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+)\s*([kmg]?)(?:i?b)?", value.strip().lower())
    if found is None or not int(found[1]):
        raise click.BadParameter(f"got {value!r}, expected a size, as in 512M or 4G")
    return int(found[1]) * UNITS[found[2]]


EXPORT = (
    click.option(
        "--precision", metavar="PRECISION", help="fp32 (default), tf32, fp16 or bf16; what the format offers."
    ),
    click.option("--opset", type=int, help="ONNX operator set (default: chosen and recorded with the reason)."),
    click.option("--batch", callback=batch_range, metavar="L:B:L", help="Least, best and largest batch of an engine."),
    click.option("--sm", callback=capabilities, metavar="LIST", help="Compute capabilities of an engine, as in 80,89."),
    click.option(
        "--islands",
        callback=words,
        metavar="NAMES",
        help="Parts kept in fp32: norm, softmax, head, ffn, module paths; auto searches.",
    ),
    click.option("--uint8", is_flag=True, help="Take bytes (batch, height, width, channels); normalise in the file."),
    click.option("--optimization-level", type=click.IntRange(0, 5), help="0: quick build, 5: quickest engine; trt."),
    click.option("--workspace", callback=size, metavar="SIZE", help="Memory an engine may use, as in 4G."),
    click.option("--timing-cache", type=click.Path(path_type=Path), help="Remember measured kernels in this file."),
    click.option(
        "--hardware-compatible",
        type=click.Choice(["none", "ampere+", "same"]),
        help="Run on any GPU from Ampere on, or of the same compute capability.",
    ),
    click.option("--version-compatible", is_flag=True, help="Run in later versions of the runtime too."),
    click.option("--keep-onnx/--no-onnx", default=True, help="Leave the ONNX file of an engine beside it."),
)


# Each one a field of `bench.preparation.Preparation`, named and offered as timm does.
PREPARATION = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
_PREPARATION = (
    click.option("--mean", callback=values, metavar="V,V,V", help="Mean of each channel, of pixels from 0 to 1."),
    click.option(
        "--std", callback=values, metavar="V,V,V", help="Standard deviation of each channel, of pixels from 0 to 1."
    ),
    click.option(
        "--interpolation",
        type=click.Choice(["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"]),
        help="How images are resized (default: bicubic).",
    ),
    click.option(
        "--crop-pct",
        type=click.FloatRange(0, 1, min_open=True),
        help="Share of the resized side that the crop keeps (default: 0.875).",
    ),
    click.option(
        "--crop-mode", type=click.Choice(["center", "squash", "border"]), help="How the crop is cut (default: center)."
    ),
)


# Options that are fields of RunnerOptions; `_RUNNER` has those that all commands with runners share.
RUNNER = ("device", "provider", "precision", "threads", "compile", "trust", "cuda_graph", "transfers", "engine_cache")
_RUNNER = (
    click.option(
        "--device",
        metavar="DEVICE",
        help="cpu, cuda, cuda:1, mps (default: cuda for engines and what bench measures beside them, else cpu).",
    ),
    click.option("--provider", metavar="NAME", help="ONNX Runtime execution provider, as in CUDAExecutionProvider."),
    click.option(
        "--engine-cache",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        help="Folder of your own for what TensorRT providers of ONNX Runtime build, to be used again.",
    ),
    click.option("--threads", type=click.IntRange(1), help="CPU threads of one call (default: the runtime's)."),
    click.option("--trust", is_flag=True, help="Open engines that no sidecar vouches for. They can run any code."),
)


def export_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of an export, each one a field of ExportOptions; what was not given is left out."""
    return _with(EXPORT, command)


def preparation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What is told of files that do not say how their images are prepared."""
    return _with(_PREPARATION, command)


def runner_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How artifacts are run, for every command that runs some."""
    return _with(_RUNNER, command)


def _with(options: Sequence[Callable[..., Any]], command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command


def given(values: dict[str, Any]) -> dict[str, Any]:
    """The values that were given, for a dataclass with defaults of its own."""
    return {name: value for name, value in values.items() if value not in (None, ())}


def taken(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Those of `values` that `names` name, which are no longer among them then."""
    return {name: values.pop(name) for name in names if name in values}
