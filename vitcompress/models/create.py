"""Create dense timm models by name, with any input size and number of classes."""

import contextlib
import inspect
import re
import traceback
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from threading import RLock
from typing import Annotated, Any

import timm
import torch
from annotated_types import Ge, Gt, Le, Len
from timm.data import resolve_model_data_config
from timm.layers import DropPath, PatchDropout, PatchDropoutWithIndices
from torch import nn
from torch.overrides import TorchFunctionMode

from vitcompress.errors import DataError, InputError, WeightsError, did_you_mean, first_line
from vitcompress.families import Family, copy_model, family_of, prepare_model, reject_wrapper, unwrap
from vitcompress.io.plugins import load_all
from vitcompress.io.tensors import LIBRARY_ERRORS, check_finite
from vitcompress.io.text import format_shape
from vitcompress.io.validation import UNKNOWN_KEY, WHOLE, Matching, create_table, validate
from vitcompress.models.arguments import allowed_arguments
from vitcompress.models.preprocessing import NAMES, Crop, Filter
from vitcompress.models.weights import USE_FILE, check_hub, load_weights
from vitcompress.plan import Plan
from vitcompress.surgery import apply_plan

NOISE = 0.1  # standard deviation for `randomize_constants`: small compared with norm weights of 1
OVERLAY, LABELS = "pretrained_cfg_overlay", "label_names"  # argument of timm.create_model, and a key in it
INITIALIZERS = {"uniform_", "normal_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_"}
LARGEST = 2**14
Side = Annotated[int, Ge(1), Le(LARGEST), WHOLE]  # pixels, or channels
Size = tuple[int | range | None, ...]  # channels, height and width of images: a number, multiples, or any
CHANGE = "change the argument in model.args, as in --set model.args.NAME=VALUE"
UNDO = "undo the change, which loading would not repeat; see also `reset_classifier`"
MOST_PARAMETERS = 2**36  # ten times as many as the largest model of timm
DROPS = (nn.Identity, nn.Dropout, DropPath, PatchDropout, PatchDropoutWithIndices)
# Attributes of modules that change no output in eval mode.
NO_EFFECT = re.compile("drop|^(training|grad_checkpointing|fused_attn|scale_by_keep|p|inplace)$")
_SEEDING = RLock()  # all threads share torch's random generator; a user's constructor may create another model
UNKNOWN = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


@dataclass(frozen=True)
class InputConfig:
    """The input of a model: size (channels, height, width) and preprocessing of images.

    The limits are for metadata of files (`exporters.sidecar.read_input`); no model reaches them.
    """

    size: tuple[Side, Side, Side]
    mean: tuple[Annotated[float, Ge(-1000), Le(1000)], ...]
    std: tuple[Annotated[float, Gt(0), Le(1000)], ...]
    interpolation: Filter
    crop_pct: Annotated[float, Ge(0.05), Le(2)]
    crop_mode: Crop


def create_model(
    arch: str,
    arch_args: Mapping[str, object] | None = None,
    weights: str | Path = "random",
    *,
    seed: int = 0,
    new_head: bool = False,
) -> nn.Module:
    """Create `timm.create_model(arch, **arch_args)` in eval mode, prepared for pruning.

    It may have other parameter names than timm's (see `families.prepare_model`). `model.plan` is its identity plan.

    weights: `random` (from `seed`), `hub` (timm's pretrained weights, needs a network) or a file (.safetensors, .pth;
    averaged weights of a training checkpoint are preferred, as in timm). Position embeddings and relative position
    tables are resampled to the input size. new_head: accept weights with another number of classes and start with a
    random classifier. Raises InputError for an unknown architecture, or arguments that it does not accept, and
    WeightsError for weights that are not available, or belong to another model.
    """
    args = arch_args or {}
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(arch, args, pretrained=str(weights) == "hub", new_head=new_head)
    if str(weights) not in ("random", "hub"):
        load_weights(model, weights, new_head)
    return _finish(model, arch, args)


def create_on_meta(arch: str, arch_args: Mapping[str, object]) -> nn.Module:
    """`create_model` on torch's meta device: shapes without weights. Raises InputError as `create_model`."""
    model = build_on_meta(arch, arch_args)
    if (count := sum(parameter.numel() for parameter in model.parameters())) > MOST_PARAMETERS:
        message = f"{arch} with {arch_args} has {count:,} parameters, at most {MOST_PARAMETERS:,} are supported"
        raise InputError(message, hint=CHANGE)
    return _finish(model, arch, arch_args)


def build_on_meta(arch: str, arch_args: Mapping[str, object]) -> nn.Module:
    """timm's model on the meta device, not prepared: with timm's parameter names. Raises InputError."""
    try:
        with torch.device("meta"), SkipOnMeta(INITIALIZERS):
            return _build(arch, arch_args)
    except InputError:  # some models compute with values in their constructor
        with _SEEDING, torch.random.fork_rng(devices=[]):
            return _build(arch, arch_args).to("meta")


class SkipOnMeta(TorchFunctionMode):
    """Functions of these names return their tensor if it is on the meta device, where only its shape counts.

    There most of the time goes into functions that change no shape: initialization, norms, activations.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear and args:  # of rows: torch 2.8 counts some others as products of batches
            return func(args[0].reshape(-1, args[0].shape[-1]), *args[1:], **kwargs).reshape(*args[0].shape[:-1], -1)
        if getattr(func, "__name__", "") in self.names:
            tensor = args[0] if args else next(v for v in kwargs.values() if isinstance(v, torch.Tensor))
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def _finish(model: nn.Module, arch: str, args: Mapping[str, object]) -> nn.Module:
    prepare_model(model).eval().plan = Plan(arch, args)  # type: ignore[assignment]
    config = dict[str, object](vars(input_config(model)))  # timm's own functions read it from here
    own = {"input_size": config.pop("size"), "test_input_size": None, "test_crop_pct": None, **config}
    classes = {"num_classes": model.num_classes} if hasattr(model, "num_classes") else {}
    model.pretrained_cfg = {**getattr(model, "pretrained_cfg", {}), **own, **classes}  # type: ignore[assignment]
    return model


def check_weights(model: nn.Module, *, one_type: bool = False) -> None:
    """Raise InputError for a model on the meta device; with `one_type`, also for weights of several types."""
    name, types = f"this {type(model).__name__}", {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError(f"{name} has no weights, it is on the meta device", hint="create it on another device")
    if one_type and len(types) > 1:
        raise InputError(f"{name} has weights of several types: {', '.join(sorted(types))}", hint="use model.float()")


def prepared(model: nn.Module) -> nn.Module:
    """`model` if it has a plan, so that it is prepared, else a copy that `prepare_model` rewrote."""
    return model if hasattr(model, "plan") else prepare_model(copy_model(model))


def plan_of(model: nn.Module) -> Plan:
    """The plan of `model`: what was removed so far from which timm model.

    For a model of `timm.create_model` without `model.plan`, the identity plan of the architecture and the arguments
    that timm recorded; drop rates are not part of it. Raises InputError if it is changed in another way than by
    `reset_classifier`, not timm's, or not finite.
    """
    reject_wrapper(model)
    check_finite(dict(model.named_parameters()), f"this {type(model).__name__}")
    if isinstance(plan := getattr(model, "plan", None), Plan):
        return plan
    cfg = getattr(model, "pretrained_cfg", {})
    hint = "create the model with vitcompress.create_model, and prune it with vitcompress.prune"
    if not (arch := cfg.get("architecture")):
        raise InputError(f"this {type(model).__name__} was not created by timm", hint=hint)
    family_of(model)  # raises if no family supports it, which is the better reason
    try:
        name = arch if cfg.get("tag") == timm.get_pretrained_cfg(arch, False).tag else f"{arch}.{cfg.get('tag')}"
        default, args = timm.get_pretrained_cfg(name).to_dict(), timm.models.get_model_args(model)
        overlay = {key: cfg[key] for key in ("input_size", *NAMES) if cfg.get(key) != default.get(key)}
        args |= {OVERLAY: overlay} if overlay else {}
        built, plan = build_on_meta(name, args), Plan(name, args)
    except (InputError, RuntimeError) as error:  # RuntimeError: of an architecture or a tag that timm lacks
        raise InputError(f"the arguments of this {arch} are unknown: {error}", hint=hint) from None
    if (changed := find_difference(model, built)) and find_difference(model, prepare_model(built)):
        raise InputError(f"this {arch} is not as timm builds it with {plan.arch_args}: {changed} differs", hint=UNDO)
    return plan


def current_plan(model: nn.Module) -> Plan:
    """`plan_of`, with what `reset_classifier` changed since (classes, pooling, place of the norm), the input size and
    the preprocessing: what is saved with `model`, and named in its files. Raises WeightsError for other changes, too.
    """
    check_weights(model)
    plan = with_changes(plan_of(model), model)
    shapes = apply_plan(create_on_meta(plan.arch, plan.arch_args), plan)
    if hasattr(model, "plan") and (difference := find_difference(model, shapes)):
        raise WeightsError(f"this {plan.arch} is not the model of its plan: {difference} differs", hint=UNDO)
    return plan


def with_changes(plan: Plan, model: nn.Module) -> Plan:
    """`plan` with the arguments of timm.create_model that were changed in `model` since, see `current_plan`."""
    blank = create_on_meta(plan.arch, plan.arch_args)
    now, recorded = (Plan(plan.arch, timm.models.get_model_args(one)).arch_args for one in (model, blank))
    changed = {name: value for name, value in now.items() if recorded.get(name) != value}
    plan = name_classes(plan, class_names_of(model))
    own, other = ({**vars(about), "input_size": about.size} for about in map(input_config, (model, blank)))
    names = NAMES if "img_size" in now else ("input_size", *NAMES)  # PVTv2 has no such argument
    if preprocessing := {name: own[name] for name in names if own[name] != other[name]}:
        changed[OVERLAY] = {**(plan.arch_args.get(OVERLAY) or {}), **preprocessing}  # type: ignore[dict-item]
    standard = plan.standard and {**plan.standard, "args": {**plan.standard["args"], **changed}}
    return replace(plan, arch_args={**plan.arch_args, **changed}, standard=standard) if changed else plan


def with_arguments(plan: Plan, model: nn.Module, own: Plan) -> Plan:
    """`plan` with the arguments of `model`, whose plan is `own`, if these change neither modules nor channels."""
    if plan.delta() == own.delta() or plan.arch.split(".")[0] != own.arch.split(".")[0]:
        return plan
    family, dense = family_of(model), [create_on_meta(one.arch, one.arch_args) for one in (plan, own)]
    there, here = ((family.sites(one), family.spaces(one)) for one in dense)
    return replace(with_changes(plan, model), arch=own.arch, arch_args=own.arch_args) if there == here else plan


def find_difference(model: nn.Module, other: nn.Module) -> str:
    """The first module of another type or settings, or tensor of another shape, in two models; empty if none is."""
    own, others = _structure(model), _structure(other)
    names = [name or "its class" for name in {**own, **others} if own.get(name, "") != others.get(name, "")]
    settings, expected = _attributes(model), _attributes(other)
    names += [name for name, value in settings.items() if value != expected.get(name, value)]
    return names[0] if names else ""


def _structure(model: nn.Module) -> dict[str, str]:
    """Types and settings of modules, but of those that only drop values while training, and shapes of all tensors."""
    named = model.named_modules(remove_duplicate=False)
    types = {n: "" if isinstance(m, DROPS) else f"{getattr(m, 'replaces', type(m))} {m.extra_repr()}" for n, m in named}
    return types | {name: str(tuple(tensor.shape)) for name, tensor in model.state_dict().items()}


def _attributes(model: nn.Module) -> dict[str, object]:
    """Numbers and texts that modules compute with, such as the number of heads, by the names of their attributes."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and not key.startswith("_") and not NO_EFFECT.search(key)
    }


def with_class_names(args: Mapping[str, object], names: Sequence[str]) -> dict[str, object]:
    """Arguments of timm.create_model with these class names in its pretrained configuration; () removes them."""
    overlay: dict[str, Any] = dict(args.get(OVERLAY) or {})  # type: ignore[call-overload]
    overlay = {key: value for key, value in overlay.items() if key != LABELS} | ({LABELS: list(names)} if names else {})
    return {key: value for key, value in args.items() if key != OVERLAY} | ({OVERLAY: overlay} if overlay else {})


def name_classes(plan: Plan, names: Sequence[str]) -> Plan:
    """`plan` with these class names, also for the standard model; () removes them."""
    standard = plan.standard and {**plan.standard, "args": with_class_names(plan.standard["args"], names)}
    return replace(plan, arch_args=with_class_names(plan.arch_args, names), standard=standard)


def check_class_count(names: Sequence[str], model: nn.Module) -> None:
    """Raise InputError if `model` has another number of classes."""
    if len(names) != (count := getattr(model, "num_classes", None)):
        hint = "give one name per class, in the order of the classifier's outputs"
        raise InputError(f"{len(names)} class names, but the model has {count} classes", hint=hint)


def class_names_of(model: nn.Module) -> tuple[str, ...]:
    """The class names of `model`; empty if they are unknown or of another classifier."""
    names = getattr(model, "pretrained_cfg", {}).get(LABELS) or ()
    return tuple(names) if len(names) == getattr(model, "num_classes", None) else ()


def randomize_constants(model: nn.Module, seed: int = 0) -> None:
    """Add noise to every parameter that timm initializes with one value: biases, norms, LayerScales, gates.

    With zero biases or LayerScales of 1e-5, a test could not detect a lost bias or a wrongly sliced layer.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=NOISE)


def _build(arch: str, args: Mapping[str, Any], *, pretrained: bool = False, new_head: bool = False) -> nn.Module:
    check_arguments(arch, args)
    try:
        model: nn.Module = timm.create_model(arch, pretrained=False, **args)
    except (*LIBRARY_ERRORS, OSError) as error:
        raise InputError(f"timm cannot build {arch} with {args}: {_message(error)}", hint=CHANGE) from None
    if pretrained:
        check_hub(arch, args.get("num_classes"), new_head=new_head)
        try:
            model = timm.create_model(arch, pretrained=True, **args)
        except (*LIBRARY_ERRORS, OSError) as error:
            message = f"the weights of {arch} could not be downloaded: {first_line(error)}"
            raise WeightsError(message, hint=USE_FILE) from None
    return model


def check_arguments(arch: str, args: Mapping[str, object], place: str = "") -> None:
    """Raise InputError for an unknown architecture, or arguments that no model of it has. place: starts the message."""
    name = arch.split(".")[0]
    # The package of a family may register it.
    if not timm.is_model(name) and not any(timm.is_model(name) for _ in load_all({}, "families", Family)):
        message = f"{place}timm has no model {arch!r}{did_you_mean(name, timm.list_models())}"
        raise InputError(message, hint="see timm.list_models(), or install the package that registers the model")
    own = {key: value for key, value in args.items() if key not in inspect.signature(timm.create_model).parameters}
    problems = [f"model.args.{key}   {UNKNOWN_KEY}" for key in args if key not in {*own, OVERLAY}]
    classes = [(key, own.pop(key)) for key in ("act_layer", "norm_layer") if callable(own.get(key))]  # not in plans
    problems += [f"model.args.{key}   got {kind}, expected timm's name of it, as in 'relu'" for key, kind in classes]
    validate(_table(name), {"args": own, "overlay": args.get(OVERLAY)}, "model.args.", problems)
    if problems:
        wrong = "; ".join(" ".join(problem.split()) for problem in problems)
        raise InputError(f"timm cannot build {arch} with these arguments: {wrong}", hint=CHANGE)


@lru_cache
def _table(arch: str) -> Any:
    """The arguments that a model may have. Those of a class that only plugins support are plain data."""
    value: Any = bool | Annotated[float, Ge(-(2**14)), Le(2**14)] | Annotated[str, Matching(r"^\w{0,40}$")] | None
    allowed = allowed_arguments(arch)
    hints = typing.get_type_hints(InputConfig, include_extras=True)
    about = {"input_size": hints.pop("size"), LABELS: tuple[str, ...], **hints}
    overlay: Any = create_table(**{name: kind | None for name, kind in about.items()})
    arguments: Any = create_table(**allowed) if allowed else dict[str, value | Annotated[tuple[value, ...], Len(1, 8)]]
    return create_table(args=arguments, overlay=overlay | None)


def check_classifier(arch: str, args: Mapping[str, object], on_meta: nn.Module) -> None:
    """Raise InputError if the model that timm builds with these arguments, `on_meta`, cannot classify an image."""
    if (classes := int(getattr(on_meta, "num_classes", 1))) < 1:
        message = f"{arch} with {args} has no classifier: num_classes is {classes}"
        raise InputError(message, hint="set model.classes to 2 or more")
    size, logits = input_config(on_meta).size, None
    try:
        with torch.no_grad(), contextlib.suppress(NotImplementedError):  # an operation that needs values
            logits = on_meta(torch.zeros(2, *size, device="meta"))
    except LIBRARY_ERRORS as error:
        message = f"timm builds {arch} with {args}, but the model rejects images of {size}: {_message(error)}"
        raise InputError(message, hint=CHANGE) from None
    if logits is not None and logits.ndim != 2:  # global_pool = ""
        message = f"{arch} with {args} outputs {tuple(logits.shape[1:])} for an image, not one logit per class"
        raise InputError(message, hint=CHANGE)


def _message(error: Exception) -> str:
    """The message of timm or torch in one line; if it is not informative, with the line of code that raised it."""
    words = " ".join(str(error).split())
    if words and (isinstance(error, (ValueError, AssertionError, RuntimeError, OSError)) or UNKNOWN.search(words)):
        return words
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "timm" in Path(frame.filename).parts]
    return f"{type(error).__name__}{f': {words}' if words else ''} in timm's `{(own or frames)[-1].line}`"


def image_size(model: Any) -> Size:
    """Channels, height and width of the images that `model`, of timm, takes."""
    embed: Any = getattr(model, "patch_embed", None)
    sides: Any = getattr(embed, "img_size", None) or (None, None)
    if sides[0] and not getattr(embed, "strict_img_size", False):
        any_size = getattr(embed, "dynamic_img_pad", True)
        sides = (None if any_size else range(side, LARGEST + 1, side) for side in embed.patch_size)
    return getattr(model, "in_chans", None), *sides


def is_allowed(side: int, allowed: int | range | None) -> bool:
    """Whether a side of images is as `image_size` requires."""
    return side in allowed if isinstance(allowed, range) else allowed in (None, side)


def check_images(images: torch.Tensor, size: Size = ()) -> None:
    """Raise DataError unless `images`, (batch, *size), are floating-point numbers."""
    if not images.is_floating_point():
        hint = "normalize them for the model, or pass a data set of PIL images"
        raise DataError(f"the images are {images.dtype}, not floating-point numbers", hint=hint)
    if images.ndim != 4 or not all(map(is_allowed, images.shape[1:], size)):
        names = (f"multiple of {side.step}" if isinstance(side, range) else str(side or "any") for side in size)
        expected = " x ".join(names) or "channels x height x width"
        message = f"images of shape {format_shape(images.shape)} do not fit, expected batches of {expected}"
        other = "resize or convert them, or create the model with another img_size, in_chans or (for PVTv2) "
        other += "pretrained_cfg_overlay={'input_size': (channels, height, width)}"
        raise DataError(message, hint="wrap single images in a DataLoader" if images.ndim == 3 else other)


def input_config(model: nn.Module) -> InputConfig:
    """Input size of `model`, and the preprocessing of its pretrained configuration.

    Raises InputError if its patches do not divide its images, which only timm's dynamic sizes require.
    """
    config = resolve_model_data_config(model := unwrap(model))
    channels = int(getattr(model, "in_chans", config["input_size"][0]))
    embed: Any = getattr(model, "patch_embed", None)
    height, width = getattr(embed, "img_size", None) or config["input_size"][1:]
    if not all(map(is_allowed, (height, width), image_size(model)[1:])):
        message = f"patches of {format_shape(embed.patch_size)} pixels do not divide images of {height}x{width}"
        raise InputError(message, hint="use another img_size, or leave dynamic_img_size out")
    mean, std = (  # the average where the images have another number of channels
        tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels
        for values in (config["mean"], config["std"])
    )
    crop = config["interpolation"], float(config["crop_pct"]), config["crop_mode"]
    return InputConfig((channels, int(height), int(width)), mean, std, *crop)
