"""What the shapes of weights show: arguments of timm's model classes, and which architecture the weights are of."""

import re
from collections.abc import Callable, Mapping
from math import isqrt
from typing import Any

from timm.models import beit, eva, pvt_v2, swin_transformer, vision_transformer
from torch import nn

Shapes = Mapping[str, tuple[int, ...]]
Rule = Callable[[Shapes], object]

PATCHES = "patch_embed.proj.weight"
TABLE = "attn.relative_position_bias_table"
SOME = 1e-5  # initial value of a LayerScale; the weights replace it


def _size(axis: int, *names: str) -> Rule:
    """The size of one axis of the first of these tensors that exists."""
    return lambda shapes: next(shapes[name][axis] for name in names if name in shapes)


def _present(name: str, needed: str, value: object = True, otherwise: object = False) -> Rule:
    """`value` with the tensor `name`, else `otherwise`; unknown without the tensor `needed`."""
    return lambda shapes: (shapes[needed], value if name in shapes else otherwise)[1]


def _count(shapes: Shapes, prefix: str) -> int:
    """Number of modules `prefix`0, `prefix`1 ..."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
    return 1 + max(int(match[1]) for name in shapes if (match := pattern.match(name)))


def _stages(prefix: str, rule: Callable[[Shapes, str], object]) -> Rule:
    """`rule` of every stage, with the prefix of the stage's blocks."""
    return lambda shapes: [rule(shapes, f"{prefix}{n}.blocks.") for n in range(_count(shapes, prefix))]


def _square_root(count: int, what: int = 1) -> int | None:
    """The side of a square of `count`, times `what`; None if it is no square."""
    side = isqrt(max(count, 0))
    return side * what if side and side * side == count else None


def _position_prefix(shapes: Shapes) -> int:
    """Number of class and register tokens."""
    return sum(shapes[name][1] for name in ("cls_token", "dist_token", "reg_token") if name in shapes)


def _table_size(shapes: Shapes) -> int | None:
    """Image size of an absolute position table, with or without positions of class and register tokens."""
    tokens, patch = shapes["pos_embed"][1], shapes[PATCHES][-1]
    return _square_root(tokens - _position_prefix(shapes), patch) or _square_root(tokens, patch)


def _patches_only(shapes: Shapes) -> bool:
    """Whether class and register tokens have no position."""
    return _square_root(shapes["pos_embed"][1] - _position_prefix(shapes)) is None


def _beit_size(shapes: Shapes) -> int | None:
    """Image size of a relative position table: all distances of patches, and 3 of the class token."""
    rows = _size(0, f"blocks.0.{TABLE}", "rel_pos_bias.relative_position_bias_table")(shapes)
    side = _square_root(int(str(rows)) - 3)
    return None if side is None else (side + 1) // 2 * shapes[PATCHES][-1]


def _window(shapes: Shapes, stage: int) -> int:
    return (isqrt(shapes[f"layers.{stage}.blocks.0.{TABLE}"][0]) + 1) // 2


def _swin_size(shapes: Shapes) -> int | None:
    """Image size, if a stage is smaller than the window, which then covers the whole stage."""
    windows = [_window(shapes, stage) for stage in range(_count(shapes, "layers."))]
    patch = shapes[PATCHES][-1]
    return next((w * patch * 2**stage for stage, w in enumerate(windows) if w < windows[0]), None)


EMBEDDING: dict[str, Rule] = {
    "patch_size": _size(-1, PATCHES),
    "in_chans": _size(1, PATCHES),
    "embed_dim": _size(0, PATCHES),
}
PLAIN: dict[str, Rule] = {
    "img_size": _table_size,
    **EMBEDDING,
    "depth": lambda shapes: _count(shapes, "blocks."),
    "mlp_ratio": lambda shapes: shapes["blocks.0.mlp.fc2.weight"][1] / shapes[PATCHES][0],
    "class_token": _present("cls_token", "blocks.0.norm1.weight"),
    "global_pool": _present("fc_norm.weight", "fc_norm.weight", "avg"),
    "num_classes": _size(0, "head.weight"),
}
# Model class -> argument -> its value according to the shapes of weights with timm's names. A rule knows nothing if its
# tensors are missing or it returns None. The same rules read the model that timm builds: only what differs is an
# argument. The number of heads is not visible where one tensor contains all of them.
RULES: dict[type[nn.Module], dict[str, Rule]] = {
    vision_transformer.VisionTransformer: PLAIN
    | {
        "mlp_ratio": lambda shapes: shapes["blocks.0.mlp.fc1.weight"][0] / shapes[PATCHES][0],
        "reg_tokens": lambda shapes: shapes.get("reg_token", (1, 0))[1],
        "no_embed_class": _patches_only,
        "qkv_bias": _present("blocks.0.attn.qkv.bias", "blocks.0.attn.qkv.weight"),
        "qk_norm": _present("blocks.0.attn.q_norm.weight", "blocks.0.attn.qkv.weight"),
        "init_values": _present("blocks.0.ls1.gamma", "blocks.0.ls1.gamma", SOME),
    },
    eva.Eva: PLAIN | {"num_reg_tokens": _size(1, "reg_token")},
    beit.Beit: PLAIN
    | {
        "img_size": _beit_size,
        "num_heads": _size(1, f"blocks.0.{TABLE}", "rel_pos_bias.relative_position_bias_table"),
    },
    swin_transformer.SwinTransformer: {
        "img_size": _swin_size,
        **EMBEDDING,
        "depths": _stages("layers.", _count),
        "num_heads": _stages("layers.", lambda shapes, blocks: shapes[f"{blocks}0.{TABLE}"][1]),
        "window_size": lambda shapes: _window(shapes, 0),
        "mlp_ratio": lambda shapes: shapes["layers.0.blocks.0.mlp.fc2.weight"][1] / shapes[PATCHES][0],
        "num_classes": _size(0, "head.fc.weight", "head.weight"),
    },
    pvt_v2.PyramidVisionTransformerV2: {
        "in_chans": _size(1, PATCHES),
        "embed_dims": _stages("stages.", lambda shapes, blocks: shapes[f"{blocks}0.norm1.weight"][0]),
        "depths": _stages("stages.", _count),
        "mlp_ratios": _stages(
            "stages.",
            lambda shapes, blocks: shapes[f"{blocks}0.mlp.fc2.weight"][1] / shapes[f"{blocks}0.norm1.weight"][0],
        ),
        "sr_ratios": _stages("stages.", lambda shapes, blocks: shapes.get(f"{blocks}0.attn.sr.weight", (1,))[-1]),
        "num_classes": _size(0, "head.weight"),
    },
}

# Name of an architecture, its class if the rules know it, and a tensor that only its weights have.
KINDS: tuple[tuple[str, type[nn.Module] | None, str], ...] = (
    ("Swin Transformer", swin_transformer.SwinTransformer, f"layers.0.blocks.0.{TABLE}"),
    ("PVTv2", pvt_v2.PyramidVisionTransformerV2, "stages.0.blocks.0.attn.kv.weight"),
    ("BEiT", beit.Beit, f"blocks.0.{TABLE}"),
    ("BEiT", beit.Beit, "rel_pos_bias.relative_position_bias_table"),
    ("EVA or DINOv3", eva.Eva, "blocks.0.gamma_1"),
    ("EVA", eva.Eva, "blocks.0.attn.q_proj.weight"),
    ("distilled DeiT", vision_transformer.VisionTransformer, "head_dist.weight"),
    ("ViT", vision_transformer.VisionTransformer, "blocks.0.attn.qkv.weight"),
    ("ConvNeXt", None, "stages.0.blocks.0.conv_dw.weight"),
    ("ResNet", None, "layer1.0.conv1.weight"),
)
SIZES = {192: "tiny", 384: "small", 768: "base", 1024: "large"}  # width -> its word in timm's names
NAMES = {"ViT": "vit_{}_patch{}_224", "distilled DeiT": "deit_{}_distilled_patch{}_224"}
SHOWN = ("embed_dim", "embed_dims", "depth", "depths", "patch_size", "img_size", "num_classes")


def shapes_of(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def read_arguments(kind: type[nn.Module] | None, shapes: Shapes) -> dict[str, object]:
    """The arguments of a class of `RULES`, or of a class derived from one, that `shapes` show."""
    facts: dict[str, object] = {}
    for name, rule in next((rules for base, rules in RULES.items() if kind and issubclass(kind, base)), {}).items():
        try:
            facts[name] = rule(shapes)
        except (LookupError, StopIteration, ValueError):  # no such tensor
            continue
    return {name: value for name, value in facts.items() if value is not None}


def kind_of(shapes: Shapes) -> tuple[str, type[nn.Module] | None]:
    """The architecture that weights seem to be of, and its class if `RULES` has it; "" if unknown."""
    return next(((label, kind) for label, kind, name in KINDS if name in shapes), ("", None))


def describe_shapes(shapes: Shapes) -> str:
    """As in `ViT (embed_dim 192, depth 12, patch_size 16, num_classes 12)`."""
    label, kind = kind_of(shapes)
    facts = read_arguments(kind, shapes)
    values = ", ".join(f"{name} {facts[name]}" for name in SHOWN if name in facts)
    return f"{label}{f' ({values})' if values else ''}" if label else "an unknown architecture"


def usual_name(shapes: Shapes) -> str | None:
    """The name that timm gives an architecture of this width; None if there is none."""
    label, kind = kind_of(shapes)
    facts = read_arguments(kind, shapes)
    size = SIZES.get(int(str(facts.get("embed_dim", 0))))
    return NAMES[label].format(size, facts["patch_size"]) if label in NAMES and size else None
