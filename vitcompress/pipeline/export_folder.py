"""Export a finished run folder again: another format or precision, the fastest one here, or on its target machine."""

import math
import shlex
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vitcompress.errors import ArtifactError, CheckFailedError, InputError
from vitcompress.exporters.base import Exported, Exporter
from vitcompress.exporters.options import AUTO, DEFAULTS, ONLY_EIGHT_BITS, ExportOptions, Precision
from vitcompress.exporters.runtimes import available_exporter, exported_files, find_exporter, open_runner
from vitcompress.exporters.sidecar import DENSE, check_sha256, read_classes, read_sidecar, sidecar_path, usable_sidecar
from vitcompress.exporters.tensorrt.export import source_path
from vitcompress.io.checks import Check, Status, Verification, update_verification
from vitcompress.io.files import decode_json_values, file_sha256, read_record
from vitcompress.io.manifest import check_unchanged, read_manifest
from vitcompress.io.progress import SILENT, Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.text import format_speedup
from vitcompress.models.checkpoint import load_model, read_plan
from vitcompress.pipeline.calibration import Calibration
from vitcompress.pipeline.export import SCAN_IMAGES, measure_quickly, write_export
from vitcompress.pipeline.folder import dense_folder_of_run
from vitcompress.verify.engine import inspector_checks
from vitcompress.verify.files import contents_of, file_status, is_about, quarantine
from vitcompress.verify.folder import check_files, recorded_images, run_classes
from vitcompress.verify.outputs import Original, PlannedOriginal
from vitcompress.verify.weights import compare_tensors, shape_check, weight_table

FASTEST = "fastest"
FORMATS = ("onnx", "openvino")  # with `PRECISIONS`, what `choose_fastest` measures
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8", "int8+bf16")
FACTS = ("precision", "opset", "build", "verified", "versions")  # of a sidecar or manifest, in signatures


def export_folder(
    folder: Path,
    name: str = "onnx",
    *,
    options: ExportOptions | None = None,
    out: Path | None = None,
    dense: bool = False,
    data: Path | None = None,
    progress: Progress = SILENT,
    traces: dict[Any, Any] | None = None,
) -> Exported:
    """Write the model of a run folder in the format `name`, by default to `model.<suffix>` in the folder.

    A precision other than fp32, and bytes as input, are part of the file's name: `model-fp16-uint8.onnx`. Both always
    are, and the targets of `--sm`, as in `model-fp32-float32-sm89.rtx.engine`, if the shorter name is that of another
    file. dense: write the model before pruning, to `dense.<suffix>`. data: the folder of the run's images, if they have
    moved. traces: of earlier exports of the same model.
    Raises InputError for a format or options that are not supported here, and for the name of a file of another format,
    model, precision, input or target; ArtifactError without a finished run or the dense model; and as `write_export`.
    """
    files, options = RunFolder(folder), options or ExportOptions()
    exporter = available_exporter(name, hint="`vitcompress doctor` lists what this machine can export")
    exporter.check(options)
    targets = "".join(f"-sm{target}" for target in options.sm)
    labels = (options.label, f"-{options.precision}-{'uint8' if options.uint8 else 'float32'}{targets}")
    paths = [files.exported("dense" if dense else "model", f"{label}{exporter.suffix}") for label in labels]
    path = out or next((path for path in paths if not _describe_other(path, name, options)), paths[0])
    check_name(exporter, folder, path, dense=dense)
    if other := _describe_other(path, name, options):
        message = f"{path} is a file of another format, precision or input, or for other GPUs ({other})"
        raise InputError(message, hint="give another --out, or remove the file")
    if folder.resolve() in path.parent.resolve().parents:
        progress.note(f"{path} is in a subfolder of the run: its manifest, report and `verify` do not include it")
    model, onnx = load_model(_source(folder, dense).path), files.exported("model", ".onnx")
    read = files.report, files.verification, files.recorded_outputs, files.unfolded, sidecar_path(onnx)
    check_unchanged(folder, *read)
    read_record(files.verification, Verification)  # checks of the file are added to it
    calibration = Calibration(model, options, files, progress=progress, data=data)
    images, real = recorded_images(folder, model)
    if real and AUTO in options.islands:
        try:
            images = calibration.sample(SCAN_IMAGES)
        except InputError as error:
            progress.note(f"the fp32 layers are chosen on test images: {error.message}")
    return write_export(
        exporter,
        Original(model, images[:SCAN_IMAGES], real),
        path,
        options=options,
        classes=run_classes(files, model) or read_classes(onnx),
        progress=progress,
        calibration=calibration,
        traces=traces,
    )


def _source(folder: Path, dense: bool) -> RunFolder:
    """The folder of the model to export. Raises ArtifactError if that of the dense model is missing."""
    files = RunFolder(dense_folder_of_run(folder) if dense else folder)
    if dense and not files.plan.is_file():
        message = f"the dense model of {folder} is missing: there is no {files.plan}"
        raise ArtifactError(message, hint=f"copy {files.path.name} of the run to {files.path.parent}, or omit --dense")
    if (run := RunFolder(folder)).recipe.is_file() and not run.report.is_file():
        raise ArtifactError(f"the run in {folder} is not finished", hint="repeat its command, which continues it")
    return files


def check_name(exporter: Exporter, folder: Path, out: Path, *, dense: bool) -> None:
    """Raise InputError for the name of a file of another model or format, and for a folder that the run removes."""
    files, place = RunFolder(folder.resolve()), out.parent.resolve()
    if own := {files.state, files.failed, files.tensorboard} & {place, *place.parents}:
        raise InputError(f"{out} is in {own.pop().name}, which belongs to the run", hint="give another --out")
    if out.name.startswith(DENSE) is not dense and place == files.path:
        message = f"{out} has the name of a file of the {'compressed' if dense else 'dense'} model"
        hint = f"give another --out; names of files of the dense model, and of no others, begin with {DENSE!r}"
        raise InputError(message, hint=hint)
    exporter.check_path(out)


def _describe_other(path: Path, name: str, options: ExportOptions) -> str | None:
    """Format, precision, input and targets of the file `path`, if they are not the format `name` and `options`."""
    if not path.is_file() or not (old := usable_sidecar(path)):  # a damaged one is replaced
        return None
    kind, targets = old["metadata"].get("input", ""), old["build"].get("sm", ())
    same = (old["format"], old["precision"], "uint8" in kind) == (name, options.precision, options.uint8)
    if same and (not options.sm or set(targets) == set(options.sm)):
        return None
    return ", ".join([old["format"], old["precision"], kind, *(f"sm {target}" for target in targets)])


@dataclass(frozen=True)
class ExportOutcome:
    """The checks of an exported file. path: where it is now; a file that failed was moved."""

    path: Path
    verdict: Status
    checks: tuple[Check, ...]

    @property
    def reason(self) -> str:
        """The first check with the verdict of the file."""
        return next((f"{c.name}: {c.detail}" for c in self.checks if c.verdict == self.verdict), "")

    def to_dict(self) -> dict[str, Any]:
        checks = [check.to_dict() for check in self.checks]
        return {"verdict": self.verdict, "verified": self.verdict == "passed", "checks": checks}


def verify_export(
    folder: Path, exported: Exported, progress: Progress = SILENT, *, dense: bool = False
) -> ExportOutcome:
    """Compare an exported file with the model of the run `folder`, on the images that the folder was verified with.

    The ONNX file that an engine was built from is checked too, as most machines can run it. The result is recorded in
    the sidecar and, for a file that stays in the folder, in its verify.json. One that fails is moved to `failed`.
    """
    progress.stage(f"Compare {exported.path.name} with the model")
    path, source, files = exported.path, source_path(exported.path), _source(folder, dense)
    inside = path.parent.resolve() == folder.resolve()
    model = load_model(files.path)
    command = None if inside else _copy_command(folder, exported)
    images, plan = recorded_images(folder, model), read_plan(files.plan)
    unfolded, classes = None if dense else files.unfolded, run_classes(RunFolder(folder), model)
    original = PlannedOriginal(model, *images, command, trust=True, plan=plan, unfolded=unfolded, classes=classes)
    paths = [file for file in (path, source) if file.is_file()]
    results, tensors = check_files(paths, original, "files checked", progress)
    checks = tuple(chain.from_iterable(results.values()))
    verdict = file_status(path, checks)
    if inside:
        stays, weights = verdict != "failed", dict[str, object]()
        added = [*checks, *inspector_checks(path)] if stays else []
        if not dense:  # the table of weights is that of the compressed model
            tensors = tensors if stays else {}
            for file in exported_files(folder, "model"):
                with suppress(InputError):  # a damaged file fails when the folder is verified
                    if file not in results and (contents := contents_of(file)):
                        tensors[file.name] = compare_tensors(model, contents, original.rows)
            added.append(shape_check(original.rows, model))
            weights = weight_table(original.rows, model, tensors)
        # The file ends the checks "no file was exported" and "a file of this name was rejected".
        outdated = {f"export.{path.name}", *(() if dense else ("onnx",))} if stays else set()
        names = outdated | {check.name for check in added}
        new = Verification(tuple(added), weights)
        update_verification(folder, new, lambda n: n in names or is_about(path, n) or is_about(source, n))
    return ExportOutcome(quarantine(path) if verdict == "failed" else path, verdict, checks)


def _copy_command(folder: Path, exported: Exported) -> str:
    """Copies a file and its companions into the run folder, and verifies it there, on the target."""
    name, own = exported.path.name, exported.files
    files = sorted(p for p in exported.path.parent.iterdir() if p.name in own or p.name.startswith(f"{name}."))
    return f"{shlex.join(['cp', *map(str, files), str(folder)])} && vitcompress verify {shlex.quote(str(folder))}"


@dataclass
class Candidate:
    """result: `chosen`, or why not. ms: median time of the smallest batch. speedup: over the first measured one."""

    format: str
    precision: Precision
    result: str = "not checked"
    ms: float | None = None
    speedup: str = ""


def options_for(options: ExportOptions, candidate: Candidate) -> ExportOptions:
    """`options` in the precision of `candidate`, without those that have no effect in it."""
    useless = set() if "int8" in candidate.precision else {*ONLY_EIGHT_BITS, "islands"}
    return replace(options.only(DEFAULTS.keys() - useless), precision=candidate.precision)


def choose_fastest(
    folder: Path,
    form: str | None,
    options: ExportOptions,
    *,
    out: Path | None,
    dense: bool,
    progress: Progress,
    data: Path | None = None,
) -> tuple[Candidate, list[Candidate]]:
    """Measure `PRECISIONS` interleaved: the fastest one that passes its checks, and all, by speed.

    form: the format; None: those of `FORMATS` that `out`, the file to write, may have. data: as in `export_folder`.
    Raises CheckFailedError if none passes, and the first InputError if none can be exported and run.
    """
    formats: tuple[str, ...] = (form,) if form else FORMATS
    if out:
        formats = tuple(name for name in formats if find_exporter(name).file_suffix == out.suffix) or formats
        check_name(find_exporter(formats[0]), folder, out, dense=dense)
    candidates, exports, problem = list[Candidate](), list[tuple[Candidate, Exported]](), None
    for name, precision in product(formats, PRECISIONS):
        exporter = find_exporter(name)
        with suppress(InputError):  # the format does not have this precision
            exporter.check(ExportOptions(precision=precision))
            candidates.append(Candidate(name, precision))
    if not candidates:
        raise InputError(f"{form} has none of the precisions {', '.join(PRECISIONS)}", hint="name one in --precision")
    write = partial(export_folder, folder, dense=dense, data=data, traces={})
    with TemporaryDirectory(prefix="vitcompress-") as temporary:
        for candidate in candidates:
            used = options_for(options, candidate)
            path = Path(temporary) / f"{candidate.format}{used.label}{find_exporter(candidate.format).file_suffix}"
            try:
                if reason := find_exporter(candidate.format).cannot_run():
                    raise InputError(f"{candidate.format} cannot run here: {reason}", hint="use another --format")
                progress.stage(f"Export {path.name}")
                exported = write(candidate.format, options=used, out=path)
                open_runner(path).close()  # not every machine runs what it can write
                exports.append((candidate, exported))
            except (InputError, CheckFailedError) as error:
                candidate.result, problem = error.message.replace(f"{path} ", ""), problem or error
        if problem and not exports:
            raise problem
        progress.stage(f"Measure {len(exports)} files interleaved")
        bench = measure_quickly([exported for _, exported in exports], progress)
        for text in bench.disturbed:
            progress.note(f"disturbed: {text}")
        for (candidate, _), row, ratio in zip(exports, bench.rows, (None, *bench.ratios), strict=True):
            candidate.ms, candidate.speedup = row["latency_ms"]["p50"], format_speedup(ratio) if ratio else "1"
        for candidate, exported in sorted(exports, key=lambda pair: pair[0].ms or 0):
            outcome = verify_export(folder, exported, progress, dense=dense)
            if outcome.verdict == "passed":
                candidate.result = "chosen"
                return candidate, sorted(candidates, key=lambda candidate: candidate.ms or math.inf)
            candidate.result = outcome.reason
    problems = "; ".join(f"{candidate.format} {candidate.precision}: {candidate.result}" for candidate, _ in exports)
    raise CheckFailedError(f"no file passes its checks: {problems}", hint="use --precision fp32")


def sign_artifact(path: Path, key: Any) -> Path:
    """Sign an exported file or a run folder with a private `key`; returns the path of the signature.

    It states the SHA-256 of the file, its data files, sidecar, ONNX source and plan (of a folder: of the manifest, all
    files that it lists, and the plan), the facts of the build, and the verdicts of the checks. Raises ArtifactError for
    a file without a sidecar, a folder without a manifest, and one that was changed.
    """
    from vitcompress.io.signature import write_signature  # which needs an extra

    files = RunFolder(path)
    record = files.manifest if path.is_dir() else sidecar_path(path)
    if not (read_manifest(path) if path.is_dir() else record.is_file()):
        hint = "`vitcompress export` writes the sidecar of a file, `vitcompress verify DIR --adopt` a manifest"
        raise ArtifactError(f"{path} cannot be signed: there is no {record}", hint=hint)
    if path.is_dir():
        check_unchanged(path)
        data = read_manifest(path)
        verified = read_record(files.verification, Verification) or {}
    else:
        check_sha256(path)
        data = read_sidecar(path)
        verified = data.get("verification") or {}
    metadata, source = decode_json_values(data.get("metadata", {})), data.get("source")
    sources = {"plan": data.get("plan_sha256") or metadata.get("plan_sha256") or ""}
    sources |= {source["name"]: source["sha256"]} if source else {}
    verdicts = Counter(check["verdict"] for check in verified.get("checks", ()))
    facts = {**{name: data[name] for name in FACTS if name in data}, "metadata": metadata, "verification": verdicts}
    return write_signature(path, {record.name: file_sha256(record), **data["files"]}, sources, facts, key)
