"""A latency is measured on the runtime that was named, and reaches the step that aims at it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vitcompress import models
from vitcompress.distributed import Runtime
from vitcompress.errors import InputError
from vitcompress.methods import METHODS, isomorphic
from vitcompress.pipeline.latency import latency_ms
from vitcompress.pipeline.preflight import Job, described, structure
from vitcompress.progress import Progress
from vitcompress.recipe import load_recipe


def job(folder: Path, *sets: str) -> Job:
    recipe = load_recipe("digits_isomorphic", ["model.args.depth=1", "bench.batch=2", "model.classes=10", *sets])
    return described(recipe, folder, Runtime(torch.device("cpu")), Progress(), None, structure_only=True)


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
def test_a_model_is_timed_where_it_was_asked_for_and_left_as_it_is(runtime: str, tmp_path: Path) -> None:
    about = job(tmp_path)
    model = models.create(about.recipe.model.name, about.arch_args)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert latency_ms(about, model, runtime) > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not list(tmp_path.iterdir())


def test_an_unknown_runtime_is_refused(tmp_path: Path) -> None:
    about = job(tmp_path)
    with pytest.raises(InputError, match="no runtime 'tflite'"):
        latency_ms(about, about.blank, "tflite")


def test_without_a_clock_the_structure_is_that_of_the_shares(tmp_path: Path) -> None:
    """What --structure-only and the checks before a run can know of a target in milliseconds."""
    options: Any = job(tmp_path, "step.0.target=latency", "step.0.amount=1.0").recipe.steps[0].options
    assert isinstance(options, isomorphic.Options) and METHODS["isomorphic"].options is isomorphic.Options
    plans = [
        structure(job(tmp_path, f"step.0.target={target}", "step.0.amount=1.0")) for target in ("latency", "ratios")
    ]
    assert plans[0] == plans[1]
