"""Does a sliced model compute what the masked one did? Asked of every step that took channels away.

The run keeps each such model as it was just before (`keep_given`), with the weights of that moment. Channel
gates on it (forward hooks that know nothing of slicing) must give what the model that surgery sliced gives.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from vitcompress import surgery
from vitcompress.families import Space, family_of
from vitcompress.io.checks import Check, compared, largest_difference, listed
from vitcompress.io.files import write_text
from vitcompress.io.tensors import save_tensors
from vitcompress.models.checkpoint import PLAN, load_model_files, read_plan
from vitcompress.plan import Plan
from vitcompress.surgery.masks import channel_gates
from vitcompress.verify.tolerance import reference

GIVEN, GIVEN_PLAN = "given.safetensors", "given_plan.json"
STEPS = "state/step-*"


@dataclass(frozen=True)
class GivenStep:
    """A step of a run: the model that it was given, what made that of the dense one, and what the step adds."""

    name: str
    model: nn.Module
    base: Plan
    delta: Plan


def keep_given(folder: Path, model: nn.Module, plan: Plan) -> None:
    """Keep in a step's `folder` the model that its plan is about to slice or fold, once. plan: what makes `model`."""
    if not (folder / GIVEN_PLAN).is_file():
        save_tensors(folder / GIVEN, model.state_dict(), {"plan": plan.digest})
        write_text(folder / GIVEN_PLAN, plan.to_json())


def given_steps(folder: Path) -> Iterator[GivenStep]:
    """The steps of the run `folder` that sliced or folded, one at a time as they are large."""
    for step in sorted(folder.glob(STEPS)):
        if (step / GIVEN_PLAN).is_file():
            model = load_model_files(step / GIVEN_PLAN, step / GIVEN)
            base, delta = (read_plan(step / name) for name in (GIVEN_PLAN, PLAN))
            yield GivenStep(step.name, model, base, delta)


def slice_check(model: nn.Module, delta: Plan, images: Tensor, name: str = "slice") -> Check:
    """`delta` carried out by slicing `model` against the same by masks, on `images`, (count, channels, height, width).

    Nothing is rounded by slicing, so in float64 both may differ by as much as that precision makes of the same sums in
    another order. Heads that are regrouped have no mask: both sides get them by slicing, the rest is compared.
    """
    regrouped = _regrouped(model, delta)
    told = ""
    if regrouped:
        told = (
            f"the heads of {', '.join(regrouped)} are regrouped, which changes the function: no mask computes the same"
        )
        model, delta = _with_new_heads(model, delta, regrouped)
        if not delta.kept:
            return Check(name, "not_run", detail=told)
    sliced = surgery.apply_to_copy(model, replace(delta, folded=()))
    masked = surgery.apply_to_copy(model, replace(delta, kept={}, heads={}, padded=(), folded=())).double().eval()
    truth = reference(sliced.eval(), images)
    with torch.no_grad():
        before = masked(images.double())
        with channel_gates(masked, family_of(masked), _gates(masked, delta)):
            expected = masked(images.double())
    detail = (
        f"largest difference of the logits of masked and sliced, float64, {len(delta.kept)} spaces; the masks alone "
        f"move them by {largest_difference(before, expected):.1e}" + (f"; left out: {told}" if told else "")
    )
    return compared(name, largest_difference(truth.exact, expected), truth.exact_between, detail)


def slice_checks(folder: Path, plan: Plan, images: Tensor) -> list[Check]:
    """One check for each step of the run `folder` that sliced, with what the run kept of it, and one that what the
    steps kept is what `plan`, that of the deployed model, keeps.
    """
    checks: list[Check] = []
    kept: dict[str, tuple[int, ...]] = {}
    for step in given_steps(folder):
        if step.delta.kept:
            kept |= step.base.then(step.delta).kept
            checks.append(slice_check(step.model, step.delta, images, f"slice.{step.name}"))
    if not checks:
        return [Check("slice", "not_run", detail="the folder does not hold the models as they were before slicing")]
    if len(checks) == 1:
        checks = [replace(checks[0], name="slice")]
    wrong = [name for name, channels in plan.kept.items() if kept.get(name) != channels]
    return [*checks, listed("slice.plan", wrong, f"{len(plan.kept)} spaces keep what the steps kept of them")]


def _gates(model: nn.Module, delta: Plan) -> dict[str, Tensor]:
    gates = {}
    for space in family_of(model).spaces(model):
        if space.name in delta.kept:
            gate = torch.zeros(space.size, dtype=torch.float64)
            gate[list(delta.kept[space.name])] = 1.0
            gates[space.name] = gate
    return gates


def _with_new_heads(model: nn.Module, delta: Plan, attentions: list[str]) -> tuple[nn.Module, Plan]:
    """`model` after what `delta` does to these attentions, and the rest of `delta`."""
    own = {space.name for space in family_of(model).spaces(model) if space.attention in attentions}
    kept = [{n: c for n, c in delta.kept.items() if (n in own) == inside} for inside in (True, False)]
    heads = [{n: c for n, c in delta.heads.items() if (n in attentions) == inside} for inside in (True, False)]
    first = Plan(delta.arch, delta.arch_args, kept=kept[0], heads=heads[0])
    return surgery.apply_to_copy(model, first), replace(delta, kept=kept[1], heads=heads[1])


def _regrouped(model: nn.Module, delta: Plan) -> list[str]:
    """The attentions whose new heads are not each a part of one old head, the same for q, k and v."""
    regrouped = []
    owners: dict[str, list[list[set[int]]]] = {}
    for space in family_of(model).spaces(model):
        if space.attention:
            owners.setdefault(space.attention, []).append(_owners(space, delta))
    for attention, found in owners.items():
        first = found[0]
        mixed = any(other != first for other in found) or any(len(old) > 1 for old in first)
        if mixed or len({old for heads in first for old in heads}) < len(first):
            regrouped.append(attention)
    return regrouped


def _owners(space: Space, delta: Plan) -> list[set[int]]:
    """For each head that is left, the old heads that its channels come from."""
    kept = delta.kept.get(space.name, tuple(range(space.size)))
    width = len(kept) // delta.heads.get(space.attention, space.heads)
    old = space.size // space.heads
    return [{channel // old for channel in kept[start : start + width]} for start in range(0, len(kept), width)]
