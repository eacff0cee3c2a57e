"""Check what a finished run recorded: no file changed since then, and the counts follow from the stored results."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from vitcompress.errors import ArtifactError, first_line
from vitcompress.io.checks import Check, Verification, problem_check
from vitcompress.io.files import read_json, read_record
from vitcompress.io.manifest import REMEDY, find_changes, read_manifest
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import LIBRARY_ERRORS
from vitcompress.training.metrics import PAIRED_TESTS, wilson

MANIFEST = "manifest"


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
