"""How fast the rows are: all exported models in one go, in turns, so that what slows the machine slows all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from vitcompress.bench import accuracy, suite
from vitcompress.exporters.runtimes import RunnerOptions
from vitcompress.io.files import file_sha256, read_json, write_json
from vitcompress.io.progress import Progress
from vitcompress.models.checkpoint import WEIGHTS
from vitcompress.pipeline.export_folder import export_folder
from vitcompress.pipeline.study.runs import Run
from vitcompress.pipeline.study.spec import Study

FILE, MODEL = "speed.json", "model.onnx"
BASE = "dense"


def measured(
    folder: Path, study: Study, runs: Sequence[Run], when: Literal["now", "later", "again"], progress: Progress
) -> dict[str, Any] | None:
    """speed.json: `suite`'s rows and ratios with the names of runs, the first row being the dense model.

    What was measured stands as long as it was of these very models and in this way. None where nothing is to be
    measured yet.
    """
    path = folder / FILE
    about = {"models": _weights(runs), "settings": asdict(study.speed)}
    if path.is_file() and when != "again" and about.items() <= (found := read_json(path)).items():
        return dict(found)
    files = _exported(runs, progress)
    if when == "later":
        progress.note("speed is not measured yet; the same command without --speed later does it")
        return None
    progress.stage(f"Measure {len(files)} models in turns")
    table = study.speed
    how = RunnerOptions(threads=table.threads)
    options = suite.BenchOptions(table.protocol, table.batch, table.warmup, table.runs, how)
    found = suite.run(list(files.values()), options, progress=progress).as_data()
    found = {**about, "correct": _correct(files, how), **_renamed(found, files)}
    write_json(path, found)
    return dict(found)


def _folders(runs: Sequence[Run]) -> dict[str, Path]:
    """The dense model of the first run, which all are held against, and every run."""
    return {BASE: runs[0].dense_folder, **{run.name: run.folder for run in runs}}


def _weights(runs: Sequence[Run]) -> dict[str, str]:
    return {name: file_sha256(folder / WEIGHTS) for name, folder in _folders(runs).items()}


def _exported(runs: Sequence[Run], progress: Progress) -> dict[str, Path]:
    """The ONNX file of every model, written where a run has left none."""
    folders = _folders(runs)
    for number, folder in enumerate(folders.values(), 1):
        if not (folder / f"{MODEL}.json").is_file():
            export_folder(folder)
        progress.update("export", number, len(folders), folder.name)
    return {name: folder / MODEL for name, folder in folders.items()}


def _correct(files: Mapping[str, Path], how: RunnerOptions) -> dict[str, int]:
    """How many test images each run's file gets right, so that speed and accuracy are of the same file."""
    options = accuracy.EvaluateOptions(runner=how)
    return {
        name: accuracy.run([str(file)], options)["rows"][0]["correct"] for name, file in files.items() if name != BASE
    }


def _renamed(found: dict[str, Any], files: Mapping[str, Path]) -> dict[str, Any]:
    """`found` with the names of runs instead of their files."""
    names = {str(file): name for name, file in files.items()}
    for row in found["rows"]:
        row["artifact"] = names[row["artifact"]]
    for ratio in found["ratios"]:
        ratio["a"], ratio["b"] = names[ratio["a"]], names[ratio["b"]]
    for file, name in names.items():
        found["warnings"] = [warning.replace(file, name) for warning in found["warnings"]]
    return found
