"""Record in the sidecar of an exported file whether it passed its checks, and move files that failed away.

A file passes if it stores the weights of its model and gives the model's outputs, whether a recipe or `vitcompress
export` wrote it.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitcompress.errors import ArtifactError, OutputError
from vitcompress.exporters.sidecar import amend_sidecar, read_sidecar
from vitcompress.exporters.tensorrt.export import source_path
from vitcompress.io.checks import Check, Status
from vitcompress.io.files import read_json, write_json
from vitcompress.io.run_folder import RunFolder
from vitcompress.verify.outputs import PREFIX


def file_status(path: Path, checks: Sequence[Check]) -> Status:
    """failed if any check failed, passed if all checks of the file's own outputs passed, otherwise not_run.

    The bytes of an engine may not show its weights, and the ONNX file that it was built from may need kernels that only
    the engine has, as for bf16.
    """
    if any(check.verdict == "failed" for check in checks):
        return "failed"
    own, source = (f"{PREFIX}{file.name}." for file in (path, source_path(path)))
    outputs = [c for c in checks if f"{c.name}.".startswith(own) and not f"{c.name}.".startswith(source)]
    return "passed" if outputs and all(check.verdict == "passed" for check in outputs) else "not_run"


def record_status(path: Path, checks: Sequence[Check]) -> Status:
    """Write into the sidecar of `path`, if it has one, its status and checks. Returns the status."""
    status = file_status(path, checks)
    if read_sidecar(path) is not None:
        verification = {"verdict": status, "checks": [check.to_dict() for check in checks]}
        amend_sidecar(path, verified=status == "passed", verification=verification)
    return status


def quarantine(path: Path) -> Path:
    """Move a file that failed, with its data files, sidecar and other companions, to the folder `failed` beside it.

    Raises:
        OutputError: the files cannot be moved.
    """
    folder = RunFolder(path.parent).failed
    files: dict[str, Any] = {path.with_suffix(".bin").name if path.suffix == ".xml" else path.name: ""}
    with suppress(ArtifactError):  # the sidecar itself may be damaged
        files = (read_sidecar(path) or {"files": files})["files"]
    try:
        companions = (file.name for file in path.parent.iterdir() if file.name.startswith(f"{path.name}."))
        folder.mkdir(exist_ok=True)
        for name in dict.fromkeys((path.name, *files, *companions)):
            if (path.parent / name).is_file():
                (path.parent / name).replace(folder / name)
    except OSError as error:
        raise OutputError(f"{path} could not be moved to {folder}: {error.strerror}") from None
    return folder / path.name


def rejected_exports(folder: Path) -> dict[str, str]:
    """Names of the files that a run could not export, or moved away, and why."""
    path = RunFolder(folder).rejected
    return dict(read_json(path)) if path.is_file() else {}


def reject_export(folder: Path, name: str, reason: str) -> None:
    """Add a file to `rejected_exports`."""
    write_json(RunFolder(folder).rejected, {**rejected_exports(folder), name: reason})
