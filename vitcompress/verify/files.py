"""All checks of one exported file: its sidecar, its graph, its weights and its outputs."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from vitcompress.errors import ArtifactError, MissingExtraError
from vitcompress.exporters import exporter_of
from vitcompress.exporters.sidecar import find_mismatches, sidecar_path
from vitcompress.exporters.tensorrt.export import TENSORRT
from vitcompress.io.checks import Check, problem_check
from vitcompress.plan import Plan
from vitcompress.surgery.shapes import PlannedTensor
from vitcompress.verify.engine import engine_checks
from vitcompress.verify.onnx import checker_check, graph_checks
from vitcompress.verify.outputs import PREFIX, Original, output_checks
from vitcompress.verify.weights import CHECK, FileTensors, compare_tensors, exported_module, plan_rows

ENGINES = {TENSORRT.file_suffix, *TENSORRT.other_suffixes}


@dataclass(frozen=True)
class PlannedOriginal(Original):
    """An original with its plan, and the weights before folding where the run keeps them."""

    plan: Plan = field(kw_only=True)
    unfolded: Path | None = None

    @cached_property
    def rows(self) -> tuple[PlannedTensor, ...]:
        return plan_rows(self.plan)


@dataclass(frozen=True)
class FileResult:
    """The checks of an exported file, and its tensors where its format allows reading them."""

    checks: tuple[Check, ...]
    tensors: FileTensors | None = None


def check_file(path: Path, original: PlannedOriginal) -> FileResult:
    """Compare the exported file `path` with its model. Files that cannot be read or run have failed checks."""
    name, checks, tensors = f"{CHECK}.{path.name}", structure_checks(path, original), None
    try:
        tensors = read_tensors(path, original)
        checks += [tensors.check(name)] if tensors else []
    except ArtifactError as error:
        checks.append(Check(name, "failed", detail=error.message))
    except MissingExtraError as error:
        command = original.command or f"vitcompress verify {path.parent}"
        checks.append(Check(name, "not_run", detail=f"{error.message}; {error.hint}", command=command))
    if is_engine(path):
        checks += engine_checks(path, original.model, original.plan, original.rows, original.unfolded)
    checks += output_checks(path, original)
    return FileResult(tuple(checks), tensors)


def read_tensors(path: Path, original: PlannedOriginal) -> FileTensors | None:
    """The tensors of a file, compared with those of the model; None if the format does not allow reading them.

    Raises:
        ArtifactError: the file is damaged, or was not written by vitcompress.
        MissingExtraError: reading the format needs a package that is not installed.
    """
    exporter = exporter_of(path)
    if exporter is None or exporter.contents is None:
        return None
    contents = exporter.contents(path)
    return compare_tensors(exported_module(original.model, contents.metadata), contents, original.rows)


def structure_checks(path: Path, original: PlannedOriginal | None) -> list[Check]:
    """Check the sidecar and, of an ONNX file, the graph. Without the model, only whether the graph is well-formed."""
    label = file_label(path)
    checks = list(_sidecar_checks(path, label))
    if path.suffix == ".onnx":
        checks.append(checker_check(path, label))
        if original is not None:
            with suppress(ArtifactError):  # a file that cannot be read fails the check before
                checks += graph_checks(original.model, original.plan.digest, path, label)
    return checks


def _sidecar_checks(path: Path, label: str) -> Iterator[Check]:
    """An engine is code, and is trusted only with its sidecar; other files may have none."""
    sidecar = sidecar_path(path)
    if sidecar.is_file():
        yield problem_check(f"{label}.file", find_mismatches(path), f"sha256 of every file as in {sidecar.name}")
    elif is_engine(path):
        yield problem_check(f"{label}.file", [f"{sidecar.name} is missing: the engine is not trusted"], "")


def is_engine(path: Path) -> bool:
    return path.suffix in ENGINES


def file_label(path: Path) -> str:
    """What the names of the checks of a file's structure begin with."""
    if path.suffix != ".onnx":
        return path.name
    if is_engine(Path(path.stem)):
        return f"{path.stem}.source"
    return {"model": "onnx", "dense": "onnx.dense"}.get(path.stem, f"onnx.{path.stem}")


def is_about(path: Path, name: str) -> bool:
    """Whether the check `name` is one of the file `path`, or of the outputs and weights of an engine's ONNX file."""
    own = f"{name}.".startswith((f"{PREFIX}{path.name}.", f"{CHECK}.{path.name}."))
    return own or file_label(path) in (name, name.rpartition(".")[0])
