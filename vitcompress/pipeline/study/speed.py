"""Measure the speed of all rows of a study interleaved, so that a machine that slows down slows all models down."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from vitcompress.bench import accuracy, suite
from vitcompress.bench.report.records import BenchRecord
from vitcompress.exporters.onnx.export import ONNX
from vitcompress.exporters.runtimes import RunnerOptions
from vitcompress.exporters.sidecar import sidecar_path
from vitcompress.io.files import file_sha256, read_json, write_json
from vitcompress.io.progress import Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.pipeline.export_folder import export_folder
from vitcompress.pipeline.study.runs import Run
from vitcompress.pipeline.study.spec import Study

FILE = "speed.json"
DENSE = "dense"


def measure_speed(
    folder: Path, study: Study, runs: Sequence[Run], when: Literal["now", "later", "again"], progress: Progress
) -> dict[str, Any] | None:
    """speed.json: rows and ratios of the benchmark with names of runs instead of files; the first row is the dense
    model. None if nothing is to be measured yet.

    An existing measurement is used if it is of the same models with the same settings.
    """
    path = folder / FILE
    folders = {DENSE: runs[0].dense_folder, **{run.name: run.folder for run in runs}}
    weights = {name: file_sha256(RunFolder(model).weights) for name, model in folders.items()}
    inputs = {"models": weights, "settings": asdict(study.speed)}
    if path.is_file() and when != "again" and inputs.items() <= (known := read_json(path)).items():
        return dict(known)
    files = _export_all(folders, progress)
    if when == "later":
        progress.note("speed is not measured yet; the same command without --speed later measures it")
        return None
    progress.stage(f"Measure {len(files)} models interleaved")
    table = study.speed
    runner = RunnerOptions(threads=table.threads)
    options = suite.BenchOptions(table.protocol, table.batch, table.warmup, table.runs, runner)
    result = suite.run(list(files.values()), options, progress=progress).to_dict()
    speed = {**inputs, "correct": _count_correct(files, runner), **_rename(result, files)}
    write_json(path, speed)
    return speed


def _export_all(folders: Mapping[str, Path], progress: Progress) -> dict[str, Path]:
    """The ONNX file of every model; exports those that are missing."""
    files = {name: RunFolder(folder).exported("model", ONNX.suffix) for name, folder in folders.items()}
    for number, file in enumerate(files.values(), 1):
        if not sidecar_path(file).is_file():
            export_folder(file.parent)
        progress.update("export", number, len(files), file.parent.name)
    return files


def _count_correct(files: Mapping[str, Path], runner: RunnerOptions) -> dict[str, int]:
    """Number of test images that each run's file classifies correctly, so that speed and accuracy are of one file."""
    options = accuracy.EvaluateOptions(runner=runner)
    return {
        name: accuracy.run([str(file)], options)["rows"][0]["correct"] for name, file in files.items() if name != DENSE
    }


def _rename(result: BenchRecord, files: Mapping[str, Path]) -> BenchRecord:
    """`result` with the names of runs instead of their files."""
    names = {str(file): name for name, file in files.items()}
    for row in result["rows"]:
        row["artifact"] = names[row["artifact"]]
    for ratio in result["ratios"]:
        ratio["a"], ratio["b"] = names[ratio["a"]], names[ratio["b"]]
    for file, name in names.items():
        result["warnings"] = [warning.replace(file, name) for warning in result["warnings"]]
    return result
