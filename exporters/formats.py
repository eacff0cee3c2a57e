"""The table of exporters. To add one, see README.md beside this file."""

from pathlib import Path

from vitcompress.errors import InputError, did_you_mean
from vitcompress.exporters.base import Exporter
from vitcompress.exporters.onnx.export import ONNX
from vitcompress.exporters.openvino.export import OPENVINO
from vitcompress.exporters.sidecar import DENSE, sidecar_path
from vitcompress.exporters.tensorrt.export import TENSORRT, TENSORRT_RTX
from vitcompress.io.plugins import load_plugin, load_plugins

EXPORTERS: dict[str, Exporter] = {exporter.name: exporter for exporter in (ONNX, OPENVINO, TENSORRT, TENSORRT_RTX)}
# Suffix -> exporter whose runner opens such files.
BY_SUFFIX = {suffix: e for e in reversed(EXPORTERS.values()) for suffix in (e.file_suffix, *e.other_suffixes)}


def find_exporter(name: str | Exporter) -> Exporter:
    """The exporter of the format `name`: a built-in one, or an entry point in the group `vitcompress.exporters`.

    An Exporter is returned unchanged.

    Raises:
        InputError: there is no such format, or the entry point does not load.
    """
    if isinstance(name, Exporter):
        return name
    exporter = EXPORTERS.get(name) or load_plugin("exporters", name, Exporter)
    if exporter is None:
        raise InputError(
            f"there is no export format {name!r}{did_you_mean(name, EXPORTERS)}",
            hint=f"use one of {', '.join(EXPORTERS)}, or install the package that declares it",
        )
    return exporter


def available_exporter(name: str | Exporter, *, hint: str) -> Exporter:
    """`find_exporter`, which also raises InputError with `hint` if this machine cannot write the format."""
    exporter = find_exporter(name)
    if reason := exporter.unavailable():
        raise InputError(f"{exporter.name} cannot be exported on this machine: {reason}", hint=hint)
    return exporter


def exporter_of(path: Path) -> Exporter | None:
    """The exporter whose runner opens the file `path`, by its last suffix; None if no installed one does."""
    if path.suffix in BY_SUFFIX:
        return BY_SUFFIX[path.suffix]
    plugins = load_plugins("exporters", Exporter).values()
    return next((plugin for plugin in plugins if path.suffix in (plugin.file_suffix, *plugin.other_suffixes)), None)


def exported_files(folder: Path, stem: str) -> list[Path]:
    """The exported files of the `model` of a run folder, or of its `dense` model.

    These are the files with a suffix of a built-in format, and all files with a sidecar. Files of the dense model have
    names that start with `dense`. Files with other names (`export --out`) belong to the model if they have a sidecar.
    """
    files = sorted(p for p in folder.glob("*") if p.suffix in BY_SUFFIX or sidecar_path(p).is_file())
    if stem == DENSE:
        return [path for path in files if path.name.startswith(DENSE)]
    others = (path for path in files if not path.name.startswith(DENSE))
    return [path for path in others if path.name.startswith(stem) or sidecar_path(path).is_file()]
