"""Write exported files: check the range of fp16, search fp32 layers, export; and all exports of a recipe."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

from torch import nn

from vitcompress.bench import suite
from vitcompress.errors import ArtifactError, CheckFailedError, DeviceError, PrecisionError
from vitcompress.exporters.base import Exported, Exporter, ModelInfo, write_sidecar
from vitcompress.exporters.onnx.export import measure_quantization
from vitcompress.exporters.options import AUTO, ONLY_EIGHT_BITS, ExportOptions
from vitcompress.exporters.precision import SOFTMAX, expand_layers, present_layers
from vitcompress.exporters.ranges import check_fp16, scan_ranges
from vitcompress.exporters.runtimes import find_exporter, open_runner
from vitcompress.exporters.sidecar import read_sidecar
from vitcompress.io import hardware
from vitcompress.io.files import write_json
from vitcompress.io.manifest import record_changes
from vitcompress.io.progress import SILENT, Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.text import format_percent, format_speedup
from vitcompress.models.checkpoint import load_model
from vitcompress.models.cost import count_by_module
from vitcompress.models.create import check_class_count, class_names_of, current_plan, input_config
from vitcompress.pipeline.calibration import Calibration
from vitcompress.pipeline.fp32_layers import NO_RANGES, LayerSearch, best_evaluator, rank_layers, search
from vitcompress.pipeline.job import Job
from vitcompress.plan import is_within
from vitcompress.training.metrics import random_images
from vitcompress.verify.files import quarantine, reject_export, rejected_exports
from vitcompress.verify.folder import noise_images
from vitcompress.verify.outputs import Original

Write = Callable[..., Exported]  # (path, **changes of options): writes a file
Model = Literal["dense", "model"]  # the beginning of the names of its files
QUICK = suite.BenchOptions("paper", batch=1, warmup=10, runs=40)
SCAN_IMAGES = 64  # on which fp16 overflow is checked and fp32 layers are chosen


def write_export(
    exporter: Exporter,
    original: Original,
    path: Path,
    *,
    options: ExportOptions,
    classes: Sequence[str] = (),
    progress: Progress = SILENT,
    calibration: Calibration | None = None,
    traces: dict[Any, Any] | None = None,
) -> Exported:
    """Write the model of `original` in the format of `exporter`.

    Before an export in half precision, its images show the ranges inside the model and the fp32 layers `auto`. The
    speed of an int8 file is compared with that of one in fp32. calibration: for int8 and fp8. traces: of earlier
    exports of the same model. Raises PrecisionError if a result inside the model is too large for fp16, InputError if
    the format does not support this model with these options (nothing was written), CheckFailedError if the outputs
    agree with no set of fp32 layers (`failed/<name>.islands.json` beside `path` lists all sets), and as the exporter.
    """
    model, result = original.model, None
    exporter.check_model(model, options)
    classes = classes or class_names_of(model)
    if classes:
        check_class_count(classes, model)
    about: ModelInfo = {"input": input_config(model), "classes": classes, "plan_digest": current_plan(model).digest}
    about["traces"] = {} if traces is None else traces
    if calibration is not None:
        about |= {"calibrate": calibration, "factors": calibration.factors}
        chosen = options.weight_bits is not None or options.eight_bits != "int8"
        if not chosen and calibration.trained.get("weight_bits") == 7:  # not the 8 that are the default of some formats
            options = replace(options, weight_bits=7)
    if AUTO in options.islands:
        result, divergences = _search_layers(exporter, original, options, about, path, progress)
        options = replace(options, islands=result.chosen or ())
    elif options.precision == "fp16":
        check_fp16(model, original.images, options.islands, offer_islands="islands" in exporter.supported(options))

    def write(path: Path, **changes: Any) -> Exported:
        return exporter.export(model, path, options=replace(options, **changes), **about)

    with record_changes(path.parent):
        exported = exporter.export(model, path, options=options, progress=progress, **about)
        if result is not None:
            exported = _add_costs(exported, result, divergences, write, model)
        if options.precision.startswith("int8") and not exporter.cannot_run():
            wide = options.only(exporter.uses - {"precision", "islands", *ONLY_EIGHT_BITS})
            exported = compare_with_fp32(exported, partial(exporter.export, model, options=wide, **about))
    return exported


def compare_with_fp32(exported: Exported, write: Write) -> Exported:
    """`exported` with its speed over the fp32 file that `write` writes, and a note in the warnings of its build.

    A file that this machine cannot run is not measured.
    """
    if (bench := _measure_over(exported, write)) is None:
        return exported
    ratio = {**bench.ratios[0], "a": "fp32", "b": exported.precision}
    reason = None if exported.format == "onnx" else hardware.slow_reason(exported.precision)
    slow = f": {ratio['verdict']} here; {reason or '--precision fastest measures the others'}"
    text = f"{exported.precision} over fp32 {format_speedup(ratio)}{slow * (ratio['verdict'] != 'faster')}"
    warnings = [*exported.build.get("warnings", ()), text, *bench.disturbed]
    return write_sidecar(replace(exported, speed=ratio, build={**exported.build, "warnings": warnings}))


def _measure_over(exported: Exported, write: Write) -> suite.Bench | None:
    """The file and the one that `write` writes, by `measure_quickly`; None if this machine cannot run them."""
    with suppress(DeviceError), TemporaryDirectory(prefix="vitcompress-") as folder:
        open_runner(exported.path).close()
        return measure_quickly([write(Path(folder) / f"base{exported.path.suffix}"), exported])
    return None


def measure_quickly(files: Sequence[Exported], progress: Progress = SILENT) -> suite.Bench:
    """Measure files interleaved at their smallest batch: 1, except for engines with another range."""
    least = max((exported.build.get("batch") or (1,))[0] for exported in files)
    return suite.run([exported.path for exported in files], replace(QUICK, batch=least), progress)


def _add_costs(
    exported: Exported, result: LayerSearch, divergences: Mapping[str, float], write: Write, model: nn.Module
) -> Exported:
    """`exported` with its search, completed by `LayerSearch.costs`.

    divergences: of `rank_layers`. write(path, islands=): writes the same file with other fp32 layers.
    """
    kept, warnings = expand_layers(model, result.chosen or ()), [*exported.build.get("warnings", ())]
    work = count_by_module(model, input_config(model).size)
    macs, costs = dict[str, int](), dict[str, Mapping[str, Any]]()
    for layer in divergences:
        part = work[layer.removesuffix(SOFTMAX)]
        macs[layer] = part.macs - part.macs_linear if layer.endswith(SOFTMAX) else part.macs  # attention products alone
    for layer in (layer for layer in divergences if is_within(layer, kept)):
        bench = _measure_over(exported, partial(write, islands=tuple(name for name in kept if name != layer)))
        speed: Mapping[str, Any] = {**bench.ratios[0], "a": f"with {layer}", "b": exported.precision} if bench else {}
        share = macs[layer] / sum(macs.values())
        costs[layer] = {"divergence": divergences[layer], "macs": share, "speed": speed}
        text = f"is {format_speedup(speed)} as fast" if speed else f"has {format_percent(share)} fewer products in them"
        warnings.append(f"{layer} adds {divergences[layer]:.2g} nats in eight bits; with it in fp32 the file {text}")
    search = asdict(replace(result, costs=costs))
    return write_sidecar(replace(exported, islands_search=search, build={**exported.build, "warnings": warnings}))


def _search_layers(
    exporter: Exporter, original: Original, options: ExportOptions, about: ModelInfo, path: Path, progress: Progress
) -> tuple[LayerSearch, Mapping[str, float]]:
    """Search the fp32 layers of the file `path`; also returns `rank_layers`.

    Raises PrecisionError if fp16 always overflows, and CheckFailedError, with all trials in a file, if no set passed.
    """
    fixed = tuple(name for name in options.islands if name != AUTO)
    evaluator = best_evaluator(exporter, original, options, about)
    ranges, ranked, precision = NO_RANGES, dict[str, float](), options.precision
    if options.eight_bits:
        ranked = rank_layers(original, measure_quantization(original.model, options, "int32_bias", **about))
    elif precision == "fp16":
        ranges = scan_ranges(original.model, original.images)
    names = tuple(ranked) if options.eight_bits else None
    result = search(original, evaluator, precision, fixed=fixed, ranges=ranges, ranked=names, progress=progress)
    if result.chosen is None:
        trials, last = RunFolder(path.parent).failed / f"{path.name}.islands.json", result.tries[-1]
        write_json(trials, asdict(result))
        problem = f"the outputs of {path.name} in {precision} do not agree with those of the model"
        count = f"{len(result.tries)} were tried, the largest ({', '.join(last.islands)}) failed: {last.reason}"
        hint = f"use --precision {'bf16 or ' if precision == 'fp16' else ''}fp32; {trials} lists every set"
        raise CheckFailedError(f"{problem} with any set of fp32 layers: {count}", hint=hint)
    return result, ranked


@dataclass(frozen=True)
class PlannedFile:
    """A file that the recipe exports. options: those that its format uses."""

    exporter: Exporter
    model: Model
    path: Path
    options: ExportOptions


def _planned_files(job: Job) -> list[PlannedFile]:
    """Both models in every format of the recipe, the dense one first: a fair comparison needs the same exporter."""
    table, models = job.recipe.export, get_args(Model)
    return [
        PlannedFile(exporter, model, job.files.exported(model, exporter.suffix), table.only(exporter.supported(table)))
        for model, exporter in product(models, map(find_exporter, table.formats))
    ]


def export_models(job: Job) -> None:
    """Write all files that the recipe exports and that do not exist.

    A file that half precision cannot represent is reported and omitted; the rest of the run continues without it.
    """
    traces: dict[Model, dict[Any, Any]] = {"dense": {}, "model": {}}
    folder = shlex.quote(str(job.folder))
    for planned in _planned_files(job):
        path, exporter = planned.path, planned.exporter
        if path.name not in rejected_exports(job.folder) and not _is_complete(planned):
            job.progress.stage(f"Export {path.name}")
            try:
                _export_file(job, planned, traces[planned.model])
            except (CheckFailedError, PrecisionError) as error:
                remedy = f"; {error.hint} in `vitcompress export {folder}`" if error.hint else ""
                reject_export(job.folder, path.name, f"{error.message}{remedy}")
                job.progress.note(f"{error.message}{remedy}")
        if planned.model == "model" and (reason := exporter.cannot_run()):
            job.progress.note(f"{exporter.name} was built, not run; {reason} (`vitcompress verify {folder}`)")


def _is_complete(planned: PlannedFile) -> bool:
    """Whether the file exists with a complete sidecar."""
    sidecar = read_sidecar(planned.path) if planned.path.is_file() else {}
    return bool(sidecar) and (AUTO not in planned.options.islands or bool(sidecar["islands_search"]))


def _export_file(job: Job, planned: PlannedFile, traces: dict[Any, Any]) -> None:
    options = planned.options
    model = load_model(job.dense_folder if planned.model == "dense" else job.folder)
    present = (*present_layers(model, options.islands), AUTO)
    if absent := [name for name in options.islands if name not in present]:
        job.progress.note(f"not in {planned.path.name}, so not in fp32: {', '.join(absent)}")
    original, calibration = Original(model, noise_images(model, job.base), real=False), None
    if job.data is not None:  # the test images make no choices
        source, seed = job.data.heldout or job.data.train, job.recipe.run.seed
        original = Original(model, random_images(source, job.input, SCAN_IMAGES, seed))
        calibration = Calibration(model, options, job.files, job.data.train, seed, job.progress)
    exported = write_export(
        planned.exporter,
        original,
        planned.path,
        options=replace(options, islands=tuple(name for name in options.islands if name in present)),
        classes=job.class_names,
        progress=job.progress,
        calibration=calibration,
        traces=traces,
    )
    job.files.verification.unlink(missing_ok=True)  # a new file must be verified
    for warning in exported.build.get("warnings", ()):
        job.progress.note(f"{planned.path.name}: {warning}")


def quarantine_failed(job: Job) -> None:
    """Move each exported file that failed a check away, and record why."""
    for path in (planned.path for planned in _existing(job)):
        try:
            checks = (read_sidecar(path).get("verification") or {}).get("checks", ())
            failed = [f"{check['name']}: {check['detail']}" for check in checks if check["verdict"] == "failed"]
        except ArtifactError as error:
            failed = [error.message]
        if failed:
            reject_export(job.folder, path.name, failed[0])
            job.progress.note(f"{path.name} does not match its model: moved to {quarantine(path)}; {failed[0]}")


def _existing(job: Job) -> list[PlannedFile]:
    return [planned for planned in _planned_files(job) if planned.path.is_file()]


def runnable_files(job: Job, model: Model) -> dict[str, tuple[Path, str | None]]:
    """The exports of one model that this machine can run, by format, each with the device to run it on."""
    runnable = {}
    for planned in _existing(job):
        name, path = planned.exporter.name, planned.path
        if planned.model == model and planned.exporter.cannot_run() is None:
            device = job.onnx_device if name == "onnx" else None
            try:
                open_runner(path, device=device).close()
                runnable[name] = path, device
            except DeviceError as error:  # not every processor computes in the precision of every file
                job.progress.note(f"not run here: {error.message}")
    return runnable
