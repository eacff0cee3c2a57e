"""Folded against unfolded: each fold by itself against a rigorous bound, all of them together in float64."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from vitcompress import surgery
from vitcompress.families import family_of
from vitcompress.families.base import scale_parameter
from vitcompress.io.checks import Check, compared, largest_difference
from vitcompress.models.checkpoint import load_model_files, read_plan
from vitcompress.plan import Plan
from vitcompress.verify.outputs import agreement_check
from vitcompress.verify.slice import given_steps
from vitcompress.verify.tolerance import fold_excess, in_float64, reference, storage_limit

UNFOLDED, UNFOLDED_PLAN = "state/unfolded.safetensors", "state/unfolded_plan.json"
EXACT_IMAGES = 8  # images that are evaluated in float64 too


def fold_checks(unfolded: nn.Module, folded: nn.Module, names: Iterable[str], images: Tensor) -> list[Check]:
    """Folded against unfolded on `images`, (count, channels, height, width), each folded module alone and all together.

    names: the folded FFNs and LayerScales, as in `Plan.folded`.
    """
    chains = _chains(unfolded, tuple(names))
    few = images[:EXACT_IMAGES]
    truth = reference(unfolded, few)
    inputs = _inputs(unfolded, [chain[0] for chain in chains.values()], few)
    checks = []
    for target, chain in chains.items():
        layers, result = [_layer(unfolded, name) for name in chain], folded.get_submodule(target)
        assert isinstance(result, nn.Linear)
        difference, quotient = fold_excess(layers, result, inputs[chain[0]], folds=len(chain) - 1)
        detail = f"difference over its rounding bound, worst of all outputs; largest difference {difference:.1e}"
        checks.append(compared(f"fold.{target}", quotient, 1.0, detail))
    with in_float64(folded) as wide:
        apart = largest_difference(answers(wide, few), truth.exact)
    stored = storage_limit(folded, {target: len(chain) - 1 for target, chain in chains.items()}, few)
    detail = "largest difference of the logits, float64" if chains else "nothing was folded"
    checks.append(compared("fold", apart, stored + truth.exact_between, detail))
    expected, got = answers(unfolded, images), answers(folded, images)
    checks.append(agreement_check("fold.agreement", expected, got, stored + truth.between))
    return checks


def _chains(unfolded: nn.Module, names: tuple[str, ...]) -> dict[str, list[str]]:
    """Folded linear layer -> the layers of the unfolded model that it stands for, in order of use."""
    family = family_of(unfolded)
    scales = family.scales(unfolded)
    chains: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for name in names:
        if name not in scales and (pair := family.linear_pair(unfolded, name)):
            chains[name] = [pair.first, pair.second]
            owner[pair.second] = name
    for name in names:
        if name in scales:
            before = scales[name]
            chains.setdefault(owner.get(before, before), [before]).append(name)
    return chains


def _layer(model: nn.Module, name: str) -> Tensor | nn.Linear:
    """A member of a chain: a linear layer, or the values of a LayerScale."""
    module = model.get_submodule(name) if name in dict(model.named_modules()) else None
    return module if isinstance(module, nn.Linear) else scale_parameter(model, name)


@torch.no_grad()
def _inputs(model: nn.Module, names: Iterable[str], images: Tensor) -> dict[str, Tensor]:
    """What the named modules are given in a float64 pass: (rows, channels) each."""
    seen = dict[str, Tensor]()
    with ExitStack() as stack:
        exact = stack.enter_context(in_float64(model))
        for name in names:

            def keep(module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                seen[name] = args[0].flatten(0, -2)

            stack.callback(exact.get_submodule(name).register_forward_pre_hook(keep).remove)
        exact(images.double())
    return seen


@torch.no_grad()
def answers(model: nn.Module, images: Tensor) -> Tensor:
    """Logits of `images`, computed in parts and in the model's own precision."""
    model = model.eval()
    return torch.cat([model(part.to(next(model.parameters()).dtype)) for part in torch.split(images, 16)])


def folded_checks(folder: Path, model: nn.Module, plan: Plan, images: Tensor) -> Iterator[Check]:
    """Everything that a run folder says was folded: at its end, and between its steps."""
    if (folder / UNFOLDED).is_file():
        unfolded = load_model_files(folder / UNFOLDED_PLAN, folder / UNFOLDED)
        before = read_plan(folder / UNFOLDED_PLAN)
        yield from fold_checks(unfolded, model, [name for name in plan.folded if name not in before.folded], images)
    else:
        why = "the unfolded weights are not in the folder" if plan.folded else "nothing was folded"
        yield Check("fold", "not_run", detail=why)
    yield from _folding_steps(folder, images)


def _folding_steps(folder: Path, images: Tensor) -> Iterator[Check]:
    """What was folded between the steps, against the model that the step was given."""
    for step in given_steps(folder):
        if step.delta.folded:
            folded = surgery.apply_to_copy(step.model, step.delta).eval()
            whole = surgery.apply_to_copy(step.model, replace(step.delta, folded=())).eval()
            for check in fold_checks(whole, folded, step.delta.folded, images):
                yield replace(check, name=f"{check.name}.{step.name}")
