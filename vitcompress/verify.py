"""Is the model that is deployed the one that was trained? Each answer with its value and its tolerance.

fold: folded against unfolded, per layer against a rigorous bound and end to end in float64. slice: see verify_slice.
reload: what is on disk against what was in memory, bit for bit. onnx: see verify_onnx. Tolerances are derived in
`bounds` and `rounding`.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitcompress import checkpoint, models, sidecar, surgery
from vitcompress.bounds import fold_excess, reference
from vitcompress.errors import ArtifactError, OutputError
from vitcompress.families import family_of
from vitcompress.plan import Plan
from vitcompress.rounding import in_float64, storage_limit
from vitcompress.standard import WEIGHTS as STANDARD
from vitcompress.verdicts import LEDGER, Check, Verification, agreement, compared, largest_difference, listed
from vitcompress.verify_engine import engine_checks, engine_weights
from vitcompress.verify_onnx import file_checks, onnx_checks, plan_check, structure_checks
from vitcompress.verify_slice import given_steps, slice_check, slice_checks
from vitcompress.verify_weights import told_files, weight_checks

__all__ = [
    "Check",
    "Verification",
    "agreement",
    "fold_checks",
    "onnx_checks",
    "reload_check",
    "slice_check",
    "standard_check",
    "structure_checks",
    "verify_folder",
]

UNFOLDED, UNFOLDED_PLAN = "state/unfolded.safetensors", "state/unfolded_plan.json"
SEEN = "state/verify.safetensors"  # the images that were looked at, and the answers to them
EXACT_IMAGES = 8  # images that are evaluated in float64 too
DENSE = "state/dense"  # where a run keeps the dense model, unless it shares it with others
DENSE_ONNX = "onnx.dense"
ENGINES = ("*.engine", "*.xml")
WHOLE = "the plan keeps every channel"


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
        layers, result = [unfolded.get_submodule(name) for name in chain], folded.get_submodule(target)
        assert isinstance(result, nn.Linear)
        difference, quotient = fold_excess(layers, result, inputs[chain[0]], folds=len(chain) - 1)
        detail = f"difference over its rounding bound, worst of all outputs; largest difference {difference:.1e}"
        checks.append(compared(f"fold.{target}", quotient, 1.0, detail))
    with in_float64(folded) as wide:
        apart = largest_difference(_answers(wide, few), truth.exact)
    stored = storage_limit(folded, {target: len(chain) - 1 for target, chain in chains.items()}, few)
    detail = "largest difference of the logits, float64" if chains else "nothing was folded"
    checks.append(compared("fold", apart, stored + truth.exact_between, detail))
    expected, got = _answers(unfolded, images), _answers(folded, images)
    checks.append(agreement("fold.agreement", expected, got, stored + truth.between))
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
def _answers(model: nn.Module, images: Tensor) -> Tensor:
    model = model.eval()
    return torch.cat([model(part.to(next(model.parameters()).dtype)) for part in torch.split(images, 16)])


def reload_check(model: nn.Module, loaded: nn.Module, images: Tensor, name: str = "reload") -> Check:
    """Is `loaded` the same model as `model`: the same names, the same bits, the same answers?"""
    ours, theirs = model.state_dict(), loaded.state_dict()
    wrong = sorted(set(ours) ^ set(theirs))
    wrong += [key for key in ours if key in theirs and not torch.equal(ours[key], theirs[key])]
    if not wrong and not torch.equal(_answers(model, images), _answers(loaded, images)):
        wrong = ["the answers"]
    return listed(name, wrong, f"{len(ours)} tensors and the answers to {len(images)} images, bit for bit")


def saved_check(model: nn.Module, plan: Plan, images: Tensor) -> Check:
    """`reload_check` of `model` against itself, saved to a temporary folder and loaded from there."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save_model(Path(folder), model, plan)
        return reload_check(model, checkpoint.load(folder), images)


def standard_check(folder: Path, model: nn.Module, plan: Plan, images: Tensor) -> Check:
    """Does standard.safetensors load strictly into the timm model that the plan names, and answer as `model` does?"""
    arch = plan.standard["arch"]
    if not (folder / STANDARD).is_file():
        return Check(
            "standard", "failed", detail=f"the plan says that the result is a {arch}, but {STANDARD} is missing"
        )
    loaded = models.create(arch, plan.standard["args"])
    try:
        loaded.load_state_dict(checkpoint.load_tensors(folder / STANDARD), strict=True)
    except RuntimeError as error:
        return Check(
            "standard", "failed", detail=f"{STANDARD} does not load into {arch}: {checkpoint.first_mismatch(error)}"
        )
    truth = reference(model, images[:EXACT_IMAGES])
    apart = largest_difference(_answers(loaded, images), _answers(model, images))
    return compared("standard", apart, truth.between, f"loaded strictly into timm's {arch}; difference of the logits")


# -------------------------------------------------------------------------------------------------------------- folders


def verify_folder(
    folder: str | Path,
    images: Tensor | None = None,
    dense: Path | None = None,
    served: Callable[[Path, Tensor, bool, Path], Iterable[Check]] | None = None,
) -> Verification:
    """Check everything that a run folder claims, and record the verdicts in its verify.json.

    images: (count, channels, height, width), normalised. They and the answers to them are kept in the folder, so that a
    later call, here or on another machine, can do without. Without any, noise is used.
    dense: folder of the model before pruning, which dense.onnx is compared with; None looks in the run folder.
    served: checks of the exported files in their own runtimes, given the folder, the images, whether these are
        real, and the folder of the model before pruning.

    Raises:
        ArtifactError, PlanError, WeightsError: not a run folder, or a damaged one.
    """
    folder = Path(folder)
    if not folder.exists():
        raise ArtifactError(f"there is no folder {folder}", hint="name a run folder, as in runs/digits_hetdpt")
    seen = checkpoint.load_tensors(folder / SEEN) if (folder / SEEN).is_file() else {}
    given, logits, checks, weights = _compressed(folder, images, seen)
    before = dense or folder / DENSE
    checks += _or_failed(DENSE_ONNX, _dense_onnx(folder, before, given))  # when the compressed model is out of memory
    real = images is not None or bool(seen)
    checks += served(folder, given, real, before) if served else _engines(folder)
    found = Verification(tuple(checks), weights)
    with _tolerating_read_only((folder / LEDGER).is_file()):  # a read-only copy of a folder can be checked all the same
        if images is not None:
            checkpoint.save_tensors(folder / SEEN, {"images": images, "logits": logits})
        found.write(folder)
    return found


def known_images(folder: Path, model: nn.Module) -> tuple[Tensor, bool]:
    """The images that the folder was verified with, and True; noise and False where it has none."""
    if (folder / SEEN).is_file():
        return checkpoint.load_tensors(folder / SEEN)["images"], True
    return noise(model), False


def _compressed(
    folder: Path, images: Tensor | None, seen: dict[str, Tensor]
) -> tuple[Tensor, Tensor, list[Check], dict[str, Any]]:
    """What the deployed model was asked, what it answered, all checks of it, and the way of its weights."""
    model = checkpoint.load(folder)
    plan = checkpoint.read_plan(folder / checkpoint.PLAN)
    given = images if images is not None else seen.get("images", noise(model))
    checks = list(_checks(folder, model, plan, given, seen))
    held, weights = weight_checks(model, plan, told_files(folder))
    return given, _answers(model, given), [*checks, *held], weights


def _tolerating_read_only(allowed: bool) -> AbstractContextManager[object]:
    return suppress(OutputError) if allowed else nullcontext()


def noise(model: nn.Module) -> Tensor:
    """A few images of noise in the size that `model` takes, always the same: (count, channels, height, width)."""
    from vitcompress.models import input_config

    return torch.randn(EXACT_IMAGES, *input_config(model).size, generator=torch.Generator().manual_seed(0))


def _checks(folder: Path, model: nn.Module, plan: Plan, images: Tensor, seen: dict[str, Tensor]) -> Iterator[Check]:
    yield from _fold(folder, model, plan, images)
    yield from _folding_steps(folder, images)
    yield from (
        slice_checks(folder, plan, images[:EXACT_IMAGES]) if plan.kept else [Check("slice", "not_run", detail=WHOLE)]
    )
    yield saved_check(model, plan, images)
    if plan.standard:
        yield standard_check(folder, model, plan, images)
    if seen and torch.equal(images, seen["images"]):
        truth = reference(model, images[:EXACT_IMAGES])
        apart = largest_difference(_answers(model, images), seen["logits"])
        yield compared("reload.recorded", apart, truth.between, "logits now against those recorded with the run")
    yield from _or_failed("onnx", _onnx(folder, model, plan, images))
    for path in sorted(folder.glob("*.engine")):
        deployed = None if path.name.startswith(sidecar.DENSE) else model
        yield from _or_failed(path.name, engine_checks(path, deployed, plan.digest, images))
        if deployed is not None:
            yield from engine_weights(path, deployed, plan, folder / UNFOLDED)


def _or_failed(name: str, checks: Iterable[Check]) -> Iterator[Check]:
    """The checks of a file. One that cannot be read or asked is a failed check: an older verdict must not stand."""
    try:
        yield from checks
    except ArtifactError as error:
        yield Check(name, "failed", detail=error.message)


def _engines(folder: Path) -> Iterator[Check]:
    for pattern in ENGINES:
        for path in sorted(folder.glob(pattern)):
            command = f"vitcompress verify {folder}"
            yield Check(path.name, "not_run", detail="was not asked for", command=command)


def _fold(folder: Path, model: nn.Module, plan: Plan, images: Tensor) -> list[Check]:
    if not (folder / UNFOLDED).is_file():
        why = "the unfolded weights are not in the folder" if plan.folded else "nothing was folded"
        return [Check("fold", "not_run", detail=why)]
    unfolded = checkpoint.load_parts(folder / UNFOLDED_PLAN, folder / UNFOLDED)
    before = checkpoint.read_plan(folder / UNFOLDED_PLAN)
    return fold_checks(unfolded, model, [name for name in plan.folded if name not in before.folded], images)


def _folding_steps(folder: Path, images: Tensor) -> Iterator[Check]:
    """What was folded between the steps, against the model that the step was given."""
    for step in given_steps(folder):
        if step.delta.folded:
            folded = surgery.applied(step.model, step.delta).eval()
            whole = surgery.applied(step.model, replace(step.delta, folded=())).eval()
            for check in fold_checks(whole, folded, step.delta.folded, images):
                yield replace(check, name=f"{check.name}.{step.name}")


def _onnx(folder: Path, model: nn.Module, plan: Plan, images: Tensor) -> Iterator[Check]:
    path = folder / "model.onnx"
    if not path.is_file():
        why = "no ONNX file was exported"
        yield Check("onnx", "not_run", detail=why, command=f"vitcompress export {folder} --format onnx")
        return
    yield from onnx_checks(model, path, images)
    yield plan_check(path, plan.digest)


def _dense_onnx(folder: Path, dense: Path, images: Tensor) -> Iterator[Check]:
    """The other file of every comparison is the model before pruning."""
    path, name, files = folder / "dense.onnx", DENSE_ONNX, told_files(folder, "dense")
    if not files:
        return
    if not (dense / checkpoint.PLAN).is_file():
        yield Check(name, "not_run", detail="the dense model is not here to be compared with")
        yield from file_checks(path, name) if path.is_file() else ()
        return
    model, plan = checkpoint.load(dense), checkpoint.read_plan(dense / checkpoint.PLAN)
    yield from weight_checks(model, plan, files)[0][1:]  # without that of the plan, which is not this run's
    if path.is_file():
        yield from onnx_checks(model, path, images[:EXACT_IMAGES], name=name)
        yield plan_check(path, plan.digest, name)
