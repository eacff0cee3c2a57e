"""A whole recipe in seconds, for tests, and a script that runs it, killed many times, and with limited file sizes.

    python whole_runs.py FOLDER

FOLDER/whole/run is never stopped. FOLDER/killed/run is started many times, each time killed by SIGKILL just before the
file of the next of `MOMENTS` appears, then continued to its end. FOLDER/limited/run is started many times with other
limits on the size of a file (`STARTS`); the result of start n is in FOLDER/limited/<n>.txt. Every start is a process of
its own, forked from one that has imported everything.
"""

import fnmatch
import os
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor, nn

from vitcompress.errors import OutputError
from vitcompress.io.progress import Progress
from vitcompress.models.create import input_config
from vitcompress.pipeline.job import RunOptions
from vitcompress.pipeline.run import RunResult, run_recipe
from vitcompress.recipe.load import load_recipe
from vitcompress.recipe.schema import Recipe
from vitcompress.training.data import open_data
from vitcompress.training.metrics import random_images
from vitcompress.training.options import DataOptions

ARCH = "vit_tiny_patch16_224"
ARGS = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 3, "num_heads": 2}
RECIPE = """
[model]
name = "vit_tiny_patch16_224"
args = { img_size = 8, patch_size = 4, in_chans = 1, embed_dim = 16, depth = 3, num_heads = 2 }
weights = "train"

[data]
source = "digits"

[dense]
epochs = 2
batch_size = 64
lr = 2e-3

[[step]]
method = "hetdpt"
pruned_layers = 2
te = { images = 40 }
collection = { epochs = 1, images_per_class = 8, lr = 5e-4, interleaved = 3 }
search = { factor = 0.25, images_per_class = 8, lr = 5e-4 }

[finetune]
epochs = 2
batch_size = 64
lr = 1e-3
distillation = "soft"
teacher = "dense"

[bench]
protocol = "paper"
batch = 2
warmup = 1
runs = 3

[run]
threads = 1
device = "cpu"
"""
RANDOM = 'method = "random"\npruned_layers = 2'
SMALL = re.sub(r'method = "hetdpt".*?\n\n', f"{RANDOM}\n\n", RECIPE, flags=re.DOTALL).replace(
    "epochs = 2", "epochs = 1"
)
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
# Without ONNX files, which take most of the time.
BARE = ("export.formats=[]", 'bench.runtimes=["torch"]')
EPS = 2.0**-24  # float32 rounding
# Two float32 computations of a logit: sums of at most 64 terms, about 10 in sequence in each of 3 blocks, each of which
# may double the error of its input.
LOGITS = EPS * 64 * 10 * 3 * 8
AGAIN = "again "  # before a pattern: the file exists already
# The file that is about to be moved into place when the process is killed, in the order of a run.
MOMENTS = (
    f"{AGAIN}dense-*/state/state.safetensors",
    "dense-*/plan.json",
    "run/state/step-0-hetdpt/te_activation_02.json",
    "run/state/step-0-hetdpt/attention_01/state.safetensors",
    "run/state/step-0-hetdpt/interleaved_02.json",
    f"{AGAIN}run/state/step-0-hetdpt/search/state.safetensors",
    "run/state/step-0-hetdpt/search.json",
    f"{AGAIN}run/state/recovery/state.safetensors",
    "run/state/unfolded_plan.json",
    "run/plan.json",
    "run/model.onnx.json",
    "run/verify.json",
    "run/report.json",
)
# Largest size of a file in bytes, and the file before which the process is killed. In turn: recipe.toml is too large,
# the first state of a training is too large, the fine-tuning is killed, dense.onnx is too large, nothing happens.
STARTS: tuple[tuple[int | None, str | None], ...] = (
    (500, None),
    (70_000, None),
    (None, f"{AGAIN}run/state/recovery/state.safetensors"),
    (50_000, None),
    (None, None),
)


class RecordedProgress(Progress):
    """Records stages, their parts and notes."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.labels: list[str] = []
        self.notes: list[str] = []

    def stage(self, title: str) -> None:
        self.stages.append(title)

    def update(self, label: str, done: int, total: int, text: str = "") -> None:
        self.labels.append(label)

    def note(self, text: str) -> None:
        self.notes.append(text)


def recipe(folder: Path, *sets: str, text: str = RECIPE, weights: str | None = None) -> Recipe:
    """The recipe in `folder`/tiny.toml, which is written if it is missing."""
    path = folder / "tiny.toml"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(text)
    return load_recipe(str(path), sets, weights=weights)


def run(
    folder: Path, *sets: str, name: str = "run", text: str = RECIPE, weights: str | None = None, **options: Any
) -> tuple[RunResult, RecordedProgress]:
    """Run `folder`/tiny.toml in `folder`/`name`; returns the result and the recorded progress."""
    progress = RecordedProgress()
    run_options = RunOptions(out=folder / name, **options)
    return run_recipe(recipe(folder, *sets, text=text, weights=weights), run_options, progress), progress


def with_steps(*steps: str) -> str:
    """SMALL with other steps."""
    return SMALL.replace(f"[[step]]\n{RANDOM}", "\n".join(f"[[step]]\n{step}\n" for step in steps))


def tree(folder: Path) -> dict[str, int]:
    """Every file and folder, with the time of its last change."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def logits(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.eval()(images)
    return out


def onnx_logits(path: Path, images: Tensor) -> Tensor:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(np.asarray(session.run(None, {"images": images.numpy()})[0]))


def digits(model: nn.Module, count: int = 16) -> Tensor:
    """Test images, preprocessed for the model."""
    return random_images(open_data(DataOptions(), 0).test, input_config(model), count, seed=3)


def forked(work: Any, *args: Any) -> int:
    """The exit code, or minus the signal, of `work(*args)` in a process of its own."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work(*args)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def until(folder: Path, moment: str) -> None:
    """Run, and kill the process just before a file that matches `moment` is moved into place."""

    def watch(event: str, args: tuple[Any, ...]) -> None:
        moved = event == "os.rename" and fnmatch.fnmatch(str(args[1]), f"{folder}/{moment.removeprefix(AGAIN)}")
        if moved and (Path(args[1]).exists() or not moment.startswith(AGAIN)):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    run(folder)


def killed(folder: Path) -> None:
    assert forked(run, folder / "whole") == 0
    for moment in MOMENTS:
        assert forked(until, folder / "killed", moment) == -signal.SIGKILL, moment
    assert forked(run, folder / "killed") == 0


def limited(folder: Path) -> None:
    recipe(folder)
    for number, (limit, moment) in enumerate(STARTS):
        code = forked(until, folder, moment) if moment else forked(start, folder, limit, folder / f"{number}.txt")
        assert code == (-signal.SIGKILL if moment else 0), number


def start(folder: Path, limit: int | None, log: Path) -> None:
    """Run with files of at most `limit` bytes; writes the error message, or `done`, to `log`."""
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        run(folder)
        message = "done"
    except OutputError as error:
        message = error.message
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    log.write_text(message)


def load() -> None:
    """Import what a run imports for data and for ONNX files."""
    open_data(DataOptions(), 0)
    torch.onnx.export(nn.Linear(2, 2), (torch.zeros(2, 2),), dynamo=True, verbose=False)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CUDA does not work in a forked process
    load()
    killed(Path(sys.argv[1]))
    limited(Path(sys.argv[1], "limited"))
