"""The only code that edits modules. The same code prunes a model and rebuilds it from a plan."""

from vitcompress.surgery.apply import apply_plan, apply_to_copy
from vitcompress.surgery.check import check_plan
from vitcompress.surgery.edit import replace_module, sliced_state
from vitcompress.surgery.fold import INTO_THE_LINEAR, Folding, FoldRecord, fold_branch_bias, fold_linears, product

__all__ = [
    "INTO_THE_LINEAR",
    "FoldRecord",
    "Folding",
    "apply_plan",
    "apply_to_copy",
    "check_plan",
    "fold_branch_bias",
    "fold_linears",
    "product",
    "replace_module",
    "sliced_state",
]
