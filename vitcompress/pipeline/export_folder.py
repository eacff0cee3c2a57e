"""Export a finished run folder again: another format or precision, or on the machine that the format is made for."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from vitcompress import exporters
from vitcompress.errors import InputError
from vitcompress.exporters.base import Exported, Exporter
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.sidecar import DENSE, class_names, sidecar_path
from vitcompress.exporters.tensorrt.export import source_path
from vitcompress.io.checks import Check, Verification, amend
from vitcompress.io.progress import Progress
from vitcompress.models.checkpoint import PLAN, load_model, read_plan
from vitcompress.models.create import input_config
from vitcompress.pipeline import export
from vitcompress.verify import outputs, quarantine
from vitcompress.verify.engine import engine_weights
from vitcompress.verify.fold import UNFOLDED
from vitcompress.verify.folder import known_images
from vitcompress.verify.weights import READABLE, readable_files, weight_checks


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
        InputError: an unknown format, one that this machine cannot write, options that it does not offer, or a name for
            another format.
        ArtifactError: not a finished run folder.
        PrecisionError: a result inside the model is too large for fp16, on the images it was verified with; nothing
            was written.
        CheckFailedError: no set of fp32 islands makes the file agree.
    """
    exporter = exporters.available_exporter(name, hint="`vitcompress doctor` says what can be")
    options = options or ExportOptions()
    exporter.check(options)
    _check_out(exporter, folder, out)
    model = load_model(folder)
    images, real = known_images(folder, model)
    path = out or folder / f"model{'' if options.precision == 'fp32' else '-' + options.precision}{exporter.suffix}"
    plan = read_plan(folder / PLAN)
    return export.write_export(
        exporter,
        model,
        path,
        images,
        input=input_config(model),
        classes=class_names(folder / "model.onnx"),
        plan_digest=plan.digest,
        options=options,
        real=real,
        progress=progress,
    )


def _check_out(exporter: Exporter, folder: Path, out: Path | None) -> None:
    """Raise InputError for a name by which the file would be taken for one of the dense model, or of another format.

    The last suffix says what runs a file: both flavours of engines end alike.
    """
    if out is not None and out.name.startswith(DENSE) and out.parent.resolve() == folder.resolve():
        raise InputError(
            f"{out} would be taken for the dense model: in a run folder its files begin with {DENSE!r}",
            hint="give another --out",
        )
    last = f".{exporter.suffix.rpartition('.')[2]}"
    if out is not None and out.suffix != last:
        raise InputError(
            f"{out} cannot be a file of the format {exporter.name}, whose names end in {last}",
            hint=f"--out {out.with_suffix(exporter.suffix)}, or another --format",
        )


@dataclass(frozen=True)
class ExportOutcome:
    """What became of an exported file. path: where it lies now; it was moved when it failed."""

    path: Path
    verdict: str
    checks: tuple[Check, ...]

    @property
    def reason(self) -> str:
        """The first of the checks that led to the verdict, in words."""
        return next((f"{c.name}: {c.detail}" for c in self.checks if c.verdict == self.verdict), "")

    @property
    def command(self) -> str | None:
        return next((check.command for check in self.checks if check.command), None)

    def as_data(self) -> dict[str, Any]:
        checks = [check.as_data() for check in self.checks]
        return {"verdict": self.verdict, "verified": self.verdict == "passed", "checks": checks}


def settle(folder: Path, exported: Exported, progress: Progress | None = None) -> ExportOutcome:
    """Hold an exported file against the model of the run `folder`, on the images that the folder was verified with.

    The ONNX file that an engine was built from is checked too: most machines can run it. The verdict goes into the
    sidecar and, where the file lies in the folder, into its verify.json; a file that fails is moved to the folder
    `failed` beside it.
    """
    (progress or Progress()).stage(f"Compare {exported.path.name} with the model")
    path, source = exported.path, source_path(exported.path)
    here, files = path.parent.resolve() == folder.resolve(), [path, *([source] if source.is_file() else [])]
    found = _held(folder, files, all_told=here)
    if not here:
        brought = _brought(folder, exported)
        found = replace(found, checks=tuple(replace(c, command=c.command and brought) for c in found.checks))
    for file in reversed(files):
        verdict = quarantine.record(file, quarantine.of(file, found.checks))
    if here:
        named = {check.name for check in found.checks}
        amend(folder, found, lambda name: name in named or quarantine.is_about(path, name))
    path = quarantine.set_aside(path) if verdict == "failed" else path
    return ExportOutcome(path, verdict, tuple(quarantine.of(exported.path, found.checks)))


def _brought(folder: Path, exported: Exported) -> str:
    """The command that copies a file from elsewhere into the run folder and verifies it there, for the target."""
    path, source = exported.path, source_path(exported.path)
    files = [*map(path.with_name, exported.files), sidecar_path(path)]
    files += [source, sidecar_path(source)] if source.is_file() else []
    return f"{shlex.join(['cp', *map(str, files), str(folder)])} && vitcompress verify {folder}"


def _held(folder: Path, files: Sequence[Path], *, all_told: bool) -> Verification:
    """The checks of the weights and answers of `files`. all_told: also of the weights of the folder's other files."""
    model, plan = load_model(folder), read_plan(folder / PLAN)
    images, real = known_images(folder, model)
    told = {path for path in files if path.suffix in READABLE} | set(readable_files(folder) if all_told else ())
    weights, table = weight_checks(model, plan, sorted(told))
    engines = (engine_weights(path, model, plan, folder / UNFOLDED) for path in files if path.suffix == ".engine")
    answers = (outputs.file_checks(model, path, images, real=real) for path in files)
    return Verification((*chain(*answers), *weights, *chain(*engines)), table)
