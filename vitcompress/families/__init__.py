"""Families of timm models. To add one: a file beside this one, and a line in `FAMILIES`."""

from torch import nn

from vitcompress.errors import UnsupportedModelError
from vitcompress.families.base import Axis, Family, Site, Space
from vitcompress.families.eva import EVA
from vitcompress.families.pvt import PVT
from vitcompress.families.swin import SWIN
from vitcompress.families.vit import VIT

FAMILIES: dict[str, Family] = {"vit": VIT, "eva": EVA, "swin": SWIN, "pvt": PVT}

__all__ = ["FAMILIES", "Axis", "Family", "Site", "Space", "family_of"]


def family_of(model: nn.Module) -> Family:
    """The family that covers `model`, found by its structure.

    Raises:
        UnsupportedModelError: with the reason, and a list of what is supported.
    """
    reasons = {name: family.refuses(model) for name, family in FAMILIES.items()}
    for name, reason in reasons.items():
        if reason is None:
            return FAMILIES[name]
    of_no_family = f"it is a {type(model).__name__}"
    why = next((reason for reason in reasons.values() if reason != of_no_family), of_no_family)
    supported = "; ".join(family.supported for family in FAMILIES.values())
    raise UnsupportedModelError(f"this model cannot be pruned: {why}", hint=f"supported: {supported}")
