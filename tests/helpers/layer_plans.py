"""Plans that remove the layers of given blocks."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from vitcompress.io.validation import options_of
from vitcompress.methods.depth import plan_layers
from vitcompress.methods.options import BypassOptions
from vitcompress.plan import Plan


def depth_plan(
    model: nn.Module, base: Plan, attentions: Sequence[int], activations: Sequence[int], **bypasses: Any
) -> Plan:
    """`plan_layers` of these blocks. bypasses: fields of BypassOptions. Raises InputError for an unknown one."""
    options = options_of(BypassOptions, bypasses, "a plan of layers")
    return plan_layers(model, base, {"attention": attentions, "activation": activations}, options)
