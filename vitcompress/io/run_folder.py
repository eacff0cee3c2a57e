"""The files of a run folder. No other module spells their names."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitcompress.io.files import user_path

# Exports with their default names (-*: in another precision, or with bytes as input), and what is beside them.
EXPORT = r"(model|dense)(-.+)?\.(onnx|xml|bin|(rtx\.)?engine)(\.onnx|\.layers)?(\.json|\.data|\.dsse)?"
SIGNATURE = ".dsse"  # added to the name of the signed file


class Entry:
    """Path of a file or folder inside a `RunFolder`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: "RunFolder", owner: type | None = None) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """Paths of everything that a run keeps in the folder `path`. Only names them: nothing is read or written here.

    The folder of a dense model and that of a pruning step use the same names for their plan, weights and lock.
    """

    path: Path

    recipe = Entry("recipe.toml")
    plan = Entry("plan.json")
    weights = Entry("model.safetensors")
    standard = Entry("standard.safetensors")  # the same weights, named as in a plain timm model
    verification = Entry("verify.json")
    benchmark = Entry("bench.json")
    report = Entry("report.json")
    markdown = Entry("report.md")
    html = Entry("report.html")
    manifest = Entry("manifest.json")  # size and SHA-256 of all other files, written last
    signature = Entry(f"manifest.json{SIGNATURE}")
    log = Entry("log.jsonl")
    warnings = Entry("warnings.log")  # of libraries
    tensorboard = Entry("tensorboard")
    lock = Entry(".lock")
    failed = Entry("failed")  # exported files that failed a check are moved here

    state = Entry("state")  # what resuming and verifying a run need
    accuracy = Entry("state/accuracy.json")
    mistakes = Entry("state/mistakes.json")  # indices of the test images that each model classifies wrongly
    step_input = Entry("given.safetensors")  # of the folder of a step: the model that it started from, and its plan
    step_input_plan = Entry("given_plan.json")
    training = Entry("training.json")  # of the folder of a dense model
    settings = Entry("settings.json")  # of the folder of a dense model: how it was trained
    dense_accuracy = Entry("state/dense_accuracy.json")  # before the first step
    recovery_state = Entry("state/recovery")
    recovery = Entry("state/recovery.json")
    control = Entry("state/control")  # the dense model after as much training; a folder like that of the dense model
    before_recovery = Entry("state/before_recovery.json")
    unfolded = Entry("state/unfolded.safetensors")
    unfolded_plan = Entry("state/unfolded_plan.json")
    folding = Entry("state/folding.json")
    unquantized = Entry("state/folded.safetensors")  # the weights before they were trained in int8 or fp8
    quantized_state = Entry("state/quantized")
    quantized = Entry("state/quantized.json")
    trained_ranges = Entry("state/trained_ranges.json")  # of the inputs of layers, and the digest of their model
    recorded_outputs = Entry("state/verify.safetensors")  # images, and the outputs of the model for them
    ranges = Entry("state/ranges")  # of inputs of layers, in int8 and fp8: one file for each model, images and settings
    rejected = Entry("state/refused.json")  # exports that failed a check, and why
    dense = Entry("state/dense")  # the dense model, where the run does not share it with others

    @classmethod
    def of(cls, artifact: str | Path) -> "RunFolder":
        """The folder `artifact`, or the one that contains it; not necessarily of a run."""
        path = user_path(artifact)
        return cls(path if path.is_dir() else path.parent)

    def step(self, number: int, method: str) -> Path:
        """What pruning step `number` (from 0) keeps."""
        return self.state / f"step-{number}-{method}"

    def steps(self) -> list[Path]:
        """The folders of all pruning steps, in their order."""
        return sorted(self.state.glob("step-*"), key=lambda path: (len(path.name.split("-")[1]), path.name))

    def exported(self, model: Literal["model", "dense"], suffix: str) -> Path:
        """The exported file of one of the two models; `suffix` with its dot."""
        return self.path / f"{model}{suffix}"

    def run_files(self) -> Iterator[Path]:
        """Everything that runs write, whether it exists or not, but the lock, which its owner removes.

        The manifest comes first, as no other change must contradict it, then the report, without which a run is not
        done. The recipe comes last: without it the folder belongs to no run.
        """
        yield from (self.manifest, self.report, self.markdown, self.html, self.verification, self.benchmark)
        yield from sorted(path for path in self.path.glob("*.*") if re.fullmatch(EXPORT, path.name))
        yield from (self.weights, self.standard, self.failed, self.signature, self.plan)
        yield from (self.log, self.warnings, self.tensorboard)
        linked = self.state.is_symlink()  # nothing behind a link belongs to the run
        yield from (path for path in sorted(self.state.glob("*")) if path.name != self.lock.name and not linked)
        yield self.recipe

    def files(self) -> Iterator[Path]:
        """The files that the manifest lists: those of runs and of dense models, and all exports with a sidecar.

        Not signatures: the manifest is signed. Nothing hidden: locks, and what is written at the moment.
        """
        starts = tuple(f"{Path(path.stem).stem}." for path in self.path.glob("*.*.json"))  # a sidecar NAME.onnx.json
        exports = {path for path in self.path.glob("*.*") if path.name.startswith(starts)}
        for path in sorted({*self.run_files(), self.settings, self.training, *exports} - {self.manifest}):
            walked = (Path(root, name) for root, _, names in os.walk(path) for name in names)  # rglob fails as files go
            inside = walked if path.is_dir() and not path.is_symlink() else (path,)
            seen = (path for path in inside if "/." not in f"/{path.relative_to(self.path).as_posix()}")
            yield from (path for path in seen if path.suffix != SIGNATURE and path.is_file() and not path.is_symlink())
