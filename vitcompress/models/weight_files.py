"""Read weights in the formats that training scripts and hubs write, with what the files state about the model."""

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from timm.models._hub import download_from_hf
from torch import Tensor

from vitcompress.errors import WeightsError, first_line
from vitcompress.io.files import read_json
from vitcompress.io.tensors import ACCEPTED, LIBRARY_ERRORS, read_checkpoint

HUB = "hf-hub:"  # prefix of the names of models on Hugging Face's hub
CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"
FOLDER_FILES = ("model.safetensors", "pytorch_model.bin")  # weights in a folder of the hub

# Keys of training scripts and of config.json -> arguments of timm.create_model and of its pretrained configuration.
ALIASES = {
    "architecture": "model",
    "arch": "model",
    "model_name": "model",
    "nb_classes": "num_classes",
    "image_size": "img_size",
    "heads": "num_heads",
    "num_attention_heads": "num_heads",
    "gp": "global_pool",
    "num_channels": "in_chans",
    "image_mean": "mean",
    "image_std": "std",
}
SIZES, NUMBERS = (int, list, tuple), (list, tuple)
STATED: dict[str, Any] = {  # what files state beside weights, with its types
    **dict.fromkeys(("model", "interpolation", "crop_mode", "global_pool"), str),
    **dict.fromkeys(("img_size", "input_size", "patch_size", "num_heads", "window_size"), SIZES),
    **{"num_classes": int, "in_chans": int, "mean": NUMBERS, "std": NUMBERS, "crop_pct": (int, float)},
}
ARGUMENTS = ("model_args", "model_kwargs")  # tables of which all keys are arguments
CLASS_NAMES = ("label_names", "class_names", "classes", "class_to_idx", "id2label", "idx_to_class", "labels")
TRAINING_ONLY = re.compile(r"drop|weight_init")  # arguments without effect on a trained model
RESAMPLE = dict(enumerate(("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")))  # PIL's numbers

# Names of tensors in transformers' ViT, DeiT, Swin and DINOv2 -> timm's; each pattern once, in this order.
TRANSFORMERS = "embeddings.patch_embeddings.projection.weight"  # ends the name of a tensor in all of these models
RENAMES = (
    (r"^(vit|deit|swin|dinov2|dinov2_with_registers)\.", ""),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.norm\.", "patch_embed.norm."),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.distillation_token$", "dist_token"),
    (r"^embeddings\.", ""),
    (r"^encoder\.layer\.", "blocks."),
    (r"^encoder\.", ""),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.attention\.(attention|self)\.", ".attn."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"\.mlp\.weights_in\.", ".mlp.fc1."),
    (r"\.mlp\.weights_out\.", ".mlp.fc2."),
    (r"^layernorm\.", "norm."),
    (r"^(cls_)?classifier\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
)
UNUSED = re.compile(r"^pooler\.|relative_position_index$")  # tensors that classify nothing


@dataclass(frozen=True)
class WeightFile:
    """Weights with timm's names.

    stated: arguments of timm.create_model, preprocessing and `model`, a name of timm, according to `stated_in`.
    part: the key of a training checkpoint that the weights are from.
    """

    path: Path
    tensors: dict[str, Tensor] = field(repr=False, default_factory=dict)
    stated: Mapping[str, Any] = field(default_factory=dict)
    stated_in: str = ""
    class_names: tuple[str, ...] = ()
    part: str | None = None


def open_weights(weights: str | Path) -> WeightFile:
    """Read a checkpoint, a Hugging Face folder, or a model of Hugging Face's hub, which is downloaded.

    Raises:
        WeightsError: there are no weights of such a format at `weights`.
    """
    path = _download(str(weights).removeprefix(HUB)) if str(weights).startswith(HUB) else Path(weights)
    files = [path / name for name in FOLDER_FILES if (path / name).is_file()]
    if path.is_dir() and not files:
        raise WeightsError(f"the folder {path} has no {' or '.join(FOLDER_FILES)}", hint=f"use {ACCEPTED}")
    config, processor = (_table(read_json(path / n) if (path / n).is_file() else {}) for n in (CONFIG, PROCESSOR))
    if config.get("hidden_act", "gelu") != "gelu":  # the only activation of timm's models of these architectures
        raise WeightsError(f"{path} has the activation {config['hidden_act']}, timm's models have gelu")
    tensors, part, content = read_checkpoint(files[0] if files else path)
    stated_in = CONFIG if files else "the checkpoint's args"
    content = {**content, **config, **_processor(processor)}
    stated, names = _stated(content), _class_names(content)
    return WeightFile(path, to_timm(tensors), stated, stated_in, names, part)


def to_timm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with timm's names, from one of the layouts of transformers; unchanged in other layouts.

    The projections of q, k and v are joined. The epsilon of transformers' norms, 1e-12 instead of timm's 1e-6, changes
    outputs by a few units in the sixth digit.
    """
    if any(name.endswith(TRANSFORMERS) for name in tensors):
        renamed: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            for pattern, replacement in RENAMES:
                name = re.sub(pattern, replacement, name)
            if not UNUSED.search(name):
                renamed[name] = tensor
        tensors = {}
        for name, tensor in renamed.items():
            q = re.sub(r"\.attn\.(key|value)\.", ".attn.query.", name)
            if ".attn.query." not in q:
                tensors[name] = tensor
            elif q == name:
                parts = (renamed.get(q.replace(".query.", f".{part}.")) for part in ("query", "key", "value"))
                tensors[q.replace(".query.", ".qkv.")] = torch.cat([part for part in parts if part is not None])
    if "dist_token" in tensors and "head_dist.weight" not in tensors:  # a token without a classifier is a register
        tensors["reg_token"] = tensors.pop("dist_token")
    if "register_tokens" in tensors:  # DINOv2: only the class token has a position
        positions = tensors["pos_embed"]
        tensors |= {"reg_token": tensors.pop("register_tokens"), "pos_embed": positions[:, 1:]}
        tensors["cls_token"] = tensors["cls_token"] + positions[:, :1]
        tensors.pop("mask_token", None)
    return tensors


def _download(name: str) -> Path:
    """The folder of a model of Hugging Face's hub in the cache of its client. Raises WeightsError."""
    paths, problem = dict[str, Path](), ""
    for file in (CONFIG, PROCESSOR, *FOLDER_FILES):  # not every model has all of them
        try:
            paths[file] = Path(download_from_hf(name, file))
        except (*LIBRARY_ERRORS, OSError) as error:
            problem = first_line(error)
        if file in paths and file in FOLDER_FILES:
            return paths[file].parent
    raise WeightsError(f"{HUB}{name} could not be downloaded: {problem}", hint=f"use {ACCEPTED}")


def _stated(content: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint or config.json states, with the names of timm's arguments."""
    options = _table(content.get("args"))
    tables = [_table(content.get("pretrained_cfg")), content, options]
    named = [(ALIASES.get(key, key), value) for table in tables for key, value in table.items()]
    stated = {key: value for key, value in named if value and isinstance(value, STATED.get(key, ()))}
    if stated.get("interpolation", "bicubic") not in RESAMPLE.values():  # as in `random`
        del stated["interpolation"]
    size = stated.pop("input_size", None)
    stated |= {"img_size": size} if size and "img_size" not in stated else {}
    for arguments in (_table(table.get(key)) for table in (content, options) for key in ARGUMENTS):
        stated |= {key: value for key, value in arguments.items() if not TRAINING_ONLY.search(key)}
    if isinstance(size := stated.get("img_size"), list | tuple):  # (channels, height, width) or (height, width)
        stated["img_size"] = size[-1] if len({*size[-2:]}) == 1 else list(size[-2:])
    return stated


def _table(value: object) -> dict[str, Any]:
    return vars(value) if isinstance(value, Namespace) else dict(value) if isinstance(value, Mapping) else {}


def _class_names(content: Mapping[str, Any]) -> tuple[str, ...]:
    """The class names of a checkpoint or config.json: a list, or a table from or to the number of the class."""
    tables = (_table(content.get("pretrained_cfg")), _table(content.get("args")), content)
    listed = [table.get(key) for key in CLASS_NAMES for table in tables]
    names = next((names for names in listed if isinstance(names, list | tuple | Mapping) and names), ())
    if isinstance(names, Mapping):
        by_number = names if all(str(key).isdecimal() for key in names) else {v: k for k, v in names.items()}
        numbers = {str(number): name for number, name in by_number.items()}
        names = [numbers.get(str(number)) for number in range(len(numbers))]
    unnamed = all(name == f"LABEL_{number}" for number, name in enumerate(names))  # transformers' default
    return tuple(names) if not unnamed and all(isinstance(name, str) and name for name in names) else ()


def _processor(config: Mapping[str, Any]) -> dict[str, Any]:
    """Preprocessing of transformers' preprocessor_config.json, with timm's names."""
    if not config:
        return {}
    short, crop = (_edge(config.get(key)) for key in ("size", "crop_size"))
    crop = crop if config.get("do_center_crop") else short
    squash = isinstance(config.get("size"), Mapping) and "height" in config["size"]
    values = {"mean": config.get("image_mean"), "std": config.get("image_std")}
    if config.get("do_normalize") is False:
        values = {"mean": [0.0] * 3, "std": [1.0] * 3}
    values["interpolation"] = RESAMPLE.get(config.get("resample", -1))
    if short and crop and config.get("do_resize", True):
        values |= {"crop_pct": min(crop / short, 1.0), "crop_mode": "squash" if squash else "center"}
    return values


def _edge(size: Any) -> int | None:
    """The edge of `224`, `{"height": 224, "width": 224}` or `{"shortest_edge": 256}`."""
    edges = [size.get("height"), size.get("shortest_edge")] if isinstance(size, Mapping) else [size]
    return next((edge for edge in edges if isinstance(edge, int)), None)
