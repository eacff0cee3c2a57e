"""Top-1 and top-5 of artifacts on the same labelled images, with counts, and whether a difference is real."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitcompress.bench.preprocessing import Preparation, prepared, takes_plain_bytes
from vitcompress.bench.report import recorded
from vitcompress.errors import ArtifactError, InputError
from vitcompress.exporters.runtimes import Runner, RunnerOptions, open_runner
from vitcompress.exporters.sidecar import class_names
from vitcompress.exporters.torch_runner import TIMM
from vitcompress.exporters.uint8 import to_bytes
from vitcompress.io.progress import Progress
from vitcompress.models.checkpoint import PLAN
from vitcompress.recipe.load import load_recipe
from vitcompress.training.data import DataOptions, open_test
from vitcompress.training.datasets import few
from vitcompress.training.distributed import Runtime
from vitcompress.training.loaders import EvalLoader, Images
from vitcompress.training.metrics import evaluate_images, mcnemar

DIGITS = "digits"


@dataclass(frozen=True)
class EvaluateOptions:
    """data: a folder of images (PATH/val/CLASS), `digits`, or None for that of the run folder. workers: processes that
    load images. bench: a file with the output of `vitcompress bench --json`, to take speeds from; what the run folder
    of an artifact measured is known without. preparation: of images for artifacts that do not say it.
    """

    data: str | None = None
    split: str | None = None
    batch: int = 64
    workers: int = 0
    bench: Path | None = None
    preparation: Preparation = field(default_factory=Preparation)
    runner: RunnerOptions = field(default_factory=RunnerOptions)


def run(
    artifacts: Sequence[str], options: EvaluateOptions | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Accuracy of files, run folders and `timm:NAME`s on one test set; several are compared with the first.

    Each row holds the file's hash and, where the same file was measured in the same way, its `speed`.

    Raises:
        ArtifactError, DeviceError: one of them cannot be run, or has another number of classes than the data.
        DataError: images that are missing or cannot be used.
        InputError: no data is named and no run folder says which it was.
    """
    options, progress = options or EvaluateOptions(), progress or Progress()
    given = recorded.benches(options.bench) if options.bench else []
    _check_there(artifacts)
    benches = [[*_measured_with(artifact), *given] for artifact in artifacts]
    classes, images = open_test(data_of(artifacts, options))
    rows, right = [], []
    with ExitStack() as stack:
        asked = [_opened(artifact, classes, options, stack) for artifact in artifacts]  # all of them, before any work
        for artifact, one, measured in zip(artifacts, asked, benches, strict=True):
            progress.stage(f"Evaluate {artifact}")
            if one.remark:
                progress.note(one.remark)
            row, mask = _judge(one, images, options)
            rows.append({**row, "speed": _speed(row, measured)})
            right.append(mask)
            progress.note(f"{row['correct']} of {row['total']} right")
    tests = [
        {"a": rows[0]["artifact"], "b": row["artifact"], **asdict(mcnemar(right[0], mask))}
        for row, mask in zip(rows[1:], right[1:], strict=True)
    ]
    return {"images": len(images), "classes": len(classes), "rows": rows, "mcnemar": tests}


def data_of(artifacts: Sequence[str], options: EvaluateOptions) -> DataOptions:
    """The test data: what was asked for, else what the first run folder among the artifacts was made with."""
    found = _data_of(artifacts, options)
    if options.split is None:
        return found
    if found.source == DIGITS:
        raise InputError(
            f"the digits have no split {options.split!r}, only their test images", hint="leave --split out"
        )
    return replace(found, test_split=options.split)


def _data_of(artifacts: Sequence[str], options: EvaluateOptions) -> DataOptions:
    if options.data == DIGITS:
        return DataOptions()
    if options.data is not None:
        return DataOptions("imagefolder", options.data, workers=options.workers)
    for artifact in map(Path, artifacts):
        recipe = (artifact if artifact.is_dir() else artifact.parent) / "recipe.toml"
        if recipe.is_file():
            return load_recipe(str(recipe)).data
    raise InputError("no data to evaluate on", hint="give --data PATH with PATH/val/CLASS, or --data digits")


def _check_there(artifacts: Sequence[str]) -> None:
    """Raise for artifacts that do not exist, before anything is said of the data."""
    for artifact in artifacts:
        if not artifact.startswith(TIMM) and not Path(artifact).exists():
            open_runner(artifact)


def _judge(asked: "PaddedRunner", images: Images, options: EvaluateOptions) -> tuple[dict[str, Any], np.ndarray]:
    """One row, and which images were right."""
    runtime = Runtime(torch.device("cpu"), workers=options.workers)
    found, mask = evaluate_images(asked, EvalLoader(images, asked.input, asked.batch, runtime), runtime)
    about = {"input": asked.input.to_dict(), **_about(asked.runner)}
    return {"artifact": asked.runner.name, **found.to_dict(), **about}, mask


class PaddedRunner:
    """A runner that is asked at any batch: what it takes of `batch` images at a time, filled up with the last one.

    Files with a fixed batch, and engines whose smallest is not 1, could not be given the end of a data set otherwise.
    """

    def __init__(self, runner: Runner, batch: int, given: Preparation) -> None:
        self.runner = runner
        self.input, self.remark = prepared(runner, given)
        self._plain_bytes = takes_plain_bytes(runner)
        least, _, most = runner.describe().get("batch_range") or (1, batch, batch)
        self._least, self.batch = int(least), int(min(max(batch, least), most))

    def __call__(self, images: Tensor) -> Tensor:
        short = max(0, self._least - len(images))
        filled = torch.cat([images, images[-1:].expand(short, *images.shape[1:])])
        return self.runner(to_bytes(filled.cpu(), self.input) if self._plain_bytes else filled)[: len(images)]


def _opened(artifact: str, classes: Sequence[str], options: EvaluateOptions, stack: ExitStack) -> PaddedRunner:
    """An artifact that knows the classes of the data; `stack` closes it."""
    runner = open_runner(artifact, options.runner)
    stack.callback(runner.close)
    asked = PaddedRunner(runner, options.batch, options.preparation)
    told = asked(torch.zeros(1, *runner.input_size)).shape[1]
    if told != len(classes):
        raise ArtifactError(
            f"{runner.name} has {told} classes, the data has {len(classes)}",
            hint="evaluate it on data with its own classes",
        )
    asked.remark = " ".join(filter(None, (asked.remark, _renamed(Path(artifact), classes))))
    return asked


def _renamed(artifact: Path, classes: Sequence[str]) -> str:
    """A sentence where the data's classes all have other names than the artifact's, which is no reason not to count.

    Raises:
        ArtifactError: some names are the same and some are not, so that answers and labels mean different classes.
    """
    known = class_names(artifact / "model.onnx" if artifact.is_dir() else artifact)
    if known in (tuple(classes), (), tuple(map(str, range(len(classes))))):  # numbers: without data nobody knew names
        return ""
    if set(known).isdisjoint(classes):
        return f"its classes are called {few(known)}, the data's {few(classes)}: taken to be the same, in this order"
    lost, new = ([name for name in one if name not in other] for one, other in ((known, classes), (classes, known)))
    what = f"{artifact} was trained with class {few(lost)}, the data has {few(new)} instead" if lost else ""
    raise ArtifactError(
        what or f"{artifact} was trained with the classes in another order: {few(known)}; the data has {few(classes)}",
        hint="evaluate it on data with its own classes",
    )


def _about(runner: Runner) -> dict[str, Any]:
    known = runner.describe()
    return {key: known.get(key) for key in ("sha256", *recorded.SAME)}


def _measured_with(artifact: str) -> list[dict[str, Any]]:
    """What the run measured that the artifact comes from; in other folders a file of this name may be anything."""
    folder = Path(artifact) if Path(artifact).is_dir() else Path(artifact).parent
    path = folder / recorded.BENCH
    return recorded.benches(path) if path.is_file() and (folder / PLAN).is_file() else []


def _speed(row: dict[str, Any], measured: list[dict[str, Any]]) -> dict[str, Any] | None:
    """How fast the artifact of a row was, by measurements of the same file in the same way."""
    how = {key: row[key] for key in ("runtime", "device", "precision")}
    return recorded.speed(measured, row["sha256"], **how)
