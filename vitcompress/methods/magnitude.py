"""Magnitude head pruning, a baseline without data: keep the heads with the largest weights in every attention.

The score of a head is the sum of w^2 over the weights that write and read its values (v and the output projection).
"""

from dataclasses import replace

import torch

from vitcompress.errors import PlanError
from vitcompress.families import Family
from vitcompress.methods.base import Context, Method
from vitcompress.methods.budget import Group
from vitcompress.methods.options import MagnitudeOptions as Options
from vitcompress.methods.scores import Scores, channel_scores
from vitcompress.methods.width import Candidates
from vitcompress.plan import Plan


def plan(model: torch.nn.Module, context: Context, options: Options) -> Plan:
    context.progress.stage("score heads by the magnitude of their weights")
    scores = channel_scores(model, context.family.spaces(model), lambda name, weight: weight.square())
    return _keep(model, context.family, context.plan, options, scores)


def structure(model: torch.nn.Module, family: Family, base: Plan, options: Options) -> Plan:
    scores = {space.name: -torch.arange(space.size) for space in family.spaces(model)}  # keeps the first heads
    return _keep(model, family, base, options, scores)


def _keep(model: torch.nn.Module, family: Family, base: Plan, options: Options, scores: Scores) -> Plan:
    spaces = family.spaces(model)
    values = [space for space in spaces if space.kind == "v"]
    groups = [Group(v.attention, "head", scores[v.name].view(v.heads, -1).sum(1), "") for v in values]
    counts = {group.name: max(1, round(options.keep_heads * group.size)) for group in groups}
    if all(counts[group.name] == group.size for group in groups):
        several = any(group.size > 1 for group in groups)
        hint = "lower keep_heads" if several else "use isomorphic: the only head of an attention stays"
        raise PlanError(f"keep_heads = {options.keep_heads:g} removes no head of this model", hint=hint)
    return Candidates(model, spaces, groups, base).delta(counts)


def resize(options: Options, model: torch.nn.Module, family: Family, strength: float) -> Options:
    return replace(options, keep_heads=1 - strength)


SUMMARY = "heads with the smallest weights, without data"
MAGNITUDE = Method("magnitude", SUMMARY, Options, plan, structure, resize=resize)
