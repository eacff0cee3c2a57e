"""Parsing of option values, shell completion, and groups of options that several commands share."""

import contextlib
import re
from collections.abc import Callable, Iterable
from functools import reduce
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from vitcompress.io.files import user_path

PROVIDERS = {name.lower(): f"{name}ExecutionProvider" for name in ("CPU", "CUDA", "Tensorrt")}
MOST = 2**20  # images of a call, and calls
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


class HomePath(click.Path):
    """A path whose `~` is the home folder: shells replace it in `--out ~/x`, and leave it in `--out=~/x`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(user_path(value), param, ctx)


class KeyPath(HomePath):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from vitcompress.io.signature import read_private_key  # which needs an extra

        return read_private_key(super().convert(value, param, ctx))


KEY = KeyPath(path_type=Path, dir_okay=False)  # the private key in a file
PATH, FILE, FOLDER = (HomePath(path_type=Path, **kind) for kind in ({}, {"dir_okay": False}, {"file_okay": False}))

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


def complete_names(names: Callable[[], Iterable[str]]) -> Callable[..., list[CompletionItem]]:
    """Shell completion of an argument that is one of `names()`, or a file."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        items = [CompletionItem(name) for name in names() if name.startswith(incomplete)]
        return items or [CompletionItem(incomplete, type="file")]

    return complete


def parse_list(convert: Callable[[str], Any], expected: str) -> Callable[[str], tuple[Any, ...]]:
    """Parse a comma-separated list with at least one item. convert: raises ValueError for a wrong item."""

    def parse(value: str) -> tuple[Any, ...]:
        with contextlib.suppress(ValueError, click.BadParameter):
            if items := tuple(convert(word.strip()) for word in value.split(",") if word.strip()):
                return items
        raise click.BadParameter(f"got {value!r}, expected {expected}")

    return parse


parse_words = parse_list(str, "names")
parse_formats = parse_list(str.lower, "formats")
parse_capabilities = parse_list(lambda s: int(re.sub("^sm_?|[.]", "", s.lower())), "compute capabilities, as in 80,8.9")
parse_batches = parse_list(click.IntRange(1, MOST), "numbers from 1 to 1048576, as in 1,8,64")
SHARES = "numbers from 0 to 1, as in 0.485,0.456,0.406; divide those of bytes by 255"
parse_shares = parse_list(click.FloatRange(0, 1), SHARES)


def parse_batch_range(value: str) -> tuple[int, ...]:
    """`1:8:256` -> (1, 8, 256); `8` -> (8, 8, 8)."""
    parts = value.split(":")
    if len(parts) not in (1, 3) or not all(re.fullmatch("0*[1-9][0-9]{0,5}", part) for part in parts):
        raise click.BadParameter(f"got {value!r}, expected MIN:OPT:MAX, as in 1:256:256, or one number")
    return tuple(int(part) for part in parts) * (3 // len(parts))


def parse_size(value: str) -> int:
    """`512M` -> bytes."""
    match = re.fullmatch(r"(\d{1,15})\s*([kmg]?)(?:i?b)?", value.strip().lower())
    if match is None or not int(match[1]):
        raise click.BadParameter(f"got {value!r}, expected a size, as in 512M or 4G")
    return int(match[1]) * UNITS[match[2]]


def parse_points(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Percentage points of a loss, from 0 to below 100."""
    if value is None or 0 <= value < 100:  # not for NaN
        return value
    raise click.BadParameter(f"got {value:g}, expected percentage points from 0 to below 100, as in 1.5")


def add_options(*options: Decorator) -> Decorator:
    """Add several options to a command, in this order."""
    return lambda command: reduce(lambda inner, option: option(inner), reversed(options), command)


class _Option(click.Option):
    """Errors name the environment variable that the value is from."""

    def get_error_hint(self, ctx: click.Context | None) -> str:
        hint, name = super().get_error_hint(ctx), self.name or ""
        if ctx is not None and ctx.get_parameter_source(name) is ParameterSource.ENVIRONMENT:
            return f"{hint} (from {ctx.auto_envvar_prefix}_{name.upper()})"
        return hint


def option(names: str, help: str, type: Any = None, metavar: str | None = None, **about: Any) -> Decorator:
    """`click.option`. names: `--out -o`. about: its other arguments."""
    return click.option(*names.split(), cls=_Option, help=help, type=type, metavar=metavar, **about)


def flag(names: str, help: str, **about: Any) -> Decorator:
    """An option without a value."""
    return option(names, help, is_flag=True, **about)


# For lists: `--sm 89 --sm 120` is `--sm 89,120`.
PARTS: Any = {"multiple": True, "callback": lambda ctx, param, parts: sum(parts, ()) or None}


def precision_option(default: str, *names: str) -> Decorator:
    """--precision, one of `names`, which shells complete."""
    help, kind = f"{', '.join(names)} (default: {default}).", click.Choice(names, case_sensitive=False)
    return option("--precision", help, kind, "PRECISION")


METHODS = ["minmax", "percentile", "entropy", "mse"]
GPUS = ["none", "ampere+", "same"]
ISLANDS_HELP = "Layers to keep in fp32: norm, softmax, head, ffn, module paths, or auto to search for a minimal set."
# Each option is a field of ExportOptions.
export_options = add_options(
    precision_option("fp32", "fp32", "tf32", "fp16", "bf16", "int8", "int8+bf16", "fp8", "fastest"),
    option("--opset", "ONNX operator set (default: chosen and recorded with the reason).", int),
    option("--batch", "Batch sizes of an engine (trt, trt-rtx).", parse_batch_range, "MIN:OPT:MAX"),
    option("--sm", "Compute capabilities, as in 80,89 (trt, trt-rtx).", parse_capabilities, "LIST", **PARTS),
    option("--islands", ISLANDS_HELP, parse_words, "NAMES", **PARTS),
    option("--weight-bits", "For int8 (default: 8 in engines and OpenVINO with VNNI, else 7).", click.IntRange(7, 8)),
    option("--calibration", "Training images that int8 and fp8 use (default: 256).", click.IntRange(1)),
    option("--calibration-method", "How they determine ranges (default: minmax).", click.Choice(METHODS)),
    flag("--smooth", "Move scales of channels from LayerNorms into the next layers (int8, fp8)."),
    flag("--uint8", "Take uint8 images (batch, height, width, channels); normalize inside."),
    option("--optimization-level", "0: fastest build, 5: fastest engine (trt).", click.IntRange(0, 5)),
    option("--workspace", "Memory for an engine, as in 4G (trt, trt-rtx).", parse_size, "SIZE"),
    option("--timing-cache", "File that caches kernel timings (trt).", PATH),
    option("--hardware-compatible", "Run on GPUs from Ampere on, or of the same capability (trt).", click.Choice(GPUS)),
    flag("--version-compatible", "Run in later versions of TensorRT, too (trt)."),
    option("--keep-onnx/--no-onnx", "Keep the ONNX file of an engine beside it.", default=True),
)
# Fields of Preprocessing, as in timm.
FILTERS = ["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"]
preprocessing_options = add_options(
    option("--mean", "Mean per channel, of pixels from 0 to 1.", parse_shares, "V,V,V"),
    option("--std", "Standard deviation per channel.", parse_shares, "V,V,V"),
    option("--interpolation", "Interpolation for resizing images.", click.Choice(FILTERS)),
    option("--crop-pct", "Side of the crop, as a share of the resized side.", click.FloatRange(0, 1, min_open=True)),
    option("--crop-mode", "How to crop.", click.Choice(["center", "squash", "border"])),
)
# The fields of RunnerOptions that all commands with runners share.
DEVICE_HELP = "cpu, cuda, cuda:1, mps (default: cuda for engines, and torch and ONNX beside them; else cpu)."
PROVIDER_HELP = "ONNX Runtime execution provider, such as CUDAExecutionProvider, or cpu, cuda, tensorrt."
runner_options = add_options(
    option("--device", DEVICE_HELP, str.lower, "DEVICE"),
    option("--provider", PROVIDER_HELP, lambda value: PROVIDERS.get(value.lower(), value), "NAME"),
    option("--engine-cache", "Cache directory for engines built by ONNX Runtime's TensorRT provider.", FOLDER, "DIR"),
    option("--threads", "CPU threads of one call (default: the runtime's).", click.IntRange(1, 1024)),
    flag("--trust", "Open engines without a matching sidecar. They can run any code."),
)


def take(values: dict[str, Any], kind: type[Any]) -> Any:
    """A `kind` of those `values` that are its fields (without `batch`), which are removed."""
    return kind(**{name: values.pop(name) for name in kind.__dataclass_fields__ if name in values and name != "batch"})


max_drop_option = option(
    "--max-drop",
    "Exit code 1 unless the 95 % interval of each paired difference of top-1 (over the dense model and, if there is "
    "one, the control; in evaluate, over the first artifact) excludes a loss of more than POINTS percentage points.",
    float,
    "POINTS",
    callback=parse_points,
)
require_signed_option = flag(
    "--require-signed",
    "Open only files with a valid signature by a trusted key (VITCOMPRESS_TRUSTED_KEYS, or trusted_keys in the user's "
    "configuration folder). Records nothing in run folders.",
)
DRY_RUN_HELP = "Print stages, cost and problems; write nothing. Exit code 2 if the run would be rejected."
dry_run_option = flag("--dry-run", DRY_RUN_HELP)
SET_EXAMPLE = "as in --set finetune.epochs=10 (of a study: --set epochs=60)"
SET_HELP = f"Change a key, {SET_EXAMPLE}; KEY= restores its default. Can be repeated."
set_option = option("--set", SET_HELP, metavar="KEY=VALUE", multiple=True)
