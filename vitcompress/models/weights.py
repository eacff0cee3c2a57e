"""Weights of dense models: from timm's hub or from a file, checked against the model."""

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import timm
from timm.models import pvt_v2, swin_transformer, vision_transformer
from torch import Tensor, nn

from vitcompress.errors import WeightsError
from vitcompress.io.tensors import load_tensors, part_of

# What brings checkpoints to a model's names and input size: position embeddings and tables are resampled.
FILTERS = {
    vision_transformer.VisionTransformer: partial(vision_transformer.checkpoint_filter_fn, adapt_layer_scale=True),
    swin_transformer.SwinTransformer: swin_transformer.checkpoint_filter_fn,
    pvt_v2.PyramidVisionTransformerV2: pvt_v2.checkpoint_filter_fn,
}
GIVE_FILE = "give a local file with --weights PATH (.safetensors or .pth)"
# What timm raises for arguments, or for weights, that do not fit a model.
UNBUILDABLE = (TypeError, ValueError, AssertionError, RuntimeError, LookupError, AttributeError, ArithmeticError)


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


def load_weights(model: nn.Module, path: Path, new_head: bool) -> None:
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
