"""Verify a run folder: its manifest and records, the model, every exported file. `tolerance` derives tolerances."""

import math
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitcompress.errors import ArtifactError, OutputError, WeightsError, first_line
from vitcompress.exporters.runtimes import exported_files
from vitcompress.exporters.sidecar import DENSE
from vitcompress.exporters.tensorrt.export import source_path
from vitcompress.io.checks import Check, Verification, largest_difference, limit_check, problem_check
from vitcompress.io.files import read_json, read_record, signed_files, write_json
from vitcompress.io.manifest import REMEDY, find_changes, read_manifest, record_changes, write_manifest
from vitcompress.io.progress import SILENT, Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import LIBRARY_ERRORS, load_tensors, save_tensors
from vitcompress.io.validation import RESTORE
from vitcompress.models.checkpoint import load_model, read_plan, write_model
from vitcompress.models.cost import count_cost
from vitcompress.models.create import class_names_of, create_model, create_on_meta, input_config
from vitcompress.models.weights import load_weights
from vitcompress.plan import Plan
from vitcompress.training.metrics import PAIRED_TESTS, wilson
from vitcompress.verify.engine import inspector_checks
from vitcompress.verify.files import check_file, record_status, rejected_exports, structure_checks
from vitcompress.verify.fold import EXACT_IMAGES, fold_folder_checks
from vitcompress.verify.outputs import AGREEMENT, Original, PlannedOriginal
from vitcompress.verify.slice import slice_folder_checks
from vitcompress.verify.tolerance import BATCH, exact_logits, model_logits, pair_limits
from vitcompress.verify.weights import FileTensors, shape_check, weight_table

MOST_IMAGES = 1000  # on which files are compared with their model
FEW_IMAGES = 64  # on which models are compared with each other; and images of noise, whose outputs are much alike
WORK = 1.2 * 10**12  # multiply-accumulates of the dense model on all images: 68 in DeiT-B, minutes on two cores
STORED_BYTES = 2**27  # of all images, which the run folder keeps
MANIFEST = "manifest"  # in the names of checks


def verify_folder(
    folder: str | Path,
    images: Tensor | None = None,
    dense: Path | None = None,
    progress: Progress = SILENT,
    *,
    adopt: bool = False,
) -> Verification:
    """Check a run folder, and record the results in its verify.json and in the sidecars of the exported files.

    manifest: all files are as they were written; otherwise nothing else is checked. report: its counts are those of the
    stored results. fold and slice: the model computes what it did before folding and slicing. reload: it is stored bit
    for bit. standard: the plain timm model gives the same outputs. weights: all tensors have the planned shapes.
    Exported files: see `check_file`.

    images: (count, channels, height, width), normalized. The folder keeps them and their outputs, for later calls
    without images. Without any, noise is used. dense: folder of the model before pruning, which dense.onnx is compared
    with; None: the one inside the run folder. adopt: without a manifest, write one if no check fails. Where signatures
    are required, nothing is written. Raises ArtifactError, PlanError or WeightsError if it is no run folder, or a
    damaged one, InputError if its manifest has a newer format, and OutputError if verify.json cannot be written; a
    folder that was verified before may be read-only.
    """
    files = RunFolder(Path(folder))
    if not files.path.exists():
        raise ArtifactError(f"there is no folder {files.path}", hint="name a run folder, such as runs/digits_hetdpt")
    checks, verified = [*manifest_checks(files, adopt=adopt)], files.verification.is_file()
    with record_changes(files.path), suppress(OSError):
        if files.plan.is_file() and not signed_files.get():  # without a plan, the file may be of something else
            files.verification.unlink(missing_ok=True)  # the result of an earlier call
    with record_changes(files.path):
        verification, recorded = Verification(tuple(checks)), None
        if not any(check.verdict == "failed" for check in checks):
            verification, recorded = _check_content(files, checks, images, RunFolder(dense or files.dense), progress)
        with suppress(OutputError) if verified else nullcontext():
            if not signed_files.get():
                write_json(files.verification, verification.to_dict(files.path))
            if recorded is not None:
                save_tensors(files.recorded_outputs, recorded)
    if adopt and verification.passed and not files.manifest.is_file():
        write_manifest(files.path)
    return verification


def _check_content(
    files: RunFolder, first: Sequence[Check], images: Tensor | None, dense: RunFolder, progress: Progress
) -> tuple[Verification, dict[str, Tensor] | None]:
    """All checks after the `first` ones; `images` and their outputs for later calls."""
    model = load_model(files.path)
    recorded, plan, classes = _read_recorded(files, model), read_plan(files.plan), run_classes(files, model)
    real = images is not None or bool(recorded)
    shown = recorded.get("images", noise_images(model, plan)) if images is None else images
    original = PlannedOriginal(model, shown, real, plan=plan, unfolded=files.unfolded, classes=classes)
    checks = [*first, *report_checks(files), *_missing_exports(files)]
    checks += [*_model_checks(files, original, recorded, progress)]
    engines = set(files.path.glob("*.engine"))  # also those whose sidecar is missing, whatever their names
    paths = {*exported_files(files.path, "model"), *engines} - set(exported_files(files.path, DENSE))
    results, tensors = check_files(sorted(paths), original, "files checked", progress)
    for path, own in results.items():
        checks += (*own, *inspector_checks(path))
    weights = weight_table(original.rows, model, tensors)
    new = None if images is None else {"images": images, "logits": model_logits(model, images)}
    del original, model  # before the dense model is loaded
    checks += _dense_checks(files, dense, shown, real, progress)
    return Verification(tuple(checks), weights), new


def manifest_checks(files: RunFolder, *, adopt: bool = False) -> Iterator[Check]:
    """A failed check for each file that differs from the manifest. An unfinished run has no manifest yet.

    adopt: the manifest may be missing, as it will be written. Raises InputError for one of a newer format.
    """
    try:
        manifest, changes = read_manifest(files.path), find_changes(files.path)
        report = read_json(files.report) if not manifest and files.report.is_file() else None
    except ArtifactError as error:
        yield Check(MANIFEST, "failed", detail=error.sentence())
        return
    for name, problem in changes.items():
        yield Check(f"{MANIFEST}.{name}", "failed", detail=problem)
    if manifest and not changes:
        yield Check(MANIFEST, "passed", detail=f"{len(manifest['files'])} files have their recorded SHA-256")
    if manifest or adopt:
        return
    if (isinstance(report, dict) and report.get(MANIFEST)) or _was_checked(files):
        yield Check(MANIFEST, "failed", detail=f"{files.manifest.name} is missing; {REMEDY}")
    elif report or not files.recipe.is_file():
        adopt_it = "`vitcompress verify DIR --adopt` writes one, if no other file has this name"
        yield Check(MANIFEST, "not_run", detail=f"vitcompress has written no {files.manifest.name}; {adopt_it}")


def _was_checked(files: RunFolder) -> bool:
    """Whether verify.json has checks of a manifest."""
    with suppress(ArtifactError):  # without a manifest, any verify.json may be replaced
        checks = (read_record(files.verification, Verification) or {"checks": ()})["checks"]
        return any(c["name"].partition(".")[0] == MANIFEST and c["verdict"] != "not_run" for c in checks)
    return False


def report_checks(files: RunFolder) -> Iterator[Check]:
    """Check that report.json has the stored plan and accuracy, and that these counts are those of each image."""
    if files.report.is_file():
        try:
            problems = list(_report_problems(files, read_json(files.report)))
        except (ArtifactError, *LIBRARY_ERRORS) as error:
            problems = [f"{files.report.name} or what it was written from has other contents: {first_line(error)}"]
        yield problem_check("report", problems, "plan and accuracy are those stored with the run")


def _report_problems(files: RunFolder, report: Any) -> Iterator[str]:
    if report.get("plan") != read_json(files.plan):
        yield f"plan is not that of {files.plan.name}"
    accuracy = report.get("accuracy") or {}
    stored, mistakes = (read_json(path) if accuracy else {} for path in (files.accuracy, files.mistakes))
    wrong = {name: set(images) for name, images in mistakes.items()}
    for name, record in accuracy.items():
        if record != stored[name]:
            yield f"accuracy.{name} is not that of {files.accuracy.name}"
        if other := PAIRED_TESTS.get(name):
            a, b = wrong[other], wrong["compressed"]
            ours: dict[str, object] = {"only_a": len(b - a), "only_b": len(a - b)}
        else:
            count, total = record["total"] - len(wrong[name]), record["total"]
            ours = {"correct": count, "top1": count / total, "top1_ci95": [*wilson(count, total)]}
        for key, value in ours.items():
            if record[key] != value:
                yield f"accuracy.{name}.{key} is {record[key]}, {value} by {files.mistakes.name}"
    for artifact in report.get("artifacts") or ():
        if artifact["accuracy"] != accuracy.get(artifact["file"]):
            yield f"artifacts has another accuracy of {artifact['file']}"


def _missing_exports(files: RunFolder) -> Iterator[Check]:
    """A failed check for each file that the recipe exports and that was rejected."""
    for name, reason in rejected_exports(files.path).items():
        if not (files.path / name).is_file():
            yield Check(f"export.{name}", "failed", detail=reason)
    if not exported_files(files.path, "model"):
        command = f"vitcompress export {shlex.quote(str(files.path.absolute()))} --format onnx"
        yield Check("onnx", "not_run", detail="no file was exported", command=command)


def _model_checks(
    files: RunFolder, original: PlannedOriginal, recorded: Mapping[str, Tensor], progress: Progress
) -> Iterator[Check]:
    model, plan, images = original.model, original.plan, original.images[:FEW_IMAGES]
    parts: dict[str, Callable[[], Iterable[Check]]] = {
        "fold": lambda: fold_folder_checks(files, model, plan, images),
        "slice": lambda: slice_folder_checks(files, plan, images[:EXACT_IMAGES]),
        "reload": lambda: _reload_checks(files, original, recorded),
        "weights": lambda: [shape_check(original.rows, model)],
    }
    for done, (name, run) in enumerate(parts.items()):
        progress.update("model checked", done, len(parts), name)
        yield from run()
    progress.update("model checked", len(parts), len(parts))


def check_files(
    paths: Sequence[Path], original: PlannedOriginal, label: str, progress: Progress
) -> tuple[dict[Path, list[Check]], dict[str, FileTensors]]:
    """Check exported files, and record the results in their sidecars.

    Returns the checks, and the tensors of files whose format allows reading them, by name.
    """
    results, tensors = dict[Path, list[Check]](), dict[str, FileTensors]()
    for done, path in enumerate(paths):
        progress.update(label, done, len(paths), path.name)
        results[path], own = check_file(path, original)
        tensors |= {path.name: own} if own else {}
    for path in results:
        checks = [check for file in (path, source_path(path)) for check in results.get(file, ())]
        with suppress(OutputError, ArtifactError):  # a read-only folder; a damaged sidecar, which has a failed check
            record_status(path, checks)
    if paths:
        progress.update(label, len(paths), len(paths))
    return results, tensors


def _dense_checks(
    files: RunFolder, dense: RunFolder, images: Tensor, real: bool, progress: Progress
) -> Iterator[Check]:
    """Check the folder of the dense model, and compare the files of that model with it, where the folder is present."""
    changed = [replace(c, name=f"dense.{c.name}") for c in manifest_checks(dense) if c.verdict == "failed"]
    yield from changed
    paths = [] if changed else exported_files(files.path, DENSE)
    if paths and dense.plan.is_file():
        model, plan = load_model(dense.path), read_plan(dense.plan)
        original = PlannedOriginal(model, images, real, plan=plan, classes=run_classes(files, model))
        results, _ = check_files(paths, original, "files of the dense model checked", progress)
        yield from chain.from_iterable(results.values())
        return
    for path in paths:
        yield from structure_checks(path, None)
        detail = f"the dense model, which it is compared with, is missing: there is no {dense.path}"
        yield Check(f"{AGREEMENT}{path.name}", "not_run", detail=detail)


def _reload_checks(files: RunFolder, original: PlannedOriginal, recorded: Mapping[str, Tensor]) -> Iterator[Check]:
    model, plan, images = original.model, original.plan, original.images[:FEW_IMAGES]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), model, plan)
        yield reload_check(original, load_model(folder))
    if plan.standard:
        yield standard_check(files, model, plan, images)
    if recorded and torch.equal(images, recorded["images"][: len(images)]):
        logits = recorded["logits"][: len(images)]
        yield _logits_check("reload.recorded", model, images, logits, "those recorded with the run")


def _logits_check(name: str, model: nn.Module, images: Tensor, others: Tensor, what: str) -> Check:
    """Check that the logits `others` are those of `model`, up to rounding."""
    tolerance, _ = pair_limits(model, images[:EXACT_IMAGES])
    difference = largest_difference(model_logits(model, images), others)
    return limit_check(name, difference, tolerance, f"difference of the logits from {what}")


def reload_check(original: Original, loaded: nn.Module) -> Check:
    """Check that `loaded` has the tensors of the original, with the same bits, and gives the same outputs."""
    few, ours, theirs = original.images[:BATCH], original.model.state_dict(), loaded.state_dict()
    wrong = sorted(set(ours) ^ set(theirs))
    wrong += [key for key in ours if key in theirs and not torch.equal(ours[key], theirs[key])]
    # An export in another thread disables oneDNN for the whole process, which does not compute float64.
    if not wrong and not torch.equal(original.exact(original.images)[: len(few)], exact_logits(loaded, few)):
        wrong = ["the outputs"]
    return problem_check("reload", wrong, f"{len(ours)} tensors and the outputs of {len(few)} images, bit for bit")


def standard_check(files: RunFolder, model: nn.Module, plan: Plan, images: Tensor) -> Check:
    """Check that standard.safetensors loads strictly into the plan's timm model and gives the outputs of `model`."""
    arch, path = plan.standard["arch"], files.standard
    if not path.is_file():
        return Check("standard", "failed", detail=f"the plan names the result {arch}, but {path.name} is missing")
    try:
        loaded = create_model(arch, plan.standard["args"]).to(next(model.parameters()).dtype)
        load_weights(loaded, path, new_head=False)
    except WeightsError as error:
        return Check("standard", "failed", detail=f"{path.name} does not load into {arch}: {error.message}")
    logits = model_logits(loaded, images)
    return _logits_check("standard", model, images, logits, f"those of timm's {arch}, which loads strictly")


def run_classes(files: RunFolder, model: nn.Module) -> tuple[str, ...] | None:
    """The class names in the report of a run, else those of its model; None if neither has any."""
    match read_json(files.report) if files.report.is_file() else None:
        case {"model": {"classes": [*names]}}:
            return tuple(map(str, names))
    return class_names_of(model) or None


def recorded_images(folder: Path, model: nn.Module) -> tuple[Tensor, bool]:
    """The images that the folder was verified with, and True; noise and False if there are none."""
    files = RunFolder(folder)
    recorded = _read_recorded(files, model)
    return (recorded["images"], True) if recorded else (noise_images(model, read_plan(files.plan)), False)


def _read_recorded(files: RunFolder, model: nn.Module) -> dict[str, Tensor]:
    """Images and logits of an earlier verification; empty if there was none. Raises InputError for other contents."""
    path = files.recorded_outputs
    tensors = load_tensors(path) if path.is_file() else {}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    count = next(iter(shapes.get("images", ())), 0)
    size = input_config(model).size
    expected = {"images": (count, *size), "logits": (count, model_logits(model, torch.zeros(1, *size)).shape[1])}
    if tensors and not (count and shapes == expected):
        raise ArtifactError(f"{path} has other contents than images and logits of this model: {shapes}", hint=RESTORE)
    return tensors


def noise_images(model: nn.Module, plan: Plan) -> Tensor:
    """Images of noise in the input size of `model`, always the same: (count, channels, height, width)."""
    shape = min(image_count(plan), FEW_IMAGES), *input_config(model).size
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


def image_count(plan: Plan) -> int:
    """The number of images to compare outputs on: 1,000, or fewer if the dense model of `plan` or its images are large.

    Time and space are limited by `WORK` and `STORED_BYTES`.
    """
    dense = create_on_meta(plan.arch, plan.arch_args)
    size = input_config(dense).size
    most = min(WORK // count_cost(dense, size).macs, STORED_BYTES // (4 * math.prod(size)), MOST_IMAGES)
    return max(int(most), EXACT_IMAGES)
