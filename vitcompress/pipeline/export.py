"""Export models: scan for fp16 overflow, search fp32 layers, write, and do so for both models of a run."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor, nn

from vitcompress.errors import CheckFailedError, DeviceError, PrecisionError
from vitcompress.exporters import EXPORTERS
from vitcompress.exporters.base import About, Exported, Exporter, write_sidecar
from vitcompress.exporters.options import AUTO, ExportOptions
from vitcompress.exporters.precision import present
from vitcompress.exporters.ranges import Ranges, check_half, check_islands_help, scan
from vitcompress.exporters.runtimes import open_runner
from vitcompress.exporters.sidecar import read_sidecar
from vitcompress.io.checks import LEDGER
from vitcompress.io.files import read_json, write_json
from vitcompress.io.progress import Progress
from vitcompress.models.checkpoint import PLAN, load_model, read_plan
from vitcompress.models.create import InputConfig
from vitcompress.pipeline.fp32_layers import Search, judge_of, search
from vitcompress.pipeline.job import Job
from vitcompress.plan import Plan
from vitcompress.training.metrics import calibration_images
from vitcompress.verify import quarantine
from vitcompress.verify.folder import noise
from vitcompress.verify.quarantine import FAILED


def write_export(
    exporter: Exporter,
    model: nn.Module,
    path: Path,
    images: Tensor,
    *,
    options: ExportOptions,
    real: bool = True,
    progress: Progress | None = None,
    **about: Unpack[About],
) -> Exported:
    """Write `model` in the format of `exporter`; for half precision, check the ranges inside it first.

    images: (count, channels, height, width), normalised; what is scanned and, for the islands `auto`, compared. real:
    whether they are of the kind that the model is made for, and not noise.

    Raises:
        PrecisionError: a result inside the model is too large for fp16; nothing was written.
        CheckFailedError: no set of islands makes the file agree. What was tried then lies in
            `failed/<name>.islands.json` beside `path`.
        InputError: the format cannot hold this model with these options; nothing was written.
        InputError, VitcompressError, OutputError: as the exporter.
    """
    exporter.check_model(model, options)
    found = None
    if AUTO in options.islands:
        found = _searched(exporter, model, images, options, about["input"], real=real, progress=progress)
        options = replace(options, islands=_chosen(found, options, path))
    elif options.precision == "fp16":
        check_half(model, images, options.islands, offer_islands="islands" in exporter.uses)
    done = exporter.export(model, path, options=options, progress=progress, **about)
    if found is not None:
        done = replace(done, islands_search=found.as_data())
        write_sidecar(done)
    return done


def _searched(
    exporter: Exporter,
    model: nn.Module,
    images: Tensor,
    options: ExportOptions,
    input: InputConfig,
    *,
    real: bool,
    progress: Progress | None,
) -> Search:
    fixed = tuple(name for name in options.islands if name != AUTO)
    ranges = scan(model, images) if options.precision == "fp16" else Ranges({}, {})
    check_islands_help(model, ranges, fixed)
    judge = judge_of(exporter, model, images, options, input, real=real)
    return search(model, judge, ranges, images, fixed=fixed, real=real, progress=progress)


def _chosen(found: Search, options: ExportOptions, path: Path) -> tuple[str, ...]:
    """The islands that were found. Where none were, write down all that was tried, and raise CheckFailedError."""
    if found.chosen is not None:
        return found.chosen
    account = path.parent / FAILED / f"{path.name}.islands.json"
    write_json(account, found.as_data())
    last = found.tries[-1]
    raise CheckFailedError(
        f"{path.name} in {options.precision} does not answer as the model does with any set of fp32 islands: "
        f"{len(found.tries)} were tried, the largest ({', '.join(last.islands)}) failed: {last.reason}",
        hint=f"use --precision {'bf16 or ' if options.precision == 'fp16' else ''}fp32; {account} tells of every set",
    )


LOOKED_AT = 64  # images on which ranges are scanned and islands chosen


def export_models(job: Job) -> None:
    """Both models in every format that the recipe asks for: a fair comparison needs the same exporter.

    A file that half precision cannot hold is reported and left out; the rest of the run does without it.
    """
    refused = quarantine.refused(job.folder)
    for name in job.recipe.export.formats:
        exporter = EXPORTERS[name]
        for stem, folder, plan in (("dense", job.dense_folder, job.base), ("model", job.folder, plan_of(job))):
            path = job.folder / f"{stem}{exporter.suffix}"
            if path.name in refused or _stands(path, job, exporter):
                continue
            job.progress.stage(f"Export {path.name}")
            try:
                _export_in_format(job, exporter, path, load_model(folder), plan)
            except (CheckFailedError, PrecisionError) as error:
                way_out = f"; {error.hint} in `vitcompress export {job.folder}`" if error.hint else ""
                refused[path.name] = f"{error.message}{way_out}"
                quarantine.refuse(job.folder, refused)
                job.progress.note(refused[path.name])
        if reason := exporter.cannot_run():
            job.progress.note(f"{name} was built, not run; {reason} (`vitcompress verify {job.folder}`)")


def _stands(path: Path, job: Job, exporter: Exporter) -> bool:
    """Whether the file is there with a complete sidecar."""
    known, searched = read_sidecar(path), AUTO in _options(job, exporter).islands
    return path.is_file() and known is not None and (not searched or bool(known.get("islands_search")))


def _options(job: Job, exporter: Exporter) -> ExportOptions:
    return job.recipe.export.only(exporter.uses)


def _export_in_format(job: Job, exporter: Exporter, path: Path, model: nn.Module, plan: Plan) -> None:
    options = _options(job, exporter)
    here = present(model, options.islands)
    if gone := [name for name in options.islands if name not in (*here, AUTO)]:
        job.progress.note(f"not in {path.name}, so no islands there: {', '.join(gone)}")
    islands = tuple(name for name in options.islands if name not in gone)
    images, real = _looked_at(job, model)
    done = write_export(
        exporter,
        model,
        path,
        images,
        input=job.input,
        classes=class_names(job),
        plan_digest=plan.digest,
        options=replace(options, islands=islands),
        real=real,
        progress=job.progress,
    )
    for warning in done.build.get("warnings", ()):
        job.progress.note(f"{path.name}: {warning}")


def _looked_at(job: Job, model: nn.Module) -> tuple[Tensor, bool]:
    """Images on which choices may be made (held-out, else training images), and True; noise and False without data."""
    if job.data is None:
        return noise(model), False
    source = job.data.heldout or job.data.train
    return calibration_images(source, job.input, min(LOOKED_AT, len(source)), job.recipe.run.seed), True


def class_names(job: Job) -> tuple[str, ...]:
    """The data's class names, numbers where there is no data."""
    if job.data is not None:
        return job.data.classes
    return tuple(str(number) for number in range(job.classes))


def plan_of(job: Job) -> Plan:
    return read_plan(job.folder / PLAN)


# --------------------------------------------------------------------------------------------- what is there at the end


def drop_failed(job: Job) -> None:
    """Move away each file that did not pass the gate, and remember why it is not there."""
    refused = quarantine.refused(job.folder)
    checks = read_json(job.folder / LEDGER)["checks"]
    for path in all_exported(job):
        if wrong := [c for c in checks if c["verdict"] == "failed" and quarantine.is_about(path, c["name"])]:
            refused[path.name] = f"{wrong[0]['name']}: {wrong[0]['detail']}"
            quarantine.refuse(job.folder, refused)
            job.progress.note(
                f"{path.name} does not match its model: moved to {quarantine.set_aside(path)}; {refused[path.name]}"
            )


def exported(job: Job, stem: str) -> list[Path]:
    """The exported files of one model, in the order of the recipe's formats, as far as they are there."""
    paths = (job.folder / f"{stem}{EXPORTERS[name].suffix}" for name in job.recipe.export.formats)
    return [path for path in paths if path.is_file()]


def all_exported(job: Job) -> list[Path]:
    """`exported` of the dense model, then of the compressed one."""
    return [*exported(job, "dense"), *exported(job, "model")]


def runnable(job: Job, stem: str) -> dict[str, tuple[Path, str | None]]:
    """The exported files of one model that this machine can run, by format, each with the device to run it on."""
    found = {}
    for name in job.recipe.export.formats:
        path, device = job.folder / f"{stem}{EXPORTERS[name].suffix}", job.onnx_device if name == "onnx" else None
        if path.is_file() and EXPORTERS[name].cannot_run() is None and _opens(path, device, job):
            found[name] = path, device
    return found


def _opens(path: Path, device: str | None, job: Job) -> bool:
    """Whether the device computes in the precision of the file, which not every processor does."""
    try:
        open_runner(path, device=device).close()
    except DeviceError as error:
        job.progress.note(f"{path.name} is not run here: {error.message.removeprefix(f'{path} ')}")
        return False
    return True


def island_remarks(job: Job) -> Iterator[str]:
    """Which parts of the exported files stay in fp32, and what judged that they must."""
    for path in all_exported(job):
        found: dict[str, Any] = (read_sidecar(path) or {}).get("islands_search") or {}
        if found:
            proxy = ", which is a proxy for the GPU" if found["proxy"] else ""
            chosen, tries = ", ".join(found["chosen"]) or "nothing", len(found["tries"])
            yield f"{path.name} keeps {chosen} in fp32. Sets tried: {tries}. Judge: {found['judge']}{proxy}."
