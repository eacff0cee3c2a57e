"""A compressed model in a folder: plan.json, model.safetensors and, if there is one, the standard timm model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from vitcompress.errors import ArtifactError, PlanError, WeightsError, lines_of
from vitcompress.io.files import parse_plain, read_text, user_path, write_text
from vitcompress.io.hardware import check_device
from vitcompress.io.manifest import check_unchanged, write_manifest
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import read_checkpoint, save_tensors
from vitcompress.models import create
from vitcompress.models.standard import standard_model
from vitcompress.plan import Plan
from vitcompress.surgery import apply_plan

OTHER = "use the folder of a run (other weights: vc.create_model(NAME, weights=FILE), or recipe --weights FILE)"


def write_model(folder: Path, model: nn.Module, plan: Plan) -> None:
    """Write plan and weights, which `load_model` loads, and where the plan names one, the standard model."""
    files = RunFolder(folder)
    if plan.standard:  # for `open_weights`, and `timm.create_model(arch, checkpoint_path=..., **model_args)`
        args = plan.standard["args"]
        stated = {"arch": plan.standard["arch"], **(args.get(create.OVERLAY) or {}), "model_args": args}
        save_tensors(files.standard, standard_model(model, plan).state_dict(), {"args": json.dumps(stated)})
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
        create.check_class_count(classes, model)
        plan = create.name_classes(plan, classes)
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
    model = apply_plan(create.create_on_meta(plan.arch, plan.arch_args), plan)
    if any(buffer.is_meta and name not in tensors for name, buffer in model.named_buffers()):  # not in any file
        model = apply_plan(create.create_model(plan.arch, plan.arch_args), plan)
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


def load_strictly(model: nn.Module, tensors: Mapping[str, Tensor], path: Path, *, assign: bool = True) -> None:
    """Load the `tensors` of `path` into `model`. Raises WeightsError if they do not fit.

    assign: with their data types, as new parameters; False copies them into those of `model`.
    """
    try:
        model.load_state_dict(tensors, strict=True, assign=assign)
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
