"""What the depth-pruning methods share: options, budget, and plans from layer numbers."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Literal, cast

import torch
from annotated_types import Ge
from torch import Tensor, nn

from vitcompress import surgery
from vitcompress.errors import PlanError
from vitcompress.families import Family, Site, family_of
from vitcompress.families.gated_ffn import freeze_gate
from vitcompress.io.text import suggest_range
from vitcompress.io.validation import Doc
from vitcompress.methods.base import Context
from vitcompress.methods.calibration import training_views
from vitcompress.models.cost import count_cost
from vitcompress.plan import Plan, check_bypasses
from vitcompress.surgery.gates import GatedModel


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
    """The plan that removes, on top of `base`, the attentions and activations of the blocks with these dense numbers.

    both_pruned_output_act: `gelu` applies a GELU to the output of each block that has then lost both, as the released
    HetDPT code does; `none` leaves it out.
    gated_ffn: what becomes of an FFN whose activation gates another branch: a constant gate (`mean_gate`, `drop_gate`,
        see Plan), or the FFN goes as a whole (`drop_ffn`).

    Raises:
        PlanError: a block number without such a site, a bypass that is not one, or activations of a family whose FFNs
            are not linear without them.
    """
    check_bypasses(attention_bypass, both_pruned_output_act, gated_ffn)
    family = family_of(model)
    sites, activations = family.sites(model), tuple(activations)
    if activations and family.not_foldable:
        raise PlanError(family.not_foldable, hint="remove attentions alone (nose), or prune widths")
    attention = _chosen(sites, "attention", attentions)
    activation = _chosen(sites, "activation", activations)
    removed = {site.name: attention_bypass for site in attention}
    removed |= dict(_without(site, gated_ffn) for site in activation)
    gelu = both_pruned_output_act == "gelu" and not family.not_foldable
    appended = dict.fromkeys(_blocks_without_both(sites, [*attention, *activation]), "gelu") if gelu else {}
    return Plan(base.arch, base.arch_args, removed=removed, appended=appended)


def _blocks_without_both(sites: tuple[Site, ...], removed: list[Site]) -> list[str]:
    """The blocks that lose the last attention or activation they had, in forward order."""
    left = {site.block for site in sites if site.kind in ("attention", "activation") and site not in removed}
    return [block for _, block in sorted({(site.index, site.block) for site in removed if site.block not in left})]


def _without(activation: Site, gated_ffn: str) -> tuple[str, str]:
    """What to remove for the activation to be gone, and what stands in its place."""
    if activation.gates and gated_ffn == "drop_ffn":
        return activation.gates, "drop"
    return activation.name, gated_ffn if activation.gates else "identity"


def _chosen(sites: tuple[Site, ...], kind: str, numbers: Iterable[int]) -> list[Site]:
    by_block = {site.index: site for site in sites if site.kind == kind}
    wanted = list(dict.fromkeys(numbers))
    if missing := sorted(set(wanted) - set(by_block)):
        raise PlanError(f"no {kind} to remove in block {missing[0]}; blocks that have one: {sorted(by_block)}")
    return [by_block[number] for number in wanted]


Kind = Literal["attention", "activation"]
KINDS: tuple[Kind, ...] = ("attention", "activation")
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


@dataclass(frozen=True, kw_only=True)
class DepthOptions:
    """Options of all methods that remove attentions and activations."""

    pruned_layers: Annotated[int, Ge(1), Doc("number of attentions and activations to remove, both types together")]
    attention_bypass: Bypass = "drop"
    both_pruned_output_act: OutputAct = "none"
    gated_ffn: GatedFfn = "mean_gate"


def layers(model: nn.Module, family: Family) -> dict[Kind, tuple[Site, ...]]:
    """The attentions and the activations that `model` still has, in forward order."""
    sites = family.sites(model)
    return {kind: tuple(site for site in sites if site.kind == kind) for kind in KINDS}


def all_layers(model: nn.Module, family: Family) -> list[Site]:
    """The attentions and then the activations that `model` still has."""
    return [site for group in layers(model, family).values() for site in group]


def in_forward_order(sites: Iterable[Site]) -> list[Site]:
    """By block, in each the attention before the activation."""
    return sorted(sites, key=lambda site: (site.index, site.kind != "attention"))


def check_kinds(family: Family, kinds: Sequence[Kind]) -> None:
    """Raise PlanError when activations are among `kinds` and the family's FFNs are not linear without them."""
    if "activation" in kinds and family.not_foldable:
        raise PlanError(family.not_foldable, hint="remove attentions alone (nose), or prune widths")


def any_layers(model: nn.Module, family: Family, count: int, kinds: Sequence[Kind] = KINDS) -> dict[Kind, list[int]]:
    """`count` layers to look at size and speed before anything is scored: spread over the depth, shared among types.

    Activations get the larger half, and the last layer of each type stays: behind the last attention an exported file
    computes the class token alone, so that without late attentions it is faster than a search is likely to make it.
    Raises PlanError when `count` is more than there is.
    """
    check_kinds(family, kinds)
    found = layers(model, family)
    room = {kind: max(0, len(found[kind]) - 1) for kind in kinds}
    if count > (most := sum(room.values())):
        counts = " and ".join(f"{len(found[kind])} {kind} layers" for kind in kinds)
        raise PlanError(
            f"pruned_layers is {count}, but the model has {counts}, of which {most} may go",
            hint=suggest_range("pruned_layers", 1, most) if most else "prune widths",
        )
    taken = dict.fromkeys(kinds, 0)
    for _ in range(count):
        turn = [kind for kind in kinds if taken[kind] < room[kind]]
        fewest = min(taken[kind] for kind in turn)
        # Of equal ones the last: activations come after attentions.
        taken[[kind for kind in turn if taken[kind] == fewest][-1]] += 1
    return {kind: _spread([site.index for site in found[kind][:-1]], taken[kind]) for kind in kinds}


def _spread(numbers: Sequence[int], count: int) -> list[int]:
    """`count` of the numbers, evenly spread: the middle one of each of `count` equal parts."""
    return [numbers[(2 * part + 1) * len(numbers) // (2 * count)] for part in range(count)]


def delta(model: nn.Module, base: Plan, removed: Mapping[Kind, Iterable[int]], options: DepthOptions) -> Plan:
    """The plan that removes, on top of `base`, the layers of these blocks with the bypass of `options`."""
    return depth_plan(
        model,
        base,
        removed.get("attention", ()),
        removed.get("activation", ()),
        attention_bypass=options.attention_bypass,
        both_pruned_output_act=options.both_pruned_output_act,
        gated_ffn=options.gated_ffn,
    )


def pruned(
    model: nn.Module, context: Context, removed: Mapping[Kind, Iterable[int]], options: DepthOptions
) -> nn.Module:
    """A copy of `model` without these layers; gates stay at their means where the options say so."""
    copy = _with_mean_gates(model, context, removed, options) or deepcopy(model)
    return surgery.apply_plan(copy, delta(copy, context.plan, removed, options))


def _with_mean_gates(
    model: nn.Module, context: Context, removed: Mapping[Kind, Iterable[int]], options: DepthOptions
) -> nn.Module | None:
    """A copy of `model` in which the gates that are to go are constant; None when there are none."""
    gone = set(removed.get("activation", ()))
    ffns = [s.gates for s in layers(model, context.family)["activation"] if s.gates and s.index in gone]
    if not ffns or options.gated_ffn != "mean_gate":
        return None
    copy, means = deepcopy(model), gate_means(model, context)
    for name in ffns:
        freeze_gate(copy.get_submodule(name), means[name])
    return copy


def gate_means(model: nn.Module, context: Context) -> dict[str, Tensor]:
    """Gated FFN -> mean of its gate over the tokens of training images, (hidden,); measured once per step."""
    gates = {site.gates: site.name for site in layers(model, context.family)["activation"] if site.gates}

    def measure() -> dict[str, list[float]]:
        device = context.runtime.device
        copy = deepcopy(model).to(device).eval()
        sums = {ffn: _GateSum(copy.get_submodule(act)) for ffn, act in gates.items()}
        with torch.no_grad():
            for images, _ in training_views(context, GATE_IMAGES):
                copy(images)
        return {ffn: context.runtime.all_sum(s.total).tolist() for ffn, s in sums.items()}

    found = context.memo("gate_means", measure)
    return {ffn: torch.tensor(total[:-1]) / total[-1] for ffn, total in found.items()}


class _GateSum:
    """Sum of a module's output over all tokens, and behind it how many there were: (channels + 1,)."""

    def __init__(self, act: nn.Module) -> None:
        self.total = torch.zeros(1)
        act.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        rows = out.detach().flatten(0, -2).cpu().double()
        self.total = self.total + torch.cat([rows.sum(0), torch.tensor([float(len(rows))])])


def decided(
    model: nn.Module,
    context: Context,
    chosen: Mapping[Kind, Iterable[int]],
    options: DepthOptions,
    *,
    fades: bool = False,
) -> Plan:
    """Record the choice, report it, and return its plan.

    fades: the layers fade out during the recovery, so that their gates need not start as constants.
    """
    removed = {kind: sorted(chosen.get(kind, ())) for kind in KINDS}
    both = sorted(set(removed["attention"]) & set(removed["activation"]))
    # A block that lost both is affine up to its norms: that changes the network, so these blocks are named.
    context.memo("choice", lambda: {**removed, "both": both})
    context.progress.note(
        f"removed: attention of blocks {removed['attention']}, activation of blocks {removed['activation']}"
        + (f" (both in {both})" if both else "")
    )
    if not fades and (frozen := _with_mean_gates(model, context, removed, options)) is not None:
        context.hand_over(frozen)
    return delta(model, context.plan, removed, options)


def gated(
    model: nn.Module, context: Context, sites: Sequence[Site], options: DepthOptions, bypass: Bypass | None = None
) -> GatedModel:
    """A copy of `model` on the run's device with a gate on each of `sites`, bypassed as it will be deployed."""
    copy = deepcopy(model).to(context.runtime.device)
    means = None
    if options.gated_ffn == "mean_gate" and any(site.gates for site in sites):
        means = {ffn: mean.to(context.runtime.device) for ffn, mean in gate_means(model, context).items()}
    return GatedModel(
        copy,
        context.family,
        tuple(sites),
        attention_bypass=bypass or options.attention_bypass,
        both_pruned_output_act=options.both_pruned_output_act,
        gated_ffn=options.gated_ffn,
        gate_means=means,
    )


def macs_after(model: nn.Module, context: Context, options: DepthOptions, attentions: int, activations: int) -> float:
    """Multiply-accumulates of the folded model without the first so many layers of each type."""
    found = layers(model, context.family)
    removed: dict[Kind, list[int]] = {
        kind: [site.index for site in found[kind][:count]]
        for kind, count in zip(KINDS, (attentions, activations), strict=True)
    }
    copy = surgery.apply_to_copy(model, delta(model, context.plan, removed, options))
    surgery.fold_linears(copy, context.plan)
    return float(count_cost(copy, context.input.size).macs)


def kind_of(site: Site) -> Kind:
    """The kind of a site that `layers` gave."""
    return cast(Kind, site.kind)
