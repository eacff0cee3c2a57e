"""The only code that edits modules. The same code prunes a model and rebuilds it from a plan.

Order of application: remove, slice, fold. Everything is incremental: a plan may be applied to a model that an earlier
plan already changed.
"""

from copy import deepcopy

from torch import nn

from vitcompress.families import family_of
from vitcompress.plan import Plan
from vitcompress.surgery.checking import check
from vitcompress.surgery.constants import fold_constant
from vitcompress.surgery.depth import depth_plan
from vitcompress.surgery.folding import INTO_THE_LINEAR, Folding, FoldRecord, fold, fold_away, product
from vitcompress.surgery.modules import replace_module
from vitcompress.surgery.removal import remove
from vitcompress.surgery.slicing import pad_attentions, slice_channels, sliced_state

__all__ = [
    "INTO_THE_LINEAR",
    "FoldRecord",
    "Folding",
    "applied",
    "apply",
    "check",
    "depth_plan",
    "fold",
    "fold_constant",
    "product",
    "replace_module",
    "sliced_state",
]


def applied(model: nn.Module, plan: Plan) -> nn.Module:
    """`apply` on a copy: `model` stays as it is."""
    return apply(deepcopy(model), plan)


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Edit `model` in place as `plan` says and return it.

    Folding multiplies the weights that the model holds now; when weights are loaded afterwards, only shapes matter.

    Raises:
        PlanError: the plan names what the model does not have; every contradiction is listed, and nothing was edited.
    """
    family = family_of(model)
    check(model, family, plan)
    remove(model, family, plan)
    if plan.kept:
        slice_channels(model, family, plan)
    pad_attentions(model, plan)
    for name in plan.folded:
        fold_away(model, family, name)
    return model
