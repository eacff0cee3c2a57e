"""A pruned and folded model, and the checks of a file with its weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from contracts import build, contract, having, kept_channels
from layer_plans import depth_plan
from torch import nn

from vitcompress import surgery
from vitcompress.errors import ArtifactError
from vitcompress.families import family_of
from vitcompress.io.checks import Check
from vitcompress.plan import Plan
from vitcompress.verify.files import contents_of
from vitcompress.verify.outputs import PlannedOriginal
from vitcompress.verify.weights import compare_tensors


def pruned(variant: str, **args: Any) -> tuple[nn.Module, nn.Module, Plan]:
    """A dense model, the same model without an attention, an activation and some channels, folded, and its plan."""
    dense = build(variant, dtype=torch.float32, **args)
    base = contract(variant, **args).plan
    acts = [] if family_of(dense).not_foldable(dense) else having(dense, "activation", [1])
    plan = base.then(depth_plan(dense, base, having(dense, "attention", [0]), acts))
    plan = replace(plan, kept=kept_channels(surgery.apply_to_copy(dense, plan), {"mlp", "v"}))
    model = surgery.apply_to_copy(dense, plan)
    return dense, model, surgery.fold_linears(model, plan)[0]


def check_weights(model: nn.Module, path: Path) -> Check:
    """The weight check of one file."""
    try:
        contents = contents_of(path)
        assert contents is not None
        original = PlannedOriginal(model, torch.empty(0), plan=pruned("layer_scale")[2])
        return compare_tensors(model, contents, original.rows).check("weights")
    except ArtifactError as error:
        return Check("weights", "failed", detail=error.message)
