"""Arguments of timm's model classes: those that are allowed, and those that the shapes of weights show."""

import inspect
import re
import sys
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import isqrt
from typing import Annotated, Any

import timm
from annotated_types import Ge, Le, Len
from timm.models import beit, eva, pvt_v2, swin_transformer, vision_transformer
from torch import nn

from vitcompress.io.validation import Matching

Shapes = Mapping[str, tuple[int, ...]]
Rule = Callable[[Shapes], object]

PATCHES, FIRST = "patch_embed.proj.weight", "blocks.0."
TABLE = "attn.relative_position_bias_table"
SHARED_TABLE = "rel_pos_bias.relative_position_bias_table"


def _count(s: Shapes, prefix: str) -> int:
    """Number of modules `prefix`0, `prefix`1 ... Raises ValueError if there are none."""
    return 1 + max(int(match[1]) for name in s if (match := re.match(rf"{re.escape(prefix)}(\d+)\.", name)))


def _stages(prefix: str, rule: Callable[[Shapes, str], object]) -> Rule:
    """`rule` of every stage, with the prefix of the stage's blocks."""
    return lambda s: [rule(s, f"{prefix}{n}.blocks.") for n in range(_count(s, prefix))]


def _side(count: int) -> int:
    """The side of a square of `count`; 0 if it is no square."""
    side = isqrt(max(count, 0))
    return side if side * side == count else 0


def _patches(s: Shapes) -> int:
    """Number of positions without those of class and register tokens."""
    return s["pos_embed"][1] - sum(s[name][1] for name in ("cls_token", "dist_token", "reg_token") if name in s)


def _pixels(s: Shapes, side: int) -> object:
    """The size of `side` x `side` patches: one number if they are square; None for no patch."""
    height, width = (side * pixels for pixels in s[PATCHES][-2:])
    return (width if height == width else [height, width]) if side else None


def _beit_table(s: Shapes) -> tuple[int, ...]:
    return s[FIRST + TABLE] if FIRST + TABLE in s else s[SHARED_TABLE]


def _window(rows: int) -> int:
    """Side of the window whose distances of patches are the `rows` of a relative position table; 0 if there is none."""
    return (_side(rows) + 1) // 2


def _swin_windows(s: Shapes) -> list[int]:
    return [_window(s[f"layers.{stage}.blocks.0.{TABLE}"][0]) for stage in range(_count(s, "layers."))]


def _swin_size(s: Shapes) -> object:
    """Image size, if a stage is smaller than the window, which then covers the whole stage."""
    windows = _swin_windows(s)
    return next((_pixels(s, w * 2**stage) for stage, w in enumerate(windows) if 0 < w < windows[0]), None)


EMBEDDING: dict[str, Rule] = {
    "patch_size": lambda s: _pixels(s, 1),
    "in_chans": lambda s: s[PATCHES][1],
    "embed_dim": lambda s: s[PATCHES][0],
}
PLAIN: dict[str, Rule] = {
    # class and register tokens may have positions or not
    "img_size": lambda s: _pixels(s, _side(_patches(s)) or _side(s["pos_embed"][1])),
    **EMBEDDING,
    "depth": lambda s: _count(s, "blocks."),
    "mlp_ratio": lambda s: s[f"{FIRST}mlp.fc2.weight"][1] / s[PATCHES][0],
    "class_token": lambda s: "cls_token" in s,
    "global_pool": lambda s: "map" if "attn_pool.latent" in s else "avg" if "fc_norm.weight" in s else None,
    "num_classes": lambda s: s["head.weight"][0],
}
# Model class -> argument -> its value according to the shapes of weights with timm's names. A rule knows nothing if its
# tensors are missing or it returns None. The same rules read the model that timm builds: only what differs is an
# argument. The number of heads is not visible where one tensor contains all of them.
RULES: dict[type[nn.Module], dict[str, Rule]] = {
    vision_transformer.VisionTransformer: PLAIN
    | {
        "mlp_ratio": lambda s: s[f"{FIRST}mlp.fc1.weight"][0] / s[PATCHES][0],
        "reg_tokens": lambda s: s.get("reg_token", (1, 0))[1],
        "no_embed_class": lambda s: not _side(_patches(s)),
        "qkv_bias": lambda s: f"{FIRST}attn.qkv.bias" in s,
        "qk_norm": lambda s: f"{FIRST}attn.q_norm.weight" in s,
        "init_values": lambda s: 1e-5 if f"{FIRST}ls1.gamma" in s else None,  # the weights replace this value
    },
    eva.Eva: PLAIN | {"num_reg_tokens": lambda s: s["reg_token"][1]},
    beit.Beit: PLAIN
    | {
        "img_size": lambda s: _pixels(s, _window(_beit_table(s)[0] - 3)),  # 3 rows of the class token
        "num_heads": lambda s: _beit_table(s)[1],
    },
    swin_transformer.SwinTransformer: {
        "img_size": _swin_size,
        **EMBEDDING,
        "depths": _stages("layers.", _count),
        "num_heads": _stages("layers.", lambda s, blocks: s[f"{blocks}0.{TABLE}"][1]),
        "window_size": lambda s: _swin_windows(s)[0] or None,
        "mlp_ratio": lambda s: s["layers.0.blocks.0.mlp.fc2.weight"][1] / s[PATCHES][0],
        "num_classes": lambda s: s["head.fc.weight" if "head.fc.weight" in s else "head.weight"][0],
    },
    pvt_v2.PyramidVisionTransformerV2: {
        "in_chans": EMBEDDING["in_chans"],
        "embed_dims": _stages("stages.", lambda s, blocks: s[f"{blocks}0.norm1.weight"][0]),
        "depths": _stages("stages.", _count),
        "mlp_ratios": _stages(
            "stages.", lambda s, blocks: s[f"{blocks}0.mlp.fc2.weight"][1] / s[f"{blocks}0.norm1.weight"][0]
        ),
        "sr_ratios": _stages("stages.", lambda s, blocks: s.get(f"{blocks}0.attn.sr.weight", (1,))[-1]),
        "num_classes": PLAIN["num_classes"],
    },
}

# Name of an architecture, its class if the rules know it, and a tensor that only its weights have.
ARCHITECTURES: tuple[tuple[str, type[nn.Module] | None, str], ...] = (
    ("Swin Transformer", swin_transformer.SwinTransformer, f"layers.0.blocks.0.{TABLE}"),
    ("PVTv2", pvt_v2.PyramidVisionTransformerV2, "stages.0.blocks.0.attn.kv.weight"),
    ("BEiT", beit.Beit, FIRST + TABLE),
    ("BEiT", beit.Beit, SHARED_TABLE),
    ("EVA or DINOv3", eva.Eva, f"{FIRST}gamma_1"),
    ("EVA", eva.Eva, f"{FIRST}attn.q_proj.weight"),
    ("distilled DeiT", vision_transformer.VisionTransformer, "dist_token"),
    ("ViT", vision_transformer.VisionTransformer, f"{FIRST}attn.qkv.weight"),
    ("ConvNeXt", None, "stages.0.blocks.0.conv_dw.weight"),
    ("ResNet", None, "layer1.0.conv1.weight"),
)
SIZES: dict[object, str] = {192: "tiny", 384: "small", 768: "base", 1024: "large"}  # width -> its word in timm's names
NAMES = {"ViT": "vit_{}_patch{}_224", "distilled DeiT": "deit_{}_distilled_patch{}_224"}
# Limits that no model reaches: a plan or a checkpoint may be from anyone.
MOST = {"depth": 256, "depths": 256, "num_classes": 2**20, "mlp_ratio": 64, "mlp_ratios": 64}
WIDER = {"window_size": int | tuple[int | tuple[int, ...], ...], "patch_size": int | tuple[int, ...]}  # as timm records
SHOWN = ("embed_dim", "embed_dims", "depth", "depths", "patch_size", "img_size", "num_classes")


def shapes_of(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def base_of(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class of `RULES` that `kind` is or is derived from."""
    return next((base for base in kind.__mro__ if base in RULES), None)


def allowed_arguments(arch: str) -> dict[str, Any]:
    """Arguments of timm's model `arch` with their types and limits: the plain data that its class takes.

    Others could run code or read files. Empty if `arch` is of no class of `RULES`.
    """
    module = sys.modules[timm.model_entrypoint(arch).__module__]
    base = next((own for kind in vars(module).values() if isinstance(kind, type) and (own := base_of(kind))), None)
    hints = {name: p.annotation for name, p in inspect.signature(base).parameters.items()} if base else {}
    types = {name: _plain_type(WIDER.get(name, hint), MOST.get(name, 2**14)) for name, hint in hints.items()}
    return {name: kind | None for name, kind in types.items() if kind is not None}


def _plain_type(hint: Any, most: int) -> Any:
    """`hint` with limits, without alternatives such as functions and classes; None if nothing is left."""
    if hint in (bool, type(None)):
        return hint
    if hint is int:
        return Annotated[int, Ge(0), Le(most)]
    if hint is float:
        return Annotated[float, Ge(-most), Le(most)]
    if hint is str:
        return Annotated[str, Matching(r"^[\w.]{0,40}$")]  # no path
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        item: Any = _plain_type(parts[0], most)
        return Annotated[tuple[item, ...], Len(1, 8)]
    options = tuple(option for part in parts if (option := _plain_type(part, most)) is not None)
    return hint if origin is typing.Literal else typing.Union[options] if options else None  # noqa: UP007


def read_arguments(base: type[nn.Module] | None, shapes: Shapes) -> dict[str, object]:
    """The arguments of a class of `RULES` that `shapes` show."""
    facts, rules = dict[str, object](), RULES[base] if base and PATCHES in shapes else {}
    for name, rule in rules.items():
        with suppress(LookupError, ValueError, ZeroDivisionError):  # no such tensor, or an empty one
            facts[name] = rule(shapes)
    return {name: value for name, value in facts.items() if value is not None}


def describe_shapes(shapes: Shapes) -> tuple[str, str | None]:
    """The architecture that weights seem to be of, as in `ViT (depth 12, num_classes 12)`, and a name of timm for it.

    "" and None if unknown.
    """
    label, base = next(((label, base) for label, base, name in ARCHITECTURES if name in shapes), ("", None))
    facts = read_arguments(base, shapes)
    values = ", ".join(f"{name} {facts[name]}" for name in SHOWN if name in facts)
    size = SIZES.get(facts.get("embed_dim")) if label in NAMES else None
    return label + f" ({values})" * bool(values), NAMES[label].format(size, shapes[PATCHES][-1]) if size else None
