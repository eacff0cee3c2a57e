"""Is the deployed model the one that was trained? Each check with its value and its tolerance.

fold: see verify_fold. slice: see verify_slice. onnx: see verify_onnx. reload: what is on disk against what was in
memory, bit for bit. Tolerances are derived in `error_bounds` and `rounding`.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitcompress.errors import ArtifactError, OutputError
from vitcompress.exporters import sidecar
from vitcompress.io.checks import LEDGER, Check, Verification, compared, largest_difference, listed
from vitcompress.io.progress import Progress
from vitcompress.io.tensors import load_tensors, save_tensors
from vitcompress.models.checkpoint import PLAN, first_mismatch, load_model, read_plan, write_model
from vitcompress.models.create import create_model, input_config
from vitcompress.models.standard import WEIGHTS as STANDARD
from vitcompress.plan import Plan
from vitcompress.verify.engine import engine_checks, engine_weights
from vitcompress.verify.fold import EXACT_IMAGES, UNFOLDED, answers, folded_checks
from vitcompress.verify.onnx import file_checks, onnx_checks, plan_check
from vitcompress.verify.slice import slice_checks
from vitcompress.verify.tolerance import reference
from vitcompress.verify.weights import readable_files, weight_checks

SEEN = "state/verify.safetensors"  # the images that were looked at, and the answers to them
DENSE = "state/dense"  # where a run keeps the dense model, unless it shares it with others
DENSE_ONNX = "onnx.dense"
CHECKED, DENSE_CHECKED = "model checked", "dense model checked"
ENGINES = ("*.engine", "*.xml")
WHOLE = "the plan keeps every channel"


def reload_check(model: nn.Module, loaded: nn.Module, images: Tensor) -> Check:
    """Is `loaded` the same model as `model`: the same names, the same bits, the same answers?"""
    ours, theirs = model.state_dict(), loaded.state_dict()
    wrong = sorted(set(ours) ^ set(theirs))
    wrong += [key for key in ours if key in theirs and not torch.equal(ours[key], theirs[key])]
    if not wrong and not torch.equal(answers(model, images), answers(loaded, images)):
        wrong = ["the answers"]
    return listed("reload", wrong, f"{len(ours)} tensors and the answers to {len(images)} images, bit for bit")


def saved_check(model: nn.Module, plan: Plan, images: Tensor) -> Check:
    """`reload_check` of `model` against itself, saved to a temporary folder and loaded from there."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), model, plan)
        return reload_check(model, load_model(folder), images)


def standard_check(folder: Path, model: nn.Module, plan: Plan, images: Tensor) -> Check:
    """Does standard.safetensors load strictly into the timm model that the plan names, and answer as `model` does?"""
    arch = plan.standard["arch"]
    if not (folder / STANDARD).is_file():
        return Check(
            "standard", "failed", detail=f"the plan says that the result is a {arch}, but {STANDARD} is missing"
        )
    loaded = create_model(arch, plan.standard["args"])
    try:
        loaded.load_state_dict(load_tensors(folder / STANDARD), strict=True)
    except RuntimeError as error:
        return Check("standard", "failed", detail=f"{STANDARD} does not load into {arch}: {first_mismatch(error)}")
    truth = reference(model, images[:EXACT_IMAGES])
    apart = largest_difference(answers(loaded, images), answers(model, images))
    return compared("standard", apart, truth.between, f"loaded strictly into timm's {arch}; difference of the logits")


# -------------------------------------------------------------------------------------------------------------- folders


def verify_folder(
    folder: str | Path,
    images: Tensor | None = None,
    dense: Path | None = None,
    served: Callable[[Path, Tensor, bool, Path], Iterable[Check]] | None = None,
    progress: Progress | None = None,
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
    seen = load_tensors(folder / SEEN) if (folder / SEEN).is_file() else {}
    progress, before = progress or Progress(), dense or folder / DENSE
    given, logits, checks, weights = _compressed(folder, images, seen, progress)
    checks += _dense(folder, before, given, progress)  # when the compressed model is out of memory
    real = images is not None or bool(seen)
    checks += served(folder, given, real, before) if served else _engines(folder)
    found = Verification(tuple(checks), weights)
    with _tolerating_read_only((folder / LEDGER).is_file()):  # a read-only copy of a folder can be checked all the same
        if images is not None:
            save_tensors(folder / SEEN, {"images": images, "logits": logits})
        found.write(folder)
    return found


def known_images(folder: Path, model: nn.Module) -> tuple[Tensor, bool]:
    """The images that the folder was verified with, and True; noise and False where it has none."""
    if (folder / SEEN).is_file():
        return load_tensors(folder / SEEN)["images"], True
    return noise(model), False


def _compressed(
    folder: Path, images: Tensor | None, seen: dict[str, Tensor], progress: Progress
) -> tuple[Tensor, Tensor, list[Check], dict[str, Any]]:
    """Images and answers of the deployed model, all checks of it, and the table of its weights."""
    model = load_model(folder)
    plan = read_plan(folder / PLAN)
    given = images if images is not None else seen.get("images", noise(model))
    parts, checks = _parts(folder, model, plan, given, seen), list[Check]()
    for done, (name, part) in enumerate(parts.items()):
        progress.update(CHECKED, done, len(parts) + 1, name)
        checks += part
    progress.update(CHECKED, len(parts), len(parts) + 1, "weights")
    held, weights = weight_checks(model, plan, readable_files(folder))
    progress.update(CHECKED, len(parts) + 1, len(parts) + 1)
    return given, answers(model, given), [*checks, *held], weights


def _tolerating_read_only(allowed: bool) -> AbstractContextManager[object]:
    return suppress(OutputError) if allowed else nullcontext()


def noise(model: nn.Module) -> Tensor:
    """A few images of noise in the size that `model` takes, always the same: (count, channels, height, width)."""
    size = input_config(model).size
    return torch.randn(EXACT_IMAGES, *size, generator=torch.Generator().manual_seed(0))


def _parts(
    folder: Path, model: nn.Module, plan: Plan, images: Tensor, seen: dict[str, Tensor]
) -> dict[str, Iterator[Check]]:
    """What is checked of the model and its files, in order; nothing is computed before it is iterated."""
    parts = {"fold": folded_checks(folder, model, plan, images), "slice": _slice(folder, plan, images)}
    parts["reload"] = _reload(folder, model, plan, images, seen)
    parts["onnx"] = _or_failed("onnx", _onnx(folder, model, plan, images))
    for path in sorted(folder.glob("*.engine")):
        parts[path.name] = _engine(folder, path, model, plan, images)
    return parts


def _slice(folder: Path, plan: Plan, images: Tensor) -> Iterator[Check]:
    if plan.kept:
        yield from slice_checks(folder, plan, images[:EXACT_IMAGES])
    else:
        yield Check("slice", "not_run", detail=WHOLE)


def _reload(folder: Path, model: nn.Module, plan: Plan, images: Tensor, seen: dict[str, Tensor]) -> Iterator[Check]:
    yield saved_check(model, plan, images)
    if plan.standard:
        yield standard_check(folder, model, plan, images)
    if seen and torch.equal(images, seen["images"]):
        truth = reference(model, images[:EXACT_IMAGES])
        apart = largest_difference(answers(model, images), seen["logits"])
        yield compared("reload.recorded", apart, truth.between, "logits now against those recorded with the run")


def _engine(folder: Path, path: Path, model: nn.Module, plan: Plan, images: Tensor) -> Iterator[Check]:
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


def _onnx(folder: Path, model: nn.Module, plan: Plan, images: Tensor) -> Iterator[Check]:
    path = folder / "model.onnx"
    if not path.is_file():
        why = "no ONNX file was exported"
        yield Check("onnx", "not_run", detail=why, command=f"vitcompress export {folder} --format onnx")
        return
    yield from onnx_checks(model, path, images)
    yield plan_check(path, plan.digest)


def _dense(folder: Path, dense: Path, images: Tensor, progress: Progress) -> Iterator[Check]:
    if readable_files(folder, "dense"):
        progress.update(DENSE_CHECKED, 0, 1)
        yield from _or_failed(DENSE_ONNX, _dense_onnx(folder, dense, images))
        progress.update(DENSE_CHECKED, 1, 1)


def _dense_onnx(folder: Path, dense: Path, images: Tensor) -> Iterator[Check]:
    """The other file of every comparison is the model before pruning."""
    path, name, files = folder / "dense.onnx", DENSE_ONNX, readable_files(folder, "dense")
    if not (dense / PLAN).is_file():
        yield Check(name, "not_run", detail=f"the dense model is not here to be compared with: there is no {dense}")
        yield from file_checks(path, name) if path.is_file() else ()
        return
    model, plan = load_model(dense), read_plan(dense / PLAN)
    yield from weight_checks(model, plan, files)[0][1:]  # without that of the plan, which is not this run's
    if path.is_file():
        yield from onnx_checks(model, path, images[:EXACT_IMAGES], name=name)
        yield plan_check(path, plan.digest, name)
