"""Calibration images: exactly the requested number, balanced over the classes, never test images."""

from pathlib import Path

import numpy as np
import pytest
import torch
from method_world import context, model

from vitcompress.errors import InputError
from vitcompress.methods.base import context_for
from vitcompress.methods.calibration import accuracy, calibration_images, search_options, training_subset
from vitcompress.methods.options import RecoverOptions, SeroOptions
from vitcompress.methods.scores import gradients
from vitcompress.methods.table import METHODS
from vitcompress.plan import Plan
from vitcompress.training.distributed import Runtime
from vitcompress.training.options import TrainOptions


@pytest.mark.parametrize("count", [1, 2, 3, 10, 29, 48])
def test_the_number_of_images_is_exact_and_balanced(count: int, tmp_path: Path) -> None:
    """Three classes with 16 images each: rounding up to whole classes would give 3, 12, 30."""
    loader = calibration_images(context(tmp_path, model()), count)
    labels = np.concatenate([targets.numpy() for _, targets in loader])
    assert len(labels) == loader.total == count
    assert np.ptp(np.bincount(labels, minlength=3)) <= 1


def test_all_images_if_more_are_requested(tmp_path: Path) -> None:
    assert calibration_images(context(tmp_path, model()), 1000).total == 48


def test_every_process_needs_an_image(tmp_path: Path) -> None:
    around = context(tmp_path, model(), runtime=Runtime(torch.device("cpu"), rank=2, world_size=3))
    assert [len(targets) for _, targets in calibration_images(around, 3)] == [1]
    with pytest.raises(InputError, match="2 images cannot be shared by 3 processes"):
        calibration_images(around, 2)


def test_a_method_without_data_names_the_argument(tmp_path: Path) -> None:
    around = context_for(model(), plan=Plan("vit_tiny_patch16_224"), folder=tmp_path)
    for read in (
        lambda: calibration_images(around, 4),
        lambda: training_subset(around, 2),
        lambda: accuracy(model(), around),
        lambda: METHODS["recover"].plan(model(), around, RecoverOptions()),
        lambda: METHODS["sero"].plan(model(), around, SeroOptions(round_to=2)),
    ):
        with pytest.raises(InputError, match=r"no .* images") as caught:
            read()
        assert "pass data" in str(caught.value.hint)


def test_a_training_for_a_choice_is_plain() -> None:
    base = TrainOptions(
        epochs=9, lr_base=1.0, warmup_epochs=3, ema=0.99, distillation="soft", select="best", drop_path=0.1
    )
    plain = TrainOptions(epochs=2, lr=1e-4, min_lr=1e-4, drop_path=0.1)
    assert search_options(base, 2, 1e-4, 1e-3) == plain


def test_calibration_images_depend_on_the_seed(tmp_path: Path) -> None:
    chosen = [next(iter(calibration_images(context(tmp_path, model(), seed=seed), 12)))[0] for seed in (1, 1, 2)]
    assert torch.equal(chosen[0], chosen[1]) and not torch.equal(chosen[0], chosen[2])


def test_gradients_are_those_of_the_model_in_evaluation_mode(tmp_path: Path) -> None:
    vit = model(drop_path_rate=0.5)
    about = context(tmp_path, vit)
    evaluated, trained = gradients(vit.eval(), about, 24), gradients(vit.train(), about, 24)
    assert vit.training and all(torch.equal(evaluated[name], trained[name]) for name in evaluated)
