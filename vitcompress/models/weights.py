"""Weights of dense models in the formats that training scripts and hubs write, and what the files state about them."""

import contextlib
import re
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import vision_transformer
from timm.models._hub import download_from_hf
from torch import Tensor, nn

from vitcompress.errors import WeightsError, first_line
from vitcompress.families import prepare_model
from vitcompress.io.files import file_sha256, read_json, read_text, user_path
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import ACCEPTED, LIBRARY_ERRORS, check_finite, read_checkpoint
from vitcompress.models.arguments import base_of, describe_shapes, shapes_of
from vitcompress.plan import Plan

NOT_FILES = ("random", "hub", "train")
HUB = "hf-hub:"  # prefix of the names of models on Hugging Face's hub
CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"
FOLDER_FILES = ("model.safetensors", "pytorch_model.bin")  # weights in a folder of the hub
CHECKPOINTS = (".safetensors", ".pth", ".pt", ".tar", ".bin")
SHARDED = tuple(f"{name}.index.json" for name in FOLDER_FILES)
OTHER_MODEL = (
    "use weights of the architecture in the recipe, or change model.name or --model; those of a pruned model need its "
    "plan: save it with vitcompress.save_model"
)
NEW_HEAD = "model.new_head = true trains a new classifier (in Python: num_classes=0, then model.reset_classifier)"
USE_FILE = "use a local file with --weights PATH (.safetensors or .pth)"

# Keys of training scripts and of config.json -> arguments of timm.create_model and of its pretrained configuration.
ALIASES = {
    **dict.fromkeys(("architecture", "arch", "model_name"), "model"),
    **dict.fromkeys(("image_size", "input_size"), "img_size"),
    **dict.fromkeys(("heads", "num_attention_heads"), "num_heads"),
    **{"nb_classes": "num_classes", "num_channels": "in_chans", "gp": "global_pool"},
    **{"image_mean": "mean", "image_std": "std"},
}
STATED: dict[str, Any] = {  # what files state beside weights, with its types
    **dict.fromkeys(("model", "interpolation", "crop_mode", "global_pool"), str),
    **dict.fromkeys(("img_size", "patch_size", "num_heads", "window_size"), (int, list, tuple)),
    **dict.fromkeys(("mean", "std"), (list, tuple)),
    **{"num_classes": int, "in_chans": int, "crop_pct": (int, float)},
}
ARGUMENTS = ("model_args", "model_kwargs")  # tables of which all keys are arguments
CLASS_NAMES = ("label_names", "class_names", "classes", "class_to_idx", "id2label", "idx_to_class", "labels")
TRAINING_ONLY = re.compile(r"drop|weight_init")  # arguments without effect on a trained model
RESAMPLE = dict(enumerate(("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")))  # PIL's numbers
SHORTEST_EDGE = ("Bit", "CLIP", "ConvNext")  # starts of names of image processors where a size of one number is that

# Names of tensors in torchvision's ViT and Swin, and in transformers' ViT, DeiT, Swin and DINOv2 -> timm's; each
# pattern once, in this order.
TORCHVISION = ("conv_proj.weight", "features.1.0.attn.qkv.weight")  # one of them is in each of these models
TRANSFORMERS = "embeddings.patch_embeddings.projection.weight"  # ends the name of a tensor in all of these models
RENAMED = ("vit", "deit", "swin", "dinov2", "dinov2_with_registers")
RENAMES: tuple[tuple[str, str | Callable[[Any], str]], ...] = (
    (rf"^({'|'.join(RENAMED)})\.", ""),
    (r"^(embeddings\.patch_embeddings\.projection|conv_proj|features\.0\.0)\.", "patch_embed.proj."),
    (r"^(embeddings\.norm|features\.0\.2)\.", "patch_embed.norm."),
    (r"^(embeddings\.position_embeddings|encoder\.pos_embedding)$", "pos_embed"),
    (r"^embeddings\.distillation_token$", "dist_token"),
    (r"^class_token$", "cls_token"),
    (r"^encoder\.(layer\.|layers\.encoder_layer_)", "blocks."),
    (r"^(embeddings|encoder)\.", ""),
    (r"^features\.(\d*[13579])\.", lambda match: f"layers.{int(match[1]) // 2}.blocks."),
    (r"^features\.(\d+)\.", lambda match: f"layers.{int(match[1]) // 2 - 1}.downsample."),
    (r"\.(attention\.output\.dense|self_attention\.out_proj)\.", ".attn.proj."),
    (r"\.attention\.(attention|self)\.", ".attn."),
    (r"\.(attn\.(query|key|value)\.|self_attention\.in_proj_)", ".attn.qkv."),
    (r"\.(layernorm_before|ln_1)\.", ".norm1."),
    (r"\.(layernorm_after|ln_2)\.", ".norm2."),
    (r"\.(intermediate\.dense|mlp\.(weights_in|0|linear_1))\.", ".mlp.fc1."),
    (r"\.(output\.dense|mlp\.(weights_out|3|linear_2))\.", ".mlp.fc2."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"^(layernorm|ln)\.", "norm."),
    (r"^((cls_)?classifier|heads\.head)\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
)
UNUSED = re.compile(r"^pooler\.|^mask_token$|relative_position_index$")  # tensors that classify nothing


@dataclass(frozen=True)
class WeightFile:
    """Weights with timm's names.

    weights: their place; on the hub with the revision. stated: arguments of timm.create_model, preprocessing and
    `model`, a name of timm, according to `stated_in`. part: the key of a training checkpoint that the weights are from.
    """

    weights: str = ""
    tensors: dict[str, Tensor] = field(repr=False, default_factory=dict)
    stated: Mapping[str, Any] = field(default_factory=dict)
    stated_in: str = ""
    class_names: tuple[str, ...] = ()
    part: str | None = None


def open_weights(weights: str | Path) -> WeightFile:
    """Read a checkpoint, a Hugging Face folder, or a model of Hugging Face's hub, which is downloaded.

    Raises WeightsError if there are no weights of such a format at `weights`.
    """
    name, path, file = _locate(str(weights))
    config, processor = (_table(read_json(path / n) if (path / n).is_file() else {}) for n in (CONFIG, PROCESSOR))
    if config.get("hidden_act", "gelu") != "gelu":  # the only activation of timm's models of these architectures
        raise WeightsError(f"{path} has the activation {config['hidden_act']}, timm's models have gelu")
    if isinstance(epsilon := config.get("layer_norm_eps"), float) and epsilon > 1e-5:  # that of Swin; see `to_timm`
        raise WeightsError(f"{path} has the layer_norm_eps {epsilon}, timm's models have at most 1e-05")
    tensors, part, content = read_checkpoint(file)
    with contextlib.suppress(*LIBRARY_ERRORS):  # parts of several models: reported when they are loaded
        tensors = to_timm(tensors)
    check_finite(tensors, path)
    if any(key.endswith(TRANSFORMERS) for key in tensors):
        kind = config.get("model_type", "unknown type")
        message = f"{path} contains a model of transformers ({kind}), which is not converted"
        raise WeightsError(message, hint=f"use {', '.join(RENAMED)} of transformers, or timm's weights")
    plan_file = RunFolder(file.parent).plan
    planned = _planned(file, plan_file) if file.suffix == ".safetensors" and "plan" in content else {}
    content |= config | planned
    tables = [_table(content.get("pretrained_cfg")), content, _processor(processor), _table(content.get("args"))]
    stated_in = plan_file.name if planned else "the checkpoint's args" if file == path else CONFIG
    return WeightFile(name, tensors, _stated(tables), stated_in, parse_class_names(tables), part)


def _planned(file: Path, plan_file: Path) -> dict[str, Any]:
    """What the plan that `save_model` wrote beside `file` states. Raises WeightsError if it is not a dense model's.

    Weights of a compressed model may have the shapes of one of timm's that computes something else.
    """
    try:
        plan = Plan.from_json(read_text(plan_file))
    except (OSError, ValueError):
        raise WeightsError(f"{file} needs its {plan_file.name}", hint="copy the folder, not only the weights") from None
    if plan.delta() != plan:
        hint = "add a step to its recipe, or prune it further in Python (vc.load_model, vc.plan, vc.prune)"
        raise WeightsError(f"{file} is a compressed model, not a dense one of timm", hint=hint)
    args = dict(plan.arch_args)
    return {"pretrained_cfg": args.pop("pretrained_cfg_overlay", {}), "model": plan.arch, "model_args": args}


def read_source(weights: str, arch: str) -> dict[str, str]:
    """Where the dense weights are from: `weights`, on the hub with the revision, and `sha256` of the file.

    weights: as in a recipe; `hub` are timm's weights of `arch`. Empty if there is no file, or none with revisions.
    Raises WeightsError as `open_weights`.
    """
    if weights == "hub":
        weights = f"{HUB}{name}" if (name := getattr(timm.get_pretrained_cfg(arch), "hf_hub_id", None)) else "random"
    if weights in ("random", "train"):
        return {}
    name, _, file = _locate(weights)
    return {"weights": name, "sha256": file_sha256(file)}


def _locate(weights: str) -> tuple[str, Path, Path]:
    """The name of `weights`, their file or the folder of Hugging Face, and the file in it. Raises WeightsError."""
    path = _download(weights.removeprefix(HUB)) if weights.startswith(HUB) else user_path(weights)
    name = f"{weights.partition('@')[0]}@{path.name}" if weights.startswith(HUB) else weights  # a folder per revision
    files = [path / name for name in (*FOLDER_FILES, *SHARDED) if (path / name).is_file()]
    if path.is_dir() and not files:
        checkpoints = sorted(str(file) for file in path.iterdir() if file.suffix in CHECKPOINTS)
        hint = f"use one of its checkpoints: {', '.join(checkpoints[-3:])}" if checkpoints else f"use {ACCEPTED}"
        raise WeightsError(f"the folder {path} has no {' or '.join(FOLDER_FILES)}", hint=hint)
    if files and files[0].name in SHARDED:
        message = f"the weights in {path} are in several files ({files[0].name}); one file is needed"
        raise WeightsError(message, hint="save them with save_pretrained(FOLDER, max_shard_size='100GB')")
    return name, path, files[0] if files else path


def to_timm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with timm's names, from a layout of transformers or torchvision; unchanged in other layouts.

    The projections of q, k and v are joined. A distillation token that has no classifier beside that of the class token
    becomes a register. The epsilon of transformers' norms, 1e-12 instead of timm's 1e-6, changes outputs by a few units
    in the sixth digit.
    """
    if any(name.endswith((TRANSFORMERS, *TORCHVISION)) for name in tensors):
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for old in sorted(tensors, key=lambda name: (".value." in name, ".key." in name)):  # q, k, v
            name = old
            for pattern, replacement in RENAMES:
                name = re.sub(pattern, replacement, name)
            parts[name].append(tensors[old])
        tensors = {n: torch.cat(few) if len(few) > 1 else few[0] for n, few in parts.items() if not UNUSED.search(n)}
    if "dist_token" in tensors and "head.weight" in tensors and "head_dist.weight" not in tensors:
        tensors["reg_token"] = tensors.pop("dist_token")
    if "register_tokens" in tensors:  # DINOv2: only the class token has a position
        positions = tensors["pos_embed"]
        tensors |= {"reg_token": tensors.pop("register_tokens"), "pos_embed": positions[:, 1:]}
        tensors["cls_token"] = tensors["cls_token"] + positions[:, :1]
    return tensors


def _download(name: str) -> Path:
    """The folder of a model of Hugging Face's hub in the cache of its client. Raises WeightsError."""
    problem = ""
    for file in (CONFIG, PROCESSOR, *FOLDER_FILES, *SHARDED):  # not every model has all of them
        try:
            path = Path(download_from_hf(name, file))
        except (*LIBRARY_ERRORS, OSError) as error:
            problem = problem if file in SHARDED else first_line(error)
        else:
            if file not in (CONFIG, PROCESSOR):
                return path.parent
    raise WeightsError(f"{HUB}{name} could not be downloaded: {problem}", hint=f"use {ACCEPTED}")


def _stated(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `tables` of a checkpoint or config.json state, with the names of timm's arguments; the last one counts."""
    named = [(ALIASES.get(key, key), value) for table in tables for key, value in table.items()]
    stated = {key: value for key, value in named if value and isinstance(value, STATED.get(key, ()))}
    if stated.get("interpolation") not in RESAMPLE.values():  # as in `random`
        stated.pop("interpolation", None)
    for arguments in (_table(table.get(key)) for table in tables for key in ARGUMENTS):
        stated |= {key: value for key, value in arguments.items() if not TRAINING_ONLY.search(key)}
    if isinstance(size := stated.get("img_size"), list | tuple) and size:  # height and width, or after the channels
        stated["img_size"] = size[-1] if size[-1] == size[-2:][0] else list(size[-2:])
    return stated


def _table(value: object) -> dict[str, Any]:
    return vars(value) if isinstance(value, Namespace) else dict(value) if isinstance(value, Mapping) else {}


def parse_class_names(tables: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The class names in `tables`: a list, or a table from or to the number of the class."""
    listed = (table.get(key) for key in CLASS_NAMES for table in tables)
    names = next((names for names in listed if isinstance(names, list | tuple | Mapping) and names), ())
    if isinstance(names, Mapping):
        if not all(isinstance(name, str) for name in names.values()):
            names = {str(number): name for name, number in names.items()}
        names = [names.get(str(number), names.get(number)) for number in range(len(names))]
    unnamed = all(name == f"LABEL_{number}" for number, name in enumerate(names))  # transformers' default
    return tuple(names) if not unnamed and all(isinstance(name, str) and name for name in names) else ()


def _processor(config: Mapping[str, Any]) -> dict[str, Any]:
    """Preprocessing of transformers' preprocessor_config.json, with timm's names."""
    kind, size = str(config.get("image_processor_type") or config.get("feature_extractor_type")), config.get("size")
    short, crop = _edge(size), _edge(config.get("crop_size") if config.get("do_center_crop") else size)
    stated = {"mean": config.get("image_mean"), "std": config.get("image_std")}
    values: dict[str, Any] = {"mean": [0.0] * 3, "std": [1.0] * 3} if config.get("do_normalize") is False else stated
    factor = config.get("rescale_factor") if config.get("do_rescale", True) else 1
    if isinstance(factor, int | float) and factor > 0 and not isclose(255 * factor, 1, rel_tol=1e-6):
        with contextlib.suppress(TypeError):  # what is no number is rejected with the arguments of the model
            values = {name: [value / (255 * factor) for value in numbers] for name, numbers in values.items()}
    values["interpolation"] = RESAMPLE.get(config.get("resample", -1))
    if short and crop and config.get("do_resize", True):
        squash = "height" in size if isinstance(size, Mapping) else not kind.startswith(SHORTEST_EDGE)
        values |= {"crop_pct": min(crop / short, 1.0), "crop_mode": "squash" if squash else "center"}
    return values


def _edge(size: Any) -> int | None:
    """The edge of `224`, `{"height": 224, "width": 224}` or `{"shortest_edge": 256}`."""
    edge = size.get("height", size.get("shortest_edge")) if isinstance(size, Mapping) else size
    return edge if isinstance(edge, int) else None


def hub_classes(arch: str) -> int | None:
    """Number of classes of timm's weights of `arch`; None if unknown."""
    cfg = timm.get_pretrained_cfg(arch)
    return None if cfg is None else int(cfg.num_classes)


def check_hub(arch: str, wanted: object, *, new_head: bool) -> None:
    """Raise WeightsError if timm's hub has no weights of `arch`, or only with another class count than `wanted`.

    Does not download. new_head: accept any number of classes.
    """
    cfg = timm.get_pretrained_cfg(arch)
    if cfg is not None and not cfg.has_weights:
        raise WeightsError(f"timm's hub has no weights of {arch}", hint=USE_FILE)
    if (known := hub_classes(arch)) is not None and wanted not in (None, known) and not new_head:
        raise _class_mismatch(f"timm's weights of {arch}", known, wanted)


def _class_mismatch(what: str, have: int, wanted: object) -> WeightsError:
    return WeightsError(
        f"{what} have {have} classes, the data has {wanted}",
        hint=f"fine-tune the dense model on this data first and pass its weights with --weights; {NEW_HEAD}",
    )


def load_weights(model: nn.Module, path: str | Path, new_head: bool) -> None:
    """Load a checkpoint of timm's model, or of a model that `prepare_model` changed, which is done here if needed.

    Raises WeightsError if the file is no checkpoint of this architecture, or has another number of classes.
    """
    tensors = open_weights(path).tensors
    kind = describe_shapes(shapes_of(tensors))[0] or "an unknown architecture"
    if base := base_of(type(model)):
        options = {"adapt_layer_scale": True} if base is vision_transformer.VisionTransformer else {}
        with contextlib.suppress(*LIBRARY_ERRORS):  # weights of another model: reported below
            # timm's conversion to the names and input size of a model, which resamples position tables
            tensors = sys.modules[base.__module__].checkpoint_filter_fn(tensors, model, **options)
    if not model.state_dict().keys() <= tensors.keys():
        prepare_model(model)
    own = model.state_dict()
    heads = {key for key in {**own, **tensors} if key.split(".")[0] in ("head", "head_dist")}
    if heads.isdisjoint(own):  # num_classes = 0
        tensors = {key: tensor for key, tensor in tensors.items() if key not in heads}
    heads &= own.keys()
    if new_head and any(key not in tensors or tensors[key].shape != own[key].shape for key in heads):
        tensors = {**tensors, **{key: own[key] for key in heads}}
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    wrong = [key for key in own if key in tensors and tensors[key].shape != own[key].shape]
    only_head = {*missing, *extra, *wrong} <= heads
    if wrong and only_head:
        have, wanted = (table[min(wrong)].shape[:1].numel() for table in (tensors, own))
        if have != wanted:
            raise _class_mismatch(f"the weights in {path}, {kind},", have, wanted)
    shapes = [f"{key} is {tuple(tensors[key].shape)}, expected {tuple(own[key].shape)}" for key in wrong]
    differences = {"tensors missing": missing, "unknown": extra, "with another shape": shapes}
    problems = [f"{len(names)} {what} ({names[0]} ...)" for what, names in differences.items() if names]
    if problems:
        message = f"{path} contains the weights of another model, {kind}: {', '.join(problems)}"
        first = f".{next(iter(own))}"
        inside = [name.removesuffix(first) for name in tensors if name.endswith(first)]
        hint = f"save the entries of {' or '.join(inside)} alone, without this prefix" if inside else OTHER_MODEL
        raise WeightsError(message, hint=NEW_HEAD if only_head else hint)
    model.load_state_dict(tensors, strict=True)
