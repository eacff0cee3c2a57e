"""Plans from block numbers, as depth pruning papers give them."""

from collections.abc import Iterable

from torch import nn

from vitcompress.errors import PlanError
from vitcompress.families import Site, family_of
from vitcompress.plan import Plan, check_bypasses


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
