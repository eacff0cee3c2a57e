"""A compressed model in a folder: plan.json and model.safetensors, and as a standard timm model (UP-ViT)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitcompress.errors import ArtifactError, PlanError, WeightsError, lines_of
from vitcompress.families import Family, Site, family_of
from vitcompress.io.files import parse_plain, read_text, user_path, write_text
from vitcompress.io.hardware import check_device
from vitcompress.io.manifest import check_unchanged, write_manifest
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import read_checkpoint, save_tensors
from vitcompress.models import create
from vitcompress.plan import Plan, enclosing_module, stage_of
from vitcompress.surgery import apply_to_copy

OTHER = "use the folder of a run (other weights: vc.create_model(NAME, weights=FILE), or recipe --weights FILE)"


@torch.inference_mode(False)  # the copy can be trained, wherever it is created
def prune(model: nn.Module, plan: Plan) -> nn.Module:
    """Apply `plan` to a copy of `model`, whose attribute `plan` then describes the result.

    model: of `create_model`, `load_model`, `prune` or `timm.create_model`. plan: what to remove next. Channels are
    numbered as in `model`, sites and spaces have their dense names.

    Raises:
        PlanError: the plan does not fit the model.
        UnsupportedModelError: no family supports the model.
        InputError: the origin of the model is unknown, see `plan_of`.
    """
    whole = create.plan_of(model).then(plan)
    pruned = apply_to_copy(model, plan)
    pruned.plan = whole  # type: ignore[assignment]
    return pruned


def write_model(folder: Path, model: nn.Module, plan: Plan) -> None:
    """Write plan and weights, which `load_model` loads, and where the plan names one, the standard model."""
    files = RunFolder(folder)
    if plan.standard:  # for `timm.create_model(arch, checkpoint_path=..., **args)`
        standard = standard_model(model, plan)
        metadata = {"arch": plan.standard["arch"], "args": json.dumps(plan.standard["args"])}
        save_tensors(files.standard, standard.state_dict(), metadata)
    save_tensors(files.weights, model.state_dict(), {"plan": plan.digest})
    write_text(files.plan, plan.to_json())


def save_model(model: nn.Module, folder: str | Path, classes: Sequence[str] | None = None) -> None:
    """Write a dense or pruned model with its plan to a new folder.

    `load_model` loads it, and `vitcompress export`, `verify` and `bench` accept the folder. The weights may have been
    trained further; the classifier (`reset_classifier`) and the preprocessing (`pretrained_cfg`) may be new. classes:
    their names, which files contain that are exported from the folder (for `vc.export`, pass them as `class_names`);
    None: those that the model has.

    Raises:
        ArtifactError: the folder is not empty.
        InputError: the model has no plan and is not as timm builds it, see `plan_of`; or `classes` has another length.
        WeightsError: the model was changed in another way, see `current_plan`.
    """
    folder, plan = user_path(folder), create.current_plan(model)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArtifactError(f"{folder} is {'not empty' if folder.is_dir() else 'a file'}", hint="choose a new folder")
    model = create.prepared(model)
    if classes is not None:
        create.check_class_names(classes, model)
        plan = replace(plan, arch_args=create.with_class_names(plan.arch_args, classes))
    write_model(folder, model, plan)
    write_manifest(folder)


@torch.inference_mode(False)
def load_model(folder: str | Path, device: str | torch.device = "cpu") -> nn.Module:
    """Load the model of a run folder (`timm.create_model`, plan and strict weights) in eval mode.

    It is a timm model: `forward_features` and `reset_classifier`, for example, work. `model.plan` is its plan.

    Raises:
        ArtifactError: not a run folder, or the plan or the weights are not as its manifest records.
        PlanError, WeightsError: a damaged file, or plan and weights of different runs.
    """
    files, place = RunFolder(user_path(folder)), check_device(device)
    check_unchanged(files.path, files.plan, files.weights)
    return load_model_files(files.plan, files.weights).to(place)


def load_model_files(plan_path: Path, weights_path: Path) -> nn.Module:
    """`load_model` for a plan and weights in different places."""
    if plan_path.parent.is_file():
        message, folder = f"{plan_path.parent} is a file, not a run folder", plan_path.parent.parent
        raise ArtifactError(message, hint=f"use its folder: {folder}" if RunFolder(folder).plan.is_file() else OTHER)
    for path in (plan_path, weights_path):
        if not path.is_file():
            message = f"{plan_path.parent} is not a finished run folder: {path.name} is missing"
            raise ArtifactError(message, hint=f"run the recipe to its end, or {OTHER}")
    plan = read_plan(plan_path)
    tensors = load_for(weights_path, plan)
    model = create.rebuild(plan, tensors)
    load_strictly(model, tensors, weights_path)
    model.plan = plan  # type: ignore[assignment]
    dtype = next(model.parameters()).dtype
    for buffer in (buffer for name, buffer in model.named_buffers() if name not in tensors):  # rotary embeddings
        buffer.data = buffer.to(dtype if buffer.is_floating_point() else buffer.dtype)
    return model.eval()


def load_for(path: Path, plan: Plan) -> dict[str, Tensor]:
    """Load the safetensors file `path`. Raises PlanError if its metadata name another plan."""
    tensors, _, metadata = read_checkpoint(path, wrapped=False)
    if metadata.get("plan", plan.digest) != plan.digest:
        message = f"{path.parent}: {path.name} was saved with another plan"
        raise PlanError(message, hint="plan.json was edited or belongs to another run; restore it")
    return tensors


def load_strictly(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Load the `tensors` of `path` into `model`. Raises WeightsError if they do not fit."""
    try:
        model.load_state_dict(tensors, strict=True, assign=True)  # assign: keep their data types
    except RuntimeError as error:
        raise WeightsError(f"{path} does not fit its plan: {lines_of(error)[:2][-1]}") from None  # below the headline


def read_plan(path: Path) -> Plan:
    """Read a plan from a JSON file. Raises PlanError if the file is missing or invalid."""
    try:
        parse_plain(json.loads, text := read_text(path))
        return Plan.from_json(text)
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read: {error}") from None
    except PlanError as error:
        raise PlanError(f"{path}: {error.message}", hint=error.hint) from None


@dataclass(frozen=True)
class Block:
    """An attention and the FFN after it, of the same dense block or of two."""

    attention: Site
    ffn: Site

    @property
    def parts(self) -> tuple[str, ...]:
        """The sites to remove: the dense block, or the two parts."""
        same = self.attention.block == self.ffn.block
        return (self.attention.block,) if same else (self.attention.name, self.ffn.name)


def standard_blocks(model: nn.Module, family: Family) -> dict[str, list[Block]]:
    """Stage -> its blocks in order; a hybrid of an earlier step is one block.

    Raises PlanError if attentions and FFNs do not alternate, because an earlier step removed one of them alone.
    """
    parts: dict[str, list[Site]] = {stage_of(path): [] for path in family.blocks(model)}
    for site in family.sites(model):
        if site.kind in ("attention", "ffn"):
            parts[stage_of(site.block)].append(site)
    for stage, sites in parts.items():
        if [site.kind for site in sites] != ["attention", "ffn"] * (len(sites) // 2):
            message = f"the attentions and FFNs in {stage} do not alternate, so they form no standard blocks"
            raise PlanError(message, hint="prune blocks before a step that removes attentions or FFNs alone")
    return {stage: list(map(Block, sites[::2], sites[1::2])) for stage, sites in parts.items()}


def standard_model(model: nn.Module, plan: Plan) -> nn.Module:
    """The timm model of `plan.standard` with the weights of `model`: it computes the same, and loads without a plan.

    An attention-only block and the FFN-only block after it become one block, and blocks are renumbered. Where heads
    became narrower, the dense softmax scale is multiplied into the weights of q, because the standard model uses the
    scale of its own heads.

    Raises PlanError if the weights do not fit that model, and as `standard_blocks`.
    """
    arch, args = plan.standard["arch"], plan.standard["args"]
    standard = create.create_model(arch, args).to(next(model.parameters()).dtype)
    family = family_of(model)
    prefixes: dict[str, str] = {}  # path of each block -> path of the standard block that contains it
    for stage, blocks in standard_blocks(model, family).items():
        for number, block in enumerate(blocks):
            prefixes |= dict.fromkeys((block.attention.block, block.ffn.block), f"{stage}.{number}")

    def rename(name: str) -> str:
        path = enclosing_module(name, prefixes)
        return name if path is None else prefixes[path] + name.removeprefix(path)

    state = {rename(name): tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for space in (space for space in family.spaces(model) if space.kind == "qk"):
        attention: Any = model.get_submodule(space.attention)
        target: Any = standard.get_submodule(rename(f"{space.attention}.").rstrip("."))
        q = space.axes[0]
        for axis in space.axes:
            if axis.owner == q.owner and attention.scale != target.scale:
                state[rename(axis.tensor)][q.offset : q.offset + space.size] *= attention.scale / target.scale
    try:
        standard.load_state_dict(state, strict=True)
    except RuntimeError as error:
        message = f"the model does not load as {arch}: {lines_of(error)[:2][-1]}"
        raise PlanError(message, hint="remove the steps that change more than widths and whole blocks") from None
    return standard.eval()
