"""The structure after the steps of a recipe, without data or scores."""

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any

from torch import nn

from vitcompress import surgery
from vitcompress.families import Family
from vitcompress.methods import Method, find_method
from vitcompress.plan import Plan

Step = tuple[str | Method, Any]  # a method or its name, and its options


def deltas_of_steps(model: nn.Module, family: Family, base: Plan, steps: Iterable[Step]) -> Iterator[Plan]:
    """The plan that each step adds to those before it. `model` stays as it is.

    Raises:
        PlanError: a step removes more than the model has.
        InputError: no such method.
    """
    plan, delta = base, base.delta()
    for number, (method, options) in enumerate(steps):
        if number:  # the last delta is applied by the caller, if at all
            model, plan = surgery.apply_to_copy(model, delta), plan.then(delta)
        delta = find_method(method).structure(model, family, plan, options)
        yield delta


def structure_of_steps(model: nn.Module, family: Family, base: Plan, steps: Iterable[Step]) -> Plan:
    """The plan of all steps. Raises as `deltas_of_steps`."""
    return reduce(Plan.then, deltas_of_steps(model, family, base, steps), base)
