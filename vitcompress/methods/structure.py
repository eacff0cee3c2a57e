"""The structure that the steps of a recipe leave, without data or scoring."""

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any

from torch import nn

from vitcompress import surgery
from vitcompress.families import Family
from vitcompress.methods import METHODS
from vitcompress.plan import Plan


def deltas_of_steps(model: nn.Module, family: Family, base: Plan, steps: Iterable[tuple[str, Any]]) -> Iterator[Plan]:
    """What each step adds, given its method's name and options, without data or scoring. `model` stays as it is.

    Raises:
        PlanError: a step asks for more than the model has.
    """
    plan = base
    for name, options in steps:
        delta = METHODS[name].structure(model, family, plan, options)
        yield delta
        model, plan = surgery.apply_to_copy(model, delta), plan.then(delta)


def structure_of_steps(model: nn.Module, family: Family, base: Plan, steps: Iterable[tuple[str, Any]]) -> Plan:
    """The plan of all steps. Raises PlanError like `deltas`."""
    return reduce(Plan.then, deltas_of_steps(model, family, base, steps), base)
