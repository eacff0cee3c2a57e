"""A dense model with the user's weights: which part of the checkpoint is loaded, and whether it knows the classes."""

from argparse import Namespace
from pathlib import Path

import torch
import whole_runs as world

from vitcompress.models.create import create_model, input_config
from vitcompress.training.data import open_data
from vitcompress.training.metrics import random_images

ARGS = {**world.ARGS, "num_classes": 10}
GUESSING = "no better than guessing"


def checkpoint_of_a_script(path: Path, taught: bool) -> None:
    """As written by timm's train.py: raw weights, averaged weights, options of the script."""
    raw, averaged = (create_model(world.ARCH, ARGS, seed=seed) for seed in (0, 1))
    if taught:  # least squares on the features, without training
        data = open_data(world.recipe(path.parent, text=world.SMALL).data, 0).test
        images, labels = random_images(data, input_config(averaged), len(data), 0), data.labels
        with torch.no_grad():
            features = averaged.forward_head(averaged.forward_features(images), pre_logits=True)
            targets = torch.nn.functional.one_hot(torch.from_numpy(labels)).float()
            averaged.head.weight.copy_(torch.linalg.lstsq(features, targets - 0.1).solution.T)
    torch.save({"state_dict": raw.state_dict(), "state_dict_ema": averaged.state_dict(), "args": Namespace()}, path)


def test_a_checkpoint_that_knows_the_classes(tmp_path: Path) -> None:
    checkpoint_of_a_script(tmp_path / "last.pth.tar", taught=True)
    result, progress = world.run(tmp_path, *world.BARE, text=world.SMALL, weights=str(tmp_path / "last.pth.tar"))
    assert f"dense model: `state_dict_ema` of {tmp_path / 'last.pth.tar'}" in progress.notes
    assert result.report["accuracy"]["dense"]["top1"] > 0.3  # only the averaged weights were taught
    assert not [note for note in (*progress.notes, *result.report["notes"]) if GUESSING in note]
    assert [note for note in progress.notes if note.startswith("dense model: test top-1")]


def test_a_checkpoint_that_does_not_know_the_classes_is_reported_before_pruning(tmp_path: Path) -> None:
    checkpoint_of_a_script(tmp_path / "last.pth.tar", taught=False)
    result, progress = world.run(tmp_path, *world.BARE, text=world.SMALL, weights=str(tmp_path / "last.pth.tar"))
    (note,) = [note for note in progress.notes if GUESSING in note]
    assert "0, 1, 2, 3, 4 and 5 more" in note and "mean 0.5" in note
    assert progress.notes.index(note) < 9  # after the settings of the model
    assert [note for note in result.report["notes"] if GUESSING in note]
