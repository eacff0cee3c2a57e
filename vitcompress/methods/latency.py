"""Sizes for a latency: their search, and the measurements of candidates.

Measurements are kept in the step's folder, so that a killed run continues with the same ones. Those of another machine,
another version of a runtime or another number of threads are not comparable: if a run continues there, they stay in the
folder, and candidates are measured anew.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress.errors import InputError, PlanError
from vitcompress.families import Family
from vitcompress.io.files import json_key, read_json
from vitcompress.io.progress import SILENT
from vitcompress.io.text import describe_differences
from vitcompress.methods import budget
from vitcompress.methods.base import Context, Goal, Measured, Method, check_result, reject_unused
from vitcompress.methods.budget import T, Target
from vitcompress.methods.options import LatencyOptions
from vitcompress.methods.width import deploy
from vitcompress.plan import Plan

CLOSE = 0.02  # relative difference at which a latency counts as reached
ROUNDS = 8  # bisection steps of one search; each candidate is exported and measured
STEPS = 100  # strengths from which the sizes of a method are listed
RECORD = "latency"  # sentences on the result
AMOUNTS = ("macs", "macs_linear", "params", "latency")


def check_target(options: Any) -> None:
    """Raise PlanError if the amount of a target is missing, or an option of the target has no effect."""
    if not isinstance(options, LatencyOptions):
        return
    reason = f"target is {options.target!r}"
    unused: dict[str, str | bool] = {"amount": options.target not in AMOUNTS and reason}
    unused |= {f"latency_{name}": options.target != "latency" and reason for name in ("on", "batch", "threads")}
    reject_unused(options, unused)
    if options.amount is None and options.target in AMOUNTS:
        hint = "set amount in G MACs, M parameters or ms, or leave target out"
        raise PlanError(f"amount is required with target = {options.target!r}", hint=hint)


def goal_of(options: Any) -> Goal | None:
    """The latency that a step with these options prunes to; None if there is none."""
    if getattr(options, "target", None) != "latency":
        return None
    return Goal(options.amount or 0.0, options.latency_on, options.latency_batch, options.latency_threads)


def most_candidates(method: Method, options: Any) -> int:
    """The largest number of measured candidates; a method with its own search also tries other residual widths."""
    return 3 + ROUNDS * (4 if method.describe(options).unscored is not None else 1)


def plan_step(method: Method, model: nn.Module, context: Context, options: Any, *, scored: bool = True) -> Plan:
    """The plan of a step. With a latency, of the sizes that take it.

    scored: False needs no data. Raises PlanError if no sizes take the latency, as `check_target`, and if the method
    changed `model`, whose weights the next step would start from.
    """

    def weights() -> list[tuple[int, int]]:
        return [(tensor.data_ptr(), tensor.is_inference() or tensor._version) for tensor in model.state_dict().values()]

    check_target(options)
    before, delta = weights(), check_result(method, _plan(method, model, context, options, scored=scored))
    if weights() != before:
        hint = "change a copy of it; `context.hand_over(copy)` starts the next step from its weights"
        raise PlanError(f"the method {method.name} changed the model that it plans for", hint=hint)
    return delta


def _plan(method: Method, model: nn.Module, context: Context, options: Any, *, scored: bool) -> Plan:
    """What the method returns, with a latency after a search of the sizes.

    A method that trains cannot be repeated for every size: the search measures its structures, and at the end its plan.
    """
    about = (model, context) if scored else (model, context.family, context.plan)
    plan: Callable[..., Plan] = partial(method.plan if scored else method.structure, *about)
    goal, unscored = goal_of(options), method.describe(options).unscored
    if goal is None:
        return plan(options)
    try:
        if unscored is not None:
            return method.plan(model, context, options if scored else unscored)
        search = LatencySearch(context, goal, model, most_candidates(method, options))
        sizes = list_sizes(method, model, context.family, context.plan, options)
        target: Target[int] = search.target(lambda size: sizes[size][1])
        budget.check_reach(0, len(sizes) - 1, target)
    except PlanError:  # other load on the machine may have increased the latencies: the next attempt measures anew
        if context.runtime.is_main:
            for path in context.folder.glob(f"latency-{goal.runtime}-*.json"):
                path.unlink()
        raise
    size, _ = budget.bisect(lambda strength: min(1 + int(strength * (len(sizes) - 1)), len(sizes) - 1), target)
    delta = check_result(method, plan(sizes[size][0]))
    search.conclude(delta, sizes[size][1])
    return delta


def list_sizes(method: Method, model: nn.Module, family: Family, base: Plan, options: Any) -> list[tuple[Any, Plan]]:
    """Options and structures: of the model as it is, then from the largest to the smallest size, each once.

    Raises PlanError if there are no sizes.
    """
    sizes = {base.delta().digest: (options, base.delta())}
    resized = (method.resize(options, model, family, step / STEPS) for step in range(1, STEPS + 1))
    reason: InputError = PlanError(f"{method.name} has no sizes for a latency", hint="remove target = 'latency'")
    for different in {repr(one): one for one in resized}.values():
        try:
            delta = method.structure(model, family, base, different)
            sizes.setdefault(delta.digest, (different, delta))
        except InputError as error:  # the model cannot have such sizes
            reason = error
    if len(sizes) == 1:
        raise reason
    return list(sizes.values())


@dataclass
class LatencySearch:
    """Latencies of candidates of one step, each measured once per machine. limit: the largest number of them."""

    context: Context
    goal: Goal
    model: nn.Module
    limit: int
    known: dict[str, Measured] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        context, runtime = self.context, self.goal.runtime
        here = context.runtime.broadcast(dict(context.measured_on))
        if context.runtime.is_main and (other := other_machine(context.folder, runtime, here)):
            context.progress.note(f"latencies on {runtime} are measured again, the known ones differ: {other}")
        context.memo(f"measured-on-{runtime}-{json_key(here)}", lambda: here)
        self.name = f"latency-{runtime}-{json_key({**here, 'goal': str(self.goal)})}"

    def measure(self, delta: Plan) -> Measured:
        """The latency of the model after `delta` and folding."""

        def run() -> dict[str, object]:
            if self.context.latency is None:
                raise PlanError("latencies cannot be measured here", hint="remove target = 'latency'")
            result = self.context.latency(deploy(self.model, self.context.plan, delta), self.goal)
            count = f"candidate {len(self.known) + 1} of at most {self.limit}"
            self.context.progress.note(f"{count} takes {result} on {self.goal.runtime}")
            return asdict(result)

        if delta.digest not in self.known:
            self.known[delta.digest] = Measured(**self.context.memo(f"{self.name}-{delta.digest[:16]}", run))
        return self.known[delta.digest]

    def target(self, plan: Callable[[T], Plan]) -> Target[T]:
        """The goal for candidates with a `plan`."""
        cost, fastest = lambda size: self.measure(plan(size)).ms, lambda size: self.measure(plan(size)).fastest
        return Target(self.goal.ms, cost, "ms", self.goal.runtime, fastest, ROUNDS, CLOSE)

    def conclude(self, delta: Plan, nearest: Plan) -> None:
        """Measure the plan of the step, whose `nearest` structure was searched. Record the result, why it missed the
        goal, and what other load on the machine means for the plan.
        """
        goal, result, likely = self.goal, self.measure(delta), self.measure(nearest)
        times = sorted(measured.ms for measured in self.known.values())
        range_ms = f"{times[0]:.4g} ms to {times[-1]:.4g} ms"
        remarks = [f"Planned for {goal}: the plan takes {result}; {len(times)} candidates took {range_ms}."]
        if abs(off := result.ms / goal.ms - 1) > CLOSE:
            if result.low <= goal.ms <= result.high or (result.disturbed and result.fastest <= goal.ms <= result.ms):
                reason = f"the times of the machine vary more than that (measurements of the plan: {result.repeats})"
            elif abs(likely.ms / goal.ms - 1) <= CLOSE:
                reason = f"the search measured evenly spread sizes of {likely}, and the method spread them otherwise"
            else:
                sides = [ms for ms in times if ms <= goal.ms][-1:] + [ms for ms in times if ms > goal.ms][:1]
                steps = " and ".join(f"{ms:.4g} ms" for ms in sides)
                reason = f"the nearest sizes take {steps}; smaller multiples (align, round_to) may give finer steps"
            remarks.append(f"The latency target was missed by {100 * off:+.1f} %: {reason}.")
        if causes := [measured.disturbed for measured in self.known.values() if measured.disturbed]:
            remarks.append(
                f"There was no quiet machine in {len(causes)} of {len(times)} measurements for the latency target "
                f"({causes[-1]}). Such times are too long, so the plan may be smaller than necessary: plan again on a "
                "quiet machine (--fresh, or another folder)."
            )
        first, *others = self.context.memo(RECORD, lambda: remarks)
        for remark in (first, *others):
            self.context.progress.note(remark)
        for remark in others if self.context.progress is SILENT else ():
            warnings.warn(remark, stacklevel=2)


def other_machine(folder: Path, runtime: str, here: Mapping[str, object]) -> str:
    """How machine and settings of the latencies in `folder` differ from `here`; empty if they do not."""
    paths = sorted(folder.glob(f"measured-on-{runtime}-*.json"), key=lambda path: path.stat().st_mtime)
    if not paths or any(path.stem.endswith(json_key(here)) for path in paths):
        return ""
    return "; ".join(describe_differences(read_json(paths[-1]), here))
