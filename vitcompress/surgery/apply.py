"""Apply a plan to a model: remove, slice, fold, in this order."""

from torch import nn

from vitcompress.families import copy_model, family_of
from vitcompress.families.attention import SlicedPositionAttention
from vitcompress.families.edited_block import EditedBlock, reject_new_size
from vitcompress.plan import Plan
from vitcompress.surgery.check import check_plan
from vitcompress.surgery.edit import remove_sites, slice_channels
from vitcompress.surgery.fold import fold_module


def apply_to_copy(model: nn.Module, plan: Plan) -> nn.Module:
    """`apply_plan` on a copy of `model`."""
    return apply_plan(copy_model(model), plan)


def apply_plan(model: nn.Module, plan: Plan) -> nn.Module:
    """Edit `model` in place as `plan` says and return it.

    Folding multiplies the current weights; if weights are loaded afterwards, only shapes matter. The attribute
    `model.plan` is deleted, because it no longer describes the model. Raises PlanError, with all contradictions, if the
    plan does not fit the model; nothing was removed. Raises UnsupportedModelError if no family supports the model, or
    its channels cannot be masked.
    """
    family = family_of(model)
    family.prepare(model)
    check_plan(model, family, plan)
    vars(model).pop("plan", None)
    remove_sites(model, family, plan)
    slice_channels(model, family, plan)
    for attention in map(model.get_submodule, plan.padded):
        vars(attention)["padded"] = True  # also in timm's own, whose equal widths a later plan may change
    for name in plan.folded:
        fold_module(model, family, name)
    if family.fixed_size and any(isinstance(part, EditedBlock | SlicedPositionAttention) for part in model.modules()):
        vars(model)["set_input_size"] = reject_new_size
    return model
