"""The table of exporters, and runners for all artifacts: exported files, run folders and models of timm.

A runner never changes device, provider or precision by itself: what cannot run as requested is an error.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from vitcompress.errors import ArtifactError, InputError
from vitcompress.exporters.base import Exporter
from vitcompress.exporters.onnx.export import ONNX
from vitcompress.exporters.openvino.export import OPENVINO
from vitcompress.exporters.runner import Runner, RunnerOptions
from vitcompress.exporters.sidecar import DENSE, sidecar_path
from vitcompress.exporters.tensorrt.export import TENSORRT, TENSORRT_RTX
from vitcompress.exporters.torch_runner import TIMM, TorchRunner
from vitcompress.io.files import file_sha256, signed_files, user_path
from vitcompress.io.plugins import find_by_name, load_all
from vitcompress.io.run_folder import RunFolder
from vitcompress.models.checkpoint import load_model
from vitcompress.models.source import create_named

__all__ = ["RUNNERS", "Runner", "RunnerOptions", "TorchRunner", "open_runner"]

EXPORTERS: dict[str, Exporter] = {exporter.name: exporter for exporter in (ONNX, OPENVINO, TENSORRT, TENSORRT_RTX)}
# Suffix of a file -> its runner.
RUNNERS = {suffix: e.runner for e in EXPORTERS.values() for suffix in (e.file_suffix, *e.other_suffixes)}


def runtime_of(format: str) -> str:
    """What runs the files of a format, as recipes name it: `onnxruntime`, else by the name of the format."""
    return "onnxruntime" if format == ONNX.name else format


RUNTIME_FORMATS = {runtime_of(name): name for name in EXPORTERS}  # runtime -> format of the files that it runs


def find_exporter(name: str | Exporter) -> Exporter:
    """The exporter of the format `name`, built in or of an installed package. Raises InputError if there is none."""
    return find_by_name(name, EXPORTERS, "exporters", "export format")


def available_exporter(name: str | Exporter, *, hint: str) -> Exporter:
    """`find_exporter`, which also raises InputError with `hint` if this machine cannot write the format."""
    exporter = find_exporter(name)
    if reason := exporter.unavailable():
        raise InputError(f"{exporter.name} cannot be exported on this machine: {reason}", hint=hint)
    return exporter


def exporter_of(path: Path) -> Exporter | None:
    """The exporter whose runner opens the file `path`, by its last suffix; None if no installed one does."""
    exporters = load_all(EXPORTERS, "exporters", Exporter)
    return next((e for _, e in exporters if path.suffix in (e.file_suffix, *e.other_suffixes)), None)


def exported_files(folder: Path, stem: str) -> list[Path]:
    """The exported files of the `model` of a run folder, or of its `dense` model.

    They have a suffix of a built-in format or a sidecar. Names of files of the dense model start with `dense`; files
    with other names (`export --out`) belong to the model if they have a sidecar.
    """
    own = (path for path in folder.glob("*") if path.name.startswith(DENSE) is (stem == DENSE))
    return sorted(p for p in own if sidecar_path(p).is_file() or (p.suffix in RUNNERS and p.name.startswith(stem)))


def open_runner(artifact: str | Path, options: RunnerOptions | None = None, **settings: Any) -> Runner:
    """The runner of a file, a run folder or `timm:NAME`; `settings` are fields of RunnerOptions.

    Raises ArtifactError for a file that is missing, damaged, of an unknown format, or not one of `signed_files`, and
    DeviceError for a device, provider or precision that this machine or this file does not have.
    """
    options = replace(options or RunnerOptions(), **settings)
    name, path = str(artifact), user_path(artifact)
    if name.startswith(TIMM):
        return TorchRunner(create_named(name[len(TIMM) :]), options, name=name)
    opened = RunFolder(path).weights if path.is_dir() else path
    if (signed := signed_files.get()) and opened.resolve() not in signed:
        raise ArtifactError(f"{path} is not signed", hint="`vitcompress sign` signs it; or omit --require-signed")
    if path.is_dir():
        return TorchRunner(load_model(path), options, name=name, sha256=file_sha256(opened))
    if path.is_file() and (exporter := exporter_of(path)):
        return exporter.runner(path, options)
    problem = "cannot be run" if path.exists() else "does not exist"
    model = name if name.isidentifier() else "NAME"
    raise ArtifactError(f"{path} {problem}", hint=f"give a run folder, {TIMM}{model}, or a file ({', '.join(RUNNERS)})")
