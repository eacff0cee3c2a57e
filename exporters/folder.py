"""Export a finished run folder again: another format or precision, or on the machine that the format is made for."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitcompress import checkpoint, exporters, models
from vitcompress.errors import InputError, did_you_mean
from vitcompress.export_options import ExportOptions
from vitcompress.exporters import agreement, exporting
from vitcompress.exporters.artifact import Exported, Exporter, read_sidecar
from vitcompress.exporters.tensorrt_engine import source_path
from vitcompress.plan import Plan
from vitcompress.progress import Progress
from vitcompress.verdicts import Check, amend
from vitcompress.verify import known_images


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
        PrecisionError: a result inside the model is too large for fp16, on the images it was verified with; nothing
            was written.
        CheckFailedError: no set of fp32 islands makes the file agree.
    """
    exporter, options = writable(name), options or ExportOptions()
    exporter.check(options)
    model = checkpoint.load(folder)
    images, real = known_images(folder, model)
    path = out or folder / f"model{'' if options.precision == 'fp32' else '-' + options.precision}{exporter.suffix}"
    plan = Plan.from_json((folder / checkpoint.PLAN).read_text())
    return exporting.export(
        exporter,
        model,
        path,
        images,
        input=models.input_config(model),
        classes=class_names(folder),
        plan_digest=plan.digest,
        options=options,
        real=real,
        progress=progress,
    )


@dataclass(frozen=True)
class Settled:
    """What became of an exported file. path: where it lies now; it was moved when it failed."""

    path: Path
    verdict: str
    checks: tuple[Check, ...]

    @property
    def reason(self) -> str:
        """What of the checks that did not pass is to be told first."""
        return next((f"{c.name}: {c.detail}" for c in self.checks if c.verdict != "passed"), "")

    @property
    def command(self) -> str | None:
        return next((check.command for check in self.checks if check.command), None)

    def as_data(self) -> dict[str, Any]:
        checks = [check.as_data() for check in self.checks]
        return {"verdict": self.verdict, "verified": self.verdict == "passed", "checks": checks}


def settle(folder: Path, exported: Exported, progress: Progress | None = None) -> Settled:
    """Hold an exported file against the model of the run `folder`, on the images that the folder was verified with.

    So is the ONNX file beneath an engine, which most machines can run. The verdict goes into the sidecar and, where the
    file lies in the folder, into its verify.json; a file that fails is moved to the folder `failed` beside it.
    """
    (progress or Progress()).stage(f"Compare {exported.path.name} with the model")
    model = checkpoint.load(folder)
    images, real = known_images(folder, model)
    checks, source = agreement.file_checks(model, exported.path, images, real=real), source_path(exported.path)
    if source.is_file():
        beneath = agreement.file_checks(model, source, images, real=real)
        agreement.record(source, beneath)
        checks = [*checks, *beneath]
    verdict = agreement.record(exported.path, checks)
    if exported.path.parent.resolve() == folder.resolve():
        amend(folder, checks, f"{agreement.PREFIX}{exported.path.name}")
    path = agreement.set_aside(exported.path) if verdict == "failed" else exported.path
    return Settled(path, verdict, tuple(checks))


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
