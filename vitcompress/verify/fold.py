"""Compare folded models with unfolded ones: each fold with a rigorous bound, all folds together in float64."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from operator import attrgetter

import torch
from torch import Tensor, nn

from vitcompress import surgery
from vitcompress.families import family_of, scale_parameter
from vitcompress.io.checks import Check, largest_difference, limit_check
from vitcompress.io.run_folder import RunFolder
from vitcompress.models.checkpoint import load_model_files, read_plan
from vitcompress.plan import Plan
from vitcompress.verify.outputs import agreement_check
from vitcompress.verify.slice import load_steps
from vitcompress.verify.tolerance import exact_logits, fold_excess, in_float64, model_logits, pair_limits, storage_limit

EXACT_IMAGES = 8  # images that are evaluated in float64


def fold_checks(unfolded: nn.Module, folded: nn.Module, names: Iterable[str], images: Tensor) -> list[Check]:
    """Compare a folded model with the unfolded one on `images`, (count, channels, height, width).

    names: the folded FFNs and LayerScales, as in `Plan.folded`. Each fold has a check of its own; `fold` and
    `fold.agreement` compare the logits of the models.
    """
    chains, few = _chains(unfolded, tuple(names)), images[:EXACT_IMAGES]
    between, exact_between = pair_limits(unfolded, few)
    inputs = _inputs(unfolded, [chain[0] for chain in chains.values()], few)
    checks = []
    for target, chain in chains.items():
        layers, result = [_layer(unfolded, name) for name in chain], folded.get_submodule(target)
        assert isinstance(result, nn.Linear)
        difference, quotient = fold_excess(layers, result, inputs[chain[0]], folds=len(chain) - 1)
        detail = f"difference over its rounding bound, worst of all outputs; largest difference {difference:.1e}"
        checks.append(limit_check(f"fold.{target}", quotient, 1.0, detail))
    difference = largest_difference(exact_logits(folded, few), exact_logits(unfolded, few))
    stored = storage_limit(folded, {target: len(chain) - 1 for target, chain in chains.items()}, few)
    detail = "largest difference of the logits, float64" if chains else "nothing was folded"
    checks.append(limit_check("fold", difference, stored + exact_between, detail))
    before, after = model_logits(unfolded, images), model_logits(folded, images)
    return [*checks, agreement_check("fold.agreement", before, after, stored + between)]


def _chains(unfolded: nn.Module, names: tuple[str, ...]) -> dict[str, list[str]]:
    """Folded linear layer -> the layers of the unfolded model that it replaces, in order of use."""
    family, scales = family_of(unfolded), family_of(unfolded).scales(unfolded)
    chains, owner = dict[str, list[str]](), dict[str, str]()
    for name in names:
        if name not in scales and (pair := family.linear_pair(unfolded, name)):
            chains[name] = list(pair)
            owner[pair[1]] = name
    for name in names:
        if name in scales:
            before = scales[name]
            chains.setdefault(owner.get(before, before), [before]).append(name)
    return chains


def _layer(model: nn.Module, name: str) -> Tensor | nn.Linear:
    """A layer of a chain: a linear layer, or the values of a LayerScale."""
    part = attrgetter(name)(model)
    return part if isinstance(part, nn.Linear) else scale_parameter(model, name)


@torch.no_grad()
def _inputs(model: nn.Module, names: Iterable[str], images: Tensor) -> dict[str, Tensor]:
    """The inputs of the named modules in a float64 pass: (rows, channels) each."""
    inputs = dict[str, Tensor]()
    with in_float64(model) as exact, ExitStack() as stack:
        for name in names:
            layer = exact.get_submodule(name)
            hook = layer.register_forward_pre_hook(lambda _, x, name=name: inputs.update({name: x[0].flatten(0, -2)}))
            stack.callback(hook.remove)
        exact(images.double())
    return inputs


def fold_folder_checks(files: RunFolder, model: nn.Module, plan: Plan, images: Tensor) -> Iterator[Check]:
    """Check all folds of a run: those of the deployed `model`, and those between pruning steps."""
    if files.unfolded.is_file():
        if files.unquantized.is_file():  # the weights of the folds, before more training
            model = load_model_files(files.plan, files.unquantized)
        unfolded, before = load_model_files(files.unfolded_plan, files.unfolded), read_plan(files.unfolded_plan)
        yield from fold_checks(unfolded, model, [name for name in plan.folded if name not in before.folded], images)
    else:
        detail = "the unfolded weights are not in the folder" if plan.folded else "nothing was folded"
        yield Check("fold", "not_run", detail=detail, applies=bool(plan.folded))
    for step in load_steps(files):
        if step.delta.folded:
            folded = surgery.apply_to_copy(step.model, step.delta).eval()
            whole = surgery.apply_to_copy(step.model, replace(step.delta, folded=())).eval()
            for check in fold_checks(whole, folded, step.delta.folded, images):
                yield replace(check, name=f"{check.name}.{step.name}")
