"""A script for test_killed_processes: two processes work together, are killed on the way, and start again.

    python killed_processes.py FOLDER

Each work runs in FOLDER/<work>/whole, never killed, and in FOLDER/<work>/<case>, where SIGKILL hits one process or both
just before its n-th call of some system event. What is left of the two is killed then, as torchrun does, and two new
ones go on to the end. Processes are forked from this one and meet as torchrun's do, by environment variables.
"""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import killed_training
import torch
from contracts import add_gates, layers
from killed_training import OPTIONS, fading, images, killer
from method_world import context, model
from processes import together

from vitcompress.io.files import write_text
from vitcompress.io.progress import Progress
from vitcompress.io.tensors import save_tensors
from vitcompress.methods.sero import method as sero
from vitcompress.methods.upvit import method as upvit
from vitcompress.models.create import create_model, input_config
from vitcompress.training.distributed import Runtime, start
from vitcompress.training.loop import train
from vitcompress.training.trainer import TrainingContext

STEP, WRITTEN = "vitcompress.step", "os.rename"  # a forward pass; a file or folder that moves into place
BOTH = (0, 1)


def training(folder: Path, runtime: Runtime) -> None:
    vit = create_model(killed_training.ARCH, killed_training.ARGS, seed=0)
    gated = add_gates(vit, layers(vit))
    gated.register_forward_hook(lambda *_: sys.audit(STEP))
    at = TrainingContext(input_config(vit), runtime, folder / "search", "search", 0, Progress())
    train(gated, images(), images(), OPTIONS, at, fading(gated))
    if runtime.is_main:
        save_tensors(folder / "trained.safetensors", gated.state_dict())


def exploration(folder: Path, runtime: Runtime) -> None:
    vit = model()
    vit.register_forward_hook(lambda *_: sys.audit(STEP))
    options = sero.Options(sparsity=0.5, epochs=4, refresh=2, lr=1e-3, round_to=2)
    plan = sero.plan(vit, context(folder, vit, runtime=runtime), options)
    if runtime.is_main:
        write_text(folder / "plan.json", plan.to_json())


def scoring(folder: Path, runtime: Runtime) -> None:
    vit = model()
    options = upvit.Options(target_args={"embed_dim": 8, "num_heads": 1, "depth": 2}, images=24)
    plan = upvit.plan(vit, context(folder, vit, runtime=runtime), options)
    if runtime.is_main:
        write_text(folder / "plan.json", plan.to_json())


# Work -> case -> which processes die, before which call of what.
CASES: dict[Callable[[Path, Runtime], None], dict[str, tuple[tuple[int, ...], str, int]]] = {
    training: {"one": ((1,), STEP, 14), "both": (BOTH, STEP, 20), "writing": ((0,), WRITTEN, 3)},
    exploration: {"one": ((1,), STEP, 10), "writing": ((0,), WRITTEN, 3)},
    scoring: {"writing": ((0,), WRITTEN, 3)},
}


def alone(work: Callable[[Path, Runtime], None], folder: Path, kill: tuple[str, int] | None) -> None:
    torch.set_num_threads(1)
    if kill:
        sys.addaudithook(killer(*kill))
    runtime = start("cpu")
    work(folder, runtime)
    runtime.barrier()
    runtime.stop()


def pair(
    work: Callable[[Path, Runtime], None], folder: Path, kill: tuple[tuple[int, ...], str, int] | None
) -> list[int]:
    """The exit codes, or minus the signals, of two processes of which some may be killed."""
    return together(lambda rank: alone(work, folder, kill[1:] if kill and rank in kill[0] else None))


def main(folder: Path) -> None:
    for work, cases in CASES.items():
        place = folder / work.__name__
        assert pair(work, place / "whole", None) == [0, 0], work
        for case, kill in cases.items():
            assert -signal.SIGKILL in pair(work, place / case, kill), (work, case)
            written = sorted(str(path.relative_to(place)) for path in (place / case).rglob("*"))
            write_text(place / f"{case}.txt", "\n".join(written))
            assert pair(work, place / case, None) == [0, 0], (work, case)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
