"""Families of timm models. To add one: a file beside this one, and its object in `FAMILIES`."""

from vitcompress.families.base import Axis, Family, Site, Space
from vitcompress.families.lookup import FAMILIES, family_of, prepare_model, reject_wrapper, unwrap

__all__ = ["FAMILIES", "Axis", "Family", "Site", "Space", "family_of", "prepare_model", "reject_wrapper", "unwrap"]
