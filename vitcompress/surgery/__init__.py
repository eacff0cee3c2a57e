"""The only code that edits modules. The same code prunes a model and rebuilds it from a plan."""

from vitcompress.surgery.apply import apply_plan as apply_plan
from vitcompress.surgery.apply import apply_to_copy as apply_to_copy
from vitcompress.surgery.fold import INTO_THE_LINEAR as INTO_THE_LINEAR
from vitcompress.surgery.fold import fold_branch_bias as fold_branch_bias
from vitcompress.surgery.fold import fold_linears as fold_linears
