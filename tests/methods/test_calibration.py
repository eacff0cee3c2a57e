"""Calibration images: exactly the requested number, balanced over the classes, never test images."""

from pathlib import Path

import numpy as np
import pytest
from method_world import context, model

from vitcompress.errors import InputError
from vitcompress.methods.base import context_for
from vitcompress.methods.calibration import accuracy, calibration_images, training_subset
from vitcompress.plan import Plan


@pytest.mark.parametrize("count", [1, 2, 3, 10, 29, 48])
def test_the_number_of_images_is_exact_and_balanced(count: int, tmp_path: Path) -> None:
    """Three classes with 16 images each: rounding up to whole classes would give 3, 12, 30."""
    loader = calibration_images(context(tmp_path, model()), count)
    labels = np.concatenate([targets.numpy() for _, targets in loader])
    assert len(labels) == loader.total == count
    assert np.ptp(np.bincount(labels, minlength=3)) <= 1


def test_all_images_if_more_are_requested(tmp_path: Path) -> None:
    assert calibration_images(context(tmp_path, model()), 1000).total == 48


def test_a_method_without_data_names_the_argument(tmp_path: Path) -> None:
    around = context_for(model(), plan=Plan("vit_tiny_patch16_224"), folder=tmp_path)
    for read in (
        lambda: calibration_images(around, 4),
        lambda: training_subset(around, 2),
        lambda: accuracy(model(), around),
    ):
        with pytest.raises(InputError, match=r"no .* images") as caught:
            read()
        assert "pass data" in str(caught.value.hint)
