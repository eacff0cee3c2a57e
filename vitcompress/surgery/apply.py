"""Apply a plan to a model: remove, slice, fold, in this order."""

from copy import deepcopy

from torch import nn

from vitcompress.families import family_of
from vitcompress.plan import Plan
from vitcompress.surgery.check import check_plan
from vitcompress.surgery.fold import fold_away
from vitcompress.surgery.remove import remove_sites
from vitcompress.surgery.slice import pad_attentions, slice_channels


def apply_to_copy(model: nn.Module, plan: Plan) -> nn.Module:
    """`apply` on a copy: `model` stays as it is."""
    return apply_plan(deepcopy(model), plan)


def apply_plan(model: nn.Module, plan: Plan) -> nn.Module:
    """Edit `model` in place as `plan` says and return it.

    Folding multiplies the weights that the model holds now; when weights are loaded afterwards, only shapes matter.

    Raises:
        PlanError: the plan names what the model does not have; every contradiction is listed, and nothing was edited.
    """
    family = family_of(model)
    check_plan(model, family, plan)
    remove_sites(model, family, plan)
    if plan.kept:
        slice_channels(model, family, plan)
    pad_attentions(model, plan)
    for name in plan.folded:
        fold_away(model, family, name)
    return model
