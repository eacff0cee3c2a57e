"""Top-1 and top-5 of artifacts on the same labeled images, with counts and a test of their difference."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict, cast

import numpy as np
import torch
from timm.data import resolve_data_config

from vitcompress.bench.artifacts import open_artifacts
from vitcompress.bench.report import records
from vitcompress.bench.report.measurements import SETTINGS, find_speed, match_rows, read_benchmarks
from vitcompress.errors import ArtifactError, InputError
from vitcompress.exporters.runtimes import Runner, RunnerOptions, exported_files
from vitcompress.exporters.sidecar import read_classes, usable_sidecar
from vitcompress.io.files import user_path
from vitcompress.io.progress import SILENT, Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.text import describe_value, few
from vitcompress.models.checkpoint import read_plan
from vitcompress.models.create import InputConfig, create_on_meta
from vitcompress.models.preprocessing import NAMES, Preprocessing, Value
from vitcompress.recipe.load import load_recipe_of_run
from vitcompress.training.data import images_digest, open_test
from vitcompress.training.datasets import Images, describe_skipped
from vitcompress.training.distributed import Runtime
from vitcompress.training.loaders import CHANNELS, EvalLoader
from vitcompress.training.metrics import evaluate_images, mcnemar
from vitcompress.training.options import BUILT_IN, DataOptions
from vitcompress.verify.folder import run_classes

OTHER_CLASSES = "evaluate it on data with its own classes"  # a hint
OTHER_ORDER = (
    "evaluate it alone, or on data with its order: timm sorts folders as 2, 10, a, B, torchvision as 10, 2, B, a"
)


@dataclass(frozen=True)
class EvaluateOptions:
    """What to evaluate on. data: a folder (PATH/val/CLASS), one of `BUILT_IN`, or None for that of the run folder.

    workers: processes that load images. bench: output of `vitcompress bench --json` with more speeds than the run
    folders have. preprocessing: for artifacts that do not record it.
    """

    data: str | None = None
    split: str | None = None
    batch: int = 64
    workers: int = 0
    bench: Path | None = None
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    runner: RunnerOptions = field(default_factory=RunnerOptions)


class EvaluationRow(records.AccuracyRecord, records.RuntimeRecord):
    """Accuracy of one artifact, its settings, and the recorded speed of the same file with the same settings.

    speed: one with the same threads, else its threads may differ. mistakes: indices of the wrongly classified images.
    """

    artifact: str
    input: records.RecordOf[InputConfig]
    sha256: str | None
    speed: records.SpeedRecord | None
    mistakes: list[int]


class ComparisonTest(records.McNemarRecord):
    """McNemar's test of artifact `b` against artifact `a`, the first one."""

    a: str
    b: str


class Evaluation(TypedDict):
    """Result of `vitcompress evaluate`; images, classes: their numbers in the test set."""

    images: int
    classes: int
    rows: list[EvaluationRow]
    mcnemar: list[ComparisonTest]


def run(artifacts: Sequence[str], options: EvaluateOptions | None = None, progress: Progress = SILENT) -> Evaluation:
    """Accuracy of files, run folders and `timm:NAME`s on one test set; later ones are compared with the first.

    Raises ArtifactError or DeviceError if an artifact cannot run, or has another number of classes than the data,
    DataError for images that are missing or unusable, and InputError without data, and for a `bench` of other files.
    """
    options = options or EvaluateOptions()
    extra = read_benchmarks(options.bench) if options.bench else []
    # Those of run folders: in others, a file of this name may be anything.
    folders = [(run, run.benchmark.is_file() and run.plan.is_file()) for run in map(RunFolder.of, artifacts)]
    benches = [[*extra, *(read_benchmarks(run.benchmark) if known else ())] for run, known in folders]
    data = open_test(select_data(artifacts, options))
    if data.skipped:
        progress.note(describe_skipped(data.skipped))
    with ExitStack() as stack:
        runners = open_artifacts(artifacts, options.runner, None, stack)  # all, before any work
        names = (read_class_names(user_path(artifact)) for artifact in artifacts)
        data = data.reorder(next((own for own in names if {*own} == {*data.classes}), ()))
        classes, images = data.classes, data.test
        remarks = [_prepare(runner, str(name), classes, options) for runner, (name, _) in runners.items()]
        if extra and not match_rows(extra, {runner.describe()["sha256"]: [runner.name] for runner in runners}):
            raise InputError(f"{options.bench} measures none of these artifacts", hint="use `vitcompress bench --json`")
        pairs = zip(zip(runners, remarks, strict=True), benches, strict=True)
        results = [_evaluate(*opened, known, images, options, progress) for opened, known in pairs]
    (first, reference), digest = results[0], images_digest(classes, images)
    rows = [cast(EvaluationRow, {**row, "images_digest": digest}) for row, _ in results]
    tests = [{"a": first["artifact"], "b": row["artifact"], **mcnemar(reference, mask)} for row, mask in results[1:]]
    return {"images": len(images), "classes": len(classes), "rows": rows, "mcnemar": cast(list[ComparisonTest], tests)}


def select_data(artifacts: Sequence[str], options: EvaluateOptions) -> DataOptions:
    """The test data of the options, or else of the first run folder among the artifacts."""
    recipes = [path for artifact in artifacts if (path := RunFolder.of(artifact).recipe).is_file()]
    if options.data is not None:
        data = DataOptions(options.data) if options.data in BUILT_IN else DataOptions("imagefolder", options.data)
    elif recipes:
        data = load_recipe_of_run(recipes[0]).data
    else:
        hint = "give --data PATH with PATH/val/CLASS, --data digits, or a folder with a recipe.toml"
        raise InputError("no data to evaluate on", hint=hint)
    if options.split is not None and data.source in BUILT_IN:
        problem = f"the {data.source} images have no split {options.split!r}, only their test images"
        raise InputError(problem, hint="leave --split out")
    return data if options.split is None else replace(data, test_split=options.split)


def _prepare(runner: Runner, artifact: str, classes: Sequence[str], options: EvaluateOptions) -> str:
    """Set the preprocessing of a runner and check its classes. Returns a remark on both."""
    runner.input, used = _resolve_preprocessing(runner, options.preprocessing)
    count = runner.predict(torch.zeros(1, *runner.input_size)).shape[1]
    if count != len(classes):
        raise ArtifactError(f"{runner.name} has {count} classes, the data has {len(classes)}", hint=OTHER_CLASSES)
    return " ".join(filter(None, (used, compare_classes(user_path(artifact), classes))))


def read_class_names(artifact: Path) -> tuple[str, ...]:
    """The class names of a run folder, or of an exported file; numbers or nothing if they are unknown."""
    files, paths = RunFolder(artifact), exported_files(artifact, "model") if artifact.is_dir() else [artifact]
    plan = read_plan(files.plan) if files.plan.is_file() else None
    own = run_classes(files, create_on_meta(plan.arch, plan.arch_args)) if plan else None
    return own or next(filter(None, (read_classes(path) for path in paths if usable_sidecar(path))), ())


def compare_classes(artifact: Path, classes: Sequence[str]) -> str:
    """A remark if all classes of the data have other names than those of the artifact, which are then not comparable.

    Raises ArtifactError if only some names differ, or their number or order does, so that outputs and labels mean
    different classes.
    """
    own = read_class_names(artifact)
    unnamed = own == tuple(map(str, range(len(classes))))  # or named by numbers, as those of the data then are, too
    if own in (tuple(classes), ()) or (unnamed and set(own) != set(classes)):
        return ""
    if len(own) != len(classes):
        raise ArtifactError(f"{artifact} has {len(own)} classes, the data has {len(classes)}", hint=OTHER_CLASSES)
    if set(own).isdisjoint(classes):
        return f"its classes are named {few(own)}, those of the data {few(classes)}: assumed equal, in this order"
    lost, new = ([name for name in one if name not in other] for one, other in ((own, classes), (classes, own)))
    problem = f"{artifact} was trained with class {few(lost)}, the data has {few(new)} instead" if lost else ""
    order = f"{artifact} was trained with the classes in another order: {few(own)}; the data has {few(classes)}"
    raise ArtifactError(problem or order, hint=OTHER_CLASSES if problem else OTHER_ORDER)


def _evaluate(
    runner: Runner,
    remark: str,
    benches: Sequence[records.BenchRecord],
    images: Images,
    options: EvaluateOptions,
    progress: Progress,
) -> tuple[EvaluationRow, np.ndarray]:
    """One row, and which images are correct: booleans (images,)."""
    known, runtime = runner.describe(), Runtime(torch.device("cpu"), workers=options.workers)
    assert runner.input is not None
    progress.stage(f"Evaluate {known['artifact']}")
    if remark:
        progress.note(remark)
    loader = EvalLoader(images, runner.input, options.batch, runtime)
    accuracy, mask, _ = evaluate_images(runner.predict, loader, runtime)
    progress.note(f"{accuracy.correct} of {accuracy.total} correct")
    settings = {key: known[key] for key in SETTINGS if key in known and key != "threads"}
    row = {
        **{key: known[key] for key in ("artifact", "runtime", "device", "precision", "threads", "sha256")},
        **accuracy.to_dict(),
        "input": vars(runner.input),
        "speed": find_speed(benches, known["sha256"], {**settings, "threads": known["threads"]})
        or find_speed(benches, known["sha256"], settings),
        "mistakes": np.flatnonzero(~mask).tolist(),
    }
    return cast(EvaluationRow, row), mask


def _resolve_preprocessing(runner: Runner, options: Preprocessing) -> tuple[InputConfig, str]:
    """The preprocessing of `runner`. If its artifact does not record it, this is that of the options, completed with
    timm's defaults, with a sentence on what was used and assumed.

    For uint8 input mean is 0 and std is 1: the runner then passes on the bytes of the image. Raises ArtifactError if
    mean and std are unknown, the options contradict the artifact, or the last dimension of uint8 input cannot be
    channels, and InputError if the number of values is neither 1 nor the number of channels.
    """
    values = options.changes_for(runner.input_size[0], runner.name)
    if runner.input is not None:
        for key, value in values.items():
            own: Value = getattr(runner.input, key)
            if own != value and (isinstance(value, str) or not np.allclose(own, value, rtol=1e-9, atol=0)):
                problem = f"{runner.name} records {key} {describe_value(own)}, not {describe_value(value)}"
                hint = f"leave --{key.replace('_', '-')} out: the artifact was exported with the value that it records"
                raise ArtifactError(problem, hint=hint)
        return runner.input, ""
    channels, height, width = runner.input_size
    fixed: dict[str, Value] = {}
    if runner.takes_bytes:
        if channels not in CHANNELS:
            problem = f"{runner.name} takes uint8 input of {height} x {width} x {channels}"
            hint = "give a file that takes batch x height x width x channels (insert a Transpose before this model)"
            raise ArtifactError(f"{problem}, which is no image with channels last", hint=hint)
        fixed = {"mean": (0.0,) * channels, "std": (1.0,) * channels}
    elif not {"mean", "std"} <= values.keys():
        hint = "pass --mean and --std, export it with vitcompress, or evaluate the run folder"
        raise ArtifactError(f"{runner.name} does not record its preprocessing (mean, std, crop)", hint=hint)
    config = resolve_data_config({"input_size": runner.input_size, **values, **fixed})
    used = {name: value for name, value in values.items() if name not in fixed}
    unused = [f"--{name}" for name in values if name in fixed]
    assumed = {name: config[name] for name in NAMES if name not in {*values, *fixed}}
    listed = [", ".join(f"{key} {describe_value(value)}" for key, value in one.items()) for one in (used, assumed)]
    remarks = (
        f"{runner.name} does not record its preprocessing",
        "it takes uint8 images and normalizes them itself" if fixed else "",
        f"{' and '.join(unused)} {'have' if len(unused) > 1 else 'has'} no effect on it" if unused else "",
        f"used: {listed[0]}" if used else "",
        f"assumed, timm's defaults: {listed[1]}" if assumed else "",
    )
    return InputConfig(size=config.pop("input_size"), **config), "; ".join(filter(None, remarks))
