"""A compressed model with the sizes of a model that timm knows, as that model: no plan is needed to load it.

UP-ViT cuts a model down to the sizes of a standard one. What is left to do: an attention-only block and the FFN-only
block after it become one block, blocks are renumbered, and where heads became narrower the dense softmax scale goes
into the weights of q, since the standard model computes with the scale of its own heads.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitcompress.errors import PlanError
from vitcompress.families import Family, family_of
from vitcompress.io.tensors import save_tensors
from vitcompress.models.checkpoint import first_mismatch
from vitcompress.models.create import create_model
from vitcompress.plan import Plan, enclosing_module

WEIGHTS = "standard.safetensors"


def standard_model(model: nn.Module, plan: Plan) -> nn.Module:
    """The timm model that `plan.standard` names, with the weights of `model`; it computes what `model` does.

    Raises:
        PlanError: the weights do not load strictly into that model.
    """
    arch, args = plan.standard["arch"], plan.standard["args"]
    found = create_model(arch, args).to(next(model.parameters()).dtype)
    try:
        found.load_state_dict(standard_state(model, found), strict=True)
    except RuntimeError as error:
        raise PlanError(
            f"the model does not load as {arch}: {first_mismatch(error)}",
            hint="leave out the steps that change more than widths and whole blocks",
        ) from None
    return found.eval()


def standard_state(model: nn.Module, like: nn.Module) -> dict[str, Tensor]:
    """The weights of `model` under the names of `like`, the model that they are for.

    Raises:
        PlanError: a block lacks its attention or its FFN, and no neighbour makes up for it.
    """
    family = family_of(model)
    renamed = _renamed(model, family)
    state = {renamed(name): tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for space in family.spaces(model):
        if space.kind != "qk":
            continue
        attention: Any = model.get_submodule(space.attention)
        standard: Any = like.get_submodule(renamed(f"{space.attention}.").rstrip("."))
        if attention.scale == standard.scale:
            continue
        q = space.axes[0].tensor.rpartition(".")[0]
        rows = slice(space.axes[0].offset, space.axes[0].offset + space.size)
        for axis in space.axes:
            if axis.tensor.rpartition(".")[0] == q:
                state[renamed(axis.tensor)][rows] *= attention.scale / standard.scale
    return state


def _renamed(model: nn.Module, family: Family) -> Callable[[str], str]:
    """A function from parameter names of `model` to those of the standard model."""
    prefixes = _prefixes(model, family)

    def rename(name: str) -> str:
        path = enclosing_module(name, prefixes)
        return name if path is None else prefixes[path] + name.removeprefix(path)

    return rename


def _prefixes(model: nn.Module, family: Family) -> dict[str, str]:
    """Path of each block -> path of the standard block that it is, or is a part of."""
    needed = {family.wiring.attention, family.wiring.ffn}
    found: dict[str, str] = {}
    done: dict[str, int] = {}
    open_parts: dict[str, set[str]] = {}
    for path, block in family.blocks(model).items():
        stage = path.rpartition(".")[0]
        parts = needed & {name for name, _ in block.named_children()}
        waiting = open_parts.get(stage, set())
        starts = family.wiring.attention in parts
        if starts == bool(waiting):  # an attention opens a standard block, which its FFN must complete first
            raise PlanError(f"{path} is no standard block, and its neighbour does not complete it")
        found[path] = f"{stage}.{done.get(stage, 0)}"
        open_parts[stage] = waiting | parts
        if open_parts[stage] == needed:
            done[stage], open_parts[stage] = done.get(stage, 0) + 1, set()
    if unfinished := [stage for stage, parts in open_parts.items() if parts]:
        raise PlanError(f"the last block of {unfinished[0]} has lost its FFN")
    return found


def save_standard(folder: Path, model: nn.Module, plan: Plan) -> None:
    """Write the weights as `timm.create_model(arch, checkpoint_path=..., **args)` loads them.

    Raises:
        PlanError: see `standard_model`.
    """
    state = standard_model(model, plan).state_dict()
    save_tensors(folder / WEIGHTS, state, {"arch": plan.standard["arch"], "args": json.dumps(plan.standard["args"])})
