"""The dense model that a recipe describes: architecture arguments, preprocessing and class names, each with its source.

Weights of a user are rarely of the architecture's default size. What their shapes, the options of the training script
and a config.json state becomes arguments of `timm.create_model`, so a plan rebuilds the model without that file.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from pathlib import Path
from typing import Any

from timm.models import beit, eva, pvt_v2, swin_transformer, vision_transformer
from torch import nn

from vitcompress.models.create import create_on_meta, input_config
from vitcompress.models.weight_files import WeightFile, open_weights

OVERLAY = "pretrained_cfg_overlay"  # argument of timm.create_model
PREPROCESSING = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
NOT_FILES = ("random", "hub", "train")
DEFAULT = "timm's default"
ASSUMED = f"assumed: {DEFAULT}, not visible in the weights"
RECIPE = "model.args"
WEIGHTS = "the weights"
USER = "the user"

Shapes = Mapping[str, tuple[int, ...]]


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
    class_names: of the weights, or of the user; empty if unknown. resampled: what is interpolated because model.args
    requests another image size than that of the weights, one sentence each.
    """

    arch: str
    arch_args: dict[str, object]
    weights: str
    settings: tuple[Setting, ...] = ()
    class_names: tuple[str, ...] = ()
    resampled: tuple[str, ...] = ()


def _grid(tokens: int, patch: int) -> int | None:
    """Image size with this number of patches; None if they form no square."""
    side = isqrt(max(tokens, 0))
    return side * patch if side and side * side == tokens else None


def _vit_size(shapes: Shapes) -> int | None:
    if "pos_embed" not in shapes:
        return None
    tokens, patch = shapes["pos_embed"][1], shapes["patch_embed.proj.weight"][-1]
    sizes = (_grid(tokens - prefix, patch) for prefix in _prefixes(shapes))
    return next((size for size in sizes if size), None)


def _prefixes(shapes: Shapes) -> tuple[int, ...]:
    """Possible numbers of class and register tokens in the position table."""
    names = ("cls_token", "dist_token", "reg_token")
    return sum(shapes[name][1] for name in names if name in shapes), 0


def _count(pattern: str) -> Callable[[Shapes], int]:
    return lambda shapes: 1 + max((int(m[1]) for name in shapes if (m := re.match(pattern, name))), default=-1)


def _size(name: str, axis: int) -> Callable[[Shapes], int]:
    return lambda shapes: shapes[name][axis]


PLAIN: dict[str, Callable[[Shapes], object]] = {
    "img_size": _vit_size,
    "patch_size": _size("patch_embed.proj.weight", -1),
    "in_chans": _size("patch_embed.proj.weight", 1),
    "embed_dim": _size("patch_embed.proj.weight", 0),
    "depth": _count(r"blocks\.(\d+)\."),
    "mlp_ratio": lambda shapes: shapes["blocks.0.mlp.fc2.weight"][1] / shapes["patch_embed.proj.weight"][0],
    "num_classes": _size("head.weight", 0),
}
# Model class -> argument -> its value according to the shapes of the weights. A rule whose tensors are missing knows
# nothing. The same rules read the model that timm builds, so only what differs from it becomes an argument.
RULES: dict[type[nn.Module], dict[str, Callable[[Shapes], object]]] = {
    vision_transformer.VisionTransformer: PLAIN,
    eva.Eva: PLAIN,
    beit.Beit: PLAIN,
    swin_transformer.SwinTransformer: {},
    pvt_v2.PyramidVisionTransformerV2: {},
}


def resolve_model(
    arch: str,
    args: Mapping[str, object],
    weights: str | Path = "random",
    *,
    preprocessing: Mapping[str, object] | None = None,
    classes: int | None = None,
    class_names: Sequence[str] = (),
) -> ResolvedModel:
    """Complete the arguments of a recipe with what its weights state.

    args: of the recipe; they override what the weights leave open. preprocessing: values of the user for PREPROCESSING,
    by name with their source. classes: number of classes of the data; None: that of the weights. class_names: of the
    user.

    Raises:
        InputError: timm cannot build the model.
        WeightsError: the weights cannot be read, or contradict `args`.
    """
    own = {name: value for name, value in args.items() if name != OVERLAY}
    file = None if str(weights) in NOT_FILES else open_weights(weights)
    chosen, sources, resampled = _arguments(arch, own, file)
    if classes or "num_classes" in chosen:
        chosen["num_classes"] = classes or chosen["num_classes"]
        sources["num_classes"] = "the data" if classes else sources["num_classes"]
    overlay = dict(_mapping(args.get(OVERLAY)))
    blank = create_blank(arch, json.dumps({**chosen, **({OVERLAY: overlay} if overlay else {})}))
    shown = input_config(blank).to_dict()
    stated = {} if file is None else {name: (value, file.stated_in) for name, value in file.stated.items()}
    requested = {name: (value, USER) for name, value in (preprocessing or {}).items()}
    for name in PREPROCESSING:
        kept = {name: (overlay[name], RECIPE)} if name in overlay else {}
        value, sources[name] = {name: (shown[name], DEFAULT), **stated, **kept, **requested}[name]
        if _plain(value) != _plain(shown[name]):
            overlay[name] = shown[name] = _plain(value)
    names = tuple(class_names) or (file.class_names if file else ())
    if names:
        overlay["label_names"] = list(names)
    facts = {**_facts(blank), **{name: shown[name] for name in PREPROCESSING}}
    settings = [Setting(name, value, sources.get(name, DEFAULT)) for name, value in facts.items()]
    complete = {**chosen, **({OVERLAY: overlay} if overlay else {})}
    return ResolvedModel(arch, complete, str(weights), tuple(settings), names, tuple(resampled))


def _arguments(
    arch: str, own: Mapping[str, object], file: WeightFile | None
) -> tuple[dict[str, object], dict[str, str], list[str]]:
    """Arguments, the source of each, and what is resampled."""
    chosen, sources, resampled = dict(own), dict.fromkeys(own, RECIPE), list[str]()
    return chosen, sources, resampled


def _facts(blank: nn.Module) -> dict[str, object]:
    """The arguments that the shapes of a model show."""
    shapes = {name: tuple(tensor.shape) for name, tensor in blank.state_dict().items()}
    return read_shapes(blank, shapes)


def read_shapes(model: nn.Module, shapes: Shapes) -> dict[str, object]:
    """The arguments of the kind of `model` that `shapes` show; without those that they leave open."""
    rules = next((rules for kind, rules in RULES.items() if isinstance(model, kind)), {})
    facts = {}
    for name, rule in rules.items():
        try:
            facts[name] = rule(shapes)
        except KeyError:
            continue
    return {name: value for name, value in facts.items() if value is not None}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (tuple, list)) else value


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


@lru_cache(maxsize=8)  # lists of recipes and the rows of a study use few architectures
def create_blank(arch: str, args: str) -> nn.Module:
    """`create_on_meta`, once for equal arguments. args: JSON."""
    return create_on_meta(arch, json.loads(args))
