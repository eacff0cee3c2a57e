"""Tiny models and images that the training tests share."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from killed_training import ARCH, ARGS
from torch import Tensor, nn

from vitcompress.io.progress import Progress
from vitcompress.models.create import InputConfig, create_model
from vitcompress.training.datasets import ArrayImages
from vitcompress.training.distributed import Runtime
from vitcompress.training.loop import train
from vitcompress.training.options import TrainOptions, TrainResult
from vitcompress.training.trainer import TrainingContext, TrainingControls

CPU = Runtime(torch.device("cpu"))
_NEEDS_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=_NEEDS_A_GPU)]
INPUT = InputConfig((1, 4, 4), (0.5,), (0.5,), "bicubic", 1.0, "center")
OPTIONS = TrainOptions(epochs=2, batch_size=8, lr=1e-2)


def vit(arch: str = ARCH, seed: int = 0, **changes: Any) -> nn.Module:
    return create_model(arch, {**ARGS, **changes}, seed=seed)


def two_headed() -> nn.Module:
    return vit("deit_tiny_distilled_patch16_224")


def stripes(count: int = 48) -> ArrayImages:
    """Class 0 has a bright left half, class 1 a bright right half, class 2 is even; with noise."""
    noise = np.random.default_rng(0).integers(0, 100, (count, 4, 4)).astype(np.uint8)
    labels = np.arange(count) % 3
    noise[labels == 0, :, :2] += 120
    noise[labels == 1, :, 2:] += 120
    return ArrayImages(noise, labels)


def fit(module: nn.Module, folder: Path, options: TrainOptions = OPTIONS, **more: Any) -> TrainResult:
    at = {"input": INPUT, "runtime": CPU, "folder": folder, "label": "test", "seed": 0, "progress": Progress()}
    at |= {name: more.pop(name) for name in list(more) if name in at}
    images, heldout = more.pop("images", stripes()), more.pop("heldout", stripes())
    return train(module, images, heldout, options, TrainingContext(**at), TrainingControls(**more))


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
