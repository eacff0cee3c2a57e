"""Weights of dense models, from timm's hub or from a file."""

import contextlib
from functools import partial
from pathlib import Path

import timm
from timm.models import beit, eva, pvt_v2, swin_transformer, vision_transformer
from torch import nn

from vitcompress.errors import WeightsError
from vitcompress.families import prepare_model
from vitcompress.io.tensors import LIBRARY_ERRORS
from vitcompress.models.arguments import describe_shapes, shapes_of
from vitcompress.models.weight_files import open_weights

# timm's functions that convert a checkpoint to a model's names and input size; they resample position tables.
FILTERS = {
    beit.Beit: beit.checkpoint_filter_fn,
    eva.Eva: eva.checkpoint_filter_fn,
    vision_transformer.VisionTransformer: partial(vision_transformer.checkpoint_filter_fn, adapt_layer_scale=True),
    swin_transformer.SwinTransformer: swin_transformer.checkpoint_filter_fn,
    pvt_v2.PyramidVisionTransformerV2: pvt_v2.checkpoint_filter_fn,
}
OTHER_MODEL = "use weights of the architecture in the recipe, or change model.name or --model"
USE_FILE = "use a local file with --weights PATH (.safetensors or .pth)"


def hub_classes(arch: str) -> int | None:
    """Number of classes of timm's weights of `arch`; None if unknown."""
    cfg = timm.get_pretrained_cfg(arch)
    return None if cfg is None else int(cfg.num_classes)


def check_hub(arch: str, wanted: int | None, *, new_head: bool) -> None:
    """Raise WeightsError if timm's hub has no weights of `arch`, or only with another class count than `wanted`.

    Does not download. new_head: accept any number of classes.
    """
    cfg = timm.get_pretrained_cfg(arch)
    if cfg is not None and not cfg.has_weights:
        raise WeightsError(f"timm's hub has no weights of {arch}", hint=USE_FILE)
    known = hub_classes(arch)
    if known is not None and wanted not in (None, known) and not new_head:
        raise _class_mismatch(f"timm's weights of {arch}", known, int(wanted or 0))


def _class_mismatch(what: str, have: int, wanted: int) -> WeightsError:
    return WeightsError(
        f"{what} have {have} classes, the data has {wanted}",
        hint="fine-tune the dense model on this data first and pass its weights with --weights, or set "
        "model.new_head = true to start with a random classifier",
    )


def load_weights(model: nn.Module, path: str | Path, new_head: bool) -> None:
    """Load a checkpoint of timm's model, or of a model that `prepare_model` changed, which is done here if needed.

    Raises WeightsError if the file is no checkpoint of this architecture, or has another number of classes.
    """
    tensors = open_weights(path).tensors
    about = describe_shapes(shapes_of(tensors))
    for kind, convert in FILTERS.items():
        if isinstance(model, kind):
            with contextlib.suppress(*LIBRARY_ERRORS):  # weights of another model: reported below
                tensors = convert(tensors, model)
    if not model.state_dict().keys() <= tensors.keys():
        prepare_model(model)
    own = model.state_dict()
    heads = {key for key in own if key.split(".")[0] in ("head", "head_dist")}
    differing = [key for key in sorted(heads & tensors.keys()) if tensors[key].shape != own[key].shape]
    if new_head and (differing or not heads <= tensors.keys()):
        tensors = {**tensors, **{key: own[key] for key in heads}}
    elif differing and tensors[differing[0]].shape[0] != own[differing[0]].shape[0]:
        have, wanted = (state[differing[0]].shape[0] for state in (tensors, own))
        raise _class_mismatch(f"the weights in {path}, {about},", have, wanted)
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    shapes = {key: (tuple(tensors[key].shape), tuple(own[key].shape)) for key in own if key in tensors}
    wrong = [f"{key} is {loaded}, expected {wanted}" for key, (loaded, wanted) in shapes.items() if loaded != wanted]
    kinds = {"tensors missing": missing, "unknown": extra, "with another shape": wrong}
    if problems := [f"{len(names)} {kind} ({names[0]} ...)" for kind, names in kinds.items() if names]:
        message = f"{path} contains the weights of another model, {about}: {', '.join(problems)}"
        only_head = {*missing, *extra, *differing} <= heads and len(wrong) == len(differing)
        hint = "model.new_head = true trains a new classifier" if only_head else OTHER_MODEL
        raise WeightsError(message, hint=hint)
    model.load_state_dict(tensors, strict=True)
