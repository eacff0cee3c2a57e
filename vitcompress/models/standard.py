"""A compressed model with the sizes of a standard timm model, as that model: it loads without a plan (UP-ViT).

An attention-only block and the FFN-only block after it become one block, and blocks are renumbered. Where heads became
narrower, the dense softmax scale is multiplied into the weights of q, because the standard model uses the scale of its
own heads.
"""

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitcompress.errors import PlanError
from vitcompress.families import Family, family_of
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import save_tensors
from vitcompress.models.checkpoint import first_mismatch
from vitcompress.models.create import create_model
from vitcompress.plan import Plan, enclosing_module


def standard_model(model: nn.Module, plan: Plan) -> nn.Module:
    """The timm model of `plan.standard` with the weights of `model`; it computes the same function.

    Raises PlanError if the weights do not fit that model, or a block lacks an attention or FFN that its neighbour does
    not complete.
    """
    arch, args = plan.standard["arch"], plan.standard["args"]
    standard = create_model(arch, args).to(next(model.parameters()).dtype)
    try:
        standard.load_state_dict(_standard_state(model, standard), strict=True)
    except RuntimeError as error:
        message = f"the model does not load as {arch}: {first_mismatch(error)}"
        raise PlanError(message, hint="remove the steps that change more than widths and whole blocks") from None
    return standard.eval()


def _standard_state(model: nn.Module, standard: nn.Module) -> dict[str, Tensor]:
    """The weights of `model` with the names of the model `standard`."""
    family = family_of(model)
    prefixes = _standard_paths(model, family)

    def rename(name: str) -> str:
        path = enclosing_module(name, prefixes)
        return name if path is None else prefixes[path] + name.removeprefix(path)

    state = {rename(name): tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for space in family.spaces(model):
        if space.kind != "qk":
            continue
        attention: Any = model.get_submodule(space.attention)
        target: Any = standard.get_submodule(rename(f"{space.attention}.").rstrip("."))
        q = space.axes[0]
        rows = slice(q.offset, q.offset + space.size)
        for axis in space.axes:
            if axis.owner == q.owner and attention.scale != target.scale:
                state[rename(axis.tensor)][rows] *= attention.scale / target.scale
    return state


def _standard_paths(model: nn.Module, family: Family) -> dict[str, str]:
    """Path of each block -> path of the standard block that contains it."""
    paths: dict[str, str] = {}
    counts: dict[str, list[int]] = {}  # stage -> attentions and FFNs so far
    for path, block in family.blocks(model).items():
        stage = path.rpartition(".")[0]
        count = counts.setdefault(stage, [0, 0])
        attention, ffn = (hasattr(block, name) for name in (family.wiring.attention, family.wiring.ffn))
        if attention == (count[0] > count[1]):  # an attention opens a standard block, which its FFN completes first
            raise PlanError(f"{path} is no standard block, and its neighbour does not complete it")
        count[0] += attention
        paths[path] = f"{stage}.{count[0] - 1}"
        count[1] += ffn
    if unfinished := [stage for stage, (attentions, ffns) in counts.items() if attentions > ffns]:
        raise PlanError(f"the last block of {unfinished[0]} has no FFN")
    return paths


def save_standard(folder: Path, model: nn.Module, plan: Plan) -> None:
    """Write the weights so that `timm.create_model(arch, checkpoint_path=..., **args)` loads them. Raises PlanError."""
    standard = standard_model(model, plan)
    metadata = {"arch": plan.standard["arch"], "args": json.dumps(plan.standard["args"])}
    save_tensors(RunFolder(folder).standard, family_of(standard).timm_state(standard), metadata)
