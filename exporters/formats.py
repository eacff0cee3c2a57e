"""The table of exporters. To add one, see README.md beside this file."""

from pathlib import Path

from vitcompress.errors import InputError
from vitcompress.exporters.base import Exporter
from vitcompress.exporters.onnx.export import ONNX
from vitcompress.exporters.openvino.export import OPENVINO
from vitcompress.exporters.sidecar import DENSE, sidecar_path
from vitcompress.exporters.tensorrt.export import TENSORRT, TENSORRT_RTX
from vitcompress.io.plugins import find_by_name, load_plugins

EXPORTERS: dict[str, Exporter] = {exporter.name: exporter for exporter in (ONNX, OPENVINO, TENSORRT, TENSORRT_RTX)}
# Suffix -> exporter whose runner opens such files.
BY_SUFFIX = {suffix: e for e in reversed(EXPORTERS.values()) for suffix in (e.file_suffix, *e.other_suffixes)}


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
