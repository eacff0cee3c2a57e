"""Measure all models of a study interleaved, so that a machine that slows down slows all of them down."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Literal, cast

from vitcompress.bench import accuracy, suite
from vitcompress.bench.report.records import BenchRecord
from vitcompress.exporters.onnx.export import ONNX
from vitcompress.exporters.runtimes import RunnerOptions, open_runner
from vitcompress.exporters.sidecar import sidecar_path
from vitcompress.io.files import file_sha256, read_json, write_json
from vitcompress.io.progress import Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.pipeline.export_folder import export_folder
from vitcompress.pipeline.study.spec import Run, Study

FILE = "speed.json"
DENSE = "dense"


class Speed(BenchRecord):
    """Content of speed.json: a benchmark with names of runs instead of files; the first row is the dense model.

    models: SHA-256 of the weights by name. settings: of the study's [speed]. correct: test images that the file of each
    run classifies correctly, so that speed and accuracy are of one file.
    """

    models: dict[str, str]
    settings: dict[str, object]
    correct: dict[str, int]


def measure_speed(
    folder: Path, study: Study, runs: Sequence[Run], when: Literal["now", "later", "again"], progress: Progress
) -> Speed | None:
    """Write speed.json; None if nothing is to be measured yet.

    An existing measurement is used if it is of the same models with the same settings.
    """
    path = folder / FILE
    folders = {DENSE: runs[0].dense_folder, **{run.name: run.folder for run in runs}}
    weights = {name: file_sha256(RunFolder(model).weights) for name, model in folders.items()}
    inputs = {"models": weights, "settings": asdict(study.speed)}
    known: Speed | None = read_json(path) if path.is_file() and when != "again" else None
    if known is not None and inputs.items() <= known.items():
        return known
    files = {name: RunFolder(folder).exported("model", ONNX.suffix) for name, folder in folders.items()}
    for number, file in enumerate(files.values(), 1):
        if not sidecar_path(file).is_file():
            export_folder(file.parent)
        progress.update("export", number, len(files), file.parent.name)
    if when == "later":
        progress.note("speed is not measured yet; the same command without --speed later measures it")
        return None
    progress.stage(f"Measure {len(files)} models interleaved")
    table, runner = study.speed, RunnerOptions(threads=study.speed.threads)
    options = suite.BenchOptions(table.protocol, table.batch, table.warmup, table.runs, runner)
    with ExitStack() as stack:
        runners = [stack.enter_context(closing(open_runner(file, runner))) for file in files.values()]
        for opened, name in zip(runners, files, strict=True):
            opened.name = name
        result = suite.compare(runners, options, progress).to_dict()
    evaluation = accuracy.EvaluateOptions(runner=runner)
    exports = {name: str(file) for name, file in files.items() if name != DENSE}
    correct = {name: accuracy.run([file], evaluation)["rows"][0]["correct"] for name, file in exports.items()}
    speed = cast(Speed, {**inputs, "correct": correct, **result})
    write_json(path, speed)
    return speed
