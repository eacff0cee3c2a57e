"""A script for test_distributed: one job whose result must not depend on how many processes share it.

    python distributed_training.py FOLDER

Rank 0 writes tensors.safetensors and facts.json, of one process in FOLDER/1, of two in FOLDER/2. Everything is computed
in float64, and augmentation, mixup and drop-path are off, so that what is left of a difference is the order of
additions.
"""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from killed_training import ARCH, ARGS, images
from layer_plans import depth_plan
from processes import in_both_worlds
from torch import Tensor
from torch.nn import functional

from vitcompress.families import family_of
from vitcompress.io.files import write_json
from vitcompress.io.progress import Progress
from vitcompress.io.tensors import save_tensors
from vitcompress.models.create import create_model, input_config
from vitcompress.plan import Plan
from vitcompress.surgery.gates import GatedModel
from vitcompress.training.distributed import Runtime, start
from vitcompress.training.loaders import EvalLoader, TrainLoader
from vitcompress.training.loop import train
from vitcompress.training.metrics import evaluate_images
from vitcompress.training.options import Augmentation, TrainOptions
from vitcompress.training.trainer import TrainingContext, TrainingControls

OPTIONS = TrainOptions(epochs=3, batch_size=8, accumulate=2, ema=0.9, weight_decay=0.05)
LR = {"sgd": 0.05, "adamw": 1e-3}


class Wide(GatedModel):
    """Gates and scores in float64."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.double())


def gated() -> Wide:
    model = create_model(ARCH, ARGS, seed=0)
    blocks = range(ARGS["depth"])
    return Wide(model, family_of(model), depth_plan(model, Plan(ARCH, ARGS), blocks, blocks), {}).double()


def gradients(runtime: Runtime) -> dict[str, Tensor]:
    """Of one global batch, with one attention already removed; by parameter."""
    module = gated()
    module.set_gate("blocks.0.attn", 0.0)
    network, input = runtime.wrap(module), input_config(module.model)
    loader = TrainLoader(images(), input, 8 // runtime.world_size, runtime, augmentation=Augmentation(), seed=0)
    loader.set_epoch(0)
    pixels, targets = next(iter(loader))
    functional.cross_entropy(network(pixels), targets).backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def trained(runtime: Runtime, optimizer: str, folder: Path) -> tuple[Wide, dict[str, Any]]:
    """A search in small: rank 0 chooses which activation goes, by score."""
    module = gated()

    def prune(epoch: int) -> None:
        scores = {name: score for name, score in module.scores_of().items() if name.endswith("act")}
        if epoch == 1:
            module.set_gate(runtime.broadcast(min(scores, key=scores.__getitem__)), 0.0)

    options = replace(OPTIONS, optimizer=optimizer, lr=LR[optimizer])
    at = TrainingContext(input_config(module.model), runtime, folder / optimizer, "search", 0, Progress())
    result = train(module, images(), images(), options, at, TrainingControls(after_epoch=prune))
    history = [{name: value for name, value in record.items() if name != "seconds"} for record in result.history]
    return module, {"history": history, "gates": module.gate_values(), "chosen": result.chosen}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    runtime = start("cpu")
    tensors = {f"gradient.{name}": value for name, value in gradients(runtime).items()}
    facts: dict[str, Any] = {"world": runtime.world_size}
    for optimizer in LR:
        module, facts[optimizer] = trained(runtime, optimizer, folder)
        tensors |= {f"{optimizer}.{name}": value for name, value in module.state_dict().items()}
    tensors |= {f"start.{name}": value for name, value in gated().state_dict().items()}
    loader = EvalLoader(images(), input_config(module.model), 5, runtime)
    accuracy, right, classes = evaluate_images(module, loader, runtime)
    facts |= {"accuracy": asdict(accuracy), "correct": right.tolist(), "classes": classes.tolist()}
    with torch.no_grad():
        answers = [functional.log_softmax(module(pixels), 1) for pixels, _ in loader]
    tensors["entropy"] = runtime.all_sum(-sum((p.exp() * p).sum() for p in answers))  # type: ignore[arg-type]
    facts["from_rank_0"] = runtime.broadcast({"rank": runtime.rank})
    runtime.barrier()
    if runtime.is_main:
        save_tensors(folder / "tensors.safetensors", tensors)
        write_json(folder / "facts.json", facts)
    runtime.stop()
    for _ in range(4):  # as calls of the Python API do, one after the other
        runtime = start("cpu")
        assert runtime.all_sum(torch.ones(1)).item() == runtime.world_size
        runtime.stop()


if __name__ == "__main__":
    in_both_worlds(main, Path(sys.argv[1]))
