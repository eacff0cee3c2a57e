"""Export a finished run folder again: another format or precision, or on the machine that the format is made for."""

import json
from pathlib import Path

from vitcompress import checkpoint, exporters, models
from vitcompress.errors import InputError, did_you_mean
from vitcompress.exporters.artifact import Exported, read_sidecar
from vitcompress.plan import Plan


def export_folder(
    folder: Path, name: str = "onnx", *, precision: str = "fp32", opset: int | None = None, out: Path | None = None
) -> Exported:
    """Write the model of a run folder in the format `name`, by default to `model.<suffix>` beside it.

    A precision other than fp32 goes into the file's name, so that it does not take the place of the file that the
    folder's measurements are about.

    Raises:
        InputError: an unknown format, or one that this machine cannot write.
        ArtifactError: not a finished run folder.
    """
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
    model = checkpoint.load(folder)
    path = out or folder / f"model{'' if precision == 'fp32' else '-' + precision}{exporter.suffix}"
    plan = Plan.from_json((folder / checkpoint.PLAN).read_text())
    return exporter.export(
        model,
        path,
        input=models.input_config(model),
        precision=precision,
        opset=opset,
        classes=class_names(folder),
        plan_digest=plan.digest,
    )


def class_names(folder: Path) -> tuple[str, ...]:
    """The class names of the folder's first export; none where it has none, which exporters replace by numbers."""
    known = read_sidecar(folder / "model.onnx") or {}
    return tuple(json.loads(known.get("metadata", {}).get("classes", "[]")))
