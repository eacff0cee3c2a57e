"""A dense model with weights from a training of one's own: which were taken, and whether they know the classes."""

from argparse import Namespace
from pathlib import Path

import torch
import whole_runs as world

from vitcompress.models.create import create_model, input_config
from vitcompress.training.data import open_data
from vitcompress.training.metrics import calibration_images

ARGS = {**world.ARGS, "num_classes": 10}
GUESSING = "no better than guessing"


def checkpoint_of_a_script(path: Path, taught: bool) -> None:
    """As timm's train.py writes one: raw weights, averaged ones, the script's options."""
    raw, averaged = (create_model(world.ARCH, ARGS, seed=seed) for seed in (0, 1))
    if taught:  # by least squares on what its head is given, which takes no training
        data = open_data(world.recipe(path.parent, text=world.SMALL).data, 0).test
        images, labels = calibration_images(data, input_config(averaged), len(data), 0), data.labels
        with torch.no_grad():
            features = averaged.forward_head(averaged.forward_features(images), pre_logits=True)
            wanted = torch.nn.functional.one_hot(torch.from_numpy(labels)).float()
            averaged.head.weight.copy_(torch.linalg.lstsq(features, wanted - 0.1).solution.T)
    torch.save({"state_dict": raw.state_dict(), "state_dict_ema": averaged.state_dict(), "args": Namespace()}, path)


def test_a_checkpoint_that_knows_the_classes(tmp_path: Path) -> None:
    checkpoint_of_a_script(tmp_path / "last.pth.tar", taught=True)
    result, told = world.run(tmp_path, *world.BARE, text=world.SMALL, weights=str(tmp_path / "last.pth.tar"))
    assert f"dense model: `state_dict_ema` of {tmp_path / 'last.pth.tar'}" in told.notes
    assert result.report["accuracy"]["dense"]["top1"] > 0.3  # only the averaged weights were taught
    assert not [note for note in (*told.notes, *result.report["notes"]) if GUESSING in note]
    assert [note for note in told.notes if note.startswith("dense model: held-out top-1")]


def test_one_that_does_not_is_told_before_anything_is_chosen_by_it(tmp_path: Path) -> None:
    checkpoint_of_a_script(tmp_path / "last.pth.tar", taught=False)
    result, told = world.run(tmp_path, *world.BARE, text=world.SMALL, weights=str(tmp_path / "last.pth.tar"))
    (note,) = [note for note in told.notes if GUESSING in note]
    assert "0, 1, 2, 3, 4 and 5 more" in note and "mean 0.5" in note
    assert told.notes.index(note) < 3
    assert [note for note in result.report["notes"] if GUESSING in note]
