"""Shared by the depth-pruning methods: plans from layer numbers, and copies with removed or gated layers."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitcompress import surgery
from vitcompress.errors import PlanError
from vitcompress.families import GATED, Family, Site, SiteKind, family_of
from vitcompress.families.gated_ffn import freeze_gates
from vitcompress.io.text import suggest_range
from vitcompress.methods.base import MEASURED_LAYERS, Context, Method, StepInfo, read_memo
from vitcompress.methods.calibration import calibration_images
from vitcompress.methods.hetdpt.report import report
from vitcompress.methods.options import OPTIONS, BypassOptions, DepthOptions
from vitcompress.plan import Plan
from vitcompress.surgery.gates import GatedModel

Blocks = Mapping[SiteKind, Sequence[int]]  # dense block numbers that lose their layer of this kind
GATE_IMAGES = 1024  # training images over which the mean of a gate is taken
MEAN_GATES = "mean_gates"  # file of the constant gates of layers that fade out


def layers(model: nn.Module, family: Family) -> dict[SiteKind, tuple[Site, ...]]:
    """The attentions and the activations of `model`, in forward order."""
    sites = family.sites(model)
    return {kind: tuple(site for site in sites if site.kind == kind) for kind in GATED}


def all_layers(model: nn.Module, family: Family) -> list[Site]:
    """The attentions and then the activations of `model`."""
    return [site for group in layers(model, family).values() for site in group]


def resize(options: Any, model: nn.Module, family: Family, strength: float) -> Any:
    """The options with another number of layers, without the example lists, which name a fixed number."""
    lists = {name: () for name in ("example_attention", "example_activation") if hasattr(options, name)}
    return replace(options, pruned_layers=max(1, round(strength * len(all_layers(model, family)))), **lists)


def blocks_of(sites: Iterable[Site]) -> dict[SiteKind, list[int]]:
    """The blocks of these attentions and activations, in forward order."""
    chosen = sorted(sites, key=lambda site: site.index)
    return {kind: [site.index for site in chosen if site.kind == kind] for kind in GATED}


def check_kinds(model: nn.Module, family: Family, kinds: Sequence[SiteKind]) -> None:
    """Raise PlanError if activations are among `kinds` and the FFNs are not linear without them."""
    if "activation" in kinds and (problem := family.not_foldable(model)):
        raise PlanError(problem, hint="remove attentions alone (nose), or prune widths")


def spread_layers(
    model: nn.Module, family: Family, options: DepthOptions, kinds: Sequence[SiteKind] = GATED
) -> dict[SiteKind, list[int]]:
    """Layers of a structure without scores: spread evenly over the depth and over `kinds`.

    Activations get the larger half. The last layer of each type stays: after the last attention an exported file
    computes the class token only, so a model without late attentions would be faster than most search results. Raises
    PlanError if `pruned_layers` is larger than the number of removable layers.
    """
    check_kinds(model, family, kinds)
    present = layers(model, family)
    removable = {kind: max(0, len(present[kind]) - 1) for kind in kinds}
    if (count := options.pruned_layers) > (most := sum(removable.values())):
        counts = " and ".join(f"{len(present[kind])} {kind} layers" for kind in kinds)
        message = f"pruned_layers is {count}, but the model has {counts}; at most {most} can be removed"
        raise PlanError(message, hint=suggest_range("pruned_layers", 1, most) if most else "prune widths")
    taken = dict.fromkeys(kinds, 0)
    for _ in range(count):
        left = [kind for kind in reversed(kinds) if taken[kind] < removable[kind]]  # of equal ones, activations
        taken[min(left, key=taken.__getitem__)] += 1
    places = {kind: [(2 * i + 1) * removable[kind] // (2 * n) for i in range(n)] for kind, n in taken.items()}
    return {kind: [present[kind][place].index for place in places[kind]] for kind in kinds}


def plan_layers(model: nn.Module, base: Plan, removed: Blocks, options: BypassOptions) -> Plan:
    """The plan that removes, after `base`, the attentions and activations of the blocks with these dense numbers.

    Raises PlanError for a block without such a site, or activations of FFNs that are not linear without them.
    """
    family = family_of(model)
    sites = family.sites(model)
    if removed.get("activation"):
        check_kinds(model, family, ("activation",))
    for kind in GATED:
        blocks = [site.index for site in sites if site.kind == kind]
        if missing := sorted(set(removed.get(kind, ())) - set(blocks)):
            raise PlanError(f"no {kind} to remove in block {missing[0]}; blocks that have one: {blocks}")
    gone = [site for site in sites if site.index in removed.get(site.kind, ())]
    bypasses: dict[str, str] = {}
    for site in gone:
        if site.gates and options.gated_ffn == "drop_ffn":
            bypasses[site.gates] = "drop"
        elif site.gates:
            bypasses[site.name] = options.gated_ffn
        else:
            bypasses[site.name] = options.attention_bypass if site.kind == "attention" else "identity"
    appended = {}
    if options.both_pruned_output_act == "gelu" and not family.not_foldable(model):
        left = {site.block for site in sites if site.kind in GATED and site not in gone}
        appended = {site.block: "gelu" for site in sites if site in gone and site.block not in left}
    return base.delta(removed=bypasses, appended=appended)


def record_choice(model: nn.Module, context: Context, chosen: Blocks, options: BypassOptions) -> Plan:
    """Record and report the choice, and return its plan.

    The weights of a SwiGLU model are handed over with constant gates. If the layers fade out during the recovery, it
    reads the constants with `read_mean_gates` instead.
    """
    removed = {kind: sorted(chosen.get(kind, ())) for kind in GATED}
    plan = plan_layers(model, context.plan, removed, options)
    both = sorted(set(removed["attention"]) & set(removed["activation"]))

    def freeze() -> Any:  # once: a repeated step reads the gates of another model
        means = gate_means(model, context, plan.removed, options)
        if means and context.fades:
            context.memo(MEAN_GATES, lambda: {ffn: mean.tolist() for ffn, mean in means.items()})
        elif means:
            context.hand_over(freeze_gates(deepcopy(model), means))
        # A block that lost both is affine up to its norms: that changes the network, so these blocks are named.
        return {**removed, "both": both}

    context.memo("choice", freeze)
    blocks = f"attention of blocks {removed['attention']}, activation of blocks {removed['activation']}"
    context.progress.note(f"removed: {blocks}" + (f" (both in {both})" if both else ""))
    return plan


def depth_method(
    name: str,
    summary: str,
    choose: Callable[[nn.Module, Context, Any], Blocks],
    unscored: Callable[[nn.Module, Family, Any], Blocks] = spread_layers,
    **optional: Any,
) -> Method:
    """A method from two functions that name layers: by measurements, and for a structure. `OPTIONS` has its options.

    choose(model, context, options): the layers to remove. unscored(model, family, options): as many layers without data
    or scores; raises PlanError for options that are wrong or have no effect, and so runs before `choose`. optional:
    further fields of Method; by default, a search chooses layers on the model that the step receives.
    """

    def plan(model: nn.Module, context: Context, options: Any) -> Plan:
        unscored(model, context.family, options)
        return record_choice(model, context, choose(model, context, options), options)

    def structure(model: nn.Module, family: Family, base: Plan, options: Any) -> Plan:
        return plan_layers(model, base, unscored(model, family, options), options)

    default: dict[str, Any] = {"report": report, "resize": resize, "describe": lambda _: StepInfo(MEASURED_LAYERS)}
    return Method(name, summary, OPTIONS[name], plan, structure, **{**default, **optional})


def remove_layers(model: nn.Module, context: Context, removed: Blocks, options: BypassOptions) -> nn.Module:
    """A copy of `model` without these layers; with `mean_gate`, their gates are constant."""
    plan = plan_layers(model, context.plan, removed, options)
    return surgery.apply_plan(freeze_gates(deepcopy(model), gate_means(model, context, plan.removed, options)), plan)


def gate_layers(model: nn.Module, context: Context, sites: Sequence[Site], options: BypassOptions) -> GatedModel:
    """A copy of `model` on the run's device with a gate on each of `sites`, bypassed as in the deployed model."""
    plan = plan_layers(model, context.plan, blocks_of(sites), options)
    means = gate_means(model, context, plan.removed, options)
    return GatedModel(deepcopy(model).to(context.runtime.device), context.family, plan, means)


def gate_means(model: nn.Module, context: Context, names: Collection[str], options: BypassOptions) -> dict[str, Tensor]:
    """FFN -> mean of its gate over training images, (hidden,), for activations among `names`, with `mean_gate` only."""
    gates = {site.name: site.gates for site in context.family.sites(model) if site.gates and site.name in names}
    if not gates or options.gated_ffn != "mean_gate":
        return {}
    copy = deepcopy(model).to(context.runtime.device).eval()
    totals: dict[str, Tensor] = {}  # sums over all tokens, and as the last entry their number

    def add(ffn: str, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        rows = out.detach().flatten(0, -2).cpu().double()
        totals[ffn] = totals.get(ffn, torch.zeros(1)) + torch.cat([rows.sum(0), torch.tensor([float(len(rows))])])

    for act, ffn in gates.items():
        copy.get_submodule(act).register_forward_hook(partial(add, ffn))
    with torch.no_grad():
        for images, _ in calibration_images(context, GATE_IMAGES):
            copy(images)
    summed = {ffn: context.runtime.all_sum(totals[ffn]) for ffn in gates.values()}
    return {ffn: (total[:-1] / total[-1]).to(context.runtime.dtype) for ffn, total in summed.items()}


def read_mean_gates(folder: Path) -> dict[str, Tensor]:
    """The constant gates that a step with fading layers recorded in its `folder`; empty if there are none."""
    return {ffn: torch.tensor(mean) for ffn, mean in (read_memo(folder, MEAN_GATES) or {}).items()}
