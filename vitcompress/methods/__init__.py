"""Methods: what to remove. To add one: a file beside this one, and a line in `METHODS`."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress import surgery
from vitcompress.families import Family
from vitcompress.methods import baselines, evidence, hetdpt, isomorphic, nose, sero, steps, upvit
from vitcompress.methods.charts import Chart
from vitcompress.methods.choice import MEASURED_LAYERS, TRAINED, Choice
from vitcompress.methods.stage import Stage
from vitcompress.plan import Plan
from vitcompress.workspace import Clock, Context


@dataclass(frozen=True)
class Method:
    """One way to choose what goes.

    options: dataclass of what a recipe may set. plan(model, context, options): the plan to carry out after the
    model's own; may train copies, leaves the model as it is, keeps what it measured in the context's folder.
    structure(model, family, base, options): a plan of the same size without data or scoring; raises PlanError when
    the options ask for more than the model has. stages(options, prunable): the work ahead on a model with so many
    attentions and activations, for a dry run. dilute(options, epochs): gate value of the removed layers at each epoch
    of the recovery, for methods that fade them out; None removes them at once. tables(folder), charts(folder),
    remarks(folder): what the step measured, for the report, and what its reader must know. choice(options): where what
    it removes comes from; None for a step that chooses nothing. apart(options): whether q and k of an attention may end
    with more channels per head than v, or with fewer.

    timed(options): where a latency is aimed at, options with which `plan` needs a clock but no data; else None.
    check_reach(model, family, base, options, clock): raises PlanError when such a latency is out of reach.
    """

    summary: str
    options: type[Any]
    plan: Callable[[nn.Module, Context, Any], Plan]
    structure: Callable[[nn.Module, Family, Plan, Any], Plan]
    stages: Callable[[Any, int], list[Stage]] = lambda options, prunable: []
    dilute: Callable[[Any, int], Callable[[int], float]] | None = None
    tables: Callable[[Path], list[dict[str, Any]]] = evidence.tables
    charts: Callable[[Path], list[Chart]] = evidence.charts
    remarks: Callable[[Path], list[str]] = lambda folder: []
    choice: Callable[[Any], Choice | None] = lambda options: MEASURED_LAYERS
    apart: Callable[[Any], bool] = lambda options: False
    timed: Callable[[Any], Any | None] = lambda options: None
    check_reach: Callable[[nn.Module, Family, Plan, Any, Clock], None] = lambda *about: None


METHODS: dict[str, Method] = {
    "hetdpt": Method(
        "attentions and activations: budget split by prediction, layers by learnable importance",
        options=hetdpt.Options,
        plan=hetdpt.plan,
        structure=hetdpt.structure,
        stages=hetdpt.stages,
        choice=hetdpt.choice,
    ),
    "nose": Method(
        "attentions only: greedy transfer entropy, faded out while recovering",
        options=nose.Options,
        plan=nose.plan,
        structure=nose.structure,
        stages=nose.stages,
        dilute=nose.dilute,
    ),
    "activation_only": Method(
        "activations only: greedy transfer entropy, faded out while recovering",
        options=nose.ActivationOptions,
        plan=nose.plan_activations,
        structure=nose.structure_activations,
        stages=nose.stages,
        dilute=nose.dilute,
    ),
    "te_static": Method(
        "attentions and activations with the lowest transfer entropy, measured once",
        options=baselines.StaticOptions,
        plan=baselines.te_static,
        structure=baselines.structure,
        stages=baselines.stages_te_static,
    ),
    "hetdpt_no_step2": Method(
        "HetDPT's split of the budget, layers in the order that collection removed them",
        options=hetdpt.AllocationOptions,
        plan=baselines.no_step2,
        structure=baselines.structure_no_step2,
        stages=hetdpt.allocation_stages,
        choice=lambda options: TRAINED,
    ),
    "hetdpt_no_step1": Method(
        "learnable importance of both types pooled, without a split of the budget",
        options=baselines.DirectOptions,
        plan=baselines.no_step1,
        structure=baselines.structure,
        stages=baselines.stages_no_step1,
        choice=lambda options: TRAINED,
    ),
    "random": Method(
        "layers drawn by the seed, or the first or last ones",
        options=baselines.RandomOptions,
        plan=baselines.random,
        structure=baselines.structure_random,
        choice=baselines.choice_random,
    ),
    "fixed": Method(
        "the layers that the recipe names",
        options=baselines.FixedOptions,
        plan=baselines.fixed,
        structure=baselines.structure_fixed,
        choice=lambda options: Choice("the recipe"),
    ),
    "isomorphic": Method(
        "widths: residual, FFN, heads and their channels, each kind ranked among its own",
        options=isomorphic.Options,
        plan=isomorphic.plan,
        structure=isomorphic.structure,
        stages=isomorphic.stages,
        tables=isomorphic.tables,
        charts=isomorphic.charts,
        remarks=isomorphic.remarks,
        choice=isomorphic.choice,
        timed=isomorphic.timed,
        check_reach=isomorphic.check_reach,
    ),
    "sero": Method(
        "q/k, v and FFN channels: masks explored while training, one threshold over all layers",
        options=sero.Options,
        plan=sero.plan,
        structure=sero.structure,
        stages=sero.stages,
        tables=sero.tables,
        charts=sero.charts,
        remarks=sero.remarks,
        choice=sero.choice,
        apart=lambda options: options.layout in sero.APART,
    ),
    "recover": Method(
        "train the model as it is, between two steps",
        options=steps.RecoverOptions,
        plan=steps.recover,
        structure=steps.structure_recover,
        stages=steps.stages_recover,
        choice=lambda options: None,
    ),
    "fold": Method(
        "multiply out what has become linear, so that the next step prunes the product",
        options=steps.FoldOptions,
        plan=steps.fold,
        structure=steps.structure_fold,
        tables=steps.tables_fold,
        choice=lambda options: None,
    ),
    "upvit": Method(
        "channels and blocks whose loss moves the answers least, down to the sizes of a standard model",
        options=upvit.Options,
        plan=upvit.plan,
        structure=upvit.structure,
        stages=upvit.stages,
        tables=upvit.tables,
        charts=upvit.charts,
        remarks=upvit.remarks,
        choice=upvit.choice,
    ),
}


def deltas(model: nn.Module, family: Family, base: Plan, steps: Iterable[tuple[str, Any]]) -> Iterator[Plan]:
    """What each step adds, given its method's name and options, without data or scoring. `model` stays as it is.

    Raises:
        PlanError: a step asks for more than the model has.
    """
    plan = base
    for name, options in steps:
        delta = METHODS[name].structure(model, family, plan, options)
        yield delta
        model, plan = surgery.apply_to_copy(model, delta), plan.then(delta)


def structure(model: nn.Module, family: Family, base: Plan, steps: Iterable[tuple[str, Any]]) -> Plan:
    """The plan of all steps. Raises PlanError like `deltas`."""
    return reduce(Plan.then, deltas(model, family, base, steps), base)
