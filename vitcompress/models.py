"""Dense timm models by name, with weights from timm's hub, a file or none, at any input size and class count."""

import contextlib
import inspect
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_model_data_config
from timm.models import pvt_v2, swin_transformer, vision_transformer
from torch import Tensor, nn

from vitcompress.errors import InputError, WeightsError, did_you_mean, first_line, nearest
from vitcompress.io.tensors import load_tensors, part_of

# What brings checkpoints to a model's names and input size: position embeddings and tables are resampled.
FILTERS = {
    vision_transformer.VisionTransformer: partial(vision_transformer.checkpoint_filter_fn, adapt_layer_scale=True),
    swin_transformer.SwinTransformer: swin_transformer.checkpoint_filter_fn,
    pvt_v2.PyramidVisionTransformerV2: pvt_v2.checkpoint_filter_fn,
}
STIRRED = 0.1  # standard deviation of what `stir` adds: small beside the ones of norms
GIVE_FILE = "give a local file with --weights PATH (.safetensors or .pth)"
# What timm raises for arguments, or for weights, that do not fit a model.
UNBUILDABLE = (TypeError, ValueError, AssertionError, RuntimeError, LookupError, AttributeError, ArithmeticError)
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


def create(
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
        _load_weights(model, Path(weights), new_head)
    return model.eval()


def stir(model: nn.Module, seed: int = 0) -> None:
    """Add noise to every parameter that timm starts with one value everywhere: biases, norms, LayerScales, gates.

    With zeros in all biases nobody would see that a bias was lost or sliced wrongly, and behind LayerScales of 1e-5
    that whole layers were.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=STIRRED)


def outline(arch: str, arch_args: Mapping[str, Any] | None = None) -> nn.Module:
    """`create` without the weights, on torch's meta device: all that shapes, costs and plans need, in no memory.

    Raises:
        InputError: no such architecture, or arguments that it does not take.
    """
    _check_name(arch)
    try:
        with torch.device("meta"):
            return _build(arch, dict(arch_args or {}), pretrained=False, new_head=False).eval()
    except InputError:  # some models compute with values while they are built
        return create(arch, arch_args).to("meta")


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


def check_answers(arch: str, args: Mapping[str, Any], outlined: nn.Module) -> None:
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


def hub_classes(arch: str) -> int | None:
    """How many classes timm's weights of `arch` tell apart; None where timm does not say."""
    cfg = timm.get_pretrained_cfg(arch)
    return None if cfg is None else int(cfg.num_classes)


def check_hub(arch: str, wanted: int | None, *, new_head: bool) -> None:
    """Raise WeightsError where timm's hub has no weights of `arch`, or only some of another class count than `wanted`.

    Nothing is fetched. new_head: any class count will do.
    """
    cfg = timm.get_pretrained_cfg(arch)
    if cfg is not None and not cfg.has_weights:
        raise WeightsError(f"timm's hub has no weights of {arch}", hint=GIVE_FILE)
    known = hub_classes(arch)
    if known is not None and wanted not in (None, known) and not new_head:
        raise _class_mismatch(f"timm's weights of {arch}", known, int(wanted or 0))


def _class_mismatch(what: str, have: int, wanted: int) -> WeightsError:
    return WeightsError(
        f"{what} have {have} classes, the data has {wanted}",
        hint="fine-tune the dense model on this data first and give its weights with --weights, or set "
        "model.new_head = true to start from a fresh classifier",
    )


def part_of_weights(weights: str | Path) -> str | None:
    """Which part of a training script's checkpoint `create` takes its weights from; None where there are no parts.

    Raises:
        WeightsError: as `create`.
    """
    return None if str(weights) in ("random", "hub") else part_of(Path(weights))


def _load_weights(model: nn.Module, path: Path, new_head: bool) -> None:
    tensors = load_tensors(path)
    for kind, fit in FILTERS.items():
        if isinstance(model, kind):
            with contextlib.suppress(*UNBUILDABLE):  # foreign weights: told below
                tensors = fit(tensors, model)
    own = model.state_dict()
    heads = [key for key in own if key.split(".")[0] in ("head", "head_dist")]
    differing = [key for key in heads if key in tensors and tensors[key].shape[0] != own[key].shape[0]]
    if differing and new_head:
        tensors = {**tensors, **{key: own[key] for key in heads}}
    elif differing:
        raise _class_mismatch(f"the weights in {path}", tensors[differing[0]].shape[0], own[differing[0]].shape[0])
    problem = _mismatch(own, tensors)
    if problem:
        raise WeightsError(
            f"{path} holds the weights of another model: {problem}",
            hint="give weights of the architecture that the recipe names, or change model.name",
        )
    model.load_state_dict(tensors, strict=True)


def _mismatch(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    """What keeps `given` from being loaded strictly, in one line."""
    missing, extra = sorted(set(own) - set(given)), sorted(set(given) - set(own))
    wrong = [
        f"{key} is {tuple(given[key].shape)}, expected {tuple(own[key].shape)}"
        for key in own
        if key in given and given[key].shape != own[key].shape
    ]
    parts = [
        f"{len(missing)} tensors missing ({missing[0]} ...)" if missing else "",
        f"{len(extra)} unknown ({extra[0]} ...)" if extra else "",
        f"{len(wrong)} of another shape ({wrong[0]} ...)" if wrong else "",
    ]
    return ", ".join(part for part in parts if part)


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
