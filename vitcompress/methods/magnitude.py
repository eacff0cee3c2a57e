"""Magnitude head pruning, a baseline without data: keep the heads with the largest weights in every attention.

The score of a head is the sum of w^2 over the weights that write and read its values (v and the output projection).
"""

from dataclasses import replace

import torch

from vitcompress.errors import PlanError
from vitcompress.families import Family, Space
from vitcompress.methods.base import Context, Method
from vitcompress.methods.latency import check_target
from vitcompress.methods.options import MagnitudeOptions as Options
from vitcompress.methods.scores import Scores, channel_scores
from vitcompress.plan import Plan


def plan(model: torch.nn.Module, context: Context, options: Options) -> Plan:
    spaces = context.family.spaces(model)
    context.progress.stage("score heads by the magnitude of their weights")
    return _keep(spaces, context.plan, options, channel_scores(model, spaces, lambda name, weight: weight.square()))


def structure(model: torch.nn.Module, family: Family, base: Plan, options: Options) -> Plan:
    spaces = family.spaces(model)  # without weights to rank by, the first heads are kept
    return _keep(spaces, base, options, {space.name: -torch.arange(space.size) for space in spaces})


def _keep(spaces: tuple[Space, ...], base: Plan, options: Options, scores: Scores) -> Plan:
    check_target(options)
    kept, heads = {}, {}
    for v in (space for space in spaces if space.kind == "v"):
        if (count := max(1, round(options.keep_heads * v.heads))) < v.heads:
            best = sorted(scores[v.name].view(v.heads, -1).sum(1).topk(count).indices.tolist())
            heads[v.attention] = count
            for space in (space for space in spaces if space.attention == v.attention):
                kept[space.name] = tuple(torch.arange(space.size).view(space.heads, -1)[best].flatten().tolist())
    if not heads:
        raise PlanError(f"keep_heads = {options.keep_heads:g} removes no head of this model", hint="lower keep_heads")
    return base.delta(kept=kept, heads=heads)


def resize(options: Options, model: torch.nn.Module, family: Family, strength: float) -> Options:
    return replace(options, keep_heads=1 - strength)


MAGNITUDE = Method(
    "magnitude", "heads with the smallest weights, without data", Options, plan, structure, resize=resize
)
