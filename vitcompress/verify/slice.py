"""Compare sliced models with masked ones, for every pruning step that removed channels.

The run keeps the model that each such step started from (`keep_step_input`). Channel masks on that model, forward hooks
that share no code with slicing, must give the outputs of the sliced model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from vitcompress import surgery
from vitcompress.families import Space, family_of
from vitcompress.io.checks import Check, largest_difference, limit_check, problem_check
from vitcompress.io.files import write_text
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import save_tensors
from vitcompress.models.checkpoint import load_model_files, read_plan
from vitcompress.plan import Plan
from vitcompress.surgery.masks import mask_channels
from vitcompress.verify.tolerance import exact_logits, pair_limits


@dataclass(frozen=True)
class Step:
    """A pruning step: the model that it started from, the plan of that model, and what the step adds to the plan."""

    name: str
    model: nn.Module
    base: Plan
    delta: Plan


def keep_step_input(folder: Path, model: nn.Module, plan: Plan) -> None:
    """Keep in a step's `folder` the model that the step slices or folds, once. plan: the plan of `model`."""
    files = RunFolder(folder)
    if not files.step_input_plan.is_file():
        save_tensors(files.step_input, model.state_dict(), {"plan": plan.digest})
        write_text(files.step_input_plan, plan.to_json())


def load_steps(files: RunFolder) -> Iterator[Step]:
    """The steps of a run that sliced or folded, one at a time because they are large."""
    for folder in files.steps():
        step = RunFolder(folder)
        if step.step_input_plan.is_file():
            model = load_model_files(step.step_input_plan, step.step_input)
            yield Step(folder.name, model, read_plan(step.step_input_plan), read_plan(step.plan))


def slice_check(model: nn.Module, delta: Plan, images: Tensor, name: str = "slice") -> Check:
    """Compare slicing `model` by `delta` with masking it, on `images`, (count, channels, height, width).

    Slicing rounds nothing, so in float64 the outputs differ only because sums are evaluated in another order. Regrouped
    heads have no mask: both models get them by slicing, and the other channels are compared.
    """
    regrouped, note = _regrouped(model, delta), ""
    if regrouped:
        note = f"the heads of {', '.join(regrouped)} are regrouped, which changes the function: no mask computes it"
        model, delta = _with_new_heads(model, delta, regrouped)
        if not delta.kept:
            return Check(name, "not_run", detail=note)
    sliced = surgery.apply_to_copy(model, replace(delta, folded=()))
    masked = surgery.apply_to_copy(model, replace(delta, kept={}, heads={}, padded=(), folded=())).double().eval()
    _, tolerance = pair_limits(sliced.eval(), images)
    with torch.no_grad():
        before = masked(images.double())
        with mask_channels(masked, _masks(masked, delta)):
            expected = masked(images.double())
    alone = f"the masks alone change them by {largest_difference(before, expected):.1e}"
    alone += f"; omitted: {note}" if note else ""
    detail = f"largest difference of the logits of masked and sliced, float64, {len(delta.kept)} spaces; {alone}"
    return limit_check(name, largest_difference(exact_logits(sliced, images), expected), tolerance, detail)


def slice_folder_checks(files: RunFolder, plan: Plan, images: Tensor) -> list[Check]:
    """One check for each step of a run that sliced, and one that the deployed `plan` keeps their channels."""
    if not plan.kept:
        return [Check("slice", "not_run", detail="the plan keeps every channel", applies=False)]
    checks: list[Check] = []
    kept: dict[str, tuple[int, ...]] = {}
    for step in load_steps(files):
        if step.delta.kept:
            kept |= step.base.then(step.delta).kept
            checks.append(slice_check(step.model, step.delta, images, f"slice.{step.name}"))
    if not checks:
        return [Check("slice", "not_run", detail="the folder does not have the models before slicing")]
    if len(checks) == 1:
        checks = [replace(checks[0], name="slice")]
    wrong = [name for name, channels in plan.kept.items() if kept.get(name) != channels]
    return [*checks, problem_check("slice.plan", wrong, f"{len(plan.kept)} spaces keep the channels of the steps")]


def _masks(model: nn.Module, delta: Plan) -> dict[Space, Tensor]:
    """1 for each channel that is kept, 0 for the others, by space: (channels,)."""
    spaces = (space for space in family_of(model).spaces(model) if space.name in delta.kept)
    return {s: torch.zeros(s.size).double().index_fill(0, torch.tensor(delta.kept[s.name]), 1.0) for s in spaces}


def _with_new_heads(model: nn.Module, delta: Plan, attentions: list[str]) -> tuple[nn.Module, Plan]:
    """`model` with the new heads of these attentions, and the rest of `delta`."""
    spaces = {space.name for space in family_of(model).spaces(model) if space.attention in attentions}
    kept = {name: channels for name, channels in delta.kept.items() if name in spaces}
    heads = {name: count for name, count in delta.heads.items() if name in attentions}
    other_kept = {name: channels for name, channels in delta.kept.items() if name not in kept}
    other_heads = {name: count for name, count in delta.heads.items() if name not in heads}
    regrouped = surgery.apply_to_copy(model, delta.delta(kept=kept, heads=heads))
    return regrouped, replace(delta, kept=other_kept, heads=other_heads)


def _regrouped(model: nn.Module, delta: Plan) -> list[str]:
    """The attentions whose new heads are not each a part of one old head, the same for q, k and v."""
    owners: dict[str, list[list[set[int]]]] = {}  # attention -> for its qk and its v: `_owners`
    for space in family_of(model).spaces(model):
        if space.attention:
            owners.setdefault(space.attention, []).append(_owners(space, delta))
    regrouped = []
    for attention, (first, *others) in owners.items():
        single = len(set[int]().union(*first)) == len(first) and all(len(old) == 1 for old in first)
        if not single or any(other != first for other in others):
            regrouped.append(attention)
    return regrouped


def _owners(space: Space, delta: Plan) -> list[set[int]]:
    """For each new head, the old heads that its channels belong to."""
    kept = delta.kept.get(space.name, tuple(range(space.size)))
    width = len(kept) // delta.heads.get(space.attention, space.heads)
    old = space.size // space.heads
    return [{channel // old for channel in kept[start : start + width]} for start in range(0, len(kept), width)]
