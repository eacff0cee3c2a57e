"""Export a finished run folder again: another format or precision, or on the machine that the format is made for."""

import json
from pathlib import Path

from vitcompress import checkpoint, exporters, models
from vitcompress.errors import InputError, did_you_mean
from vitcompress.export_options import ExportOptions
from vitcompress.exporters.artifact import Exported, Exporter, read_sidecar
from vitcompress.plan import Plan
from vitcompress.progress import Progress


def export_folder(
    folder: Path,
    name: str = "onnx",
    *,
    options: ExportOptions | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write the model of a run folder in the format `name`, by default to `model.<suffix>` beside it.

    A precision other than fp32 goes into the file's name, so that it does not take the place of the file that the
    folder's measurements are about.

    Raises:
        InputError: an unknown format, or one that this machine cannot write, or options that it does not offer.
        ArtifactError: not a finished run folder.
    """
    exporter, options = writable(name), options or ExportOptions()
    exporter.check(options)
    model = checkpoint.load(folder)
    path = out or folder / f"model{'' if options.precision == 'fp32' else '-' + options.precision}{exporter.suffix}"
    plan = Plan.from_json((folder / checkpoint.PLAN).read_text())
    return exporter.export(
        model,
        path,
        input=models.input_config(model),
        classes=class_names(folder),
        plan_digest=plan.digest,
        options=options,
        progress=progress,
    )


def writable(name: str) -> Exporter:
    """The exporter of the format `name`. Raises InputError when there is none, or when this machine cannot write it."""
    if name not in exporters.EXPORTERS:
        raise InputError(
            f"there is no export format {name!r}{did_you_mean(name, exporters.EXPORTERS)}",
            hint=f"the formats are {', '.join(exporters.EXPORTERS)}",
        )
    exporter = exporters.EXPORTERS[name]
    if reason := exporter.unavailable():
        raise InputError(
            f"{name} cannot be exported on this machine: {reason}", hint="`vitcompress doctor` says what is"
        )
    return exporter


def class_names(folder: Path) -> tuple[str, ...]:
    """The class names of the folder's first export; none where it has none, which exporters replace by numbers."""
    known = read_sidecar(folder / "model.onnx") or {}
    return tuple(json.loads(known.get("metadata", {}).get("classes", "[]")))
