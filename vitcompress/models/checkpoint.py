"""A compressed model in a folder: plan.json and model.safetensors."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from vitcompress.errors import ArtifactError, PlanError, WeightsError
from vitcompress.io.files import write_text
from vitcompress.io.tensors import load_tensors, save_tensors
from vitcompress.models.create import create_model, create_on_meta
from vitcompress.plan import Plan
from vitcompress.surgery import apply_plan

PLAN, WEIGHTS = "plan.json", "model.safetensors"


def write_model(folder: Path, model: nn.Module, plan: Plan) -> None:
    """Write plan.json and model.safetensors; `load` gives the model back."""
    save_tensors(folder / WEIGHTS, model.state_dict(), {"plan": plan.digest})
    write_text(folder / PLAN, plan.to_json())


def save_model(model: nn.Module, folder: str | Path) -> None:
    """Write a model that `load` gave, and that was trained further since, to a folder of its own.

    `load` gives it back, and `vitcompress export`, `verify` and `bench` take the folder. The classifier may be another
    than it was (`reset_classifier`).

    Raises:
        ArtifactError: the folder is not empty, or the model has no plan.
        WeightsError: its weights are not those of its plan, as something else was changed.
    """
    folder, plan = Path(folder), getattr(model, "plan", None)
    if not isinstance(plan, Plan):
        raise ArtifactError("the model has no plan", hint="save a model that vitcompress.load gave")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArtifactError(f"{folder} is not empty", hint="name a new folder, exports of other weights may lie there")
    weights, classes = model.state_dict(), getattr(model, "num_classes", None)
    blank = _planned(plan, weights)
    if classes != getattr(blank, "num_classes", None):
        plan = replace(plan, arch_args={**plan.arch_args, "num_classes": classes})
        blank = _planned(plan, weights)
    load_strictly(blank, weights, folder / WEIGHTS)
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder, model, plan)


def load_model(folder: str | Path, device: str | torch.device = "cpu") -> nn.Module:
    """The model of a run folder: `timm.create_model` + plan + strict weights, in eval mode.

    The result is a timm model: `forward_features`, `forward_intermediates` and `reset_classifier` work. Its plan is in
    `model.plan`.

    Raises:
        ArtifactError: not a run folder, or weights and plan of different runs.
        PlanError, WeightsError: a damaged part.
    """
    return load_model_files(Path(folder) / PLAN, Path(folder) / WEIGHTS).to(device)


def load_model_files(plan_path: Path, weights_path: Path) -> nn.Module:
    """`load` for a plan and weights that lie apart."""
    if plan_path.parent.is_file():
        raise ArtifactError(
            f"{plan_path.parent} is a file, a run folder is needed", hint=f"name its folder: {plan_path.parent.parent}"
        )
    if not plan_path.is_file() or not weights_path.is_file():
        missing = plan_path if not plan_path.is_file() else weights_path
        raise ArtifactError(
            f"{plan_path.parent} is not a finished run folder: {missing.name} is missing",
            hint="run the recipe to its end, or name another folder",
        )
    plan = read_plan(plan_path)
    tensors = load_for(weights_path, plan)
    model = _planned(plan, tensors)
    load_strictly(model, tensors, weights_path)
    model.plan = plan  # type: ignore[assignment]
    return model.to(next(model.parameters()).dtype).eval()  # what is computed and not stored (rotary embeddings), too


def _planned(plan: Plan, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The model of `plan`, to be given the `tensors`: on torch's meta device but for buffers that they do not hold."""

    model = apply_plan(create_on_meta(plan.arch, plan.arch_args), plan)
    if any(buffer.is_meta and name not in tensors for name, buffer in model.named_buffers()):
        model = apply_plan(create_model(plan.arch, plan.arch_args), plan)
    return model


def load_for(path: Path, plan: Plan) -> dict[str, Tensor]:
    """The tensors of the safetensors file `path`, which must name `plan` in its metadata if it names any plan.

    Raises:
        PlanError: they were saved for another plan.
        WeightsError: see `load_tensors`.
    """
    tensors = load_tensors(path)
    with safe_open(path, framework="pt") as file:
        made_for = (file.metadata() or {}).get("plan", plan.digest)
    if made_for != plan.digest:
        raise PlanError(
            f"{path.parent}: this is not the plan that {path.name} was saved with",
            hint="plan.json was edited or comes from another run; restore it",
        )
    return tensors


def load_strictly(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Give `model` the `tensors` of `path`. Raises WeightsError when they are not those of its plan."""
    try:
        model.load_state_dict(tensors, strict=True, assign=True)  # assigned, so in the type they were saved in
    except RuntimeError as error:
        raise WeightsError(f"{path} does not fit its plan: {first_mismatch(error)}") from None


def read_plan(path: Path) -> Plan:
    """The plan in a JSON file. Raises PlanError where there is none, or one that contradicts itself."""
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} cannot be read: {error}") from None
    except PlanError as error:
        raise PlanError(f"{path}: {error.message}", hint=error.hint) from None


def first_mismatch(error: RuntimeError) -> str:
    """What `load_state_dict` names first: below a headline it lists everything that does not fit."""
    lines = [line.strip() for line in str(error).splitlines()]
    return lines[1] if len(lines) > 1 else lines[0]
