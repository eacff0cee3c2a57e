"""The table of families, and which of them covers a model."""

import contextlib
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from vitcompress.errors import InputError, UnsupportedModelError
from vitcompress.families.base import Family
from vitcompress.families.eva import BEIT, EVA
from vitcompress.families.pvt import PVT
from vitcompress.families.swin import SWIN
from vitcompress.families.vit import VIT
from vitcompress.io.plugins import load_all

FAMILIES: dict[str, Family] = {family.name: family for family in (VIT, EVA, BEIT, SWIN, PVT)}


def family_of(model: nn.Module) -> Family:
    """The family that supports `model`, chosen by the model's structure.

    Families of other packages are tried if no family in `FAMILIES` supports the model. A plan does not name the family,
    so the package must also be installed where the model is loaded. Raises UnsupportedModelError, with the reason and
    all supported models, if no family supports the model, and InputError for a wrapped model, or if an entry point that
    might support it cannot be loaded or is no `Family`.
    """
    reject_wrapper(model)
    problems: dict[str, str] = {}  # by the models that a family supports
    for _, family in load_all(FAMILIES, "families", Family):
        if (problem := family.problem(model)) is None:
            return family
        problems[family.supported] = problem
    other_type = f"it is of type {type(model).__name__}"
    reason = next((problem for problem in problems.values() if problem != other_type), other_type)
    hint = "\n  ".join(["use one of these, or install the package that declares its family:", *problems])
    raise UnsupportedModelError(f"this model is not supported: {reason}", hint=hint)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside of modules of torch.compile, DataParallel and DistributedDataParallel, else `model`."""
    return next((unwrap(part) for name, part in model.named_children() if name in ("_orig_mod", "module")), model)


def copy_model(model: nn.Module, copied: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy, with the objects of bound hooks. copied: copies that exist already, by `id`, as of `deepcopy`.

    Raises UnsupportedModelError for a stored result, such as a computed weight, which torch cannot copy.
    """
    try:
        return deepcopy(model, copied)
    except RuntimeError as error:
        if "deepcopy" not in str(error):  # such as no memory
            raise
        values = ((f"{n}.{key}".lstrip("."), v) for n, m in unwrap(model).named_modules() for key, v in vars(m).items())
        what = next((name for name, v in values if isinstance(v, Tensor) and not v.is_leaf), "a result that it stores")
        hint = "store result.detach(), or make a computed weight permanent, as with torch.nn.utils.prune.remove"
        raise UnsupportedModelError(f"this model cannot be copied: {what} was computed", hint=hint) from error


def reject_wrapper(model: nn.Module) -> None:
    """Raise InputError for a module of `unwrap`: its layers have other names than those of the model."""
    if unwrap(model) is not model:
        raise InputError(f"this {type(model).__name__} only wraps a model", hint="pass its `_orig_mod` or `module`")


def prepare_model(model: nn.Module) -> nn.Module:
    """Rewrite `model` in place into the equal model that its family describes, and return it.

    Most models stay as they are, as do models that no family supports. Separate layers of q, k and v (EVA-02) or
    biases of them (BEiT, DINOv3 with qkv bias) are joined in the qkv layer, and a SwiGLU gets one layer for gate and
    values (DINOv3 S+), so parameters change their names.
    """
    with contextlib.suppress(UnsupportedModelError):
        family_of(model).prepare(model)
    return model
