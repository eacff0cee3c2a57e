"""Shared by the depth-pruning methods: options, plans from layer numbers, and copies with removed or gated layers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
from annotated_types import Ge
from torch import Tensor, nn

from vitcompress import surgery
from vitcompress.errors import PlanError
from vitcompress.families import Family, Site, family_of
from vitcompress.families.gated_ffn import freeze_gate
from vitcompress.io.files import read_json
from vitcompress.io.text import suggest_range
from vitcompress.io.validation import Doc
from vitcompress.methods.base import Context, Method
from vitcompress.methods.calibration import calibration_images
from vitcompress.methods.hetdpt.report import report
from vitcompress.models.cost import count_cost
from vitcompress.plan import Plan, check_bypasses
from vitcompress.surgery.gates import GatedModel

Kind = Literal["attention", "activation"]
KINDS: tuple[Kind, ...] = ("attention", "activation")
Blocks = Mapping[Kind, Iterable[int]]  # dense block numbers that lose their layer of this kind
Indices = tuple[Annotated[int, Ge(0)], ...]
# norm_identity is the released HetDPT code, double the released NOSE code (the residual stream once more).
Bypass = Annotated[
    Literal["drop", "norm_identity", "double"],
    Doc("replacement of an attention: nothing, the block's norm (HetDPT's code) or the residual stream (NOSE's code)"),
]
OutputAct = Annotated[
    Literal["none", "gelu"], Doc("`gelu` adds a GELU after blocks that lost both types, as in the released HetDPT code")
]
# drop_ffn is the only reading of HetDPT's DINOv2-g that gives the published size.
GatedFfn = Annotated[
    Literal["mean_gate", "drop_gate", "drop_ffn"],
    Doc("of a SwiGLU FFN that loses its activation: fix its gate at the mean over training images or at 1, or drop it"),
]
GATE_IMAGES = 1024  # training images over which the mean of a gate is taken
MEAN_GATES = "mean_gates"  # file of the constant gates of layers that fade out


@dataclass(frozen=True, kw_only=True)
class DepthOptions:
    """Options of all methods that remove attentions and activations."""

    pruned_layers: Annotated[int, Ge(1), Doc("number of attentions and activations to remove, both types together")] = 4
    attention_bypass: Bypass = "drop"
    both_pruned_output_act: OutputAct = "none"
    gated_ffn: GatedFfn = "mean_gate"


@dataclass(frozen=True, kw_only=True)
class FixedOptions:
    """Layers chosen by the user."""

    attention: Annotated[Indices, Doc("blocks that lose their attention")] = ()
    activation: Annotated[Indices, Doc("blocks that lose their activation")] = ()
    attention_bypass: Bypass = "drop"
    both_pruned_output_act: OutputAct = "none"
    gated_ffn: GatedFfn = "mean_gate"


BypassOptions = DepthOptions | FixedOptions


def _bypasses(options: BypassOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("attention_bypass", "both_pruned_output_act", "gated_ffn")}


def layers(model: nn.Module, family: Family) -> dict[Kind, tuple[Site, ...]]:
    """The attentions and the activations of `model`, in forward order."""
    sites = family.sites(model)
    return {kind: tuple(site for site in sites if site.kind == kind) for kind in KINDS}


def all_layers(model: nn.Module, family: Family) -> list[Site]:
    """The attentions and then the activations of `model`."""
    return [site for group in layers(model, family).values() for site in group]


def in_forward_order(sites: Iterable[Site]) -> list[Site]:
    """By block, in each the attention before the activation."""
    return sorted(sites, key=lambda site: (site.index, site.kind != "attention"))


def kind_of(site: Site) -> Kind:
    """The kind of a site from `layers`."""
    return cast(Kind, site.kind)


def check_kinds(family: Family, kinds: Sequence[Kind]) -> None:
    """Raise PlanError if activations are among `kinds` and the family's FFNs are not linear without them."""
    if "activation" in kinds and family.not_foldable:
        raise PlanError(family.not_foldable, hint="remove attentions alone (nose), or prune widths")


def spread_layers(model: nn.Module, family: Family, count: int, kinds: Sequence[Kind] = KINDS) -> dict[Kind, list[int]]:
    """`count` layers for size and speed before any score exists: spread evenly over the depth and over `kinds`.

    Activations get the larger half. The last layer of each type stays: after the last attention an exported file
    computes the class token only, so a model without late attentions would be faster than most search results.

    Raises:
        PlanError: `count` is larger than the number of removable layers.
    """
    check_kinds(family, kinds)
    present = layers(model, family)
    removable = {kind: max(0, len(present[kind]) - 1) for kind in kinds}
    if count > (most := sum(removable.values())):
        counts = " and ".join(f"{len(present[kind])} {kind} layers" for kind in kinds)
        raise PlanError(
            f"pruned_layers is {count}, but the model has {counts}; at most {most} can be removed",
            hint=suggest_range("pruned_layers", 1, most) if most else "prune widths",
        )
    taken = dict.fromkeys(kinds, 0)
    for _ in range(count):
        # The last of equal ones: activations come after attentions.
        taken[min((kind for kind in reversed(kinds) if taken[kind] < removable[kind]), key=lambda k: taken[k])] += 1
    return {kind: _spread([site.index for site in present[kind][:-1]], taken[kind]) for kind in kinds}


def _spread(numbers: Sequence[int], count: int) -> list[int]:
    """`count` of the numbers, evenly spread: the middle one of each of `count` equal parts."""
    return [numbers[(2 * part + 1) * len(numbers) // (2 * count)] for part in range(count)]


# ---------------------------------------------------------------------------------------------------------------- plans


def depth_plan(
    model: nn.Module,
    base: Plan,
    attentions: Iterable[int],
    activations: Iterable[int],
    *,
    attention_bypass: str = "drop",
    both_pruned_output_act: str = "none",
    gated_ffn: str = "mean_gate",
) -> Plan:
    """The plan that removes, after `base`, the attentions and activations of the blocks with these dense numbers.

    The keywords are those of `DepthOptions`.

    Raises:
        PlanError: a block number without such a site, an unknown bypass, or activations of a family whose FFNs are not
            linear without them.
    """
    check_bypasses(attention_bypass, both_pruned_output_act, gated_ffn)
    family = family_of(model)
    sites, activations = family.sites(model), tuple(activations)
    if activations:
        check_kinds(family, ("activation",))
    attention = _sites_in(sites, "attention", attentions)
    activation = _sites_in(sites, "activation", activations)
    removed = {site.name: attention_bypass for site in attention}
    for site in activation:
        if site.gates and gated_ffn == "drop_ffn":
            removed[site.gates] = "drop"
        else:
            removed[site.name] = gated_ffn if site.gates else "identity"
    gelu = both_pruned_output_act == "gelu" and not family.not_foldable
    appended = dict.fromkeys(_blocks_without_both(sites, [*attention, *activation]), "gelu") if gelu else {}
    return base.delta(removed=removed, appended=appended)


def _sites_in(sites: tuple[Site, ...], kind: str, blocks: Iterable[int]) -> list[Site]:
    by_block = {site.index: site for site in sites if site.kind == kind}
    wanted = list(dict.fromkeys(blocks))
    if missing := sorted(set(wanted) - set(by_block)):
        raise PlanError(f"no {kind} to remove in block {missing[0]}; blocks that have one: {sorted(by_block)}")
    return [by_block[number] for number in wanted]


def _blocks_without_both(sites: tuple[Site, ...], removed: list[Site]) -> list[str]:
    """The blocks that lose the last attention or activation they had, in forward order."""
    left = {site.block for site in sites if site.kind in KINDS and site not in removed}
    return [block for _, block in sorted({(site.index, site.block) for site in removed if site.block not in left})]


def plan_layers(model: nn.Module, base: Plan, removed: Blocks, options: BypassOptions) -> Plan:
    """The plan that removes these layers after `base`. Raises PlanError as `depth_plan`."""
    return depth_plan(model, base, removed.get("attention", ()), removed.get("activation", ()), **_bypasses(options))


def record_choice(
    model: nn.Module, context: Context, chosen: Blocks, options: BypassOptions, *, fades: bool = False
) -> Plan:
    """Record and report the choice, and return its plan.

    The weights of a SwiGLU model are handed over with constant gates. fades: the layers fade out during the recovery
    instead; it reads the constants with `read_mean_gates`.
    """
    removed = {kind: sorted(chosen.get(kind, ())) for kind in KINDS}
    both = sorted(set(removed["attention"]) & set(removed["activation"]))
    # A block that lost both is affine up to its norms: that changes the network, so these blocks are named.
    context.memo("choice", lambda: {**removed, "both": both})
    context.progress.note(
        f"removed: attention of blocks {removed['attention']}, activation of blocks {removed['activation']}"
        + (f" (both in {both})" if both else "")
    )
    means = _mean_gates(model, context, removed, options)
    if means and fades:
        context.memo(MEAN_GATES, lambda: {ffn: mean.tolist() for ffn, mean in means.items()})
    elif means:
        context.hand_over(freeze_gates(deepcopy(model), means))
    return plan_layers(model, context.plan, removed, options)


def depth_method(
    name: str,
    summary: str,
    options: type[BypassOptions],
    choose: Callable[[nn.Module, Context, Any], Blocks],
    unscored: Callable[[nn.Module, Family, Any], Blocks],
    *,
    fades: bool = False,
    **optional: Any,
) -> Method:
    """A method from two functions that name layers: by measurements, and for a structure.

    choose(model, context, options): the layers to remove. unscored(model, family, options): as many layers without data
    or scores; raises PlanError for options that are wrong or have no effect, and so runs before `choose`. fades: the
    layers fade out during the recovery. optional: further fields of Method.
    """

    def plan(model: nn.Module, context: Context, options: Any) -> Plan:
        unscored(model, context.family, options)
        return record_choice(model, context, choose(model, context, options), options, fades=fades)

    def structure(model: nn.Module, family: Family, base: Plan, options: Any) -> Plan:
        return plan_layers(model, base, unscored(model, family, options), options)

    return Method(name, summary, options, plan, structure, **{"report": report, **optional})


# --------------------------------------------------------------------------------------------------------------- copies


def remove_layers(model: nn.Module, context: Context, removed: Blocks, options: BypassOptions) -> nn.Module:
    """A copy of `model` without these layers; with `mean_gate`, their gates are constant."""
    copy = freeze_gates(deepcopy(model), _mean_gates(model, context, removed, options))
    return surgery.apply_plan(copy, plan_layers(copy, context.plan, removed, options))


def gate_layers(
    model: nn.Module, context: Context, sites: Sequence[Site], options: BypassOptions, bypass: Bypass | None = None
) -> GatedModel:
    """A copy of `model` on the run's device with a gate on each of `sites`, bypassed as in the deployed model.

    bypass: of attentions instead.
    """
    replaced = {"attention_bypass": bypass} if bypass else {}
    means = None
    if options.gated_ffn == "mean_gate" and any(site.gates for site in sites):
        means = {ffn: mean.to(context.runtime.device) for ffn, mean in gate_means(model, context).items()}
    copy = deepcopy(model).to(context.runtime.device)
    return GatedModel(copy, context.family, tuple(sites), **{**_bypasses(options), **replaced}, gate_means=means)


def gate_means(model: nn.Module, context: Context) -> dict[str, Tensor]:
    """Gated FFN -> mean of its gate over the tokens of training images, (hidden,), with the current weights."""
    copy = deepcopy(model).to(context.runtime.device).eval()
    gates = {site.gates: site.name for site in layers(copy, context.family)["activation"] if site.gates}
    sums = {ffn: _GateSum(copy.get_submodule(act)) for ffn, act in gates.items()}
    with torch.no_grad():
        for images, _ in calibration_images(context, GATE_IMAGES):
            copy(images)
    totals = {ffn: context.runtime.all_sum(gate.total) for ffn, gate in sums.items()}
    return {ffn: (total[:-1] / total[-1]).float() for ffn, total in totals.items()}


class _GateSum:
    """Sum of a module's output over all tokens, and as the last entry their number: (channels + 1,)."""

    def __init__(self, act: nn.Module) -> None:
        self.total = torch.zeros(1)
        act.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        rows = out.detach().flatten(0, -2).cpu().double()
        self.total = self.total + torch.cat([rows.sum(0), torch.tensor([float(len(rows))])])


def _mean_gates(model: nn.Module, context: Context, removed: Blocks, options: BypassOptions) -> dict[str, Tensor]:
    """The means of the gates that become constant; none unless the options are `mean_gate`."""
    blocks = set(removed.get("activation", ()))
    ffns = [site.gates for site in layers(model, context.family)["activation"] if site.gates and site.index in blocks]
    if not ffns or options.gated_ffn != "mean_gate":
        return {}
    means = gate_means(model, context)
    return {ffn: means[ffn] for ffn in ffns}


def freeze_gates(model: nn.Module, means: Mapping[str, Tensor]) -> nn.Module:
    """Make the gates of these FFNs constant, in place."""
    for ffn, mean in means.items():
        freeze_gate(model.get_submodule(ffn), mean)
    return model


def read_mean_gates(folder: Path) -> dict[str, Tensor]:
    """The constant gates that a step with fading layers recorded in its `folder`; empty if there are none."""
    path = folder / f"{MEAN_GATES}.json"
    return {ffn: torch.tensor(mean) for ffn, mean in read_json(path).items()} if path.is_file() else {}


def count_macs(model: nn.Module, context: Context, removed: Blocks, options: BypassOptions) -> float:
    """Multiply-accumulates of one image on the folded model without these layers."""
    copy = surgery.apply_to_copy(model, plan_layers(model, context.plan, removed, options))
    surgery.fold_linears(copy, context.plan)
    return float(count_cost(copy, context.input.size).macs)
