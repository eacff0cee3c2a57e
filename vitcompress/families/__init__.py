"""Families of timm models. To add one: a file beside this one, and its object in `FAMILIES`."""

from vitcompress.families.base import GATED, Axis, Family, Site, SiteKind, Space, scale_parameter
from vitcompress.families.lookup import FAMILIES, copy_model, family_of, prepare_model, reject_wrapper, unwrap

__all__ = ["FAMILIES", "GATED", "Axis", "Family", "Site", "SiteKind", "Space", "copy_model", "family_of"]
__all__ += ["prepare_model", "reject_wrapper", "scale_parameter", "unwrap"]
