"""A script for test_train: trains a tiny model several times, each time killing itself once with SIGKILL on the way.

    python killed_training.py FOLDER

Every case runs in a forked process that is killed just before its n-th call of some system event (Python's audit
hooks), in FOLDER/<case>; a second process then continues to the end. FOLDER/whole is never killed. The final tensors
lie in FOLDER/<case>.safetensors.
"""

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from contracts import add_gates, layers

from vitcompress.io.progress import Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import save_tensors
from vitcompress.models.create import create_model, input_config
from vitcompress.surgery.gates import GatedModel
from vitcompress.training.datasets import ArrayImages
from vitcompress.training.distributed import Runtime
from vitcompress.training.loop import train
from vitcompress.training.options import Augmentation, TrainOptions
from vitcompress.training.trainer import TrainingContext, TrainingControls

ARCH = "vit_tiny_patch16_224"
ARGS = {"img_size": 4, "patch_size": 2, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
# Event and which one of its kind: inside a step, in the middle of writing a state, between state and log.
CASES = {"step": ("vitcompress.step", 8), "state": ("state", 6), "rename": ("os.rename", 3), "log": ("log", 3)}
OPTIONS = TrainOptions(
    epochs=4,
    batch_size=8,
    accumulate=2,
    lr=1e-2,
    warmup_epochs=1,
    drop_path=0.2,
    ema=0.9,
    clip_grad=1.0,
    select="best",
    augmentation=Augmentation(noise=0.2, mixup=0.5, smoothing=0.1),
)


def images() -> ArrayImages:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (24, 4, 4), generator=generator, dtype=torch.uint8)
    return ArrayImages(pixels.numpy(), torch.arange(24).numpy() % 3)


def killer(event: str, which: int) -> Any:
    seen: Counter[str] = Counter()

    def watch(name: str, args: tuple[Any, ...]) -> None:
        if name == "open" and str(args[0]).endswith("log.jsonl") and args[1] == "a":
            name = "log"
        if name == "open" and ".state.safetensors." in str(args[0]):  # twice while one is written
            name = "state"
        seen[name] += 1
        if name == event and seen[name] == which:
            os.kill(os.getpid(), signal.SIGKILL)

    return watch


def fading(gated: GatedModel) -> TrainingControls:
    """One gate goes from 1 to 0 over the epochs."""
    return TrainingControls(after_epoch=lambda epoch: gated.set_gate("blocks.1.mlp.act", 1.0 - 0.25 * (epoch + 1)))


def run(folder: Path, result: Path, kill: tuple[str, int] | None) -> None:
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    RunFolder(folder).recipe.touch()  # as in a run, whose trainings write one log
    if kill:
        sys.addaudithook(killer(*kill))
    model = create_model(ARCH, ARGS, seed=0)
    gated = add_gates(model, layers(model))
    gated.register_forward_hook(lambda *_: sys.audit("vitcompress.step"))
    runtime = Runtime(torch.device("cpu"))
    at = TrainingContext(input_config(model), runtime, folder / "state" / "search", "search", 0, Progress())
    train(gated, images(), images(), OPTIONS, at, fading(gated))
    save_tensors(result, gated.state_dict())


def forked(*args: Any) -> int:
    """The exit code, or minus the signal, of `run(*args)` in a process of its own."""
    child = os.fork()
    if child == 0:
        run(*args)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(folder: Path) -> None:
    assert forked(folder / "whole", folder / "whole.safetensors", None) == 0
    for case, kill in CASES.items():
        assert forked(folder / case, folder / f"{case}.safetensors", kill) == -signal.SIGKILL, case
        assert forked(folder / case, folder / f"{case}.safetensors", None) == 0, case


if __name__ == "__main__":
    main(Path(sys.argv[1]))
