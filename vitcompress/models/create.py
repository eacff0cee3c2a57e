"""Dense timm models by name, at any input size and class count."""

import contextlib
import inspect
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_model_data_config
from torch import nn

from vitcompress.errors import InputError, WeightsError, did_you_mean, first_line, nearest
from vitcompress.models.weights import GIVE_FILE, UNBUILDABLE, check_hub, load_weights

STIRRED = 0.1  # standard deviation of what `stir` adds: small beside the ones of norms
UNKNOWN = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


@dataclass(frozen=True)
class InputConfig:
    """What a model expects: size (channels, height, width) and how images are brought to it."""

    size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop_pct: float
    crop_mode: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def create_model(
    arch: str,
    arch_args: Mapping[str, Any] | None = None,
    weights: str | Path = "random",
    *,
    seed: int = 0,
    new_head: bool = False,
) -> nn.Module:
    """Build `timm.create_model(arch, **arch_args)` in eval mode.

    Args:
        weights: `random` (drawn from `seed`), `hub` (timm's pretrained weights, needs a network) or a file
            (.safetensors, .pth; of a training script's checkpoint the averaged weights, if it has any, as in timm).
            Position embeddings and relative position tables are resampled to the input size.
        new_head: accept weights of another class count and start with a fresh classifier.

    Raises:
        InputError: no such architecture, or arguments that it does not take.
        WeightsError: weights that cannot be had, or are of another model.
    """
    _check_name(arch)
    args = dict(arch_args or {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(arch, args, pretrained=str(weights) == "hub", new_head=new_head)
    if str(weights) not in ("random", "hub"):
        load_weights(model, Path(weights), new_head)
    return model.eval()


def randomize_constants(model: nn.Module, seed: int = 0) -> None:
    """Add noise to every parameter that timm starts with one value everywhere: biases, norms, LayerScales, gates.

    With zeros in all biases nobody would see that a bias was lost or sliced wrongly, and behind LayerScales of 1e-5
    that whole layers were.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=STIRRED)


def create_on_meta(arch: str, arch_args: Mapping[str, Any] | None = None) -> nn.Module:
    """`create` without the weights, on torch's meta device: all that shapes, costs and plans need, in no memory.

    Raises:
        InputError: no such architecture, or arguments that it does not take.
    """
    _check_name(arch)
    try:
        with torch.device("meta"):
            return _build(arch, dict(arch_args or {}), pretrained=False, new_head=False).eval()
    except InputError:  # some models compute with values while they are built
        return create_model(arch, arch_args).to("meta")


def is_known(arch: str) -> bool:
    """Whether timm has a model of this name."""
    return bool(timm.is_model(arch))


def _check_name(arch: str) -> None:
    name = arch.split(".")[0]
    if not timm.is_model(name):
        close = ", ".join(nearest(name, timm.list_models()))
        raise InputError(f"timm has no model {arch!r}", hint=f"nearest: {close}" if close else "see timm.list_models()")


def _build(arch: str, args: dict[str, Any], *, pretrained: bool, new_head: bool) -> nn.Module:
    try:
        model: nn.Module = timm.create_model(arch, pretrained=False, **args)
        if not pretrained:
            return model
    except (*UNBUILDABLE, OSError) as error:
        raise InputError(f"timm cannot build {arch} with {args}: {_said(error)}", hint=_way_out(arch, error)) from None
    check_hub(arch, args.get("num_classes"), new_head=new_head)
    try:
        model = timm.create_model(arch, pretrained=True, **args)
    except (*UNBUILDABLE, OSError) as error:
        raise WeightsError(
            f"the weights of {arch} could not be fetched: {first_line(error)}",
            hint=GIVE_FILE,
        ) from None
    return model


def check_classifier(arch: str, args: Mapping[str, Any], outlined: nn.Module) -> None:
    """Raise InputError for arguments with which timm builds a model that cannot classify an image.

    outlined: the model on the meta device.
    """
    if (classes := int(getattr(outlined, "num_classes", 1))) < 1:
        raise InputError(
            f"{arch} with {args} has no classifier: num_classes is {classes}", hint="set model.classes to 1 or more"
        )
    size = input_config(outlined).size
    try:
        with torch.no_grad(), contextlib.suppress(NotImplementedError):  # no such operation without values
            outlined(torch.zeros(2, *size, device="meta"))
    except UNBUILDABLE as error:
        raise InputError(
            f"timm builds {arch} with {args}, but it cannot take images of {size}: {_said(error)}",
            hint=_way_out(arch, error),
        ) from None


def _said(error: Exception) -> str:
    """The message of timm, or of torch called by it, in one line; where it says little, the line that raised it."""
    words = " ".join(str(error).split())
    if words and (isinstance(error, (ValueError, AssertionError, RuntimeError, OSError)) or UNKNOWN.search(words)):
        return words
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "timm" in Path(frame.filename).parts]
    return f"{type(error).__name__}{f': {words}' if words else ''} in timm's `{(own or frames)[-1].line}`"


def _way_out(arch: str, error: Exception) -> str:
    """The next step after arguments that timm does not take."""
    if (found := UNKNOWN.search(str(error))) is None:
        return "change what it names in model.args, as in --set model.args.depth=12"
    kind = getattr(sys.modules[timm.model_entrypoint(arch.split(".")[0]).__module__], found[1], None)
    close = did_you_mean(found[2], inspect.signature(kind).parameters) if isinstance(kind, type) else ""
    return f"leave {found[2]} out of model.args{close}"


def input_config(model: nn.Module) -> InputConfig:
    """How images are brought to `model`: its pretrained configuration, at the size it was built for."""
    config = resolve_model_data_config(model)
    channels = int(getattr(model, "in_chans", config["input_size"][0]))
    embed = getattr(model, "patch_embed", None)
    height, width = getattr(embed, "img_size", None) or config["input_size"][1:]
    mean, std = (_per_channel(config[key], channels) for key in ("mean", "std"))
    return InputConfig(
        (channels, int(height), int(width)),
        mean,
        std,
        str(config["interpolation"]),
        float(config["crop_pct"]),
        str(config["crop_mode"]),
    )


def _per_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """One value per channel; their average where the images have another number of channels."""
    return tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels
