"""The dense model that a recipe describes: architecture arguments, preprocessing and class names, each with its source.

Weights of a user are rarely of the architecture's default size. What their shapes, the options of the training script
and a config.json state becomes arguments of `timm.create_model`, so a plan rebuilds the model without that file.
"""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import timm
from torch import nn

from vitcompress.errors import InputError, WeightsError
from vitcompress.io.files import decode_json_values, read_json
from vitcompress.models.arguments import RULES, Shapes, describe_shapes, kind_of, read_arguments, shapes_of, usual_name
from vitcompress.models.create import (
    LABELS,
    OVERLAY,
    create_model,
    create_on_meta,
    input_config,
    is_known,
    with_class_names,
)
from vitcompress.models.preprocessing import Preprocessing
from vitcompress.models.weight_files import HUB, WeightFile, open_weights

PREPROCESSING = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
POSITIONS = re.compile("^pos_embed$|relative_position_bias_table$")
NOT_FILES = ("random", "hub", "train")
DEFAULT = "timm's default"
ASSUMED = f"assumed: {DEFAULT}, not visible in the weights"
RECIPE = "model.args"
WEIGHTS = "the weights"
CLASSES_HINT = "--classes takes one name per line, or a JSON list, in the order of the classifier's outputs"


@dataclass(frozen=True)
class Setting:
    """A value that the dense model depends on, and what it comes from: `the weights`, `model.args`, `timm's default`"""

    name: str
    value: object
    source: str


@dataclass(frozen=True)
class ResolvedModel:
    """Arguments of `create_model`, and why.

    arch_args: those of the recipe, and what differs from timm's defaults. Preprocessing and class names are in timm's
    `pretrained_cfg_overlay`, so they are part of the plan. settings: everything that the model depends on, to show.
    class_names: of the weights, or of the user; empty if unknown. resampled: position tables that are interpolated
    because model.args requests another image size than that of the weights. part: the key of the checkpoint.
    """

    arch: str
    arch_args: dict[str, object]
    weights: str
    settings: tuple[Setting, ...] = ()
    class_names: tuple[str, ...] = ()
    resampled: tuple[str, ...] = ()
    part: str | None = None


def resolve_model(
    arch: str,
    args: Mapping[str, object],
    weights: str | Path = "random",
    *,
    preprocessing: Preprocessing | None = None,
    classes: int | None = None,
    class_names: Sequence[str] = (),
) -> ResolvedModel:
    """Complete the arguments of a recipe with what its weights state.

    args: of the recipe; they decide what the weights leave open. preprocessing: the user's values of PREPROCESSING.
    classes: number of classes of the data; None: that of the weights. class_names: the user's.

    Raises:
        InputError: timm cannot build the model, or `class_names` has another length.
        WeightsError: the weights cannot be read, or contradict `args`, or are of another architecture.
    """
    if arch.startswith(HUB):
        arch, weights = "", arch if str(weights) == "hub" else weights
    file = WeightFile(Path()) if str(weights) in NOT_FILES else open_weights(weights)
    if not (arch := arch or str(file.stated.get("model", ""))):
        raise InputError(f"{weights} does not name a timm architecture", hint=f"use --model NAME --weights {weights}")
    own = {name: value for name, value in args.items() if name != OVERLAY}
    chosen, sources = _arguments(arch, own, file, weights)
    if classes:
        chosen["num_classes"], sources["num_classes"] = classes, "the data"
    overlay: dict[str, Any] = dict(args.get(OVERLAY) or {})  # type: ignore[call-overload]
    try:
        blank = create_blank(arch, {**chosen, OVERLAY: overlay} if overlay else chosen)
    except InputError as error:
        if sources.get("num_heads") != ASSUMED:
            raise
        hint = "the weights do not show the number of heads: set it, as in --set model.args.num_heads=4"
        raise InputError(error.message, hint=hint) from None
    requested = bool(own.keys() & {"img_size", "window_size"})
    resampled = _resampled(shapes_of(file.tensors), shapes_of(blank.state_dict()), requested, weights)
    values: dict[str, Any] = input_config(blank).to_dict()
    changes = (preprocessing or Preprocessing()).changes_for(input_config(blank).size[0], arch)
    layers = {file.stated_in: _preprocessing(arch, file), RECIPE: dict(overlay), "the user": changes}
    for name in PREPROCESSING:
        sources[name], value = [(DEFAULT, values[name]), *((s, t[name]) for s, t in layers.items() if name in t)][-1]
        if _plain(value) != _plain(values[name]):
            overlay[name] = values[name] = _plain(value)
    names, count = tuple(class_names) or file.class_names, int(getattr(blank, "num_classes", 0))
    if class_names and len(names) != count:
        raise InputError(f"{len(names)} class names, but the model has {count} classes", hint=CLASSES_HINT)
    names = names if len(names) == count else ()
    facts = {**_facts(blank), **{name: values[name] for name in PREPROCESSING}}
    settings = [
        Setting("model", arch, "the recipe"),
        *(Setting(n, v, sources.get(n, DEFAULT)) for n, v in facts.items()),
    ]
    complete = with_class_names({**chosen, OVERLAY: overlay}, names or overlay.get(LABELS, ()))
    return ResolvedModel(arch, complete, str(weights), tuple(settings), names, resampled, file.part)


def _arguments(
    arch: str, own: Mapping[str, object], file: WeightFile, weights: str | Path
) -> tuple[dict[str, object], dict[str, str]]:
    """Arguments of timm, and the source of each. Raises WeightsError."""
    if not file.tensors:
        return dict(own), dict.fromkeys(own, RECIPE)
    default, shapes = create_blank(arch, own), shapes_of(file.tensors)
    kind = next((kind for kind in type(default).__mro__ if kind in RULES), None)
    known = inspect.signature(kind).parameters if kind else {}
    seen = read_arguments(kind, shapes)
    stated = {name: value for name, value in file.stated.items() if name in known and name not in seen}
    sources = dict.fromkeys(own, RECIPE) | dict.fromkeys(stated, file.stated_in) | dict.fromkeys(seen, WEIGHTS)
    have = {name: getattr(default, name, None) for name in stated} | _facts(default)
    differing = {name: value for name, value in (stated | seen).items() if not _equal(value, have.get(name))}
    fixed = differing.keys() & own.keys()
    label, name = kind_of(shapes)[0], usual_name(shapes)
    distilled = "distilled" in label
    other = kind and label and not seen.keys() & {"depth", "depths"}
    other = other or (distilled != hasattr(default, "head_dist"))
    if other or (name is not None and "embed_dim" in differing.keys() - fixed):
        message = f"{weights} contains {describe_shapes(shapes)}; the recipe's model is {arch}"
        raise WeightsError(message, hint=f"use --model {file.stated.get('model', name or 'NAME')}, or other weights")
    if wrong := [
        f"{name} is {differing[name]} in {sources[name]}, {own[name]} in {RECIPE}"
        for name in sorted(fixed - {"img_size", "num_classes"})
    ]:
        hint = "leave it out of model.args, or use --model NAME, which starts without arguments"
        raise WeightsError(f"{weights} contradicts the recipe: {'; '.join(wrong)}", hint=hint)
    if "num_heads" not in {**own, **stated, **seen}:
        sources["num_heads"] = ASSUMED
    return {**differing, **own}, {**sources, **dict.fromkeys(fixed, RECIPE)}


def _resampled(shapes: Shapes, model: Shapes, requested: bool, weights: str | Path) -> tuple[str, ...]:
    """Position tables that get another size. Raises WeightsError if the recipe requests none."""
    tables = {name: shapes[name] for name in model.keys() & shapes.keys() if POSITIONS.search(name)}
    lines = sorted(f"{name} from {old} to {model[name]}" for name, old in tables.items() if old != model[name])
    if lines and not requested:
        hint = "set the image size of the training, as in --set model.args.img_size=[48,96]"
        raise WeightsError(f"the image size of {weights} is unknown: {lines[0]} would be resampled", hint=hint)
    return tuple(lines)


def _preprocessing(arch: str, file: WeightFile) -> dict[str, object]:
    """What a file of weights states; a training script that names another model uses the defaults of that model."""
    model = str(file.stated.get("model", arch))
    default = timm.get_pretrained_cfg(model) if is_known(model) and model.split(".")[0] != arch.split(".")[0] else None
    cfg = default.to_dict() if default else {}
    return {name: value for name, value in {**cfg, **file.stated}.items() if name in PREPROCESSING}


def _facts(blank: nn.Module) -> dict[str, object]:
    """The arguments of a model that its weights can contradict."""
    heads = [
        next((int(module.num_heads) for module in stage.modules() if hasattr(module, "num_heads")), 0)
        for stage in getattr(blank, "layers", None) or getattr(blank, "stages", None) or [blank]
    ]
    facts = {
        "num_heads": heads if len(heads) > 1 else heads[0],
        **read_arguments(type(blank), shapes_of(blank.state_dict())),
    }
    return {**facts, "img_size": input_config(blank).size[-1]}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _equal(first: Any, second: Any) -> bool:
    """Whether two values of an argument mean the same: 48 is (48, 48)."""
    one, other = (value if isinstance(value, list | tuple) else [value, value] for value in (first, second))
    return list(one) == list(other)


def load_class_names(path: Path) -> tuple[str, ...]:
    """The class names in a text file, one per line, or in a JSON list. Raises InputError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}", hint=CLASSES_HINT) from None
    names = read_json(path) if text.lstrip().startswith("[") else [line.strip() for line in text.splitlines()]
    if names and not names[-1]:  # an empty last line
        names = names[:-1]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InputError(f"{path} contains an empty line, or no names", hint=CLASSES_HINT)
    return tuple(names)


def create_named(text: str, weights: str | Path = "random") -> nn.Module:
    """The model `NAME` or `NAME?img_size=48&depth=2`, with arguments of timm, completed by `resolve_model`.

    Raises:
        InputError, WeightsError: as `resolve_model` and `create_model`.
    """
    name, _, query = text.partition("?")
    resolved = resolve_model(name, decode_json_values(dict(parse_qsl(query, keep_blank_values=True))), weights)
    return create_model(resolved.arch, resolved.arch_args, resolved.weights)


def create_blank(arch: str, args: Mapping[str, object]) -> nn.Module:
    """`create_on_meta`, once for equal arguments."""
    return _blank(arch, json.dumps(args))


@lru_cache(maxsize=8)  # lists of recipes and the rows of a study use few architectures
def _blank(arch: str, args: str) -> nn.Module:
    return create_on_meta(arch, json.loads(args))
