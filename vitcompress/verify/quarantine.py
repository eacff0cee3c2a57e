"""The gate for exported files: a file must hold the weights of its model and answer as the model does.

Two kinds of checks are made of every exported file, whether a recipe or `vitcompress export` wrote it: its weights by
`verify_weights`, its answers by `agreement`. Their verdict goes into its sidecar. A file that fails one is moved away.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from vitcompress.errors import ArtifactError, OutputError
from vitcompress.exporters.runtimes import RUNNERS
from vitcompress.exporters.sidecar import amend_sidecar, exported_files, read_sidecar
from vitcompress.exporters.tensorrt.export import source_path
from vitcompress.io.checks import Check, Verification
from vitcompress.io.files import read_json, write_json
from vitcompress.io.progress import Progress
from vitcompress.verify import outputs
from vitcompress.verify.folder import verify_folder
from vitcompress.verify.outputs import PREFIX, folder_checks
from vitcompress.verify.weights import CHECK as WEIGHTS

KINDS = (PREFIX, f"{WEIGHTS}.")
REFUSED = "state/refused.json"  # files that a recipe asks for and that fell short -> why
FAILED = "failed"  # folder that files which fell short are moved to


def is_about(path: Path, name: str) -> bool:
    """Whether the check `name` is one that the gate asks of `path`, or of the ONNX file beneath it."""
    return f"{name}.".startswith(tuple(f"{kind}{path.name}." for kind in KINDS))


def of(path: Path, checks: Iterable[Check]) -> list[Check]:
    """Those of `checks` that the gate asks of `path`."""
    return [check for check in checks if is_about(path, check.name)]


def verdict(path: Path, checks: Iterable[Check]) -> str:
    """failed if any did, else the verdict on its own answers.

    The bytes of an engine may tell nothing of its weights, and the ONNX file beneath it may want kernels that only the
    engine has, as bf16 does.
    """

    def counts(check: Check) -> bool:
        own = check.name.startswith(PREFIX) and not is_about(source_path(path), check.name)
        return own or check.verdict == "failed"

    return outputs.verdict(filter(counts, checks))


def record(path: Path, checks: Sequence[Check]) -> str:
    """Write into the sidecar of `path` whether it is verified, and by what. Returns the verdict."""
    found = verdict(path, checks)
    if read_sidecar(path) is not None:
        known = {"verdict": found, "checks": [check.as_data() for check in checks]}
        amend_sidecar(path, verified=found == "passed", verification=known)
    return found


def set_aside(path: Path) -> Path:
    """Move a file that failed, with all that belongs to it, to a folder of such files beside it."""
    folder = path.parent / FAILED
    known: dict[str, Any] = {"files": {path.with_suffix(".bin").name if path.suffix == ".xml" else path.name: ""}}
    with suppress(ArtifactError):  # the sidecar itself may be what is wrong
        known = read_sidecar(path) or known
    try:
        beside = (found.name for found in path.parent.iterdir() if found.name.startswith(f"{path.name}."))
        names = dict.fromkeys((path.name, *known["files"], *beside))
        folder.mkdir(exist_ok=True)
        for name in names:
            if (path.parent / name).is_file():
                (path.parent / name).replace(folder / name)
    except OSError as error:
        raise OutputError(f"{path} could not be moved to {folder}: {error.strerror}") from None
    return folder / path.name


def refused(folder: Path) -> dict[str, str]:
    """The files that a run should have exported and could not, by name, and why."""
    path = folder / REFUSED
    return dict(read_json(path)) if path.is_file() else {}


def refuse(folder: Path, files: dict[str, str]) -> None:
    """Remember these `files`, by name, and why."""
    write_json(folder / REFUSED, files)


def verify(
    folder: Path, images: Tensor | None = None, dense: Path | None = None, progress: Progress | None = None
) -> Verification:
    """`verify_folder` with every exported file in its own runtime, and the verdicts in the sidecars of the files.

    Raises:
        ArtifactError, PlanError, WeightsError: as `verify_folder`.
    """
    found = verify_folder(folder, images, dense, served=partial(_served, progress), progress=progress)
    for path in (path for stem in ("model", "dense") for path in exported_files(folder, stem, RUNNERS)):
        with suppress(OutputError, ArtifactError):  # a read-only copy; a damaged sidecar is told by the runner
            record(path, of(path, found.checks))
    return found


def _served(progress: Progress | None, folder: Path, images: Tensor, real: bool, dense: Path) -> Iterator[Check]:
    for name, why in refused(folder).items():
        if not (folder / name).is_file():
            yield Check(f"export.{name}", "failed", detail=why)
    yield from folder_checks(folder, images, real, dense, progress)
