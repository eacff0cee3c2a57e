"""The only code that edits modules. The same code prunes a model and rebuilds it from a plan."""

from vitcompress.surgery.apply import apply_plan, apply_to_copy
from vitcompress.surgery.fold import INTO_THE_LINEAR, fold_branch_bias, fold_linears

__all__ = ["INTO_THE_LINEAR", "apply_plan", "apply_to_copy", "fold_branch_bias", "fold_linears"]
